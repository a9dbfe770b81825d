"""Damaged, forged and contradictory folders: always an error that names file and tensor."""

from __future__ import annotations

import json
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_toy import Toy, hub_tensors, make_mesh, toy_rules, write_folder
from safetensors.torch import save_file

from moe_tp.checkpoint import HubFolder, inspect_folder, load_into
from moe_tp.errors import CheckpointError
from moe_tp.parallel.mesh import Mesh
from moe_tp.testing import run_ranks

FILE = "model-00002-of-00003.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "m", hub_tensors(toy_rules(6)), shards=3)


def edit_header(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Rewrite a file's header; data bytes stay."""
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    text = change(header)
    text = json.dumps(header if text is None else text) if not isinstance(text, str) else text
    file.write_bytes(struct.pack("<Q", len(text)) + text.encode() + data[8 + length :])


def edit_index(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    index = json.loads((path / INDEX).read_text())
    change(index)
    (path / INDEX).write_text(json.dumps(index))


def cut(count: int) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        data = (path / FILE).read_bytes()
        (path / FILE).write_bytes(data[: len(data) - count])

    return apply


def huge_length(path: Path) -> None:
    data = (path / FILE).read_bytes()
    (path / FILE).write_bytes(struct.pack("<Q", 2**40) + data[8:])


def first_name(header: dict[str, Any]) -> str:
    return next(name for name in header if name != "__metadata__")


def with_first(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        edit_header(path / FILE, lambda h: change(h[first_name(h)]))

    return apply


def twice(path: Path) -> None:
    edit_header(
        path / FILE,
        lambda h: (
            json.dumps(h)[:-1] + f", {json.dumps(first_name(h))}: {json.dumps(h[first_name(h)])}}}"
        ),
    )


def in_two_files(path: Path) -> None:
    name = next(iter(HubFolder(path).tensors))
    save_file({name: torch.ones(2)}, path / "more.safetensors")
    edit_index(path, lambda i: i["weight_map"].update(ghost="more.safetensors"))


def overlap(path: Path) -> None:
    def change(header: dict[str, Any]) -> None:
        entries = [e for n, e in header.items() if n != "__metadata__"]
        size = entries[-1]["data_offsets"][1] - entries[-1]["data_offsets"][0]
        entries[-1]["data_offsets"] = [0, size]

    edit_header(path / FILE, change)


def swapped(path: Path) -> None:
    other = path / "model-00001-of-00003.safetensors"
    data = (path / FILE).read_bytes()
    (path / FILE).write_bytes(other.read_bytes())
    other.write_bytes(data)


def halves_mixed(path: Path) -> None:
    def change(header: dict[str, Any]) -> None:
        next(e for n, e in header.items() if e.get("dtype") == "BF16")["dtype"] = "F16"

    edit_header(path / FILE, change)


def set_file(name: str) -> Callable[[Path], None]:
    return lambda p: edit_index(p, lambda i: i["weight_map"].update({"q.weight": name}))


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "absent": (lambda p: (p / FILE).unlink(), f"{FILE}: expected by {INDEX} for .* such as '"),
    "empty": (lambda p: (p / FILE).write_bytes(b""), rf"{FILE}: expected a safetensors .* 0 bytes"),
    "cut in the data": (
        cut(100),
        rf"{FILE}: expected \d+ bytes .* last tensor is '.*the file is cut",
    ),
    "cut in the header": (
        lambda p: (p / FILE).write_bytes((p / FILE).read_bytes()[:40]),
        f"{FILE}: expected a header of",
    ),
    "longer than its header says": (
        lambda p: (p / FILE).write_bytes((p / FILE).read_bytes() + b"x"),
        f"{FILE}: .* too long",
    ),
    "huge header length": (huge_length, rf"{FILE}: .* header length of {2**40}"),
    "index cut": (
        lambda p: (p / INDEX).write_text((p / INDEX).read_text()[:200]),
        f"{INDEX}: expected JSON",
    ),
    "index is a list": (lambda p: (p / INDEX).write_text("[]"), f"{INDEX}: expected a JSON object"),
    "index without map": (
        lambda p: (p / INDEX).write_text("{}"),
        f"{INDEX}: expected a weight_map",
    ),
    "index gone": (lambda p: (p / INDEX).unlink(), f"{INDEX}: expected it beside"),
    "path escape": (set_file("../x.safetensors"), f"{INDEX}: tensor 'q.weight': .*'../x.safete"),
    "absolute path": (set_file("/etc/x.safetensors"), f"{INDEX}: tensor 'q.weight'"),
    "pickle in the index": (set_file("pytorch_model.bin"), f"{INDEX}: .*a pickle could run code"),
    "file is a number": (
        lambda p: edit_index(p, lambda i: i["weight_map"].update({"q.weight": 3})),
        f"{INDEX}: tensor 'q.weight'",
    ),
    "wrong shard in the index": (
        set_file("model-00001-of-00003.safetensors"),
        f"{INDEX}: tensor 'q.weight': expected in model-00001.*, found in",
    ),
    "index lists too much": (
        lambda p: edit_index(p, lambda i: i["weight_map"].update(ghost=FILE)),
        f"{FILE}: tensor 'ghost': expected by",
    ),
    "index lists too little": (
        lambda p: edit_index(p, lambda i: i["weight_map"].pop("q.weight")),
        "tensor 'q.weight': expected no tensor that",
    ),
    "swapped shards": (swapped, f"{INDEX}: tensor .* expected in .*, found in"),
    "name twice in a header": (twice, f"{FILE}: header: expected each name once"),
    "name in two files": (in_two_files, "expected once, found in"),
    "overlap": (overlap, f"{FILE}: tensor '.*found an overlap"),
    "unknown dtype": (
        with_first(lambda e: e.update(dtype="F12")),
        f"{FILE}: tensor '.*dtype among",
    ),
    "dtype of another size": (
        with_first(lambda e: e.update(dtype="F64")),
        f"{FILE}: tensor '.*bytes for F64",
    ),
    "another half type": (halves_mixed, f"{FILE}: tensor '.*a header is damaged"),
    "shape too large": (with_first(lambda e: e["shape"].append(2)), f"{FILE}: tensor '.*bytes for"),
    "negative shape": (
        with_first(lambda e: e.update(shape=[-1])),
        f"{FILE}: tensor '.*a shape of sizes",
    ),
    "shape of text": (
        with_first(lambda e: e.update(shape="ab")),
        f"{FILE}: tensor '.*a shape of sizes",
    ),
    "boolean shape": (
        with_first(lambda e: e.update(shape=[True])),
        f"{FILE}: tensor '.*a shape of sizes",
    ),
    "endless offset": (
        with_first(lambda e: e.update(data_offsets=[0, 10**30])),
        f"{FILE}: tensor '.*offsets",
    ),
    "a key too many": (with_first(lambda e: e.update(more=1)), f"{FILE}: tensor '.*an entry with"),
    "header is no JSON": (
        lambda p: edit_header(p / FILE, lambda h: "{" * 50),
        f"{FILE}: header: exp",
    ),
    "header nests without end": (
        lambda p: edit_header(p / FILE, lambda h: '{"a":' * 100_000),
        f"{FILE}: header: expected JSON",
    ),
    "a zip archive": (
        lambda p: (p / FILE).write_bytes(b"PK\x03\x04" + bytes(100)),
        f"{FILE}: .*a pickle or zip archive",
    ),
    "a pickle": (
        lambda p: (p / FILE).write_bytes(b"\x80\x04" + bytes(100)),
        f"{FILE}: .*a pickle or zip archive",
    ),
    "dead link": (
        lambda p: ((p / FILE).unlink(), (p / FILE).symlink_to(p / "gone")),  # type: ignore[dict-item]
        f"{FILE}: expected a file, found a link",
    ),
    "config gone": (
        lambda p: (p / "config.json").unlink(),
        r"config\.json: expected in the folder",
    ),
    "config cut": (lambda p: (p / "config.json").write_text('{"a'), r"config\.json: expected JSON"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_named(folder: Path, what: str) -> None:
    """K2, K7, C37: each kind of damage gives one error with the file and the tensor in it."""
    damage, message = DAMAGE[what]
    damage(folder)
    with pytest.raises(CheckpointError, match=message) as caught:
        HubFolder(folder)
    assert str(folder) in str(caught.value)
    assert inspect_folder(folder)["problems"]


def test_the_output_of_a_run_names_its_model(folder: Path, tmp_path: Path) -> None:
    """K2: several problems are one line too, each after a semicolon."""
    output = tmp_path / "output"
    shutil.copytree(folder, output / "final")
    said = f"run has written its model to {output}/final: give that); model.safetensors: expected"
    with pytest.raises(CheckpointError, match=re.escape(said)):
        HubFolder(output)


def wrong_names(change: Callable[[dict[str, torch.Tensor]], Any]) -> dict[str, torch.Tensor]:
    tensors = hub_tensors(toy_rules(4))
    change(tensors)
    return tensors


def moved(tensors: dict[str, torch.Tensor]) -> None:
    for name in list(tensors):
        tensors["model.language_model." + name] = tensors.pop(name)


CONTENT: dict[str, tuple[Callable[[dict[str, torch.Tensor]], Any], int, str]] = {
    "missing": (
        lambda t: t.pop("mlp.experts.3.w2"),
        4,
        r"'mlp\.experts\.3\.w2'.*num_local_experts",
    ),
    "extra": (
        lambda t: t.update({"mlp.experts.7.w1": torch.ones(12, 8).bfloat16()}),
        4,
        r"no place for: 'mlp\.experts\.7\.w1'.*num_local_experts",
    ),
    "config says 2": (lambda t: None, 2, r"no place for: 'mlp\.experts\.2\.w1'(.|\n)*gate\.weight"),
    "config says 8": (lambda t: None, 8, r"12 tensors that are missing: 'mlp\.experts\.4\.w1'"),
    "another prefix": (moved, 4, r"found 'model\.language_model\..*another prefix"),
    "misshapen": (
        lambda t: t.update({"q.weight": torch.ones(8, 16).bfloat16()}),
        4,
        r"'q\.weight': expected shape \[16, 8\], found \[8, 16\]",
    ),
    "integers": (
        lambda t: t.update({"q.weight": torch.ones(16, 8).short()}),
        4,
        r"'q\.weight': expected a floating dtype, found I16",
    ),
    "bias of 4": (
        lambda t: t.update({"mlp.gate.bias": torch.ones(4)}),
        5,
        r"'mlp\.gate\.bias': exp",
    ),
}


def load_error(path: str, world: int, experts: int, layout: dict[str, int]) -> str:
    model = Toy(make_mesh(world, **layout), experts)
    with pytest.raises(CheckpointError) as caught:
        load_into(model, HubFolder(path), toy_rules(experts))
    return str(caught.value)


@pytest.mark.parametrize("what", CONTENT)
def test_contents_that_do_not_fit_the_model(tmp_path: Path, what: str) -> None:
    """K2, C39: missing, extra, misshapen: names and the config field, on every rank alike."""
    change, experts, message = CONTENT[what]
    path = write_folder(tmp_path, wrong_names(change), shards=2)
    errors = run_ranks(load_error, 2, str(path), 2, experts, {"ep": 2})
    assert errors[0] == errors[1]
    assert re.search(message, errors[0]), errors[0]
    assert inspect_folder(path, rules=toy_rules(experts))["problems"]


def one_rank_fails(path: str) -> str:
    import torch.distributed as dist

    mesh = make_mesh(2, ep=2)
    model = Toy(mesh, 6)
    folder = HubFolder(path)
    if dist.get_rank() == 1:
        # Only rank 1 meets the damage: the file is cut under its hands.
        folder.storage.close()
        read = folder.storage.read_into

        def broken(file: str, offset: int, *out: memoryview) -> None:
            if file == FILE:
                raise OSError("the disk went away")
            read(file, offset, *out)

        folder.storage.read_into = broken  # type: ignore[method-assign]
    with pytest.raises(CheckpointError) as caught:
        load_into(model, folder, toy_rules(6))
    return str(caught.value)


def test_a_failure_of_one_rank_is_raised_on_all(folder: Path) -> None:
    """K2, F1, C37: only rank 1 needs the broken file; both raise, naming rank 1 and the cause."""
    errors = run_ranks(one_rank_fails, 2, str(folder), timeout=20.0)
    for error in errors:
        assert error.startswith("rank 1: ")
        assert "the disk went away" in error


def test_a_file_cut_after_its_header_was_read(folder: Path) -> None:
    """K2: the check of sizes passed, then the file shrank: an error, no crash."""
    opened = HubFolder(folder)
    cut(100)(folder)
    with pytest.raises(CheckpointError, match=f"{FILE}: .*cut while it was read"):
        load_into(Toy(Mesh.single()), opened, toy_rules(6))


def test_not_a_number_on_request(tmp_path: Path) -> None:
    """K2: NaN weights load by default and are named on request."""
    tensors = hub_tensors(toy_rules(6))
    tensors["o.weight"][2, 3] = float("nan")
    path = write_folder(tmp_path, tensors)
    load_into(Toy(Mesh.single()), HubFolder(path), toy_rules(6))
    with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor 'o\.weight': .*finite"):
        load_into(Toy(Mesh.single()), HubFolder(path), toy_rules(6), reject_nan=True)
    assert "'o.weight'" in inspect_folder(path, values=True)["problems"][0]


def test_missing_tensors_are_allowed_only_by_name(tmp_path: Path) -> None:
    """C39: partial load through an explicit option; what was left is reported and untouched."""
    tensors = hub_tensors(toy_rules(6))
    del tensors["lm_head.weight"], tensors["mlp.experts.2.w3"]
    path = write_folder(tmp_path, tensors)
    model = Toy(Mesh.single())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().fill_(7.0)  # type: ignore[operator]
    with pytest.raises(CheckpointError, match=r"'mlp\.experts\.2\.w3'"):
        load_into(model, HubFolder(path), toy_rules(6), allow_missing=["lm_head.*"])
    report = load_into(
        model, HubFolder(path), toy_rules(6), allow_missing=["lm_head.*", r"mlp\.experts.*"]
    )
    assert report.missing == ("lm_head.weight", "mlp.experts.2.w3")
    gate_up = model.experts.gate_up.to_local()  # type: ignore[operator,union-attr]
    assert (gate_up[2, 1] == 7).all()
    assert not (gate_up[2, 0] == 7).any()


def test_extra_prediction_layer_is_passed_over(tmp_path: Path) -> None:
    """C46 d: tensors of the family's passthrough patterns load nothing and are reported."""
    path = write_folder(tmp_path, hub_tensors(toy_rules(6), mtp=True))
    report = load_into(Toy(Mesh.single()), HubFolder(path), toy_rules(6))
    assert report.passed_over == ("mtp.0.weight",)


def test_pickles_are_refused(tmp_path: Path) -> None:
    """K7: a folder of pickles is refused by name and none is opened."""
    (tmp_path / "config.json").write_text("{}")
    torch.save({"a": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: .*a pickle"):
        HubFolder(tmp_path)


@pytest.mark.parametrize("length", [0x180, 0x4B50])
def test_a_header_length_may_begin_like_a_pickle(tmp_path: Path, length: int) -> None:
    """K7, K2: one header length in 32 has the first byte of a pickle, some those of a zip."""
    tensor = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    text = json.dumps({"t": tensor}).ljust(length).encode()
    data = struct.pack("<Q", length) + text + struct.pack("<f", 2.5)
    (tmp_path / "model.safetensors").write_bytes(data)
    assert HubFolder(tmp_path, need_config=False).read_slice("t").tolist() == [2.5]


def test_single_file_beside_an_index(folder: Path) -> None:
    """Formats: both whole: the single file, as transformers; another set of names: an error."""
    tensors = {n: torch.zeros_like(t) for n, t in hub_tensors(toy_rules(6)).items()}
    save_file(tensors, folder / "model.safetensors")
    assert not HubFolder(folder).read_slice("q.weight").any()
    del tensors["q.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"found model\.safetensors beside it"):
        HubFolder(folder)


def test_index_may_name_the_single_file(tmp_path: Path) -> None:
    """Formats: one file and an index that lists it."""
    tensors = hub_tensors(toy_rules(6))
    path = write_folder(tmp_path, tensors)
    weight_map = dict.fromkeys(tensors, "model.safetensors")
    (path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert torch.equal(HubFolder(path).read_slice("q.weight"), tensors["q.weight"])


def test_symlinked_cache_on_a_read_only_mount(folder: Path, tmp_path: Path) -> None:
    """Formats: a hub cache: links into a blobs folder, nothing writable."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(folder.iterdir())):
        file.rename(blobs / str(number))
        (snapshot / file.name).symlink_to(Path("../../blobs") / str(number))
        (blobs / str(number)).chmod(0o444)
    snapshot.chmod(0o555)
    try:
        load_into(Toy(Mesh.single()), HubFolder(snapshot), toy_rules(6))
    finally:
        snapshot.chmod(0o755)


def test_not_a_folder(tmp_path: Path) -> None:
    """K2: a file or nothing where a folder is expected."""
    (tmp_path / "f").write_text("")
    for name, found in (("f", "a file"), ("g", "nothing")):
        with pytest.raises(CheckpointError, match=f"expected a model folder, found {found}"):
            HubFolder(tmp_path / name)
    with pytest.raises(CheckpointError, match="found neither"):
        HubFolder(tmp_path, need_config=False)
