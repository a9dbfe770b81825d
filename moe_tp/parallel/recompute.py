"""Activation recompute: what a block keeps, and that its second run repeats the first.

| mode      | kept of a block                                                                     |
|-----------|-------------------------------------------------------------------------------------|
| none      | what autograd saves                                                                 |
| selective | its input, routing and attention outputs; norms, projections, dispatched rows,      |
|           | activations and expert hidden states are computed (rows sent) again                 |
| full      | its input and routing                                                               |

(Selective: after arXiv:2205.05198, section 5.) Decisions go through `keep`: the second run gets the
value of the first, whatever rounding does. Losses and counters ask `recomputing`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from moe_tp.parallel.layout import Recompute

T = TypeVar("T")


class _Tape:
    """Decisions of one run of a block, in the order in which they were taken."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self.position = 0


_recording: ContextVar[_Tape | None] = ContextVar("recording", default=None)
_replaying: ContextVar[_Tape | None] = ContextVar("replaying", default=None)


def keep(decide: Callable[[], T]) -> T:
    """Return `decide()`; in the second run of a recomputed block, what the first run returned.

    Args:
        decide: takes a decision that must not be taken twice, such as which experts a token
            goes to; its result is kept and must not be differentiable.
    """
    replaying = _replaying.get()
    if replaying is not None:
        value: T = replaying.values[replaying.position]
        replaying.position += 1
        return value
    value = decide()
    recording = _recording.get()
    if recording is not None:
        recording.values.append(value)
    return value


def recomputing() -> bool:
    """Return whether this is the second run of a recomputed block: count nothing again."""
    return _replaying.get() is not None


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


class _Bound:
    """Context in which decisions go to or come from a tape; may be entered more than once.

    Schedules that split backward into input and weight gradients run a block's second run twice.
    """

    def __init__(self, variable: ContextVar[_Tape | None], tape: _Tape, inner: Any = None) -> None:
        self.variable, self.tape = variable, tape
        self.inner = inner or contextlib.nullcontext()
        self.tokens: list[Any] = []

    def __enter__(self) -> None:
        self.tape.position = 0
        self.tokens.append(self.variable.set(self.tape))
        self.inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.inner.__exit__(*error)
        self.variable.reset(self.tokens.pop())


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
        tape = _Tape()
        save, load = None, None
        if mode == "selective":
            save, load = create_selective_checkpoint_contexts(_policy)
        return _Bound(_recording, tape, save), _Bound(_replaying, tape, load)

    return checkpoint(block, *args, use_reentrant=False, context_fn=contexts)
