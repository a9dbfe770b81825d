"""Calls of autograd Functions, and what autocast means to them."""

from __future__ import annotations

from typing import Any

import torch

_AUTOCAST = ("cuda", "cpu")


def apply_function(function: Any, *args: Any) -> Any:
    """Return `function.apply(*args)` for an autograd Function, which torch leaves untyped.

    Without gradients its forward is called as it is: autograd's part of a call takes as long as
    many an operation on the few tokens of a generation step.
    """
    for kind in _AUTOCAST:
        if torch.is_autocast_enabled(kind):
            # A product lowered inside would not fit what the backward, outside, makes of it.
            with torch.autocast(kind, enabled=False):
                return apply_function(function, *args)
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return function.apply(*args)
    return function.forward(_NoGraph(len(args)), *args)


def working_dtype(asked: torch.dtype | None, own: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype to compute in: what is asked for, else that of autocast, else `own`.

    Args:
        asked: `Runtime.compute_dtype`.
        own: of the parameters; autocast leaves fp64 alone, as torch's does.
        device: where they lie.
    """
    if asked is not None:
        return asked
    if own != torch.float64 and torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return own


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
