"""The expert kernel: one autograd function that saves little and allocates little.

Letters: R rows · P pairs · n pairs of one block · D width · F expert hidden · e local experts ·
r adapter rank.

Saved for backward, a pair: the pre-activations (2F), its row and weight; once: the rows. Expansion
of rows to pairs, activation and down input are computed again in backward, and with `recompute` so
are the pre-activations. No expert output is kept. Backward works out the gradients of a block's
rows and of its weights together; where a dispatcher wants the rows' gradients early, all of those
come first, and 3F a pair is held until the weights' are done.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from moe_tp.experts import workspace
from moe_tp.experts.activation import Activation
from moe_tp.experts.blocks import Block, Scratch, Stack, make_blocks
from moe_tp.experts.elementwise import activate, activate_backward
from moe_tp.experts.events import note
from moe_tp.experts.quantized import QuantizedStack
from moe_tp.experts.row_dropout import RowDropout


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What of the kernel's arguments is no tensor."""

    activation: Activation
    counts: tuple[int, ...] | None
    grouped: bool
    recompute: bool
    scale: float
    early: Callable[[torch.Tensor], None] | None = None
    dropout: RowDropout | None = None
    quantized: tuple[QuantizedStack, QuantizedStack] | None = None


@dataclass(slots=True, kw_only=True)
class _Weights:
    """The kernel's parameters, gate and up as one matrix."""

    gate_up_eND: Stack
    down_eDF: Stack
    gate_up_bias_eN: torch.Tensor | None
    down_bias_eD: torch.Tensor | None
    gate_up_a: torch.Tensor | None
    gate_up_b: torch.Tensor | None
    down_a: torch.Tensor | None
    down_b: torch.Tensor | None
    scale: float
    dropout: RowDropout | None

    @property
    def hidden(self) -> int:
        return self.down_eDF.shape[2]

    def low_x(self, block: Block, x_nD: torch.Tensor, row_n: torch.Tensor) -> torch.Tensor:
        """Return what the terms of gate and up see of rows, or the rows' gradient of that."""
        drop = self.dropout
        return x_nD if drop is None else drop.input(x_nD, row_n, block.value_of(drop.expert_e))

    def low_hidden(self, block: Block, h_nF: torch.Tensor, row_n: torch.Tensor) -> torch.Tensor:
        """Return what the terms of down see of its input, or the input's gradient of that."""
        drop = self.dropout
        return h_nF if drop is None else drop.hidden(h_nF, row_n, block.value_of(drop.expert_e))

    def halves(self) -> list[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Return, for gate and for up, its columns and its adapter's A `[e, r, D]` and B."""
        if self.gate_up_a is None or self.gate_up_b is None:
            return []
        a, b, size = self.gate_up_a, self.gate_up_b, self.hidden
        last = a.shape[1] - 1
        return [(slice(g * size, (g + 1) * size), a[:, min(g, last)], b[:, g]) for g in (0, 1)]


def _pre_activation(
    block: Block,
    x_nD: torch.Tensor,
    row_n: torch.Tensor,
    weights: _Weights,
    out_nN: torch.Tensor,
) -> torch.Tensor:
    """Return gate and up projections `[n, 2F]`, in `out_nN` where the block works in place."""
    out_nN = block.nt(x_nD, weights.gate_up_eND, out_nN)
    low_x_nD = weights.low_x(block, x_nD, row_n)
    for columns, a_erD, b_eFr in weights.halves():
        low_nr = block.nt(low_x_nD, a_erD)
        out_nN[:, columns].add_(block.nt(low_nr, b_eFr), alpha=weights.scale)
    if weights.gate_up_bias_eN is not None:
        out_nN.add_(block.each_row(weights.gate_up_bias_eN))
    return out_nN


def _gather(x_RD: torch.Tensor, row_n: torch.Tensor, scratch: Scratch, name: str) -> torch.Tensor:
    out = scratch.get(name, row_n.shape[0], x_RD.shape[1], x_RD.dtype)
    return torch.index_select(x_RD, 0, row_n, out=out)


def _forward_block(
    block: Block,
    rows_RD: torch.Tensor,
    row_n: torch.Tensor,
    weight_n: torch.Tensor,
    weights: _Weights,
    gate_up_nN: torch.Tensor,
    scratch: Scratch,
    act: Activation,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the block's pre-activations `[n, 2F]` and weighted outputs `[n, D]`, in fp32."""
    dtype, count = rows_RD.dtype, row_n.shape[0]
    x_nD = _gather(rows_RD, row_n, scratch, "x")
    gate_up_nN = _pre_activation(block, x_nD, row_n, weights, gate_up_nN)
    hidden_nF = scratch.get("down_in", count, weights.hidden, dtype)
    activate(gate_up_nN, hidden_nF, act)
    # x is not needed any more
    y_nD = block.nt(hidden_nF, weights.down_eDF, x_nD)
    if weights.down_a is not None and weights.down_b is not None:
        low_nr = block.nt(weights.low_hidden(block, hidden_nF, row_n), weights.down_a)
        y_nD.add_(block.nt(low_nr, weights.down_b), alpha=weights.scale)
    y_nD = _widen(y_nD, scratch)
    if weights.down_bias_eD is not None:
        y_nD.add_(block.each_row(weights.down_bias_eD))
    return gate_up_nN, y_nD.mul_(weight_n[:, None])


def _widen(y_nD: torch.Tensor, scratch: Scratch) -> torch.Tensor:
    """Return the rows in fp32 or more, as sums want them."""
    exact = torch.promote_types(y_nD.dtype, torch.float32)
    if y_nD.dtype == exact:
        return y_nD
    return scratch.get("wide", y_nD.shape[0], y_nD.shape[1], exact).copy_(y_nD)


class _Gradients:
    """Buffers for the parameters' gradients; None where no gradient is wanted."""

    def __init__(self, weights: _Weights, wanted: dict[str, bool]) -> None:
        self.of: dict[str, torch.Tensor] = {}
        for name, want in wanted.items():
            value = getattr(weights, name)
            if want and value is not None:
                self.of[name] = workspace.empty(value.shape, value.dtype, value.device)
        # a shared A gets the sum of what gate and up owe it
        if "gate_up_a" in self.of:
            self.of["gate_up_a"].zero_()

    def get(self, name: str, shape: torch.Size | None = None) -> torch.Tensor | None:
        value = self.of.get(name)
        return value if value is None or shape is None else value.view(shape)


def _backward_inputs(
    block: Block,
    row_n: torch.Tensor,
    dy_nD: torch.Tensor,
    weight_n: torch.Tensor,
    gate_up_nN: torch.Tensor,
    weights: _Weights,
    d_weight_n: torch.Tensor,
    hidden_nF: torch.Tensor,
    d_gate_up_nN: torch.Tensor,
    scratch: Scratch,
    options: Options,
    want_rows: bool,
) -> torch.Tensor | None:
    """Return the gradient of the block's rows `[n, D]`; fill those of weights and activations.

    Args:
        block: the pairs.
        row_n: their rows.
        dy_nD: gradient of the expert outputs.
        weight_n: routing weights.
        gate_up_nN: pre-activations.
        weights: the kernel's parameters.
        d_weight_n: filled with the gradient of the routing weights.
        hidden_nF: filled with the down projection's input.
        d_gate_up_nN: filled with the gradient of the pre-activations.
        scratch: buffers.
        options: of the kernel.
        want_rows: False returns None.
    """
    count, dtype = dy_nD.shape[0], dy_nD.dtype
    out = scratch.get("d_hidden", count, weights.hidden, dtype)
    d_hidden_nF = block.nn(dy_nD, weights.down_eDF, out)
    if weights.down_a is not None and weights.down_b is not None:
        low_grad_nr = block.nn(dy_nD, weights.down_b).mul_(weights.scale)
        d_low_nF = block.nn(low_grad_nr, weights.down_a)
        d_hidden_nF.add_(weights.low_hidden(block, d_low_nF, row_n))
    activate_backward(
        d_hidden_nF, gate_up_nN, weight_n, hidden_nF, d_gate_up_nN, d_weight_n, options.activation
    )
    if weights.down_bias_eD is not None:
        bias = block.each_row(weights.down_bias_eD)
        d_weight_n.add_((dy_nD * bias).sum(dim=1, dtype=d_weight_n.dtype))
    if not want_rows:
        return None
    dx_nD = block.nn(
        d_gate_up_nN, weights.gate_up_eND, scratch.get("dx", count, dy_nD.shape[1], dtype)
    )
    for columns, a_erD, b_eFr in weights.halves():
        low_grad_nr = block.nn(d_gate_up_nN[:, columns], b_eFr).mul_(weights.scale)
        dx_nD.add_(weights.low_x(block, block.nn(low_grad_nr, a_erD), row_n))
    return dx_nD


def _backward_weights(
    block: Block,
    row_n: torch.Tensor,
    x_nD: torch.Tensor,
    dy_nD: torch.Tensor,
    weight_n: torch.Tensor,
    hidden_nF: torch.Tensor,
    d_gate_up_nN: torch.Tensor,
    weights: _Weights,
    grads: _Gradients,
) -> None:
    """Fill the gradients of the block's parameters from what `_backward_inputs` left."""
    if "down_eDF" in grads.of:
        block.tn(dy_nD, hidden_nF, grads.of["down_eDF"])
    if weights.down_a is not None and weights.down_b is not None:
        low_hidden_nF = weights.low_hidden(block, hidden_nF, row_n)
        if "down_a" in grads.of:
            low_grad_nr = block.nn(dy_nD, weights.down_b).mul_(weights.scale)
            block.tn(low_grad_nr, low_hidden_nF, grads.of["down_a"])
        if "down_b" in grads.of:
            low_nr = block.nt(low_hidden_nF, weights.down_a).mul_(weights.scale)
            block.tn(dy_nD, low_nr, grads.of["down_b"])
    if "down_bias_eD" in grads.of:
        block.column_sums(dy_nD, weight_n, grads.of["down_bias_eD"])
    if "gate_up_eND" in grads.of:
        block.tn(d_gate_up_nN, x_nD, grads.of["gate_up_eND"])
    if "gate_up_bias_eN" in grads.of:
        ones = torch.ones_like(d_gate_up_nN[:, 0])
        block.column_sums(d_gate_up_nN, ones, grads.of["gate_up_bias_eN"])
    low_x_nD = weights.low_x(block, x_nD, row_n)
    for half, (columns, a_erD, b_eFr) in enumerate(weights.halves()):
        d_half_nF = d_gate_up_nN[:, columns]
        if "gate_up_a" in grads.of:
            d_a = grads.of["gate_up_a"][:, min(half, grads.of["gate_up_a"].shape[1] - 1)]
            low_grad_nr = block.nn(d_half_nF, b_eFr).mul_(weights.scale)
            part = torch.zeros_like(d_a)
            block.tn(low_grad_nr, low_x_nD, part)
            d_a.add_(part)
        if "gate_up_b" in grads.of:
            low_nr = block.nt(low_x_nD, a_erD).mul_(weights.scale)
            block.tn(d_half_nF, low_nr, grads.of["gate_up_b"][:, half])


class _Kept:
    """Down inputs and pre-activation gradients: of one block at a time, or of all pairs."""

    def __init__(
        self,
        blocks: list[Block],
        num_pairs: int,
        hidden: int,
        dtype: torch.dtype,
        scratch: Scratch,
        whole: bool,
    ) -> None:
        self._scratch, self._hidden, self._dtype = scratch, hidden, dtype
        self._whole: list[torch.Tensor] = []
        if whole and len(blocks) > 1:
            for width in (hidden, 2 * hidden):
                self._whole.append(scratch.whole(num_pairs, width, dtype))

    def of(self, block: Block) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the block's `[n, F]` and `[n, 2F]`."""
        if self._whole:
            hidden_PF, d_gate_up_PN = self._whole
            pairs = slice(block.start, block.stop)
            return hidden_PF[pairs], d_gate_up_PN[pairs]
        count, get = block.stop - block.start, self._scratch.get
        return (
            get("down_in", count, self._hidden, self._dtype),
            get("d_gate_up", count, 2 * self._hidden, self._dtype),
        )


class ExpertKernel(Function):
    """`experts_forward` of the fast back ends; see `moe_tp.experts.grouped`."""

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any,
        rows_RD: torch.Tensor,
        weight_P: torch.Tensor,
        gate_up_e2FD: torch.Tensor | None,
        down_eDF: torch.Tensor | None,
        gate_up_bias_e2F: torch.Tensor | None,
        down_bias_eD: torch.Tensor | None,
        gate_up_a: torch.Tensor | None,
        gate_up_b: torch.Tensor | None,
        down_a: torch.Tensor | None,
        down_b: torch.Tensor | None,
        pair_row_P: torch.Tensor,
        counts_e: torch.Tensor,
        options: Options,
    ) -> torch.Tensor:
        adapters = (gate_up_a, gate_up_b, down_a, down_b)
        biases = (gate_up_bias_e2F, down_bias_eD)
        weights = _weights(gate_up_e2FD, down_eDF, biases, adapters, options)
        num_pairs, dtype = pair_row_P.shape[0], rows_RD.dtype
        blocks = make_blocks(
            counts_e, options.counts, num_pairs, grouped=options.grouped, hidden=weights.hidden
        )
        scratch = Scratch(blocks, rows_RD.device)
        exact = torch.promote_types(dtype, torch.float32)
        out_RD = torch.zeros(rows_RD.shape, dtype=exact, device=rows_RD.device)
        keep = not options.recompute and any(ctx.needs_input_grad)
        saved_PN = None
        if keep and not options.grouped:
            shape = (num_pairs, 2 * weights.hidden)
            saved_PN = workspace.empty(shape, dtype, rows_RD.device)
        for block in blocks:
            pairs = slice(block.start, block.stop)
            row_n = block.rows_of(pair_row_P)
            gate_up_nN = (
                saved_PN[pairs]
                if saved_PN is not None
                else scratch.get("gate_up", row_n.shape[0], 2 * weights.hidden, dtype)
            )
            gate_up_nN, y_nD = _forward_block(
                block, rows_RD, row_n, weight_P[pairs], weights, gate_up_nN, scratch,
                options.activation,
            )  # fmt: skip
            out_RD = block.add_to_rows(out_RD, row_n, y_nD)
            if keep and options.grouped:
                saved_PN = gate_up_nN
        ctx.options, ctx.blocks = options, blocks
        ctx.save_for_backward(
            rows_RD, weight_P, gate_up_e2FD, down_eDF, *biases, *adapters, pair_row_P, saved_PN
        )
        return out_RD

    @staticmethod
    @once_differentiable
    def backward(  # noqa: D102
        ctx: Any, *grad_outputs: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        rows_RD, weight_P, gate_up, down, *rest = ctx.saved_tensors
        biases, adapters, (pair_row_P, saved_PN) = rest[:2], rest[2:6], rest[6:]
        options: Options = ctx.options
        weights = _weights(gate_up, down, biases, adapters, options)
        wanted = dict(zip(_PARAMETERS, ctx.needs_input_grad[2:10], strict=True))
        grads = _Gradients(weights, wanted)
        scratch = Scratch(ctx.blocks, rows_RD.device)
        dtype, exact = rows_RD.dtype, torch.promote_types(rows_RD.dtype, torch.float32)
        # contiguous: a sum's gradient arrives with stride 0
        dy_RD = grad_outputs[0].to(dtype).contiguous()
        want_rows = ctx.needs_input_grad[0]
        d_rows_RD = torch.zeros_like(rows_RD, dtype=exact) if want_rows else None
        d_weight_P = torch.zeros(weight_P.shape, dtype=exact, device=weight_P.device)
        # apart from the rows' gradients, so that those travel while the weights' are worked out
        late = options.early is not None and d_rows_RD is not None and bool(grads.of)
        kept = _Kept(ctx.blocks, pair_row_P.shape[0], weights.hidden, dtype, scratch, late)

        def gather(block: Block) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            row_n = block.rows_of(pair_row_P)
            x_nD = _gather(rows_RD, row_n, scratch, "x")
            return row_n, x_nD, _gather(dy_RD, row_n, scratch, "dy")

        for block in ctx.blocks:
            pairs = slice(block.start, block.stop)
            row_n, x_nD, dy_nD = gather(block)
            if saved_PN is None:
                out = scratch.get("gate_up", row_n.shape[0], 2 * weights.hidden, dtype)
                gate_up_nN = _pre_activation(block, x_nD, row_n, weights, out)
            else:
                gate_up_nN = saved_PN[pairs]
            hidden_nF, d_gate_up_nN = kept.of(block)
            dx_nD = _backward_inputs(
                block, row_n, dy_nD, weight_P[pairs], gate_up_nN, weights, d_weight_P[pairs],
                hidden_nF, d_gate_up_nN, scratch, options, want_rows,
            )  # fmt: skip
            if not late:
                _backward_weights(
                    block, row_n, x_nD, dy_nD, weight_P[pairs], hidden_nF, d_gate_up_nN, weights,
                    grads,
                )  # fmt: skip
            if d_rows_RD is not None and dx_nD is not None:
                d_rows_RD = block.add_to_rows(d_rows_RD, row_n, _widen(dx_nD, scratch))
            if block.valid_P1 is not None:
                d_weight_P = torch.where(block.valid_P1[:, 0], d_weight_P, 0)
        if d_rows_RD is not None:
            d_rows_RD = d_rows_RD.to(dtype)
        if late and options.early is not None and d_rows_RD is not None:
            options.early(d_rows_RD)
        if grads.of:
            note("expert weight gradients")
        for block in ctx.blocks if late else ():
            pairs = slice(block.start, block.stop)
            row_n, x_nD, dy_nD = gather(block)
            _backward_weights(
                block, row_n, x_nD, dy_nD, weight_P[pairs], *kept.of(block), weights, grads
            )
        return (
            d_rows_RD,
            d_weight_P.to(weight_P.dtype) if ctx.needs_input_grad[1] else None,
            grads.get("gate_up_eND", gate_up.shape if gate_up is not None else None),
            grads.get("down_eDF"),
            grads.get("gate_up_bias_eN", biases[0].shape if biases[0] is not None else None),
            *(grads.get(name) for name in _PARAMETERS[3:]),
            None,
            None,
            None,
        )


_PARAMETERS = (
    "gate_up_eND",
    "down_eDF",
    "gate_up_bias_eN",
    "down_bias_eD",
    "gate_up_a",
    "gate_up_b",
    "down_a",
    "down_b",
)


def _weights(
    gate_up_e2FD: torch.Tensor | None,
    down_eDF: torch.Tensor | None,
    biases: Any,
    adapters: Any,
    options: Options,
) -> _Weights:
    gate_up_bias, down_bias = biases
    stacks: tuple[Stack, Stack]
    if gate_up_e2FD is None or down_eDF is None:
        assert options.quantized is not None
        stacks = options.quantized
    else:
        stacks = (gate_up_e2FD.flatten(1, 2), down_eDF)
    return _Weights(
        gate_up_eND=stacks[0],
        down_eDF=stacks[1],
        gate_up_bias_eN=None if gate_up_bias is None else gate_up_bias.flatten(1, 2),
        down_bias_eD=down_bias,
        gate_up_a=adapters[0],
        gate_up_b=adapters[1],
        down_a=adapters[2],
        down_b=adapters[3],
        scale=options.scale,
        dropout=options.dropout,
    )
