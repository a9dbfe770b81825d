"""What the expert kernel does with one block of pairs, forward and backward.

Letters: R rows · n pairs of one block · D width · F expert hidden · N two times F · e local
experts · r adapter rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from moe_tp.experts import workspace
from moe_tp.experts.activation import Activation
from moe_tp.experts.blocks import Block, Scratch, Stack
from moe_tp.experts.elementwise import activate, activate_backward, turns
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
    sum_dtype: torch.dtype | None = None


@dataclass(slots=True, kw_only=True)
class Weights:
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
        """F."""
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

    def turned(self, rows_RD: torch.Tensor, act: Activation) -> bool:
        """Return whether pre-activations lie turned; only the products know them so."""
        others = (self.gate_up_bias_eN, self.gate_up_a, self.down_a)
        plain = isinstance(self.gate_up_eND, torch.Tensor) and all(x is None for x in others)
        return plain and turns(rows_RD, act)


def pre_activation(
    block: Block,
    x_nD: torch.Tensor,
    row_n: torch.Tensor,
    weights: Weights,
    out_nN: torch.Tensor,
) -> torch.Tensor:
    """Return gate and up projections `[n, 2F]`, in `out_nN` where the block works in place."""
    out_nN = block.nt(x_nD, weights.gate_up_eND, out_nN, block.turned)
    low_x_nD = weights.low_x(block, x_nD, row_n)
    for columns, a_erD, b_eFr in weights.halves():
        low_nr = block.nt(low_x_nD, a_erD)
        out_nN[:, columns].add_(block.nt(low_nr, b_eFr), alpha=weights.scale)
    if weights.gate_up_bias_eN is not None:
        out_nN.add_(block.each_row(weights.gate_up_bias_eN))
    return out_nN


def take(
    block: Block, x_RD: torch.Tensor, row_n: torch.Tensor, scratch: Scratch, name: str
) -> torch.Tensor:
    """Return the block's rows `[n, D]`, zero in empty places."""
    out = scratch.get(name, row_n.shape[0], x_RD.shape[1], x_RD.dtype)
    return block.clear(torch.index_select(x_RD, 0, row_n, out=out))


