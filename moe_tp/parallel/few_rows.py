"""Few rows on a CPU in C: the products and norms of a generation step.

One or a few rows make a product as fast as its weights come from memory. oneDNN and MKL are built
for many rows and reach a half of that; `few_rows.c` reads each weight once, where it lies, and
takes all the experts of a step in one call. Its sums are fp32's, whatever the number of rows and
threads. A norm, some 30 us of torch's calls, is one of 5. Compiled (`moe_tp.parallel.native`, 0.4 s
a process) by `generate` alone.

Letters: P rows · g matrices that rows meet · k input width · m output width · e matrices.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import torch

from moe_tp.parallel.held import is_holding
from moe_tp.parallel.native import build_or_none

MOST_ROWS = 12  # a matrix; oneDNN is quicker from 8 to 24 rows on, by their sizes
MOST_NORMED = 1 << 15  # elements; more are worth the threads of torch's operators
_SOURCE = Path(__file__).with_name("few_rows.c")


@functools.cache
def _library() -> ctypes.CDLL | None:
    library = build_or_none(_SOURCE, "products of few rows")
    if library is None:
        return None
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    for function in (library.moe_tp_rows_float, library.moe_tp_rows_bf16):
        function.argtypes = [pointer] * 5 + [count] * 3 + [ctypes.c_int]
        function.restype = None
    for function in (library.moe_tp_norm_float, library.moe_tp_norm_bf16):
        function.argtypes = [pointer] * 3 + [count] * 2 + [ctypes.c_double]
        function.restype = None
    return library


def takes(x_Pk: torch.Tensor, weights: torch.Tensor, groups: int = 1) -> bool:
    """Return whether `few_rows` is for these: inside `holding`, dense, few, fp32 or bf16.

    Args:
        x_Pk: rows.
        weights: `[m, k]` or `[e, m, k]`.
        groups: matrices that the rows meet.
    """
    return (
        is_holding()
        and 0 < x_Pk.shape[0] <= MOST_ROWS * groups
        and x_Pk.dtype == weights.dtype
        and x_Pk.dtype in (torch.bfloat16, torch.float32)
        and x_Pk.is_cpu
        and x_Pk.is_contiguous()
        and weights.is_contiguous()
        and not torch.compiler.is_compiling()
        and _library() is not None
    )


def few_rows(
    x_Pk: torch.Tensor, weights: torch.Tensor, slots: Sequence[int], counts: Sequence[int]
) -> torch.Tensor:
    """Return `[P, m]`, each run of rows times its matrix transposed, rounded once.

    Args:
        x_Pk: rows that `takes` accepts, with `weights`.
        weights: `[m, k]` or `[e, m, k]`.
        slots: of the matrix that each run of rows meets.
        counts: rows of each run; P in all.

    Collectives: none.
    """
    library, (m, k), groups = _library(), weights.shape[-2:], len(slots)
    assert library is not None
    y_Pm = x_Pk.new_empty(x_Pk.shape[0], m)
    call = library.moe_tp_rows_float if x_Pk.dtype == torch.float32 else library.moe_tp_rows_bf16
    call(
        x_Pk.data_ptr(), weights.data_ptr(), y_Pm.data_ptr(),
        (ctypes.c_int64 * groups)(*slots),
        (ctypes.c_int64 * (groups + 1))(*accumulate(counts, initial=0)),
        groups, k, m, torch.get_num_threads(),
    )  # fmt: skip
    return y_Pm


def takes_norm(x: torch.Tensor, weight_k: torch.Tensor) -> bool:
    """Return whether `few_norms` is for these: inside `holding`, dense, small, fp32 or bf16.

    Args:
        x: `[..., k]`.
        weight_k: fp32.
    """
    return (
        is_holding()
        and 0 < x.numel() <= MOST_NORMED
        and x.dtype in (torch.bfloat16, torch.float32)
        and weight_k.dtype == torch.float32
        and x.is_cpu
        and x.is_contiguous()
        and weight_k.is_contiguous()
        and not torch.compiler.is_compiling()
        and _library() is not None
    )


def few_norms(x: torch.Tensor, weight_k: torch.Tensor, eps: float) -> torch.Tensor:
    """Return `x / sqrt(mean(x^2) + eps) * weight` over the last dimension, rounded once.

    Args:
        x: `[..., k]` that `takes_norm` accepts, with `weight_k`.
        eps: added to the mean square.

    Collectives: none.
    """
    library, k = _library(), weight_k.shape[0]
    assert library is not None
    y = torch.empty_like(x)
    call = library.moe_tp_norm_float if x.dtype == torch.float32 else library.moe_tp_norm_bf16
    call(x.data_ptr(), weight_k.data_ptr(), y.data_ptr(), x.numel() // k, k, eps)
    return y
