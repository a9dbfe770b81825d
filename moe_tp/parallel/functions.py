"""Calls of autograd Functions."""

from __future__ import annotations

from typing import Any

import torch


def apply_function(function: Any, *args: Any) -> Any:
    """Return `function.apply(*args)` for an autograd Function, which torch leaves untyped.

    Without gradients its forward is called as it is: autograd's part of a call takes as long as
    many an operation on the few tokens of a generation step.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return function.apply(*args)
    return function.forward(_NoGraph(len(args)), *args)


class _NoGraph:
    """The context of a Function that no backward follows: keeps nothing."""

    def __init__(self, count: int) -> None:
        self.needs_input_grad = (False,) * count

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None:
        """Forget the tensors."""

    def mark_non_differentiable(self, *tensors: torch.Tensor) -> None:
        """Forget the tensors."""

    def set_materialize_grads(self, value: bool) -> None:
        """Forget the wish."""
