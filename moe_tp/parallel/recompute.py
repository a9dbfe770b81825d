"""Activation recompute: what a block keeps, and that its second run repeats the first.

| mode      | kept of a block                                                                     |
|-----------|-------------------------------------------------------------------------------------|
| none      | what autograd saves                                                                 |
| selective | its input, routing, attention outputs and the rows that its dispatcher received;    |
|           | norms, projections, activations and expert hidden states are computed again         |
| full      | its input and routing; rows are sent again                                          |

(Selective: after arXiv:2205.05198, section 5.) With `Runtime(resend_rows=True)` selective keeps no
rows and sends them again too. The first run of a block hands its decisions to `remember`, and the
second gets them from `recall` in the same order, whatever rounding does to its logits (R1, N3).
What a collective brought inside `keeping` is handed on in the same way. What must count once asks
`recomputing`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from moe_tp.parallel.layout import Recompute


class _Tape:
    """Decisions of one block's first run, in the order in which they were taken.

    Args:
        keeps_rows: it holds as well what collectives brought inside `keeping`.
    """

    def __init__(self, *, keeps_rows: bool) -> None:
        self.keeps_rows = keeps_rows
        self.values: list[Any] = []
        self.position = 0


_recording: ContextVar[_Tape | None] = ContextVar("recording", default=None)
_replaying: ContextVar[_Tape | None] = ContextVar("replaying", default=None)


def recomputing() -> bool:
    """Return whether this is the second run of a recomputed block: count nothing again."""
    return _replaying.get() is not None


def remember(decision: Any) -> None:
    """Keep a decision for the second run; does nothing where there will be none.

    Args:
        decision: not differentiable; as many and in the same order as the second run recalls.
    """
    tape = _recording.get()
    if tape is not None:
        tape.values.append(decision)


def recall() -> Any | None:
    """Return in the second run the next decision of the first, and otherwise None."""
    tape = _replaying.get()
    if tape is None:
        return None
    tape.position += 1
    return tape.values[tape.position - 1]


_keeping: ContextVar[bool] = ContextVar("keeping", default=False)


@contextlib.contextmanager
def keeping() -> Iterator[None]:
    """Keep what collectives bring inside, where the mode says so: the second run sends nothing."""
    token = _keeping.set(True)
    try:
        yield
    finally:
        _keeping.reset(token)


def kept_tensor() -> torch.Tensor | None:
    """Return in the second run what the next collective inside `keeping` brought; else None."""
    tape = _replaying.get()
    if tape is None or not tape.keeps_rows or not _keeping.get():
        return None
    value = recall()
    assert isinstance(value, torch.Tensor)
    return value.detach()  # an alias: autograd marks what a function returns


def keep_tensor(value: torch.Tensor) -> None:
    """Keep what a collective brought for `kept_tensor`, inside `keeping`."""
    tape = _recording.get()
    if tape is not None and tape.keeps_rows and _keeping.get():
        remember(value.detach())


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


class _Run:
    """Context of a block's first or second run; may be entered more than once.

    Schedules that split backward into input and weight gradients run a block's second run twice.
    """

    def __init__(self, variable: ContextVar[_Tape | None], tape: _Tape, inner: Any) -> None:
        self.variable, self.tape, self.inner = variable, tape, inner
        self.tokens: list[Any] = []

    def __enter__(self) -> None:
        self.tape.position = 0
        self.tokens.append(self.variable.set(self.tape))
        self.inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.inner.__exit__(*error)
        self.variable.reset(self.tokens.pop())


def run_block(
    block: Callable[..., Any], mode: Recompute, *args: Any, resend_rows: bool = False
) -> Any:
    """Return `block(*args)`, keeping of it what the mode says.

    Args:
        block: a function of tensors and constants.
        mode: see the module docstring.
        resend_rows: keep no received rows in selective mode.

    Collectives: the block's, and in backward again those that its second run needs.
    """
    if mode == "none" or not torch.is_grad_enabled():
        return block(*args)

    def contexts() -> tuple[Any, Any]:
        tape = _Tape(keeps_rows=mode == "selective" and not resend_rows)
        first: Any = contextlib.nullcontext()
        second: Any = contextlib.nullcontext()
        if mode == "selective":
            first, second = create_selective_checkpoint_contexts(_policy)
        return _Run(_recording, tape, first), _Run(_replaying, tape, second)

    return checkpoint(block, *args, use_reentrant=False, context_fn=contexts)
