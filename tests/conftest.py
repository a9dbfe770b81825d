"""Settings of every test: one thread per process, no network."""

from __future__ import annotations

import os
from collections.abc import Iterator
from unittest import mock

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(autouse=True)
def _same_environment() -> Iterator[None]:
    """A test that joins ranks sets RANK and the like: the next test must not see them."""
    with mock.patch.dict(os.environ):
        yield
