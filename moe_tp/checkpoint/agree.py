"""One verdict for all ranks: an error on any of them is raised on every one, with no hang (K2, F1).

What a rank does alone between two collectives (reading, writing) runs inside `together`; whatever
goes wrong there, the rank still takes part in the exchange that follows, and all raise alike.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from moe_tp.errors import CheckpointError, MoeTpError
from moe_tp.parallel.collectives import Group, raw_all_gather, raw_all_reduce

T = TypeVar("T")
_LIMIT = 16384  # bytes of a message that travel


def together(work: Callable[[], T], group: Group, device: torch.device) -> T:
    """Return `work()`, or raise on every rank what went wrong on any.

    Args:
        work: this rank's part; it must hold no collective.
        group: the ranks.
        device: where collectives of the group take their tensors.

    Raises:
        CheckpointError: names the first rank that failed and its cause.

    Collectives: all-reduce of one integer over `group`; all-gather of messages after a failure.
    """
    result: T | None = None
    error: Exception | None = None
    try:
        result = work()
    except Exception as caught:  # noqa: BLE001 - raised again by `settle`, on every rank
        error = caught
    settle(error, group, device)
    return result  # type: ignore[return-value]


def settle(error: Exception | None, group: Group, device: torch.device) -> None:
    """Raise on every rank if any brings an error; see `together`."""
    if group.size == 1:
        if error is None:
            return
        if isinstance(error, MoeTpError):
            raise error
        raise CheckpointError(_sentence(error)) from error
    failed = torch.tensor([error is not None], dtype=torch.int32, device=device)
    if int(raw_all_reduce(failed, group, "max")) == 0:
        return
    texts = gather_json(None if error is None else _sentence(error)[:_LIMIT], group, device)
    causes = {rank: text for rank, text in zip(group.ranks, texts, strict=True) if text is not None}
    first = min(causes)
    if len(causes) == group.size and len(set(causes.values())) == 1:
        message = causes[first]
    else:
        others = [rank for rank in causes if rank != first]
        also = f" (ranks {others} failed too)" if others else ""
        message = f"rank {first}: {causes[first]}{also}"
    raise CheckpointError(message) from error


def gather_json(value: Any, group: Group, device: torch.device) -> list[Any]:
    """Return every rank's `value`, in rank order; values are what JSON can hold.

    Collectives: all-gather of lengths, all-gather of padded texts over `group`.
    """
    if group.size == 1:
        return [value]
    text = json.dumps(value, separators=(",", ":")).encode()
    lengths = raw_all_gather(
        torch.tensor([len(text)], dtype=torch.int64, device=device), group
    ).tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    every = raw_all_gather(padded.to(device), group).view(group.size, -1).cpu().numpy()
    return [json.loads(bytes(row[:n])) for row, n in zip(every, lengths, strict=True)]


def _sentence(error: Exception) -> str:
    if isinstance(error, MoeTpError):
        return str(error)
    return f"{type(error).__name__}: {error}"
