"""Buffers that are used again instead of being given back to the system.

A large CPU tensor is fresh memory from the kernel every time, and touching it page by page costs
more than a pass over it: on shape A of `benchmarks/` a tenth of the layer's time. So the large
results of the expert kernels come from here. A buffer is free again when nothing but this list
refers to its storage, which torch's reference count of storages tells; nobody has to hand anything
back, and a tensor that lives on (a gradient, a saved activation) is simply not free. CUDA tensors
pass through, since torch caches those itself.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from math import prod

import torch

SMALLEST = 1 << 19  # bytes; below, malloc's own caching does
LIMIT = 1 << 29  # bytes kept while free

_lock = threading.Lock()
_kept: list[torch.UntypedStorage] = []


def _is_free(storage: torch.UntypedStorage) -> bool:
    # one reference is the Python object in _kept
    return bool(torch._C._storage_Use_Count(storage._cdata) == 1)


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return an uninitialised tensor, in memory that was used before if some is free.

    Args:
        shape: its sizes.
        dtype: its type.
        device: only CPU memory is kept here.
    """
    size = prod(shape) * dtype.itemsize
    if device.type != "cpu" or size < SMALLEST:
        return torch.empty(shape, dtype=dtype, device=device)
    with _lock:
        best: torch.UntypedStorage | None = None
        for storage in _kept:
            fits = size <= storage.nbytes() <= 2 * size
            if fits and (best is None or storage.nbytes() < best.nbytes()) and _is_free(storage):
                best = storage
        if best is None:
            _trim(size)
            best = torch.UntypedStorage(_rounded(size), device="cpu")
            _kept.append(best)
        flat = torch.empty(0, dtype=torch.uint8).set_(best)
        return flat[:size].view(dtype).view(tuple(shape))


def _rounded(size: int) -> int:
    """Return `size`, at most an eighth more: unequal steps share, and unused pages cost nothing."""
    grain = 1 << max(size.bit_length() - 4, 0)
    return -(-size // grain) * grain


def _trim(wanted: int) -> None:
    """Drop the oldest free buffers until `LIMIT` has room for as many bytes more."""
    free = sum(storage.nbytes() for storage in _kept if _is_free(storage))
    for storage in list(_kept):
        if free + wanted <= LIMIT:
            break
        if _is_free(storage):
            free -= storage.nbytes()
            # by identity: storages do not compare
            _kept[:] = [other for other in _kept if other is not storage]
