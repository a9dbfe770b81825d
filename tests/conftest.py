"""Settings of every test: one thread per process, no network, Ctrl-C as in a terminal."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from unittest import mock

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _same_environment() -> Iterator[None]:
    """A test that joins ranks sets RANK and the like: the next test must not see them."""
    with mock.patch.dict(os.environ):
        yield
