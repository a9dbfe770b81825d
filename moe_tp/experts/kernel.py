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

from typing import Any

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from moe_tp.experts import workspace
from moe_tp.experts.blocks import Block, Scratch, make_blocks
from moe_tp.experts.events import note
from moe_tp.experts.places import Places, make_places
from moe_tp.experts.steps import (
    Gradients,
    Kept,
    Options,
    Weights,
    backward_inputs,
    backward_weights,
    forward_block,
    pre_activation,
    take,
    weigh,
    weights_of,
    widen,
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
        weights = weights_of(gate_up_e2FD, down_eDF, biases, adapters, options)
        places = _places(pair_row_P, counts_e, rows_RD, weights, options)
        blocks = make_blocks(
            counts_e,
            places.counts or options.counts,
            places.row_Q.shape[0],
            grouped=options.grouped,
            hidden=weights.hidden,
            empty=places.empty,
            runs=places.runs,
            turned=not options.grouped and weights.turned(rows_RD, options.activation),
        )
        keep = not options.recompute and any(ctx.needs_input_grad)
        weight_Q = places.spread(weight_P)
        out_RD, saved_QN = _forward(blocks, rows_RD, weight_Q, weights, places, options, keep)
        ctx.options, ctx.blocks, ctx.num_pairs = options, blocks, pair_row_P.shape[0]
        ctx.places = places.without_tensors()
        ctx.save_for_backward(
            rows_RD, weight_Q, gate_up_e2FD, down_eDF, *biases, *adapters, saved_QN,
            *places.tensors(),
        )  # fmt: skip
        return out_RD

    @staticmethod
    @once_differentiable
    def backward(  # noqa: D102
        ctx: Any, *grad_outputs: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        rows_RD, weight_Q, gate_up, down, *rest = ctx.saved_tensors
        biases, adapters, saved_QN = rest[:2], rest[2:6], rest[6]
        options: Options = ctx.options
        places: Places = ctx.places.with_tensors(rest[7:])
        weights = weights_of(gate_up, down, biases, adapters, options)
        wanted = dict(zip(_PARAMETERS, ctx.needs_input_grad[2:10], strict=True))
        grads = Gradients(weights, wanted)
        run = _Backward(ctx.blocks, rows_RD, grad_outputs[0], weight_Q, weights, places, options)
        want_rows = ctx.needs_input_grad[0]
        # apart from the rows' gradients, so that those travel while the weights' are worked out
        late = options.early is not None and want_rows and bool(grads.of)
        kept = run.keep(late)
        d_rows_RD = run.inputs(saved_QN, kept, grads, want_rows=want_rows, late=late)
        if late and options.early is not None and d_rows_RD is not None:
            options.early(d_rows_RD)
        if grads.of:
            note("expert weight gradients")
        if late:
            run.weights_of_all(kept, grads)
        d_weight_P = places.collect(run.d_weight_Q, ctx.num_pairs)
        return (
            d_rows_RD,
            d_weight_P.to(weight_Q.dtype) if ctx.needs_input_grad[1] else None,
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


def _places(
    pair_row_P: torch.Tensor,
    counts_e: torch.Tensor,
    rows_RD: torch.Tensor,
    weights: Weights,
    options: Options,
) -> Places:
    """Return where the pairs lie; reads the counts to the host unless the products are grouped."""
    if options.grouped:
        return Places(counts=(), row_Q=pair_row_P)
    if pair_row_P.shape[0] == 0:
        return Places(counts=(0,) * counts_e.shape[0], row_Q=pair_row_P)
    hidden = 0 if options.quantized else weights.hidden
    return make_places(pair_row_P, options.counts or tuple(counts_e.tolist()), rows_RD, hidden)


def _forward(
    blocks: list[Block],
    rows_RD: torch.Tensor,
    weight_Q: torch.Tensor,
    weights: Weights,
    places: Places,
    options: Options,
    keep: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the rows' sums `[R, D]`, and with `keep` the pre-activations `[Q, 2F]`."""
    dtype, device = rows_RD.dtype, rows_RD.device
    scratch = Scratch(blocks, device)
    saved_QN = y_QD = out_RD = None
    if keep and not options.grouped:
        saved_QN = workspace.empty((places.row_Q.shape[0], 2 * weights.hidden), dtype, device)
    if options.sum_dtype == dtype and weights.down_bias_eD is None:
        y_QD = places.buffer(rows_RD)
    if y_QD is None:
        exact = torch.promote_types(dtype, torch.float32)
        out_RD = torch.zeros(rows_RD.shape, dtype=exact, device=device)
    for block in blocks:
        at = slice(block.start, block.stop)
        row_n = block.rows_of(places.row_Q)
        gate_up_nN = (
            saved_QN[at]
            if saved_QN is not None
            else scratch.get("gate_up", row_n.shape[0], 2 * weights.hidden, dtype)
        )
        gate_up_nN, y_nD = forward_block(
            block, rows_RD, row_n, weights, gate_up_nN, None if y_QD is None else y_QD[at],
            scratch, options.activation,
        )  # fmt: skip
        if out_RD is not None:
            y_nD = weigh(block, y_nD, weight_Q[at], weights, scratch)
            out_RD = block.add_to_rows(out_RD, row_n, y_nD)
        if keep and options.grouped:
            saved_QN = gate_up_nN
    if y_QD is not None:
        out_RD = places.total(y_QD, weight_Q)
    assert out_RD is not None
    return out_RD, saved_QN


class _Backward:
    """One backward: what its blocks share.

    Args:
        blocks: all pairs.
        rows_RD: the rows.
        dy_RD: gradient of the rows' sums.
        weight_Q: routing weights.
        weights: the kernel's parameters.
        places: where the pairs lie.
        options: of the kernel.
    """

    def __init__(
        self,
        blocks: list[Block],
        rows_RD: torch.Tensor,
        dy_RD: torch.Tensor,
        weight_Q: torch.Tensor,
        weights: Weights,
        places: Places,
        options: Options,
    ) -> None:
        self.blocks, self.rows_RD, self.weight_Q = blocks, rows_RD, weight_Q
        self.weights, self.places, self.options = weights, places, options
        self.scratch = Scratch(blocks, rows_RD.device)
        # contiguous: a sum's gradient arrives with stride 0
        self.dy_RD = dy_RD.to(rows_RD.dtype).contiguous()
        self.exact = torch.promote_types(rows_RD.dtype, torch.float32)
        self.d_weight_Q = torch.zeros(weight_Q.shape, dtype=self.exact, device=rows_RD.device)

    def keep(self, late: bool) -> Kept:
        """Return the buffers from which the weights' gradients are worked out."""
        rows, hidden = self.places.row_Q.shape[0], self.weights.hidden
        return Kept(self.blocks, rows, hidden, self.rows_RD.dtype, self.scratch, late)

    def _gather(self, block: Block) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        row_n = block.rows_of(self.places.row_Q)
        x_nD = take(block, self.rows_RD, row_n, self.scratch, "x")
        return row_n, x_nD, take(block, self.dy_RD, row_n, self.scratch, "dy")

    def inputs(
        self,
        saved_QN: torch.Tensor | None,
        kept: Kept,
        grads: Gradients,
        *,
        want_rows: bool,
        late: bool,
    ) -> torch.Tensor | None:
        """Return the rows' gradient; fill the routing weights' and, unless `late`, the others."""
        dtype, scratch, weights = self.rows_RD.dtype, self.scratch, self.weights
        dx_QD = self.places.buffer(self.rows_RD) if want_rows else None
        d_rows_RD = None
        if want_rows and dx_QD is None:
            d_rows_RD = torch.zeros_like(self.rows_RD, dtype=self.exact)
        for block in self.blocks:
            at = slice(block.start, block.stop)
            row_n, x_nD, dy_nD = self._gather(block)
            if saved_QN is None:
                out = scratch.get("gate_up", row_n.shape[0], 2 * weights.hidden, dtype)
                gate_up_nN = pre_activation(block, x_nD, row_n, weights, out)
            else:
                gate_up_nN = saved_QN[at]
            hidden_nF, d_gate_up_nN = kept.of(block)
            dx_nD = backward_inputs(
                block, row_n, dy_nD, self.weight_Q[at], gate_up_nN, weights, self.d_weight_Q[at],
                hidden_nF, d_gate_up_nN, scratch, self.options,
                None if dx_QD is None else dx_QD[at], want_rows,
            )  # fmt: skip
            if not late:
                backward_weights(
                    block, row_n, x_nD, dy_nD, self.weight_Q[at], hidden_nF, d_gate_up_nN, weights,
                    grads,
                )  # fmt: skip
            if d_rows_RD is not None and dx_nD is not None:
                d_rows_RD = block.add_to_rows(d_rows_RD, row_n, widen(block, dx_nD, scratch))
            if block.valid_P1 is not None:
                self.d_weight_Q = torch.where(block.valid_P1[:, 0], self.d_weight_Q, 0)
        if dx_QD is not None:
            return self.places.total(dx_QD)
        return None if d_rows_RD is None else d_rows_RD.to(dtype)

    def weights_of_all(self, kept: Kept, grads: Gradients) -> None:
        """Fill the weights' gradients of all blocks, after the rows'."""
        for block in self.blocks:
            row_n, x_nD, dy_nD = self._gather(block)
            backward_weights(
                block, row_n, x_nD, dy_nD, self.weight_Q[block.start : block.stop],
                *kept.of(block), self.weights, grads,
            )  # fmt: skip
