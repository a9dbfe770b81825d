"""Column- and row-parallel products with the sequence gathered and scattered inside them.

`gather_linear` takes owned tokens, gathers them over tp and multiplies by this rank's rows of each
weight (Megatron-LM, arXiv:1909.08053 section 3; with sequence parallelism arXiv:2205.05198 section
4.2.2). `linear_scatter` multiplies by this rank's columns and leaves each owner its summed rows.
The gathered input is not kept: backward gathers again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd import Function

from moe_tp.parallel.collectives import (
    Group,
    accumulate_dtype,
    raw_all_gather,
    raw_reduce_scatter_rows,
)
from moe_tp.parallel.functions import apply_function
from moe_tp.parallel.mesh import Mesh
from moe_tp.parallel.parameter import ParallelModule
from moe_tp.parallel.product import add_product, linear, product
from moe_tp.parallel.spec import ZEROS, Init, ParamSpec
from moe_tp.parallel.whole import sum_whole
from moe_tp.routing.scores import full_precision


class _GatherLinear(Function):
    @staticmethod
    def forward(
        ctx: Any, x_TD: torch.Tensor, group: Group, count: int, *tensors: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        weights, biases = tensors[:count], tensors[count:]
        ctx.group, ctx.count = group, count
        ctx.save_for_backward(x_TD, *weights)
        x_ND = raw_all_gather(x_TD, group)
        return tuple(
            linear(x_ND, w, b) for w, b in zip(weights, biases, strict=True) if w is not None
        )

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        x_TD, *weights = ctx.saved_tensors
        need_x, need = ctx.needs_input_grad[0], ctx.needs_input_grad[3:]
        group, count = ctx.group, ctx.count
        grads = tuple(g.contiguous() for g in grads)
        grad_w: list[torch.Tensor | None] = [None] * count
        grad_b: list[torch.Tensor | None] = [None] * count
        if any(need[:count]):
            x_ND = raw_all_gather(x_TD, group, phase="backward")
            for i, g in enumerate(grads):
                if need[i]:
                    grad_w[i] = product(g.t(), x_ND)
        for i, g in enumerate(grads):
            if need[count + i]:
                grad_b[i] = g.sum(0, dtype=accumulate_dtype(g.dtype)).to(g.dtype)
        grad_x = None
        if need_x:
            total = product(grads[0], weights[0])
            for g, w in zip(grads[1:], weights[1:], strict=True):
                total = add_product(total, g, w)
            share = [total.shape[0] // group.size] * group.size
            grad_x = raw_reduce_scatter_rows(total, share, group, phase="backward")
        return (grad_x, None, None, *grad_w, *grad_b)


class _LinearScatter(Function):
    @staticmethod
    def forward(ctx: Any, x_NF: torch.Tensor, weight_DF: torch.Tensor, group: Group) -> Any:
        ctx.group = group
        ctx.save_for_backward(x_NF, weight_DF)
        y_ND = linear(x_NF, weight_DF, None)
        return raw_reduce_scatter_rows(y_ND, [y_ND.shape[0] // group.size] * group.size, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        x_NF, weight_DF = ctx.saved_tensors
        g_ND = raw_all_gather(grads[0], ctx.group, phase="backward")
        grad_x = product(g_ND, weight_DF) if ctx.needs_input_grad[0] else None
        grad_w = product(g_ND.t(), x_NF) if ctx.needs_input_grad[1] else None
        return grad_x, grad_w, None


def gather_linear(
    x_TD: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    group: Group,
) -> tuple[torch.Tensor, ...]:
    """Return `gathered(x) @ w.T + b` for each weight.

    Args:
        x_TD: owned tokens; each rank of the group brings the same number.
        weights: this rank's rows `[out/size, D]` of each weight.
        biases: this rank's `[out/size]`, or None.
        group: the tensor-parallel group.

    Collectives: all-gather of x over `group`; backward all-gather of x and one reduce-scatter.
    """
    result: tuple[torch.Tensor, ...] = apply_function(
        _GatherLinear, x_TD, group, len(weights), *weights, *biases
    )
    return result


def linear_scatter(
    x_NF: torch.Tensor, weight_DF: torch.Tensor, bias_D: torch.Tensor | None, group: Group
) -> torch.Tensor:
    """Return this rank's rows of the sum over the group of `x @ w.T`, plus the bias once.

    Args:
        x_NF: all tokens of the group, this rank's features; N divides by the group's size.
        weight_DF: this rank's columns `[D, F/size]`.
        bias_D: whole bias, or None.
        group: the tensor-parallel group.

    Collectives: reduce-scatter over `group`, summed in fp32; backward all-gather.
    """
    y_TD: torch.Tensor = apply_function(_LinearScatter, x_NF, weight_DF, group)
    return y_TD if bias_D is None else y_TD + bias_D


class ColumnParallelLinear(ParallelModule):
    """`y = gathered(x) @ weight.T + bias` with the outputs split over tp.

    Args:
        dim: input width.
        out: output width over all ranks; tp must divide it.
        mesh: the mesh.
        dtype: parameter dtype.
        bias: with a bias, split like the outputs.
        init: first values of the weight.
    """

    def __init__(
        self,
        dim: int,
        out: int,
        mesh: Mesh,
        *,
        dtype: torch.dtype = torch.float32,
        bias: bool = False,
        init: Init | None = None,
    ) -> None:
        super().__init__(mesh)
        spec = ParamSpec(shape=(out, dim), shards={"tp": 0}, init=init or Init())
        self.add_parameter("weight", spec, dtype)
        if bias:
            spec = ParamSpec(shape=(out,), shards={"tp": 0}, init=ZEROS, role="bias")
            self.add_parameter("bias", spec, dtype)

    def bias_or_none(self) -> torch.Tensor | None:
        """Return this rank's part of the bias, or None without one."""
        return self.local("bias") if "bias" in self.specs else None

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Return `[T * tp, out / tp]` for owned tokens `[T, D]`; see `gather_linear`."""
        group = self.mesh.group("tp")
        (y_NF,) = gather_linear(x_TD, [self.local("weight")], [self.bias_or_none()], group)
        return self.with_low_rank(x_TD, y_NF)


class RowParallelLinear(ParallelModule):
    """`y = scattered(x @ weight.T) + bias` with the inputs split over tp.

    Args:
        dim: input width over all ranks; tp must divide it.
        out: output width.
        mesh: the mesh.
        dtype: parameter dtype.
        bias: with a bias, whole on every rank and added once.
        init: first values of the weight.
    """

    def __init__(
        self,
        dim: int,
        out: int,
        mesh: Mesh,
        *,
        dtype: torch.dtype = torch.float32,
        bias: bool = False,
        init: Init | None = None,
    ) -> None:
        super().__init__(mesh)
        spec = ParamSpec(shape=(out, dim), shards={"tp": 1}, init=init or Init())
        self.add_parameter("weight", spec, dtype)
        if bias:
            spec = ParamSpec(shape=(out,), partial=True, init=ZEROS, role="bias")
            self.add_parameter("bias", spec, dtype)

    def forward(self, x_NF: torch.Tensor, *, whole: bool = False) -> torch.Tensor:
        """Return `[N / tp, out]` owned rows for `[N, dim / tp]`; see `linear_scatter`.

        Args:
            x_NF: all tokens, this rank's features.
            whole: return all rows on every rank; without gradient or adapter.

        Collectives: as `linear_scatter`; with `whole` as `sum_whole`.
        """
        bias = self.local("bias") if "bias" in self.specs else None
        weight, group = self.local("weight"), self.mesh.group("tp")
        if whole:
            y_ND = sum_whole(linear(x_NF, weight, None), group)
            return y_ND if bias is None else y_ND + bias
        return self.with_low_rank(x_NF, linear_scatter(x_NF, weight, bias, group))


class ReplicatedLinear(ParallelModule):
    """`y = x @ weight.T + bias` on owned tokens, with whole weights on every rank.

    Args:
        dim: input width.
        out: output width.
        mesh: the mesh.
        dtype: parameter dtype.
        bias: with a bias.
        keep_fp32: never cast below fp32; the product is then taken in fp32 too.
        init: first values of the weight.
    """

    def __init__(
        self,
        dim: int,
        out: int,
        mesh: Mesh,
        *,
        dtype: torch.dtype = torch.float32,
        bias: bool = False,
        keep_fp32: bool = False,
        init: Init | None = None,
    ) -> None:
        super().__init__(mesh)
        spec = ParamSpec(shape=(out, dim), partial=True, init=init or Init(), keep_fp32=keep_fp32)
        self.add_parameter("weight", spec, dtype)
        if bias:
            spec = ParamSpec(
                shape=(out,), partial=True, init=ZEROS, role="bias", keep_fp32=keep_fp32
            )
            self.add_parameter("bias", spec, dtype)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Return `[T, out]` for `[T, dim]`, in the wider of the input's and the weight's dtype."""
        weight = self.local("weight")
        bias = self.local("bias") if "bias" in self.specs else None
        dtype = torch.promote_types(x_TD.dtype, weight.dtype)
        x_TD, bias = x_TD.to(dtype), None if bias is None else bias.to(dtype)
        with full_precision(x_TD.device):
            y_TD = F.linear(x_TD, weight.to(dtype), bias)
        return self.with_low_rank(x_TD, y_TD)
