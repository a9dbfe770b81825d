"""Logits and scores, in fp32 or more whatever the model's dtype and autocast say (R4).

T tokens on this rank · D width · E experts
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_tp.routing.config import RouterConfig, Score

__all__ = ["compute_scores", "full_precision", "position_free_sigmoid", "promote", "router_logits"]

_PIECE = 1 << 17  # numbers of the input that are widened at a time


def full_precision(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which autocast lowers nothing on this device.

    Args:
        device: of the tensors inside.
    """
    if not torch.amp.is_autocast_available(device.type):
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)


def promote(x: Tensor, dtype: str = "float32") -> Tensor:
    """Return `x` in fp32, or in fp64 if it is already or `dtype` says so.

    Args:
        x: floating point, any shape.
        dtype: `float32` or `float64`, the least precision wanted.
    """
    return x.to(
        torch.promote_types(torch.promote_types(x.dtype, torch.float32), getattr(torch, dtype))
    )


def router_logits(
    x_TD: Tensor,
    weight_ED: Tensor,
    bias_E: Tensor | None = None,
    *,
    dtype: str = "float32",
    product: Callable[[Tensor, Tensor], Tensor] = torch.mm,
) -> Tensor:
    """Return logits_TE whose product is accumulated and kept in fp32 or more.

    A bf16 product would round 8.00 and 8.02 to one number before the choice (R4).

    Args:
        x_TD: the router's input, any floating dtype.
        weight_ED: the router's weight, any floating dtype (kept in fp32 by the layer).
        bias_E: the router's linear bias.
        dtype: `float32` or `float64`.
        product: of two matrices, for the gradients.
    """
    with full_precision(x_TD.device):
        exact = promote(x_TD[:0], dtype).dtype
        weight, bias = weight_ED.to(exact), None if bias_E is None else bias_E.to(exact)
        if x_TD.dtype == exact:
            return F.linear(x_TD, weight, bias)
        logits: Tensor = _WideLinear.apply(x_TD, weight, bias, product)  # type: ignore[no-untyped-call]
        return logits


class _WideLinear(torch.autograd.Function):
    """A linear layer in the dtype of its weight; keeps the input as it came, not a wide copy."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        product: Callable[[Tensor, Tensor], Tensor],
    ) -> Tensor:
        ctx.product = product
        ctx.save_for_backward(x, weight)
        y = weight.new_empty((x.shape[0], weight.shape[0]))
        for piece, wide in _wide_pieces(x, weight.dtype):
            y[piece] = F.linear(wide, weight, bias)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad, want = grads[0], ctx.needs_input_grad
        d_x = torch.empty_like(x) if want[0] else None
        d_weight = torch.zeros_like(weight) if want[1] else None
        with full_precision(x.device):  # a backward may be called under autocast too
            if d_weight is not None:
                for piece, wide in _wide_pieces(x, weight.dtype):
                    d_weight += ctx.product(grad[piece].t(), wide)
            if d_x is not None:
                for piece in _pieces(x):
                    d_x[piece] = ctx.product(grad[piece], weight)
            return d_x, d_weight, grad.sum(0) if want[2] else None, None


def _pieces(x: Tensor) -> list[slice]:
    """Return runs of rows whose wide copy stays in a CPU's cache; elsewhere all rows."""
    if not x.is_cpu or torch.compiler.is_compiling():
        return [slice(None)]
    rows = max(_PIECE // max(x.shape[1], 1), 1)
    return [slice(at, at + rows) for at in range(0, x.shape[0], rows)]


def _wide_pieces(x: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Yield runs of rows and what they hold in `dtype`, in memory that the next one uses again."""
    buffer: Tensor | None = None
    for piece in _pieces(x):
        rows = x[piece]
        if buffer is None:
            buffer = torch.empty(rows.shape, dtype=dtype, device=x.device)
        yield piece, buffer[: rows.shape[0]].copy_(rows)


class _Sigmoid(torch.autograd.Function):
    """1 / (1 + exp(-x)); its saved output gives a backward without overflow."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = torch.exp(-x).add_(1).reciprocal_()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        grad: Tensor = grads[0] * y * (1 - y)
        return grad


def position_free_sigmoid(x: Tensor) -> Tensor:
    """Return sigmoid(x), the same bits for the same number wherever it lies in memory (R1).

    `torch.sigmoid` on CPU uses another formula for the last elements of a buffer and for strided
    input, so a row gave other bits alone than inside a batch, and experts with equal logits came
    out unequal. `exp` does not, and adding and dividing are rounded exactly.

    Args:
        x: any shape.
    """
    y: Tensor = _Sigmoid.apply(x)  # type: ignore[no-untyped-call]
    return y


def compute_scores(logits_TE: Tensor, score: Score) -> Tensor:
    """Return scores_TE: probabilities over all experts, or one sigmoid an expert.

    For `softmax_topk` these are the probabilities over all experts too: the choice and the losses
    use them, the weights do not.

    Args:
        logits_TE: fp32 or fp64.
        score: see `RouterConfig`.
    """
    if score == "sigmoid":
        return position_free_sigmoid(logits_TE)
    return torch.softmax(logits_TE, dim=-1)


def choice_scores(
    logits_TE: Tensor, scores_TE: Tensor, config: RouterConfig, bias_E: Tensor | None
) -> Tensor:
    """Return what experts are ranked by; it never enters the weights (R3).

    Without a bias the logits themselves: they order experts as the scores do, and keep apart what
    rounding or saturation makes equal. With one, score + bias, as in DeepSeek-V3 (arXiv 2412.19437,
    eq. 16); `softmax_topk` has no score before the choice, so logit + bias.

    Args:
        logits_TE, scores_TE: fp32 or fp64.
        config: the router.
        bias_E: the correction bias, fp32 or fp64.
    """
    sums_groups = config.num_groups > 1 and config.group_score == "top2_sum"
    if config.score == "softmax_topk" or (bias_E is None and not sums_groups):
        return logits_TE if bias_E is None else logits_TE + bias_E
    base_TE = scores_TE if bias_E is None else scores_TE + bias_E
    # A score of -inf is a plain 0, which a bias would raise above the experts that take part.
    return base_TE.masked_fill(torch.isneginf(logits_TE), float("-inf"))
