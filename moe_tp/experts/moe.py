"""The Mixture-of-Experts layer.

Letters: T tokens on this rank · D width · F expert hidden · E experts.

A call, in six steps: the router scores the owned tokens; dispatch moves rows to the experts; the
experts compute one partial sum a row; combine brings the sums back; the shared expert adds its
own; the losses that keep the load even are worked out over all ranks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, Protocol

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.utils.checkpoint import checkpoint

from moe_tp.errors import ConfigError
from moe_tp.experts.activation import Activation
from moe_tp.experts.activation import activation as activation_of
from moe_tp.experts.agree import agreed_seed
from moe_tp.experts.dispatch import (
    CountingDispatcher,
    Dispatcher,
    Received,
    SplitDispatcher,
    Wire,
)
from moe_tp.experts.dispatchers import make_dispatcher
from moe_tp.experts.events import note
from moe_tp.experts.few import choose_few, compute_few, serves
from moe_tp.experts.host import connected
from moe_tp.experts.layer import GroupedExperts
from moe_tp.experts.losses import MoEAux, Sequences, router_losses
from moe_tp.experts.mlp import GatedMLP
from moe_tp.experts.pieces import run_pieces, split_in_pieces
from moe_tp.experts.router import Router, count_load, counted_step, update_router_bias
from moe_tp.experts.serving import ServingDispatcher, WholeDispatcher
from moe_tp.log import warn_once
from moe_tp.parallel.linear import ReplicatedLinear
from moe_tp.parallel.mesh import Mesh
from moe_tp.parallel.parameter import ParallelModule, initialise
from moe_tp.parallel.random import DropoutKey
from moe_tp.parallel.recompute import keeping
from moe_tp.parallel.spec import Init
from moe_tp.routing.assignment import Assignment, assign
from moe_tp.routing.config import RouterConfig
from moe_tp.routing.masks import as_mask
from moe_tp.routing.table import ExpertTable, first_table

__all__ = [
    "GroupedExperts",
    "MoE",
    "MoEAux",
    "Router",
    "Sequences",
    "counted_step",
    "update_router_bias",
]


class RoutingTape(Protocol):
    """Records or replays choices; `MoE.tape` holds one, see `moe_tp.experts.replay`."""

    def before(
        self, layer: int, identity_T: torch.Tensor | None, mask_T: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Return the choices to use again, or None to choose now."""
        ...

    def after(self, layer: int, identity_T: torch.Tensor | None, assignment: Assignment) -> None:
        """Take note of the choices."""
        ...


