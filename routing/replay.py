"""Recorded choices, to route the same way again: for debugging, comparison and RL.

A record is a few bytes a choice; `to_tensors` gives a flat dict that any tensor file can hold. With
the identity of each token in it, it serves every layout: a rank looks up the tokens that it owns.

T tokens on this rank · K choices
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from moe_tp.errors import RoutingError
from moe_tp.routing.assignment import Assignment

__all__ = ["RoutingRecord"]

_SAMPLE = 2**32  # identities are sample * 2^32 + column


class RoutingRecord:
    """Choices by (layer, call); `call` counts what the caller counts: micro-batches, say.

    Recording rows in their order again replaces them, and so does recording a token again, so a
    recompute changes nothing. The choices before any capacity drop are kept: replaying drops again
    by the same rule.
    """

    def __init__(self) -> None:
        self._ids: dict[tuple[int, int], Tensor] = {}
        self._tokens: dict[tuple[int, int], Tensor] = {}

    def add(
        self,
        assignment: Assignment,
        *,
        layer: int,
        call: int = 0,
        identity_T: Tensor | None = None,
    ) -> None:
        """Keep the choices of one layer in one call, on the host in the smallest integer dtype.

        Args:
            assignment: from `route`.
            layer, call: the key.
            identity_T: int64, a number for each token; masked tokens are then left out, and a key
                may be added to with other tokens. None keeps the rows in their order.
        """
        dtype = (
            torch.int16 if assignment.num_experts <= torch.iinfo(torch.int16).max else torch.int32
        )
        ids_TK = assignment.chosen_TK.detach().to(device="cpu", dtype=dtype)
        if identity_T is None:
            self._ids[layer, call] = ids_TK
            self._tokens.pop((layer, call), None)
            return
        tokens_T = identity_T.detach().to("cpu", torch.int64)
        if assignment.mask_T is not None:
            real_T = assignment.mask_T.cpu()
            ids_TK, tokens_T = ids_TK[real_T], tokens_T[real_T]
        self._merge((layer, call), tokens_T, ids_TK)

    def ids(
        self,
        *,
        layer: int,
        call: int = 0,
        identity_T: Tensor | None = None,
        mask_T: Tensor | None = None,
    ) -> Tensor:
        """Return ids_TK int64 for `route(..., replay_TK=...)`.

        Args:
            layer, call: the key.
            identity_T: the tokens, where they were recorded by identity; on any device.
            mask_T: True where a token is real; others may be missing and get -1.

        Raises:
            RoutingError: nothing was recorded under the key, or not this token.
        """
        key = (layer, call)
        if key not in self._ids:
            raise RoutingError(
                f"no routing was recorded for layer {layer}, call {call}; the record holds "
                f"{len(self._ids)} keys, layers {sorted({key[0] for key in self._ids})}"
            )
        if (identity_T is None) != (key not in self._tokens):
            how = "by identity" if identity_T is None else "in the order of its rows"
            raise RoutingError(
                f"layer {layer}, call {call} was recorded {how}; replay it as it was recorded"
            )
        if identity_T is None:
            return self._ids[key].to(torch.int64)
        own_T, tokens_N = identity_T.detach().cpu(), self._tokens[key]
        found_TK = torch.full((own_T.shape[0], self._ids[key].shape[1]), -1)
        at_T = torch.searchsorted(tokens_N, own_T).clamp_max(max(tokens_N.shape[0] - 1, 0))
        known_T = torch.zeros_like(own_T, dtype=torch.bool)
        if tokens_N.shape[0]:
            known_T = tokens_N[at_T] == own_T
            found_TK[known_T] = self._ids[key][at_T[known_T]].to(torch.int64)
        lost_T = ~known_T if mask_T is None else ~known_T & mask_T.cpu()
        if bool(lost_T.any()):
            sample, column = divmod(int(own_T[lost_T][0]), _SAMPLE)
            raise RoutingError(
                f"layer {layer}: {int(lost_T.sum())} of {own_T.shape[0]} tokens are not in the "
                f"record, the first is column {column} of sample {sample}; replay the batches "
                "that were recorded, with the same sample_offset"
            )
        return found_TK.to(identity_T.device)

    def update(self, other: RoutingRecord) -> None:
        """Add all that another record holds.

        Args:
            other: of another rank, say; its tokens replace those of the same identity.
        """
        for key, ids_TK in other._ids.items():
            if key in other._tokens:
                self._merge(key, other._tokens[key], ids_TK)
            else:
                self._ids[key] = ids_TK
                self._tokens.pop(key, None)

    def __len__(self) -> int:
        return len(self._ids)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(sorted(self._ids))

    def to_tensors(self) -> dict[str, Tensor]:
        """Return the record as named tensors, `layer.L.call.C` and `token.L.call.C`."""
        named = {f"layer.{layer}.call.{call}": self._ids[layer, call] for layer, call in self}
        for layer, call in sorted(self._tokens):
            named[f"token.{layer}.call.{call}"] = self._tokens[layer, call]
        return named

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> RoutingRecord:
        """Return the record that `to_tensors` gave.

        Args:
            tensors: by name.
        """
        record = cls()
        for name, tensor in tensors.items():
            parts = name.split(".")
            if len(parts) != 4 or parts[0] not in ("layer", "token") or parts[2] != "call":
                raise RoutingError(f"{name!r} is not the name of recorded routing (layer.L.call.C)")
            key = (int(parts[1]), int(parts[3]))
            if parts[0] == "token":
                record._tokens[key] = tensor
                continue
            if tensor.ndim != 2 or tensor.dtype not in (torch.int16, torch.int32, torch.int64):
                raise RoutingError(
                    f"{name!r} holds {tensor.dtype} {tuple(tensor.shape)}, not integer ids "
                    "[tokens, choices]"
                )
            record._ids[key] = tensor
        for key, tokens_N in record._tokens.items():
            rows = record._ids[key].shape[0] if key in record._ids else -1
            if tokens_N.dtype != torch.int64 or tokens_N.shape != (rows,):
                raise RoutingError(
                    f"token.{key[0]}.call.{key[1]} holds {tokens_N.dtype} {tuple(tokens_N.shape)}, "
                    f"not one int64 identity for each of {max(rows, 0)} rows"
                )
        return record

    def _merge(self, key: tuple[int, int], tokens_T: Tensor, ids_TK: Tensor) -> None:
        """Add rows by identity, kept in ascending order; a later row replaces an earlier one."""
        if key in self._tokens:
            tokens_T = torch.cat([tokens_T, self._tokens[key]])
            ids_TK = torch.cat([ids_TK, self._ids[key]])
        tokens_N, order_N = torch.sort(tokens_T, stable=True)
        first_N = torch.ones_like(tokens_N, dtype=torch.bool)
        first_N[1:] = tokens_N[1:] != tokens_N[:-1]
        self._tokens[key] = tokens_N[first_N].clone()
        self._ids[key] = ids_TK[order_N[first_N]].clone()
