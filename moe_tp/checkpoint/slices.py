"""Byte ranges of a dense block of a stored tensor, read with as few requests as its bytes allow.

Stretches of a file that lie no more than the storage's `gap` apart are read in one request, and the
bytes between them counted as gaps; wider apart, each is read by itself, straight to where it
belongs, so that a rank asks for its own slice and no more.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from moe_tp.checkpoint.blocks import numel
from moe_tp.checkpoint.header import TensorInfo
from moe_tp.checkpoint.storage import Storage

STAGE = 8 << 20  # bytes asked at once where gaps are dropped
_ROWS = 512  # rows asked at once; with their gaps, as many buffers as a system call takes


@dataclass(slots=True)
class Counter:
    """Bytes asked from storage: of slices, of gaps that were read along, of headers."""

    slices: int = 0
    gaps: int = 0
    headers: int = 0


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor as writable bytes."""
    array: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(array)


def span(info: TensorInfo, ranges: Sequence[range]) -> tuple[int, int]:
    """Return (first byte in the file, number of bytes) of the stretch that a block lies in."""
    item = info.dtype.itemsize
    strides = [math.prod(info.shape[d + 1 :]) * item for d in range(len(info.shape))]
    first = sum(r.start * s for r, s in zip(ranges, strides, strict=True))
    last = sum((r.stop - 1) * s for r, s in zip(ranges, strides, strict=True))
    return info.offset + first, last - first + item


def read_dense(
    storage: Storage,
    info: TensorInfo,
    ranges: Sequence[range],
    counter: Counter,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the block of a stored tensor, in its stored dtype, on the CPU.

    Args:
        storage: where the file is.
        info: the tensor.
        ranges: what to read along each dimension; every step is 1.
        counter: counts the bytes.
        out: contiguous CPU tensor to fill instead of a new one.
    """
    sizes = [len(r) for r in ranges]
    if out is None:
        out = torch.empty(sizes, dtype=info.dtype)
    assert out.is_contiguous()
    assert out.dtype == info.dtype
    assert out.numel() == numel(ranges)
    if out.numel() == 0:
        return out
    view = bytes_of(out)
    item = info.dtype.itemsize
    strides = [math.prod(info.shape[d + 1 :]) * item for d in range(len(info.shape))]
    # The longest stretch: dimensions that are whole from the right, and one that is cut.
    cut = len(ranges)
    while cut > 0 and sizes[cut - 1] == info.shape[cut - 1]:
        cut -= 1
    cut = max(cut - 1, 0)
    length = math.prod(sizes[cut:]) * item
    base = info.offset + sum(r.start * s for r, s in zip(ranges, strides, strict=True))
    counter.slices += len(view)
    if cut == 0:
        storage.read_into(info.file, base, view)
        return out
    count, stride = sizes[cut - 1], strides[cut - 1]
    done = 0
    for outer in itertools.product(*(range(n) for n in sizes[: cut - 1])):
        start = base + sum(i * s for i, s in zip(outer, strides, strict=False))
        block = view[done : done + count * length]
        if stride - length <= storage.gap:
            _read_joined(storage, info.file, start, stride, length, block, counter)
        else:
            _read_apart(storage, info.file, start, stride, length, block)
        done += count * length
    return out


def _read_apart(
    storage: Storage, file: str, start: int, stride: int, length: int, out: memoryview
) -> None:
    for row in range(len(out) // length):
        storage.read_into(file, start + row * stride, out[row * length : (row + 1) * length])


def _read_joined(
    storage: Storage,
    file: str,
    start: int,
    stride: int,
    length: int,
    out: memoryview,
    counter: Counter,
) -> None:
    """Read rows and the gaps between them, each row straight to its place, gaps over each other."""
    count = len(out) // length
    per = min(_ROWS, max(1, STAGE // stride))
    gap = memoryview(bytearray(stride - length))
    for first in range(0, count, per):
        last = min(first + per, count)
        views = [gap] * (2 * (last - first) - 1)
        views[::2] = [out[row * length : (row + 1) * length] for row in range(first, last)]
        storage.read_into(file, start + first * stride, *views)
        counter.gaps += (last - first - 1) * len(gap)
