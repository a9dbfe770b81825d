"""Products of two matrices, by whichever of torch's libraries is fast on this processor.

torch multiplies fp32 matrices on a CPU with MKL, which leaves AVX-512 unused on processors of other
makers than its own: less than half the rate that oneDNN, also part of torch, reaches there. The
choice depends on the machine and on sizes alone, so that a run repeated gives the same bits.

Few rows times a matrix, the products of a generation step, go through C where that compiles
(`moe_tp.parallel.few_rows`). Where it does not, one bf16 row is better off without oneDNN, which
torch takes for bf16: that needs 38 us for 512 x 512, and torch's own dot products need 17.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F

from moe_tp.parallel.few_rows import few_rows, takes

_LEAST_WORK = 1 << 17  # multiplications; below, oneDNN's larger cost of a call shows
_PIECE = 1 << 18  # elements of one transposed product: what is copied then lies in cache


@functools.cache
def _prefers_onednn() -> bool:
    """Return whether fp32 products go through oneDNN: x86 with AVX-512 that is not Intel's."""
    if not torch.backends.mkldnn.is_available():
        return False
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    try:
        return "GenuineIntel" not in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False


def compiles_each_size(x: torch.Tensor) -> bool:
    """Return whether products with `x` are oneDNN's, which compiles each number of rows anew."""
    if not x.is_cpu:
        return False
    return x.dtype == torch.bfloat16 or (x.dtype == torch.float32 and _prefers_onednn())


@functools.cache
def _has_amx() -> bool:
    """Return whether bf16 products are so quick that the calls around them show."""
    supported = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return torch.backends.mkldnn.is_available() and supported is not None and supported()


def batches(x: torch.Tensor) -> bool:
    """Return whether one product of several matrices is quicker than one each; `x` is a factor."""
    return x.is_cpu and x.dtype == torch.bfloat16 and _has_amx()


def _by_onednn(a: torch.Tensor, columns: int) -> bool:
    if a.dtype != torch.float32 or not a.is_cpu or torch.compiler.is_compiling():
        return False
    rows, inner = a.shape
    return rows * inner * columns >= _LEAST_WORK and _prefers_onednn()


def _by_dots(x: torch.Tensor) -> bool:
    if x.dtype != torch.bfloat16 or x.shape[0] != 1 or not x.is_cpu:
        return False
    return _prefers_onednn() and not torch.compiler.is_compiling()


def _dots(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return the product without oneDNN, which torch knows to leave out for all or nothing.

    Another thread's product in between goes without it too, and differs by rounding alone.
    """
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        return F.linear(x, weight, bias)
    finally:
        torch._C._set_mkldnn_enabled(enabled)


def _onednn(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return y


def product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return the matrix product `a @ b`, in `out` where that is given; outside autograd.

    Args:
        a: `[n, k]`, or `[b, n, k]` of several products, where `batches` is true.
        b: `[k, m]`, or `[b, k, m]`.
        out: `[n, m]`, or `[b, n, m]`, overwritten.

    Collectives: none.
    """
    if a.dim() == 3:
        return torch.bmm(a, b) if out is None else torch.bmm(a, b, out=out)
    if not _by_onednn(a, b.shape[1]):
        return torch.mm(a, b) if out is None else torch.mm(a, b, out=out)
    if out is None:
        return _onednn(a, b.t(), None)
    # a transposed left side is repacked whole, so it goes in pieces whose result stays in cache
    rows = max(_PIECE // b.shape[1], 1) if a.stride(0) == 1 else a.shape[0]
    for start in range(0, a.shape[0], rows):
        out[start : start + rows].copy_(_onednn(a[start : start + rows], b.t(), None))
    return out


def add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Add `a @ b` to `total` in place and return that; outside autograd.

    Args:
        total: `[n, m]`.
        a, b: as for `product`.

    Collectives: none.
    """
    return total.add_(_onednn(a, b.t(), None)) if _by_onednn(a, b.shape[1]) else total.addmm_(a, b)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return `x @ weight.T + bias`; outside autograd.

    Args:
        x: `[n, k]`.
        weight: `[m, k]`.
        bias: `[m]`, or None.

    Collectives: none.
    """
    if takes(x, weight):
        y = few_rows(x, weight, (0,), (x.shape[0],))
        return y if bias is None else y.add_(bias)
    if _by_dots(x):
        return _dots(x, weight, bias)
    by_onednn = _by_onednn(x, weight.shape[0])
    return _onednn(x, weight, bias) if by_onednn else F.linear(x, weight, bias)


def linears(
    x: torch.Tensor, weights: torch.Tensor, slots: Sequence[int], counts: Sequence[int]
) -> torch.Tensor:
    """Return each run of rows times the transpose of its matrix `[n, m]`; outside autograd.

    Args:
        x: `[n, k]`.
        weights: `[e, m, k]`.
        slots: of the matrix that each run of rows meets, at least one.
        counts: rows of each run; n in all.

    Collectives: none.
    """
    if takes(x, weights, len(slots)):
        return few_rows(x, weights, slots, counts)
    runs = zip(x.split_with_sizes(list(counts)), slots, strict=True)
    parts = [linear(rows, weights[slot], None) for rows, slot in runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
