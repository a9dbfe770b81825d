"""Passes over bf16 rows that torch has no operator for, compiled on the machine they run on.

Of SwiGLU's backward torch makes a dozen passes over memory, `passes.c` makes one. Its compilation
(`moe_tp.parallel.native`) takes 0.2 s. Where there is no C compiler torch's operators do the work,
with a bf16 rounding after each of them.

Letters: n pairs of one block · N two times F · F expert hidden.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path

import torch

from moe_tp.parallel.native import build_or_none

_SOURCE = Path(__file__).with_name("passes.c")


@functools.cache
def _passes() -> ctypes.CDLL | None:
    library = build_or_none(_SOURCE, "expert activations")
    return None if library is None else _declared(library)


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    """Return the library, its functions' arguments named."""
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    library.moe_tp_swiglu.argtypes = [pointer] * 2 + [count] * 2 + [ctypes.c_int]
    library.moe_tp_swiglu_backward.argtypes = [pointer] * 6 + [count] * 2 + [ctypes.c_int]
    sizes = (ctypes.POINTER(count), count, count, ctypes.c_int)
    library.moe_tp_turned_swiglu.argtypes = [*[pointer] * 2, *sizes]
    library.moe_tp_turned_swiglu_backward.argtypes = [*[pointer] * 7, *sizes]
    for function in (
        library.moe_tp_swiglu,
        library.moe_tp_swiglu_backward,
        library.moe_tp_turned_swiglu,
        library.moe_tp_turned_swiglu_backward,
    ):
        function.restype = None
    return library


def available(rows: Sequence[torch.Tensor], weights: Sequence[torch.Tensor] = ()) -> bool:
    """Return whether the passes take these: dense, on a CPU, where the passes compile.

    Args:
        rows: all that are read or written, 2-D; taken in bf16.
        weights: numbers of rows, likewise; taken in fp32.
    """
    if torch.compiler.is_compiling():
        return False
    fit = all(x.dtype == torch.bfloat16 for x in rows)
    fit = fit and all(x.dtype == torch.float32 for x in weights)
    fit = fit and all(x.is_cpu and x.is_contiguous() for x in (*rows, *weights))
    return fit and _passes() is not None


def swiglu(gate_up_nN: torch.Tensor, hidden_nF: torch.Tensor) -> None:
    """Fill `hidden_nF` with `silu(gate) * up`, rounded once."""
    passes = _passes()
    assert passes is not None
    passes.moe_tp_swiglu(
        gate_up_nN.data_ptr(), hidden_nF.data_ptr(), *hidden_nF.shape, torch.get_num_threads()
    )


def swiglu_backward(
    grad_nF: torch.Tensor,
    gate_up_nN: torch.Tensor,
    weight_n: torch.Tensor,
    hidden_nF: torch.Tensor,
    d_gate_up_nN: torch.Tensor,
    d_weight_n: torch.Tensor,
) -> None:
    """Do the backward of `weight * silu(gate) * up`, each result rounded once.

    Args:
        grad_nF: gradient of the weighted activation.
        gate_up_nN: pre-activations.
        weight_n: fp32, the routing weights.
        hidden_nF: filled with `weight * silu(gate) * up`.
        d_gate_up_nN: filled with the gradient of the pre-activations.
        d_weight_n: fp32, filled with that of the weights, a sum over F in fp32.
    """
    passes = _passes()
    assert passes is not None
    passes.moe_tp_swiglu_backward(
        grad_nF.data_ptr(), gate_up_nN.data_ptr(), weight_n.data_ptr(), hidden_nF.data_ptr(),
        d_gate_up_nN.data_ptr(), d_weight_n.data_ptr(), *hidden_nF.shape,
        torch.get_num_threads(),
    )  # fmt: skip


def turned_swiglu(gate_up_nN: torch.Tensor, hidden_nF: torch.Tensor, counts: Sequence[int]) -> None:
    """Do `swiglu` of pre-activations that lie turned.

    Args:
        gate_up_nN: of each expert one column after the other.
        hidden_nF: filled, its rows one after the other.
        counts: rows of each expert.
    """
    passes = _passes()
    assert passes is not None
    passes.moe_tp_turned_swiglu(
        gate_up_nN.data_ptr(), hidden_nF.data_ptr(), *_experts(counts), hidden_nF.shape[1],
        torch.get_num_threads(),
    )  # fmt: skip


def turned_swiglu_backward(
    grad_nF: torch.Tensor,
    gate_up_nN: torch.Tensor,
    weight_n: torch.Tensor,
    hidden_nF: torch.Tensor,
    d_gate_up_nN: torch.Tensor,
    d_turned_nN: torch.Tensor,
    d_weight_n: torch.Tensor,
    counts: Sequence[int],
) -> None:
    """Do `swiglu_backward` where `gate_up_nN` lies turned, as `hidden_nF` then does too.

    Args:
        grad_nF, gate_up_nN, weight_n, hidden_nF, d_weight_n: as for `swiglu_backward`.
        d_gate_up_nN: filled with the gradient of the pre-activations, as rows.
        d_turned_nN: filled with the same, turned.
        counts: rows of each expert.
    """
    passes = _passes()
    assert passes is not None
    passes.moe_tp_turned_swiglu_backward(
        grad_nF.data_ptr(), gate_up_nN.data_ptr(), weight_n.data_ptr(), hidden_nF.data_ptr(),
        d_gate_up_nN.data_ptr(), d_turned_nN.data_ptr(), d_weight_n.data_ptr(), *_experts(counts),
        hidden_nF.shape[1], torch.get_num_threads(),
    )  # fmt: skip


def _experts(counts: Sequence[int]) -> tuple[ctypes.Array[ctypes.c_int64], int]:
    return (ctypes.c_int64 * len(counts))(*counts), len(counts)
