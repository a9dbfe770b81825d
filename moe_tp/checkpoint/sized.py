"""Sizes that know which config fields decide about them, for messages about shapes."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence

LAYERS = r"model\.layers\..*"  # the pattern of hub names in layers


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


def name_hint(names: Iterable[str], hints: Mapping[str, str], there: Collection[str]) -> str:
    """Return in brackets which fields decide whether tensors are there.

    Args:
        names: hub names.
        hints: pattern of hub names -> field; the first that matches a name speaks of it. That of
            `LAYERS` speaks of whole layers.
        there: layers of which other tensors are there as they should be: one more or less in them
            says nothing about the number of layers.
    """
    first = set()
    for name in names:
        layer = layer_of(name)
        if layer is not None and layer not in there:
            first.add(LAYERS)
        else:
            first.add(next((p for p in hints if p != LAYERS and re.fullmatch(p, name)), ""))
    return bracketed([text for pattern, text in hints.items() if pattern in first])


def layer_of(name: str) -> str | None:
    """Return the layer that a hub tensor belongs to, such as `model.layers.3`; None if to none."""
    found = re.match(r".*?\.layers\.\d+(?=\.)", name)
    return None if found is None else found[0]


def bracketed(fields: Sequence[str]) -> str:
    """Return the end of a message that names config fields, empty for none."""
    return f" (decided by {', '.join(fields)} in config.json)" if fields else ""
