"""What the router of a layer owes beside the main loss, over all owners of tokens.

Letters: E experts · S sequences · T tokens on this rank.

Counts carry no gradient, so they are summed over the owners first; then each rank's part of a loss
is that of its own tokens, the parts add up to the global value, and so do their gradients (L2).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from moe_tp.errors import ConfigError
from moe_tp.experts.dispatch import Wire
from moe_tp.parallel.collectives import raw_all_reduce
from moe_tp.parallel.mesh import Mesh
from moe_tp.routing.assignment import Assignment
from moe_tp.routing.config import RouterConfig
from moe_tp.routing.losses import load_balance_loss, sequence_counts, z_loss
from moe_tp.routing.metrics import router_entropy

_ENTROPY = 1_000_000
# of all ranks the first four, of this rank the rest; the share dropped is 1 - kept / choices, the
# mean entropy of a token's probabilities entropy / tokens
SUMS = (
    *("tokens", "choices", "kept", "entropy"),
    *("rows_sent", "rows_received", "bytes_sent", "bytes_received"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """Which sequence each owned token is of, for losses of each sequence by itself.

    Args:
        sequence_T: int64 in [0, count), the same numbers on all ranks that share a batch.
        count: sequences of the batch that these ranks share.
    """

    sequence_T: torch.Tensor
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEAux:
    """What a layer tells beside its output.

    Args:
        loss: weighted losses, its global value on every rank; each rank's gradient is that of its
            own tokens.
        counts_E: int64, tokens that each expert worked on, of all ranks.
        chosen_E: int64, tokens that chose each expert, before capacity dropped any.
        num_tokens: int64, real tokens of all ranks.
        balance_loss, z_loss: global values without coefficient, detached; 0 where not asked for.
        entropy_sum: of each real token's probabilities in nats, summed over all ranks.
        wire: what this rank sent and received.
    """

    loss: torch.Tensor
    counts_E: torch.Tensor
    chosen_E: torch.Tensor
    num_tokens: torch.Tensor
    balance_loss: torch.Tensor
    z_loss: torch.Tensor
    entropy_sum: torch.Tensor
    wire: Wire = field(default_factory=Wire)

    def sums(self) -> torch.Tensor:
        """Return, fp64, what `SUMS` names, on the device of the counts."""
        device = self.num_tokens.device
        known = [self.num_tokens, self.chosen_E.sum(), self.counts_E.sum(), self.entropy_sum]
        wire = self.wire
        own = [wire.rows_sent, wire.rows_received, wire.bytes_sent, wire.bytes_received]
        return torch.cat(
            [
                torch.stack([value.to(torch.float64) for value in known]),
                torch.tensor(own, dtype=torch.float64, device=device),
            ]
        )


def router_losses(
    assignment: Assignment,
    config: RouterConfig,
    mesh: Mesh,
    *,
    before_E: torch.Tensor,
    total_E: torch.Tensor | None = None,
    sequences: Sequences | None = None,
    step_tokens: torch.Tensor | int | None = None,
    gradient_factor: float = 1.0,
) -> MoEAux:
    """Return the layer's losses and load.

    Args:
        assignment: of the owned tokens.
        config: which losses, and their weights.
        mesh: names the owners.
        before_E: choices of this rank in earlier micro-batches of the step.
        total_E: choices of the whole step on all ranks, from `counted_step`.
        sequences: for the loss of each sequence.
        step_tokens: real tokens of the whole step, over which losses are a mean; None takes this
            call's.
        gradient_factor: ranks of a host that averages gradients, else 1.

    Collectives: an all-reduce of two or three counts an expert over the owners, and where a loss
    is asked for one of its value.
    """
    owners = mesh.group("stage")
    experts = config.num_experts
    own = torch.as_tensor(assignment.num_tokens, device=before_E.device).reshape(1)
    # a whole number of millionths, so that it travels with the counts
    entropy = (router_entropy(assignment) * _ENTROPY).to(torch.int64).reshape(1)
    packed = torch.cat([assignment.chosen_E, assignment.counts_E, before_E, own, entropy])
    total = raw_all_reduce(packed, owners)
    chosen_E, counts_E, before_E, tokens, entropy = total.split([experts] * 3 + [1, 1])
    zero = assignment.scores_TE.new_zeros(())
    parts = [zero, zero]
    mean_over = tokens[0] if step_tokens is None else step_tokens
    if config.balance_coef:
        step_E = _step_counts(config, chosen_E, before_E, total_E, step_tokens is not None)
        parts[0] = _balance_part(assignment, config, mesh, step_E, sequences, mean_over)
    if config.z_coef:
        parts[1] = z_loss(assignment.logits_TE, mask_T=assignment.mask_T, num_tokens=mean_over).to(
            zero.dtype
        )
    loss = values = torch.stack(parts)
    if config.balance_coef or config.z_coef:
        values = raw_all_reduce(loss.detach(), owners)
        # the value is everybody's, the gradient that of the own tokens
        loss = values + (loss - loss.detach()) * gradient_factor
    weights = loss.new_tensor([config.balance_coef, config.z_coef])
    return MoEAux(
        loss=(loss * weights).sum(),
        counts_E=counts_E,
        chosen_E=chosen_E,
        num_tokens=tokens[0],
        balance_loss=values.detach()[0],
        z_loss=values.detach()[1],
        entropy_sum=entropy[0].to(torch.float64) / _ENTROPY,
    )


def _step_counts(
    config: RouterConfig,
    chosen_E: torch.Tensor,
    before_E: torch.Tensor,
    total_E: torch.Tensor | None,
    in_parts: bool,
) -> torch.Tensor:
    """Return the choices that the balance loss is about.

    Args:
        config: which kind.
        chosen_E: of this call.
        before_E: of the step's earlier calls.
        total_E: of the whole step, or None.
        in_parts: the call is one of several of a step.

    Raises:
        ConfigError: the counts of the whole step are wanted and nobody counted them.
    """
    if config.balance_kind != "global_batch":
        return chosen_E
    if not config.balance_exact:
        return chosen_E + before_E
    if total_E is None and in_parts:
        raise ConfigError(
            "balance_exact=True with step_tokens needs the load of the whole step; call the layer "
            "inside `counted_step(model, count)`, as forward_backward does, or set "
            "balance_exact=False (counts of the step so far)"
        )
    return chosen_E if total_E is None else total_E


def _balance_part(
    assignment: Assignment,
    config: RouterConfig,
    mesh: Mesh,
    counts_E: torch.Tensor,
    sequences: Sequences | None,
    mean_over: torch.Tensor | int,
) -> torch.Tensor:
    """Return this rank's part of the balance loss."""
    if config.balance_kind == "sequence":
        if sequences is None:
            raise ConfigError(
                "balance_kind='sequence' needs to know which token is of which sequence; pass "
                "sequences=Sequences(sequence_T=..., count=...)"
            )
        counts_SE, tokens_S = sequence_counts(assignment, sequences.sequence_T, sequences.count)
        packed = torch.cat([counts_SE.flatten(), tokens_S])
        packed = raw_all_reduce(packed, mesh.group("cp_tp"))
        counts_SE = packed[: counts_SE.numel()].view_as(counts_SE)
        tokens_S = packed[counts_SE.numel() :]
        num = raw_all_reduce((tokens_S > 0).sum().reshape(1), mesh.group("dp"))[0]
        return load_balance_loss(
            assignment,
            kind="sequence",
            counts_E=counts_SE,
            num_tokens=tokens_S,
            sequence_T=sequences.sequence_T,
            num_sequences=num,
        )
    return load_balance_loss(
        assignment, kind=config.balance_kind, counts_E=counts_E, num_tokens=mean_over
    )