def forward_block(
    block: Block,
    rows_RD: torch.Tensor,
    row_n: torch.Tensor,
    weights: Weights,
    gate_up_nN: torch.Tensor,
    y_nD: torch.Tensor | None,
    scratch: Scratch,
    act: Activation,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the block's pre-activations `[n, 2F]` and outputs `[n, D]`, without weight or bias.

    Args:
        block: the pairs.
        rows_RD: all rows.
        row_n: the row of each pair.
        weights: the kernel's parameters.
        gate_up_nN, y_nD: where to put them; None: in a buffer that the next block uses again.
        scratch: buffers.
        act: the activation.
    """
    dtype, count = rows_RD.dtype, row_n.shape[0]
    x_nD = take(block, rows_RD, row_n, scratch, "x")
    gate_up_nN = pre_activation(block, x_nD, row_n, weights, gate_up_nN)
    hidden_nF = scratch.get("down_in", count, weights.hidden, dtype)
    activate(block, gate_up_nN, hidden_nF, act)
    # x is not needed any more
    y_nD = block.nt(hidden_nF, weights.down_eDF, x_nD if y_nD is None else y_nD)
    if weights.down_a is not None and weights.down_b is not None:
        low_nr = block.nt(weights.low_hidden(block, hidden_nF, row_n), weights.down_a)
        y_nD.add_(block.nt(low_nr, weights.down_b), alpha=weights.scale)
    return gate_up_nN, y_nD


def weigh(
    block: Block,
    y_nD: torch.Tensor,
    weight_n: torch.Tensor,
    weights: Weights,
    scratch: Scratch,
) -> torch.Tensor:
    """Return outputs with their bias and weight, in fp32 or more, as sums want them."""
    y_nD = widen(block, y_nD, scratch)
    if weights.down_bias_eD is not None:
        y_nD.add_(block.each_row(weights.down_bias_eD))
    return block.clear(y_nD.mul_(weight_n[:, None]))


def widen(block: Block, y_nD: torch.Tensor, scratch: Scratch) -> torch.Tensor:
    """Return rows in fp32 or more, zero in empty places."""
    exact = torch.promote_types(y_nD.dtype, torch.float32)
    if y_nD.dtype == exact:
        return y_nD
    wide_nD = scratch.get("wide", y_nD.shape[0], y_nD.shape[1], exact)
    return block.clear(wide_nD.copy_(y_nD))


class Gradients:
    """Buffers for the parameters' gradients; None where no gradient is wanted."""

    def __init__(self, weights: Weights, wanted: dict[str, bool]) -> None:
        self.of: dict[str, torch.Tensor] = {}
        for name, want in wanted.items():
            value = getattr(weights, name)
            if want and value is not None:
                self.of[name] = workspace.empty(value.shape, value.dtype, value.device)
        # a shared A gets the sum of what gate and up owe it
        if "gate_up_a" in self.of:
            self.of["gate_up_a"].zero_()

    def get(self, name: str, shape: torch.Size | None = None) -> torch.Tensor | None:
        """Return a parameter's gradient, in a shape; None where none is wanted."""
        value = self.of.get(name)
        return value if value is None or shape is None else value.view(shape)


def backward_inputs(
    block: Block,
    row_n: torch.Tensor,
    dy_nD: torch.Tensor,
    weight_n: torch.Tensor,
    gate_up_nN: torch.Tensor,
    weights: Weights,
    d_weight_n: torch.Tensor,
    hidden_nF: torch.Tensor,
    d_gate_up_nN: torch.Tensor,
    scratch: Scratch,
    options: Options,
    dx_nD: torch.Tensor | None,
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
        hidden_nF: filled with the down projection's input; turned where the block is.
        d_gate_up_nN: filled with the gradient of the pre-activations, likewise.
        scratch: buffers.
        options: of the kernel.
        dx_nD: where to put the result; None: in a buffer that the next block uses again.
        want_rows: False returns None.
    """
    count, dtype = dy_nD.shape[0], dy_nD.dtype
    out = scratch.get("d_hidden", count, weights.hidden, dtype)
    d_hidden_nF = block.nn(dy_nD, weights.down_eDF, out)
    if weights.down_a is not None and weights.down_b is not None:
        low_grad_nr = block.nn(dy_nD, weights.down_b).mul_(weights.scale)
        d_low_nF = block.nn(low_grad_nr, weights.down_a)
        d_hidden_nF.add_(weights.low_hidden(block, d_low_nF, row_n))
    d_turned_nN = d_gate_up_nN if block.turned else None
    if block.turned:
        d_gate_up_nN = scratch.get("d_gate_up_rows", count, d_gate_up_nN.shape[1], dtype)
    activate_backward(
        block, d_hidden_nF, gate_up_nN, weight_n, hidden_nF, d_gate_up_nN, d_turned_nN, d_weight_n,
        options.activation,
    )  # fmt: skip
    if weights.down_bias_eD is not None:
        bias = block.each_row(weights.down_bias_eD)
        d_weight_n.add_((dy_nD * bias).sum(dim=1, dtype=d_weight_n.dtype))
    if not want_rows:
        return None
    if dx_nD is None:
        dx_nD = scratch.get("dx", count, dy_nD.shape[1], dtype)
    dx_nD = block.nn(d_gate_up_nN, weights.gate_up_eND, dx_nD)
    for columns, a_erD, b_eFr in weights.halves():
        low_grad_nr = block.nn(d_gate_up_nN[:, columns], b_eFr).mul_(weights.scale)
        dx_nD.add_(weights.low_x(block, block.nn(low_grad_nr, a_erD), row_n))
    return dx_nD


def backward_weights(
    block: Block,
    row_n: torch.Tensor,
    x_nD: torch.Tensor,
    dy_nD: torch.Tensor,
    weight_n: torch.Tensor,
    hidden_nF: torch.Tensor,
    d_gate_up_nN: torch.Tensor,
    weights: Weights,
    grads: Gradients,
) -> None:
    """Fill the gradients of the block's parameters from what `backward_inputs` left."""
    if "down_eDF" in grads.of:
        block.tn(dy_nD, hidden_nF, grads.of["down_eDF"], (False, block.turned))
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
        block.tn(d_gate_up_nN, x_nD, grads.of["gate_up_eND"], (block.turned, False))
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


class Kept:
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


def weights_of(
    gate_up_e2FD: torch.Tensor | None,
    down_eDF: torch.Tensor | None,
    biases: Any,
    adapters: Any,
    options: Options,
) -> Weights:
    """Return the kernel's parameters as its steps take them."""
    gate_up_bias, down_bias = biases
    stacks: tuple[Stack, Stack]
    if gate_up_e2FD is None or down_eDF is None:
        assert options.quantized is not None
        stacks = options.quantized
    else:
        stacks = (gate_up_e2FD.flatten(1, 2), down_eDF)
    return Weights(
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
