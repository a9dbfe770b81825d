"""Calls of autograd Functions, with and without a graph."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Function

from moe_tp.parallel.functions import apply_function

wanted: list[tuple[bool, ...]] = []


class _Twice(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, by: float) -> torch.Tensor:
        wanted.append(tuple(ctx.needs_input_grad))
        ctx.save_for_backward(x)
        ctx.by = by
        return x * by

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0] * ctx.by, None


def test_without_gradients_nothing_is_kept_and_the_result_is_the_same() -> None:
    """Issue 7: no graph, no input wanted, the same numbers; with gradients a graph as ever."""
    x = torch.randn(3, requires_grad=True)
    wanted.clear()
    y = apply_function(_Twice, x, 2.0)
    assert y.grad_fn is not None
    with torch.no_grad():
        bare = apply_function(_Twice, x, 2.0)
    assert bare.grad_fn is None
    assert torch.equal(bare, y)
    assert wanted == [(True, False), (False, False)]
    y.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2.0))  # type: ignore[arg-type]