class MoE(nn.Module):
    """Routed experts over ep x etp, with an optional shared expert over tp.

    In a user's own model: leave its parameters to this library (`prepare_for_ddp`, or
    `fully_shard(..., ignored_params=set(library_parameters(model)))`), and call
    `settle_gradients(model)` after the last backward of a step. Under `torch.autocast` the layer
    computes in autocast's dtype, as `Runtime(compute_dtype=...)` would have it.

    Args:
        dim: D.
        expert_dim: F, over all ranks.
        router: how tokens choose experts.
        mesh: the mesh.
        num_shared: shared experts, computed as one of `num_shared * expert_dim` hidden.
        shared_dim: hidden size of the shared expert, where it is no multiple of F.
        shared_gate: scale the shared expert's output by a sigmoid of the token.
        gradient: the host's convention: `sum` for losses that are a sum over ranks, `mean` where
            it averages gradients over ranks (DDP and FSDP2 by default).
        activation: of experts and shared expert, by name or as an object.
        expert_bias: biases on both projections of the experts.
        dtype: parameter dtype; the router keeps fp32.
        init: first values of all weights.
        layer: number of the layer, for messages and noise.
        table: placement of the experts; None is contiguous, but for `Runtime.spare_slots`.
        dispatcher: a dispatcher of the user's own; None takes what the mesh's runtime names.
        even_tokens: all ranks of tp always bring equally many tokens.
        seed: of the first values; None draws one and agrees on it.

    Raises:
        ConfigError: experts or widths do not fit the mesh.
        RankMismatchError: ranks make unlike layers.

    Collectives: those of `agreed_seed`.
    """

    def __init__(
        self,
        dim: int,
        expert_dim: int,
        router: RouterConfig,
        mesh: Mesh,
        *,
        num_shared: int = 0,
        shared_dim: int | None = None,
        shared_gate: bool = False,
        gradient: Literal["sum", "mean"] = "sum",
        activation: str | Activation = "silu",
        expert_bias: bool = False,
        dtype: torch.dtype = torch.float32,
        init: Init | None = None,
        layer: int = 0,
        table: ExpertTable | None = None,
        dispatcher: Dispatcher | None = None,
        even_tokens: bool = False,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        if min(dim, expert_dim) < 1 or num_shared < 0:
            raise ConfigError(
                f"dim={dim}, expert_dim={expert_dim} and num_shared={num_shared} are no sizes of a "
                f"layer; choose dim and expert_dim from 1 on, num_shared from 0 on"
            )
        if gradient not in ("sum", "mean"):
            raise ConfigError(f"gradient={gradient!r} is not a convention; choose 'sum' or 'mean'")
        self.dim, self.mesh, self.config, self.layer = dim, mesh, router, layer
        act = activation_of(activation) if isinstance(activation, str) else activation
        spare = mesh.runtime.spare_slots
        self.table = table or first_table(router.num_experts, mesh.size("ep"), spare)
        self.router = Router(dim, router, mesh, dtype=dtype, init=init, layer=layer)
        self.experts = GroupedExperts(
            dim, expert_dim, self.table, mesh,
            dtype=dtype, bias=expert_bias, activation=act, init=init,
        )  # fmt: skip
        padded, self.own_dispatcher = router.pad_to_capacity, dispatcher is not None
        self.dispatcher = dispatcher or make_dispatcher(mesh, self.table, padded=padded)
        hidden = num_shared * expert_dim if shared_dim is None else shared_dim
        self._serving: dict[bool, ServingDispatcher] = {}  # made by the first `serve`
        self.shared = self.shared_gate = None
        if hidden:
            self.shared = GatedMLP(
                dim, hidden, mesh,
                dtype=dtype, activation=act, init=init, even_tokens=even_tokens or padded,
            )  # fmt: skip
        if shared_gate:
            if not hidden:
                raise ConfigError("shared_gate=True has no shared expert; set num_shared")
            self.shared_gate = ReplicatedLinear(dim, 1, mesh, dtype=dtype, init=init)
        self.tape: RoutingTape | None = None
        self._with_others = any(mesh.size(axis) > 1 for axis in ("ep", "etp", "tp"))
        self._host_ranks = mesh.size("stage") if gradient == "mean" else 1
        for module in self.modules():
            if isinstance(module, ParallelModule):
                module.gradient_scale = 1.0 / self._host_ranks
        if router.kind == "expert_choice":
            warn_once(
                "expert_choice",
                "kind='expert_choice' lets a token's experts depend on later tokens: a causal "
                "model then trains on what it cannot see when it generates",
            )
        if not torch.empty(0).is_meta:
            settings = (
                f"dim={dim} expert_dim={expert_dim} hidden={hidden} shared_gate={shared_gate} "
                f"gradient={gradient} activation={type(act).__name__} expert_bias={expert_bias} "
                f"dtype={dtype} init={init} layer={layer} table={self.table}"
            )
            initialise(self, agreed_seed(mesh, router, settings, seed))

    @_disable_dynamo  # torch.compile: one graph break, and the layer runs as it is
    def forward(
        self,
        x: torch.Tensor,
        mask: torch.Tensor | None = None,
        token_ids: torch.Tensor | None = None,
        *,
        key: DropoutKey | None = None,
        sequences: Sequences | None = None,
        step_tokens: torch.Tensor | int | None = None,
        replay: torch.Tensor | None = None,
        identity: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, MoEAux]:
        """Return the layer's output, of x's shape and dtype, and what the router has to say.

        Args:
            x: `[..., D]`, this rank's own tokens, any number of them.
            mask: bool, x's shape without D: True where a token is real; others give 0, whatever
                they hold.
            token_ids: vocabulary ids, for `kind="hash"`.
            key: makes the router's noise a function of the token; None draws from torch.
            sequences: which token is of which sequence, for the loss of each sequence.
            step_tokens: real tokens of the whole optimiser step, for losses that add up over its
                micro-batches; None: the losses are means over this call's tokens.
            replay: `[T, K]` recorded choices to use again.
            identity: int64, a number for each token, the same in every layout, for
                `record_routing` and for dropout of the experts' adapters.

        Raises:
            ConfigError: x is not `[..., D]` of floating point, or the mask has another shape or is
                one that is added to attention scores.

        Collectives: those of the dispatcher over ep and etp, of the shared expert over tp, and of
        the losses over all owners of tokens.
        """
        x_TD, mask_T = self._tokens(x, mask)
        ids_T = None if token_ids is None else token_ids.reshape(-1)
        if self.tape is not None and replay is None:
            replay = self.tape.before(self.layer, identity, mask_T)

        assignment = self.router(x_TD, mask_T=mask_T, token_ids_T=ids_T, key=key, replay_TK=replay)
        if self.tape is not None:
            self.tape.after(self.layer, identity, assignment)
        if self.experts.adapter is not None and self.experts.adapter.keyed:
            assignment = replace(assignment, identity_T=identity)
        # Before the experts: nothing after `combine` is saved, so recompute stops before it.
        aux = router_losses(
            assignment, self.config, self.mesh,
            before_E=self.router.step_counts_E, total_E=self.router.total_E, sequences=sequences,
            step_tokens=step_tokens, gradient_factor=self._host_ranks,
        )  # fmt: skip
        y_TD, wire = self._routed_and_shared(x_TD, assignment, mask_T)

        return count_load(y_TD, self.router, assignment).view(x.shape), replace(aux, wire=wire)

    def use_table(self, table: ExpertTable) -> None:
        """Let experts and dispatchers follow another table; the experts' slots are the caller's."""
        self.table = self.experts.table = table
        padded = self.config.pad_to_capacity
        self.dispatcher = make_dispatcher(self.mesh, table, padded=padded)
        self._serving = {}

    def _tokens(
        self, x: torch.Tensor, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return x and its mask as rows; padding, which may hold NaN, is zero from here on."""
        if x.dim() == 0 or x.shape[-1] != self.dim:
            raise ConfigError(
                f"x has shape {tuple(x.shape)}, but the layer works on rows of dim={self.dim}; "
                f"its last dimension must be that"
            )
        if not x.is_floating_point():
            raise ConfigError(
                f"x is {x.dtype}, but the layer works on floating-point activations; embed token "
                f"ids first"
            )
        x_TD = x.reshape(-1, self.dim)
        if torch.is_grad_enabled() and self._with_others:
            x_TD = connected(x_TD)
        if mask is None:
            return x_TD, None
        if mask.shape not in (x.shape[:-1], x_TD.shape[:1]):
            raise ConfigError(
                f"the mask has shape {tuple(mask.shape)}, but x has shape {tuple(x.shape)}; give "
                f"one value for each token"
            )
        mask_T = as_mask(mask.reshape(-1))
        return torch.where(mask_T[:, None], x_TD, 0.0), mask_T

    def serve(
        self,
        x_TD: torch.Tensor,
        mask_T: torch.Tensor | None,
        token_ids_T: torch.Tensor | None,
        *,
        even: bool,
        whole: bool = False,
    ) -> torch.Tensor:
        """Return the layer's output alone, for generation: nothing is dropped, counted or owed.

        Args:
            x_TD, mask_T, token_ids_T: as in `forward`.
            even: all ranks of ep x etp bring equally many tokens, and few of them.
            whole: all ranks of tp bring the same tokens, see `WholeDispatcher`; they are `even`.

        Collectives: those of the dispatcher, with `even` an exchange that counts nothing, with
            `whole` a sum over tp; those of the shared expert over tp.
        """
        alone = not whole and self.mesh.size("ep") * self.mesh.size("etp") == 1
        if (even or alone) and not self.own_dispatcher and serves(x_TD, self.router, self.experts):
            chosen = choose_few(x_TD, mask_T, self.router)
            if chosen is not None:
                (ids_TK, weights_TK), serving = chosen, self._server(whole)
                rows_TD = x_TD.to(self.experts.compute_dtype)
                rows_ND, weights_NK, slot_NK = serving.gather(rows_TD, ids_TK, weights_TK)
                partial_ND = compute_few(rows_ND, slot_NK.tolist(), weights_NK, self.experts)
                y_TD = serving.scatter(partial_ND, ids_TK).to(x_TD.dtype)
                return y_TD if self.shared is None else y_TD + self._shared(x_TD, mask_T, whole)
        assignment = self.router(x_TD, mask_T=mask_T, token_ids_T=token_ids_T)
        if self.config.capacity_factor is not None:
            # A place in an expert must not depend on the neighbours in the batch.
            config = replace(self.config, capacity_factor=None)
            assignment = assign(assignment.chosen_TK, assignment.logits_TE, config, mask_T=mask_T)
        if not even or alone:
            return self._routed_and_shared(x_TD, assignment, mask_T)[0]
        serving = self._server(whole)
        received = serving.dispatch(x_TD.to(self.experts.compute_dtype), assignment)
        partial_RD = self.experts(received.rows_RD, received.pair_weight_P, received)
        y_TD = serving.combine(partial_RD, received, x_TD.dtype)
        return y_TD + self._shared(x_TD, mask_T, whole)

    def _server(self, whole: bool) -> ServingDispatcher:
        if whole not in self._serving:  # its lookup is copied from the host: not for every token
            kind = WholeDispatcher if whole else ServingDispatcher
            self._serving[whole] = kind(self.mesh, self.table)
        return self._serving[whole]

    def _routed_and_shared(
        self, x_TD: torch.Tensor, assignment: Assignment, mask_T: torch.Tensor | None
    ) -> tuple[torch.Tensor, Wire]:
        """Return what experts and shared expert make of the tokens, and what travelled for it.

        The shared expert runs while rows are in flight where the dispatcher lets it (and the
        runtime's `overlap` is on).
        """
        runtime = self.mesh.runtime
        x_in_TD = x_TD.to(self.experts.compute_dtype)
        pieces = split_in_pieces(assignment, self.mesh, self.table, runtime.dispatch_rows)
        if len(pieces) > 1:
            y_TD, wire = self._in_pieces(x_in_TD, pieces)
            return y_TD.to(x_TD.dtype) + self._shared(x_TD, mask_T), wire
        if runtime.overlap and isinstance(self.dispatcher, SplitDispatcher):
            with keeping():
                pending = self.dispatcher.start(x_in_TD, assignment)
            shared_TD = self._shared(x_TD, mask_T)
            with keeping():
                received = self.dispatcher.finish(pending)
            y_TD = self._compute(received, None)
        else:
            shared_TD = self._shared(x_TD, mask_T)
            with keeping():
                received = self.dispatcher.dispatch(x_in_TD, assignment)
            y_TD = self._compute(received, None)
        return y_TD.to(x_TD.dtype) + shared_TD, self._wire(received)

    def _in_pieces(self, x_TD: torch.Tensor, pieces: list[Assignment]) -> tuple[torch.Tensor, Wire]:
        """Return the experts' sums in fp32 or more, each piece sent again in backward.

        With `overlap` the rows of the next piece are in flight while the experts compute one.
        """
        exact, wires = torch.promote_types(x_TD.dtype, torch.float32), []
        if isinstance(self.dispatcher, SplitDispatcher):

            def compute(received: Received) -> torch.Tensor:
                wires.append(self._wire(received))
                return self._compute(received, exact)

            y_TD = run_pieces(
                x_TD, pieces, self.dispatcher, compute, overlap=self.mesh.runtime.overlap
            )
            return y_TD, sum(wires[: len(pieces)], Wire())

        def routed(x_TD: torch.Tensor, piece: Assignment) -> torch.Tensor:
            received = replace(self.dispatcher.dispatch(x_TD, piece), sum_dtype=None)
            wires.append(self._wire(received))
            return self._compute(received, exact)

        y_TD = torch.zeros_like(x_TD, dtype=exact)
        for piece in pieces:
            y_TD = y_TD + checkpoint(
                routed, x_TD, piece, use_reentrant=False, preserve_rng_state=False
            )
        return y_TD, sum(wires[: len(pieces)], Wire())

    def _compute(self, received: Received, dtype: torch.dtype | None) -> torch.Tensor:
        note("experts")
        partial_RD = self.experts(received.rows_RD, received.pair_weight_P, received)
        return self.dispatcher.combine(partial_RD, received, dtype)

    def _wire(self, received: Received) -> Wire:
        dispatcher: object = self.dispatcher
        return dispatcher.wire(received) if isinstance(dispatcher, CountingDispatcher) else Wire()

    def _shared(
        self, x_TD: torch.Tensor, mask_T: torch.Tensor | None, whole: bool = False
    ) -> torch.Tensor | float:
        """Return the shared expert's output, 0 without one and in masked rows."""
        if self.shared is None:
            return 0.0
        note("shared expert")
        y_TD: torch.Tensor = self.shared(x_TD, whole=whole)
        if self.shared_gate is not None:
            gate_T1 = torch.sigmoid(self.shared_gate(x_TD))
            y_TD = y_TD * gate_T1.to(y_TD.dtype)
        return y_TD if mask_T is None else torch.where(mask_T[:, None], y_TD, 0.0)
