"""SIGTERM in a rank that has nothing to save: it leaves at once, with one sentence (F1).

A handler of Python runs when the main thread comes back to Python, which inside a collective is
when the other ranks have done their part, or never. So a thread waits for the signal too: the C
part of Python's handler writes to a file descriptor the moment that it comes.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

__all__ = ["leave_at_sigterm"]

_CODE = 130


def leave_at_sigterm(sentence: str) -> None:
    """End the process at a SIGTERM, as long as nobody else takes it; for the main thread.

    Args:
        sentence: goes to stderr.
    """
    leaving = threading.Lock()

    def leave(number: int, frame: FrameType | None) -> None:
        if leaving.acquire(blocking=False):
            os.write(2, f"{sentence}\n".encode())
            os._exit(_CODE)

    def wait() -> None:
        while came := os.read(told, 1):
            if came[0] == signal.SIGTERM and signal.getsignal(signal.SIGTERM) is leave:
                leave(signal.SIGTERM, None)

    told, teller = os.pipe()
    os.set_blocking(teller, False)
    signal.set_wakeup_fd(teller, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, leave)
    threading.Thread(target=wait, daemon=True).start()
