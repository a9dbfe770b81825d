"""What one call of generation works out once: views of weights, never copies.

A step of generation takes as long as its calls from Python, and asking a DTensor for its local
tensor is one of the dearer ones. Inside `holding` such views stay from step to step. They show
what is done to a parameter in place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")
_held: ContextVar[dict[tuple[int, str], Any] | None] = ContextVar("held", default=None)


@contextlib.contextmanager
def holding() -> Iterator[None]:
    """Keep what `held` makes while the context is open; without gradients alone.

    Parameters stay where they are meanwhile: not for weights that ZeRO gathers and frees.
    """
    token = _held.set({})
    try:
        yield
    finally:
        _held.reset(token)


def held(owner: object, name: str, make: Callable[[], T]) -> T:
    """Return `make()`, of an earlier call where one is kept.

    Args:
        owner: alive as long as the context is open.
        name: of the value.
        make: gives views of parameters.
    """
    store = _held.get()
    if store is None:
        return make()
    key = (id(owner), name)
    if key not in store:
        store[key] = make()
    value: T = store[key]
    return value


def is_holding() -> bool:
    """Return whether `holding` is open."""
    return _held.get() is not None
