"""Passes over bf16 rows that torch has no operator for, compiled on the machine they run on.

Of SwiGLU's backward torch makes a dozen passes over memory, `passes.c` makes one. Its compilation
takes 0.2 s, once a process at first use, in a folder of its own that is removed again: nothing is
cached, so nothing can be stale, and ranks that start together do not meet. Where there is no C
compiler of the GNU kind torch's operators do the work, with a bf16 rounding after each of them.

Letters: n pairs of one block · N two times F · F expert hidden.
"""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from moe_tp.log import get_logger

_SOURCE = Path(__file__).with_name("passes.c")
_FLAGS = (
    "-O3", "-march=native", "-mprefer-vector-width=512", "-fno-math-errno", "-fno-trapping-math",
    "-fPIC", "-fopenmp",
)  # fmt: skip
_PATIENCE = 60.0  # seconds


def _threads_library() -> str | None:
    """Return the file of the OpenMP library that torch runs on: a second would fight with it."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        path = line.split(maxsplit=5)[-1]
        if Path(path).name.startswith(("libgomp", "libiomp5")):
            return path
    return None


def build(source: Path = _SOURCE) -> ctypes.CDLL:
    """Return the passes, compiled.

    Args:
        source: a file in C.

    Raises:
        OSError: there is no compiler, or it does not make a library that loads.
    """
    compiler = shutil.which("gcc") or shutil.which("cc")
    threads = _threads_library()
    if compiler is None or threads is None:
        raise OSError("no C compiler, or no OpenMP library in torch")
    with tempfile.TemporaryDirectory(prefix="moe_tp-") as folder:
        made, library = Path(folder, "passes.o"), Path(folder, "passes.so")
        for command in (
            [compiler, *_FLAGS, "-c", str(source), "-o", str(made)],
            [compiler, "-shared", str(made), threads, "-Wl,-z,defs", "-lc", "-o", str(library)],
        ):
            try:
                subprocess.run(command, check=True, capture_output=True, timeout=_PATIENCE)
            except subprocess.SubprocessError as error:
                told = getattr(error, "stderr", None) or b""
                raise OSError(f"{error}: {told.decode(errors='replace')[-300:]}") from error
        return ctypes.CDLL(str(library))


@functools.cache
def _passes() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    try:
        library = build()
    except OSError as error:
        get_logger(__name__).info("expert activations run on torch's operators: %s", error)
        return None
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    library.moe_tp_swiglu.argtypes = [pointer] * 2 + [count] * 2 + [ctypes.c_int]
    library.moe_tp_swiglu_backward.argtypes = [pointer] * 6 + [count] * 2 + [ctypes.c_int]
    for function in (library.moe_tp_swiglu, library.moe_tp_swiglu_backward):
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
