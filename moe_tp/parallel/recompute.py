"""Activation recompute: what a block keeps, and that its second run repeats the first.

| mode      | kept of a block                                                                     |
|-----------|-------------------------------------------------------------------------------------|
| none      | what autograd saves                                                                 |
| selective | its input and attention outputs; norms, routing, projections, dispatched rows,      |
|           | activations and expert hidden states are computed (rows sent) again                 |
| full      | its input                                                                           |

(Selective: after arXiv:2205.05198, section 5.) The second run routes again, from the same bits and
with noise keyed by token, so it chooses as the first did (R1, N3). What must count once asks
`recomputing`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from moe_tp.parallel.layout import Recompute

_second_run: ContextVar[bool] = ContextVar("second_run", default=False)


def recomputing() -> bool:
    """Return whether this is the second run of a recomputed block: count nothing again."""
    return _second_run.get()


_ATTENTION = {
    getattr(torch.ops.aten, name).default
    for name in (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
    )
}


def _policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if op in _ATTENTION:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


class _SecondRun:
    """Context of a block's second run; may be entered more than once.

    Schedules that split backward into input and weight gradients run a block's second run twice.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.tokens: list[Any] = []

    def __enter__(self) -> None:
        self.tokens.append(_second_run.set(True))
        self.inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.inner.__exit__(*error)
        _second_run.reset(self.tokens.pop())


def run_block(block: Callable[..., Any], mode: Recompute, *args: Any) -> Any:
    """Return `block(*args)`, keeping of it what the mode says.

    Args:
        block: a function of tensors and constants.
        mode: see the module docstring.

    Collectives: the block's, and in backward again those that its second run needs.
    """
    if mode == "none" or not torch.is_grad_enabled():
        return block(*args)

    def contexts() -> tuple[Any, Any]:
        first: Any = contextlib.nullcontext()
        second: Any = contextlib.nullcontext()
        if mode == "selective":
            first, second = create_selective_checkpoint_contexts(_policy)
        return first, _SecondRun(second)

    return checkpoint(block, *args, use_reentrant=False, context_fn=contexts)
