"""The calls of a generation: all prompts at once, then one column after the other.

Letters: B rows · S columns of a call · L columns so far · T owned tokens.

Prompts end at the same column; what fills the columns before a shorter one is seen by nobody and
routed nowhere, and its positions count its own tokens alone. So are rows without a prompt, and
rows that have finished.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from moe_tp.experts.layer import GroupedExperts
from moe_tp.infer.cache import Cache
from moe_tp.models.blocks import Call
from moe_tp.models.decoder import Decoder
from moe_tp.models.rope import Rotation, rotation
from moe_tp.models.tokens import Tokens, attention_masks, owned_tokens
from moe_tp.parallel.parameter import ParallelModule
from moe_tp.parallel.pipeline.schedule import run_forward
from moe_tp.parallel.whole import sharers

MOST_WHOLE = 64  # tokens: beyond, what travels counts for more than how often


def keeps_whole(model: Decoder) -> bool:
    """Return whether each rank of tp may hold all tokens of a step (`moe_tp.parallel.whole`).

    Only where the ranks of tp hold all experts between them; where the router chooses by a token's
    logits alone, so that it chooses alike on all; and without adapters, whose products share out
    tokens.
    """
    mesh, router = model.mesh, model.config.moe.router
    tp, block = mesh.size("tp"), mesh.size("ep") * mesh.size("etp")
    return (
        tp > 1
        and tp % block == 0
        and router.kind == "top_k"
        and router.function is None
        and not any(_adapted(module) for module in model.modules())
    )


def _adapted(module: nn.Module) -> bool:
    if isinstance(module, GroupedExperts) and module.adapter is not None:
        return True
    return isinstance(module, ParallelModule) and module.low_rank is not None


class Stream:
    """One batch on its way through the model.

    Args:
        model: in evaluation mode, with no cp.
        prompts: this rank's, each with at least one token.
        rows: B, at least as many; the rest is empty and takes part in every collective.
        new_tokens: the most that will be asked for.
    """

    def __init__(
        self, model: Decoder, prompts: Sequence[Sequence[int]], rows: int, new_tokens: int
    ) -> None:
        self.model, self.mesh = model, model.mesh
        config, device = model.config, model.mesh.device
        length = max((len(prompt) for prompt in prompts), default=1)
        ids = torch.zeros(rows, length, dtype=torch.int64)
        self.lengths = torch.ones(rows, dtype=torch.int64)
        for i, prompt in enumerate(prompts):
            ids[i, length - len(prompt) :] = torch.as_tensor(prompt, dtype=torch.int64)
            self.lengths[i] = len(prompt)
        self.ids_BS = ids.to(device)
        self.lengths = self.lengths.to(device)
        self.columns = 0
        column = torch.arange(length + new_tokens, device=device)
        self.real_BL = column >= length - self.lengths[:, None]
        # an empty row attends like a whole one, so that no mask is needed for its sake
        self.real_BL[len(prompts) :] = True
        self.ragged = not bool(self.real_BL.all())
        self.live_B = torch.arange(rows, device=device) < len(prompts)
        self.windows = {config.window(layer) for layer in range(config.num_layers)}
        held = [int(number) for number in model.layers]
        windows = [(layer, config.window(layer)) for layer in held]
        self.cache = Cache(windows, length + new_tokens)
        self.turns = self._rotation(column[None])  # of all positions that there will be
        self.whole = keeps_whole(model)

    def _rotation(self, positions_BS: torch.Tensor) -> Rotation:
        config, dtype = self.model.config, self.model.activation_dtype
        return rotation(config.rope, config.attention.rope_size, positions_BS, dtype)

    def first_call(self) -> Call:
        """Return the call of all prompts."""
        length = self.ids_BS.shape[1]
        real_BS = self.real_BL[:, :length]
        masks = attention_masks(
            length, self.windows, real_BS if self.ragged else None, None, self.mesh.device
        )
        positions = torch.arange(length, device=self.mesh.device) - (length - self.lengths[:, None])
        routed_BS = real_BS & self.live_B[:, None]
        turn = self._rotation(positions.clamp_min(0))
        return self._call(self.ids_BS, turn, routed_BS, masks, even=False)

    def next_call(self, ids_B: torch.Tensor) -> Call:
        """Return the call of one more column.

        Args:
            ids_B: the token of each row.
        """
        self.columns += 1
        end = self.columns
        masks: dict[int, torch.Tensor | None] = {}
        for window in self.windows:
            seen = slice(max(0, end - window) if window else 0, end)
            masks[window] = self.real_BL[:, None, None, seen] if self.ragged else None
        positions = self.lengths + (end - 1 - self.ids_BS.shape[1])
        routed = self.live_B[:, None]
        turn = self.turns.at(positions)
        return self._call(ids_B[:, None], turn, routed, masks, even=True)

    def finish_rows(self, live_B: torch.Tensor) -> None:
        """Route no more tokens of rows that are not live."""
        self.live_B = live_B

    def keep_rows(self, rows: torch.Tensor) -> None:
        """Go on with these rows alone."""
        self.cache.keep_rows(rows)
        self.ids_BS, self.lengths = self.ids_BS[rows], self.lengths[rows]
        self.real_BL, self.live_B = self.real_BL[rows], self.live_B[rows]
        self.ragged = not bool(self.real_BL.all())

    def _call(
        self,
        ids_BS: torch.Tensor,
        turn: Rotation,
        routed_BS: torch.Tensor,
        masks: dict[int, torch.Tensor | None],
        *,
        even: bool,
    ) -> Call:
        model, (batch, length) = self.model, ids_BS.shape
        whole = even and self.whole and batch <= MOST_WHOLE
        tp = sharers(self.mesh, whole)
        owned = batch if whole else owned_tokens(batch, length, self.mesh)
        rows = owned * tp.size
        mine = slice(tp.rank * owned, (tp.rank + 1) * owned)
        if not even:
            self.columns = length

        def flat(value_BS: torch.Tensor) -> torch.Tensor:
            return F.pad(value_BS.reshape(-1), (0, rows - batch * length))

        ids_N = flat(ids_BS)
        nothing = ids_N.new_zeros(0)
        tokens = Tokens(
            batch=batch,
            length=length,
            given=length,
            rows=rows,
            ids_N=ids_N,
            ids_T=ids_N[mine],
            targets_N=None,
            mask_T=flat(routed_BS)[mine],
            token_ids_T=nothing,
            sequence_T=nothing,
            token_ids_BS=nothing,
            rotation=turn,
            masks=masks,
            whole=whole,
        )
        return Call(tokens=tokens, seed=model.seed, step=0, caches=self.cache.layers, even=even)


def run_call(model: Decoder, call: Call) -> torch.Tensor | None:
    """Return `[B, V / tp]`, the logits of the last column; None on pipeline ranks without the head.

    Collectives: those of the model.
    """
    tokens = call.tokens
    ids_BS = tokens.ids_N[: tokens.batch * tokens.length].view(tokens.batch, tokens.length)
    if not model.stages:
        out: torch.Tensor | None = model(ids_BS, call=call).logits
        return out
    carried = model.carried(len(tokens.ids_T))
    result = run_forward(
        model.stages, model.mesh, first_input=ids_BS, arguments={"call": call}, carried=carried
    )
    return None if result is None else result[0]
