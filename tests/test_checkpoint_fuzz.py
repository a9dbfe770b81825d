"""Fuzz over the reader: the same weights, or an error that names file and tensor; never else.

Bytes of weights carry no checksum in this format, and two tensors of one shape whose names or
offsets are exchanged in a header make another valid file: what is drawn here leaves those alone.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from checkpoint_toy import Toy, hub_tensors, make_mesh, toy_rules, write_folder
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe_tp.checkpoint import HubFolder, load_into
from moe_tp.errors import CheckpointError
from moe_tp.parallel.mesh import Mesh
from moe_tp.testing import run_ranks

INDEX = "model.safetensors.index.json"
SHARDS = [f"model-{n:05d}-of-00003.safetensors" for n in (1, 2, 3)]
QUICK = {"derandomize": True, "deadline": None, "suppress_health_check": list(HealthCheck)}


@cache
def base() -> tuple[Path, dict[str, bytes], dict[str, torch.Tensor]]:
    """A folder that the examples damage and mend, its bytes, and its weights."""
    path = write_folder(Path(mkdtemp()) / "m", hub_tensors(toy_rules(6)), shards=3)
    return path, {file.name: file.read_bytes() for file in path.iterdir()}, weights(path)


def weights(path: Path) -> dict[str, torch.Tensor]:
    model = Toy(Mesh.single())
    load_into(model, HubFolder(path), toy_rules(6))
    return {n: p.detach().to_local().clone() for n, p in model.named_parameters()}  # type: ignore[operator]


def same_or_named(changed: dict[str, bytes], tensor: str | None = None) -> str | None:
    """Load the folder with these files changed; return the error, None if nothing changed."""
    path, before, expected = base()
    try:
        for name, content in changed.items():
            (path / name).write_bytes(content)
        after = weights(path)
    except CheckpointError as error:
        text = str(error)
        assert any(name in text for name in before), f"no file is named: {text}"
        assert tensor is None or repr(tensor) in text, f"{tensor} is not named: {text}"
        return text
    finally:
        for name in changed:
            (path / name).write_bytes(before[name])
    for parameter, value in expected.items():
        assert torch.equal(after[parameter], value), f"{parameter} changed"
    return None


def split(content: bytes) -> tuple[dict[str, Any], bytes]:
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def joined(header: dict[str, Any], data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


@settings(max_examples=120, **QUICK)
@given(st.data())
def test_damaged_bytes(data: st.DataObject) -> None:
    """K2, C37: flips, digits, cuts, insertions, deletions and exchanges of whole files, in headers,
    index and config."""
    _, before, _ = base()
    name = data.draw(st.sampled_from(sorted(n for n in before if "token" not in n)))
    content = bytearray(before[name])
    reach = len(content)
    if name.endswith(".safetensors"):
        reach = 8 + struct.unpack("<Q", content[:8])[0]
    at = data.draw(st.integers(0, reach - 1))
    match data.draw(st.sampled_from(["flip", "digit", "cut", "insert", "delete", "file"])):
        case "flip":
            content[at] ^= 1 << data.draw(st.integers(0, 7))
        case "digit":
            places = [i for i in range(reach) if chr(content[i]).isdigit()]
            if places:
                content[data.draw(st.sampled_from(places))] = ord(
                    data.draw(st.sampled_from("0123456789"))
                )
        case "cut":
            del content[data.draw(st.integers(0, len(content) - 1)) :]
        case "insert":
            content[at:at] = data.draw(st.binary(min_size=1, max_size=8))
        case "delete":
            del content[at : at + data.draw(st.integers(1, 64))]
        case "file":
            content = bytearray(before[data.draw(st.sampled_from(sorted(before)))])
    same_or_named({name: bytes(content)})


def entries(header: dict[str, Any]) -> list[str]:
    return [name for name in header if name != "__metadata__"]


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False),
    st.text(max_size=5),
    st.lists(st.integers(-3, 2**40), max_size=4),
)


@settings(max_examples=80, **QUICK)
@given(st.data())
def test_forged_headers(data: st.DataObject) -> None:
    """K2: wrong dtypes, shapes and offsets, tensors that are gone, doubled or renamed, and values
    of the wrong kind: an error with the tensor in it, and never another weight."""
    _, before, _ = base()
    file = data.draw(st.sampled_from(SHARDS))
    header, body = split(before[file])
    name = data.draw(st.sampled_from(entries(header)))
    entry = header[name]
    kind = data.draw(
        st.sampled_from(["dtype", "shape", "turned", "offsets", "gone", "renamed", "odd", "length"])
    )
    content: bytes | None = None
    match kind:
        case "dtype":
            codes = ["F64", "F32", "F16", "BF16", "I16", "U16", "I32", "BOOL", "F8_E4M3", "X"]
            entry["dtype"] = data.draw(st.sampled_from(codes))
        case "shape":
            entry["shape"] = data.draw(st.lists(st.integers(0, 20), max_size=3))
        case "turned":
            entry["shape"] = entry["shape"][::-1]
        case "offsets":
            entry["data_offsets"] = data.draw(st.lists(st.integers(0, 4000), max_size=3))
        case "gone":
            del header[name]
        case "renamed":
            header[data.draw(st.text(min_size=1, max_size=8))] = header.pop(name)
        case "odd":
            field = data.draw(st.sampled_from(["dtype", "shape", "data_offsets"]))
            entry[field] = data.draw(ODD)
        case "length":
            length = data.draw(st.integers(0, 2**64 - 1))
            content = struct.pack("<Q", length) + before[file][8:]
    changed = joined(header, body) if content is None else content
    if split(before[file])[0] == header and content is None:
        assert same_or_named({file: changed}) is None
        return
    told = same_or_named({file: changed})
    if kind not in ("length", "odd"):
        same = sorted(header.get(name, {}).items()) == sorted(split(before[file])[0][name].items())
        # what is carried along unread may have any shape and dtype that fill its bytes
        carried = name.startswith("mtp.") and kind in ("dtype", "shape", "turned")
        assert told is not None or same or carried or entry["dtype"] == "F16", kind


NAMES = st.one_of(
    st.sampled_from(
        ["../x.safetensors", "/etc/passwd", "a/b.safetensors", "..", ".", "", "x.bin", "x.pt"]
    ),
    st.sampled_from([*SHARDS, "model.safetensors", "config.json", "gone.safetensors"]),
    ODD,
)


@settings(max_examples=60, **QUICK)
@given(st.data())
def test_forged_indices(data: st.DataObject) -> None:
    """K2, K7: names that leave the folder, pickles, shards that do not exist, entries moved to
    another shard, dropped, added or of the wrong kind: nothing outside is opened."""
    _, before, _ = base()
    index = json.loads(before[INDEX])
    name = data.draw(st.sampled_from(sorted(index["weight_map"])))
    kept = index["weight_map"][name]
    match data.draw(st.sampled_from(["moved", "dropped", "added", "map"])):
        case "moved":
            index["weight_map"][name] = data.draw(NAMES)
        case "dropped":
            del index["weight_map"][name]
        case "added":
            index["weight_map"][data.draw(st.text(max_size=6))] = data.draw(NAMES)
        case "map":
            index["weight_map"] = data.draw(ODD)
    told = same_or_named({INDEX: json.dumps(index).encode()})
    found = index["weight_map"]
    unchanged = isinstance(found, dict) and found.get(name) == kept
    assert told is not None or unchanged


@settings(max_examples=15, **QUICK)
@given(st.permutations(SHARDS))
def test_swapped_shards(order: list[str]) -> None:
    """K2: whole shards under each other's names: an error, unless each is where it was."""
    _, before, _ = base()
    told = same_or_named({a: before[b] for a, b in zip(SHARDS, order, strict=True)})
    assert (told is None) == (order == SHARDS)


