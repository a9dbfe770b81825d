"""The process of a command, which signals end with one sentence and exit code 130 (F1).

Imports next to nothing, so that a Ctrl-C finds `entry` at work as soon as Python itself is up.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING

from moe_tp.cli import RUN_FOLDER

if TYPE_CHECKING:
    from types import FrameType

__all__ = ["entry", "loaded"]

_RANKS = ("RANK", "SLURM_PROCID")  # variables of torchrun and our launcher, of Slurm
_CODE = 130


def entry() -> None:
    """End the process with the exit code of `main`, or with 130 where a signal has stopped it.

    SIGTERM is taken as Ctrl-C is, from here until a run that saves has a handler of its own. A
    rank of torchrun or Slurm, which may be inside a collective, leaves at once; a rank of our
    launcher, which speaks for it, keeps the default.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where it is ignored
        signal.signal(signal.SIGINT, _leave)
    if _rank() is None:
        signal.signal(signal.SIGTERM, _leave)
    elif RUN_FOLDER not in os.environ:
        from moe_tp.cli.leaving import leave_at_sigterm

        leave_at_sigterm(_sentence())
    from moe_tp.cli.main import main

    try:
        code = main()
    except KeyboardInterrupt:
        code = _CODE
        if RUN_FOLDER not in os.environ:
            print(_sentence(), file=sys.stderr)
    sys.exit(code)


def loaded() -> None:
    """Have signals raise KeyboardInterrupt from now on, where they made the process leave."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is _leave:
            signal.signal(number, signal.default_int_handler)


def _leave(number: int, frame: FrameType | None) -> None:
    """End the process at once: extension modules swallow what is raised while they are loaded."""
    if RUN_FOLDER not in os.environ:
        os.write(2, f"{_sentence()}\n".encode())
    os._exit(_CODE)


def _rank() -> str | None:
    return next((os.environ[name] for name in _RANKS if name in os.environ), None)


def _sentence() -> str:
    """Return what stderr shows of a signal."""
    rank = _rank()
    return f"moe-tp: {'' if rank is None else f'rank {rank}: '}stopped by a signal"
