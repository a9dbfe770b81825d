"""Tokens that end an answer, and the one that fills rows, as a model folder names them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moe_tp.checkpoint.agree import together
from moe_tp.checkpoint.remote import open_storage
from moe_tp.errors import DataError
from moe_tp.models.decoder import Decoder

_FILE = "generation_config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stops:
    """Special tokens of generation.

    Args:
        ids: an answer ends with the first of these; it is part of the answer.
        pad: fills the rest of finished rows.
    """

    ids: frozenset[int]
    pad: int


def stops_of(model: Decoder) -> Stops:
    """Return the stop and padding tokens of the folder that a model was read from.

    `generation_config.json` is asked first, then `config.json`, for `eos_token_id` (a number or a
    list) and `pad_token_id`; padding falls back to a stop token, then to 0.

    Raises:
        DataError: the file is no JSON object, or names no token; on every rank.

    Collectives: an agreement over the world where the model was read from a folder.
    """
    sources: list[Mapping[str, Any]] = [model.hub_config]
    if model.source is not None:
        mesh = model.mesh
        found = together(lambda: _generation_config(model), mesh.group("world"), mesh.device)
        sources.insert(0, found)
    ids: frozenset[int] = frozenset()
    for source in sources:
        ids = _ids(source.get("eos_token_id"))
        if ids:
            break
    pad = next((s["pad_token_id"] for s in sources if _is_id(s.get("pad_token_id"))), None)
    return Stops(ids=ids, pad=min(ids, default=0) if pad is None else int(pad))


def _generation_config(model: Decoder) -> Mapping[str, Any]:
    """Return generation_config.json of the model's folder; empty where there is none."""
    assert model.source is not None
    storage = open_storage(model.source)
    try:
        size = storage.sizes().get(_FILE)
        if size is None:
            return {}
        content = json.loads(storage.read(_FILE, 0, size))
    except ValueError as error:
        raise DataError(f"{_FILE} of {storage.where} cannot be read as JSON: {error}") from error
    finally:
        storage.close()
    if not isinstance(content, dict):
        raise DataError(f"{_FILE} of {storage.where} holds no JSON object")
    return content


def _ids(value: Any) -> frozenset[int]:
    values = value if isinstance(value, list) else [value]
    return frozenset(int(v) for v in values if _is_id(v))


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
