"""Small libraries in C, compiled on the machine they run on, for what torch has no operator for.

A compilation takes some tenths of a second, once a process at first use, in a folder of its own
that is removed again: nothing is cached, so nothing can be stale, and ranks that start together do
not meet. Where there is no C compiler of the GNU kind torch's operators do the work.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from moe_tp.log import get_logger

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


def build(source: Path, *flags: str) -> ctypes.CDLL:
    """Return the library of a file in C.

    Args:
        source: the file.
        flags: for the compiler, beside those that are always given.

    Raises:
        OSError: there is no compiler, or it does not make a library that loads.
    """
    compiler = shutil.which("gcc") or shutil.which("cc")
    threads = _threads_library()
    if compiler is None or threads is None:
        raise OSError("no C compiler, or no OpenMP library in torch")
    with tempfile.TemporaryDirectory(prefix="moe_tp-") as folder:
        made, library = Path(folder, "made.o"), Path(folder, "made.so")
        for command in (
            [compiler, *_FLAGS, *flags, "-c", str(source), "-o", str(made)],
            [compiler, "-shared", str(made), threads, "-Wl,-z,defs", "-lc", "-o", str(library)],
        ):
            try:
                subprocess.run(command, check=True, capture_output=True, timeout=_PATIENCE)
            except subprocess.SubprocessError as error:
                told = getattr(error, "stderr", None) or b""
                raise OSError(f"{error}: {told.decode(errors='replace')[-300:]}") from error
        return ctypes.CDLL(str(library))


def build_or_none(source: Path, instead: str) -> ctypes.CDLL | None:
    """Return the library of a file in C, None where it does not compile.

    Args:
        source: the file.
        instead: what goes by torch's operators then, for the log.
    """
    if not sys.platform.startswith("linux"):
        return None
    try:
        return build(source)
    except OSError as error:
        get_logger(__name__).info("%s by torch's operators: %s", instead, error)
        return None
