"""Sizes that know which config fields decide about them, for messages about shapes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence


class Sized(int):
    """A size with the config fields that it follows from; sums and products keep them.

    Args:
        value: the size.
        fields: names in config.json.
    """

    fields: tuple[str, ...]

    def __new__(cls, value: int, fields: tuple[str, ...] = ()) -> Sized:
        """Return the size."""
        size = super().__new__(cls, value)
        size.fields = fields
        return size

    def __add__(self, other: int) -> Sized:
        """Return the sum, which follows from the fields of both."""
        return Sized(int(self) + int(other), _joined(self, other))

    def __mul__(self, other: int) -> Sized:
        """Return the product, which follows from the fields of both."""
        return Sized(int(self) * int(other), _joined(self, other))

    __radd__, __rmul__ = __add__, __mul__


def _joined(*sizes: int) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for size in sizes for name in getattr(size, "fields", ())))


def shape_hint(wanted: Sequence[int], found: Sequence[int]) -> str:
    """Return in brackets which fields decide about the sizes that differ, empty if none is known.

    Args:
        wanted: the shape that the configuration asks for.
        found: the shape on disk.
    """
    if len(wanted) != len(found):
        return ""
    return bracketed(_joined(*(w for w, f in zip(wanted, found, strict=True) if w != f)))


def name_hint(names: Iterable[str], hints: Mapping[str, str]) -> str:
    """Return in brackets which fields decide whether tensors are there.

    Args:
        names: hub names.
        hints: pattern of hub names -> field; the first that matches a name speaks of it.
    """
    first = {next((p for p in hints if re.fullmatch(p, name)), "") for name in names}
    return bracketed([text for pattern, text in hints.items() if pattern in first])


def bracketed(fields: Sequence[str]) -> str:
    """Return the end of a message that names config fields, empty for none."""
    return f" (decided by {', '.join(fields)} in config.json)" if fields else ""