@settings(max_examples=20, **QUICK)
@given(st.data())
def test_not_a_number_anywhere(data: st.DataObject) -> None:
    """K2: one NaN or infinity in any tensor loads by default and is named on request."""
    tensors = hub_tensors(toy_rules(6), mtp=False)
    name = data.draw(st.sampled_from(sorted(tensors)))
    flat = tensors[name].view(-1)
    value = data.draw(st.sampled_from(["nan", "inf", "-inf"]))
    flat[data.draw(st.integers(0, len(flat) - 1))] = float(value)
    path = write_folder(Path(mkdtemp()), tensors)
    load_into(Toy(Mesh.single()), HubFolder(path), toy_rules(6))
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: tensor '{name}': .*finite"):
        load_into(Toy(Mesh.single()), HubFolder(path), toy_rules(6), reject_nan=True)


def error_of(path: str) -> str:
    try:
        model = Toy(make_mesh(2, ep=2))
        load_into(model, HubFolder(path), toy_rules(6))
    except CheckpointError as error:
        return str(error)
    return ""


def damages() -> Iterator[tuple[str, Callable[[bytes], bytes]]]:
    yield SHARDS[1], lambda b: b[:-7]
    yield SHARDS[0], lambda b: struct.pack("<Q", 2**50) + b[8:]
    yield INDEX, lambda b: b.replace(SHARDS[2].encode(), b"../x.safetensors", 1)
    yield SHARDS[2], lambda b: b.replace(b'"BF16"', b'"F16" ', 1)


def test_every_rank_is_told(tmp_path: Path) -> None:
    """K2: each kind of damage is the same error on both ranks, with no hang."""
    _, before, _ = base()
    for number, (file, damage) in enumerate(damages()):
        path = tmp_path / str(number)
        path.mkdir()
        for name, content in before.items():
            (path / name).write_bytes(damage(content) if name == file else content)
        one, two = run_ranks(error_of, 2, str(path), timeout=30.0)
        assert one == two
        assert file in one
