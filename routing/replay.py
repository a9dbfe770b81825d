"""Recorded choices, to route the same way again: for debugging, comparison and RL.

The recompute of activation checkpointing does not need this: without noise routing is a function of
the logits (R1), and noise is an argument. A record is a few bytes a choice; `to_tensors` gives a
flat dict that any tensor file can hold.

T tokens on this rank · K choices
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from moe_tp.errors import RoutingError
from moe_tp.routing.assignment import Assignment

__all__ = ["RoutingRecord"]


class RoutingRecord:
    """Choices by (layer, call); `call` counts what the caller counts: micro-batches, say.

    Recording a key again replaces it, so a recompute changes nothing. The choices before any
    capacity drop are kept: replaying drops again by the same rule.
    """

    def __init__(self) -> None:
        self._ids: dict[tuple[int, int], Tensor] = {}

    def add(self, assignment: Assignment, *, layer: int, call: int = 0) -> None:
        """Keep the choices of one layer in one call, on the host in the smallest integer dtype.

        Args:
            assignment: from `route`.
            layer, call: the key.
        """
        dtype = (
            torch.int16 if assignment.num_experts <= torch.iinfo(torch.int16).max else torch.int32
        )
        self._ids[layer, call] = assignment.chosen_TK.detach().to(device="cpu", dtype=dtype)

    def ids(self, *, layer: int, call: int = 0) -> Tensor:
        """Return ids_TK int64 for `route(..., replay_TK=...)`.

        Args:
            layer, call: the key.
        """
        if (layer, call) not in self._ids:
            raise RoutingError(
                f"no routing was recorded for layer {layer}, call {call}; the record holds "
                f"{len(self._ids)} keys, layers {sorted({key[0] for key in self._ids})}"
            )
        return self._ids[layer, call].to(torch.int64)

    def __len__(self) -> int:
        return len(self._ids)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(sorted(self._ids))

    def to_tensors(self) -> dict[str, Tensor]:
        """Return the record as named tensors, `layer.L.call.C`."""
        return {f"layer.{layer}.call.{call}": self._ids[layer, call] for layer, call in self}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> RoutingRecord:
        """Return the record that `to_tensors` gave.

        Args:
            tensors: by name.
        """
        record = cls()
        for name, ids_TK in tensors.items():
            parts = name.split(".")
            if len(parts) != 4 or parts[0] != "layer" or parts[2] != "call":
                raise RoutingError(f"{name!r} is not the name of recorded routing (layer.L.call.C)")
            if ids_TK.ndim != 2 or ids_TK.dtype not in (torch.int16, torch.int32, torch.int64):
                raise RoutingError(
                    f"{name!r} holds {ids_TK.dtype} {tuple(ids_TK.shape)}, not integer ids "
                    "[tokens, choices]"
                )
            record._ids[int(parts[1]), int(parts[3])] = ids_TK
        return record
