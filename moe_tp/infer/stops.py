"""Tokens that end an answer, and the one that fills rows, as a model folder names them."""

from __future__ import annotations

import json
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moe_tp.checkpoint.agree import together
from moe_tp.checkpoint.remote import open_storage
from moe_tp.errors import DataError
from moe_tp.log import warn_once
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
    list) and `pad_token_id`; padding falls back to a stop token, then to 0. A value that is no id
    of the vocabulary is warned of and passed over: some published folders say -1 for none.

    Raises:
        DataError: the file is no JSON object; on every rank.

    Collectives: an agreement over the world where the model was read from a folder.
    """
    sources: list[tuple[str, Mapping[str, Any]]] = [("config.json", model.hub_config)]
    if model.source is not None:
        mesh = model.mesh
        found = together(lambda: _generation_config(model), mesh.group("world"), mesh.device)
        sources.insert(0, (_FILE, found))
    vocab_size = model.config.vocab_size
    stops = [_ids(file, source, "eos_token_id", vocab_size) for file, source in sources]
    pads = [_ids(file, source, "pad_token_id", vocab_size) for file, source in sources]
    ids = frozenset(next(filter(None, stops), []))
    return Stops(ids=ids, pad=next((pad[0] for pad in pads if pad), min(ids, default=0)))


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


def _ids(file: str, source: Mapping[str, Any], name: str, vocab_size: int) -> list[int]:
    """Return the token ids that a file has under a name, having warned of values that are none."""
    value = source.get(name)
    if value is None:
        return []
    several = isinstance(value, list) and name == "eos_token_id"
    values = value if several else [value]
    bad = [v for v in values if not is_id(v, vocab_size)]
    if bad:
        warn_once(
            f"{file} {name}={value!r}",
            f"{file}: {name}={value!r} is passed over: {bad[0]!r} is no token id of the vocabulary "
            f"(0 to {vocab_size - 1}); correct the file",
        )
    return [int(v) for v in values if is_id(v, vocab_size)]


def is_id(value: Any, vocab_size: int) -> bool:
    """Return whether a value is a token id of a vocabulary of this size."""
    try:
        return not isinstance(value, bool) and 0 <= operator.index(value) < vocab_size
    except TypeError:
        return False
