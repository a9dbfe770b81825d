"""`s3://` folders by range reads, against a local server that speaks S3 (moto)."""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
import torch
from checkpoint_toy import Toy, hub_tensors, make_mesh, toy_rules, write_folder
from moto.moto_api import recorder
from moto.server import ThreadedMotoServer

from moe_tp.checkpoint import HubFolder, export_folder, load_into
from moe_tp.errors import CheckpointError
from moe_tp.parallel.mesh import Mesh
from moe_tp.parallel.shards import to_local
from moe_tp.testing import run_ranks

FOLDER = "s3://bucket/models/m"
SETTINGS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "NO_PROXY": "127.0.0.1",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A bucket with a folder of three shards; the address of its server."""
    recorder._location = str(tmp_path_factory.mktemp("s3") / "recording")  # not in the checkout
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    moto.start()
    host, port = moto.get_host_and_port()
    address = f"http://{host}:{port}"
    before = dict(os.environ)
    join(address)
    folder = write_folder(tmp_path_factory.mktemp("s3") / "m", hub_tensors(toy_rules(6)), shards=3)
    fs = fsspec.filesystem("s3")
    fs.mkdir("bucket")
    for file in folder.iterdir():
        fs.pipe_file(f"bucket/models/m/{file.name}", file.read_bytes())
    os.environ.clear()
    os.environ.update(before)
    yield address
    moto.stop()


def join(address: str) -> None:
    """Set what a user sets for a store of that address."""
    os.environ.update(SETTINGS, AWS_ENDPOINT_URL=address)
    fsspec.get_filesystem_class("s3").clear_instance_cache()


def ranges_asked(address: str, start: bool) -> list[tuple[str, str]]:
    """Start to record requests, or return the (path, range) of the GETs since then."""

    def tell(action: str) -> list[str]:
        with urllib.request.urlopen(f"{address}/moto-api/recorder/{action}", data=b"") as answer:
            return str(answer.read().decode()).splitlines()

    if start:
        tell("reset-recording")
        tell("start-recording")
        return []
    lines = tell("download-recording")
    tell("stop-recording")
    found = []
    for line in filter(None, lines):
        request = json.loads(line)
        headers = {name.lower(): value for name, value in request["headers"].items()}
        if request["method"] == "GET" and request["url"].split("?")[0].endswith(".safetensors"):
            found.append((request["url"], headers.get("range", "")))
    return found


def load(address: str, world: int, layout: dict[str, int]) -> tuple[int, int, int]:
    """Load on these ranks; return bytes of slices, of gaps, and of the slices that it holds."""
    join(address)
    tensors = hub_tensors(toy_rules(6))
    folder = HubFolder(FOLDER)
    model = Toy(make_mesh(world, **layout), dtype=torch.bfloat16)
    load_into(model, folder, toy_rules(6))
    part = to_local(model.q.weight)  # type: ignore[arg-type]
    rows = len(part)
    first = rows * (torch.distributed.get_rank() if world > 1 else 0)
    assert torch.equal(part, tensors["q.weight"][first : first + rows])
    held = sum(to_local(p).numel() for p in model.parameters())
    return folder.counter.slices, folder.counter.gaps, 2 * held


def test_each_rank_asks_for_ranges_of_its_own(server: str) -> None:
    """K6: weights come by range requests, of a rank's own slices; columns are read along."""
    ranges_asked(server, start=True)
    slices, gaps, held = load(server, 1, {})
    asked = ranges_asked(server, start=False)
    assert gaps == 0
    assert slices == held + 6 * 4  # the router's bias is a buffer in fp32
    assert asked
    assert all(span.startswith("bytes=") for _, span in asked)
    whole = slices
    for slices, _, held in run_ranks(load, 2, server, 2, {"tp": 2, "ep": 2}):
        assert slices <= held + 24
        assert slices < 0.65 * whole


def test_far_columns_are_one_request(server: str, tmp_path: Path) -> None:
    """K6: on a store where a request costs more than a megabyte, rows are not asked one by one."""
    join(server)
    wide = torch.arange(64 * 8192, dtype=torch.float32).view(64, 8192)
    folder = write_folder(tmp_path / "w", {"w": wide})
    fs = fsspec.filesystem("s3")
    for file in folder.iterdir():
        fs.pipe_file(f"bucket/wide/{file.name}", file.read_bytes())
    opened = HubFolder("s3://bucket/wide")
    ranges_asked(server, start=True)
    got = opened.read_slice("w", (slice(0, 64), slice(100, 200)))
    assert torch.equal(got, wide[:, 100:200])
    assert len(ranges_asked(server, start=False)) == 1
    assert opened.gap_bytes == 63 * (8192 - 100) * 4
    local = HubFolder(folder)
    local.read_slice("w", (slice(0, 64), slice(100, 200)))
    assert local.gap_bytes == 0


def test_large_tensors_come_in_parts_at_once(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K6: a large read is cut into ranges that run together, and put together again."""
    join(server)
    monkeypatch.setattr("moe_tp.checkpoint.remote._PART", 100)
    opened = HubFolder(FOLDER)
    ranges_asked(server, start=True)
    tensors = hub_tensors(toy_rules(6))
    for name, tensor in tensors.items():
        assert torch.equal(opened.read_slice(name), tensor)
    asked = ranges_asked(server, start=False)
    assert len(asked) == sum(max(1, -(-t.nbytes // 100)) for t in tensors.values())


def test_errors_name_the_object(server: str, tmp_path: Path) -> None:
    """K2: a missing folder, a missing shard and one that was cut since its header was read."""
    join(server)
    with pytest.raises(CheckpointError, match=r"s3://bucket/nothing: "):
        HubFolder("s3://bucket/nothing")
    fs = fsspec.filesystem("s3")
    fs.copy("bucket/models/m", "bucket/models/n", recursive=True)
    opened = HubFolder("s3://bucket/models/n")
    file = "model-00002-of-00003.safetensors"
    data = fs.cat_file(f"bucket/models/n/{file}")
    fs.pipe_file(f"bucket/models/n/{file}", data[:-200])
    with pytest.raises(CheckpointError, match=rf"s3://bucket/models/n/{file}: "):
        load_into(Toy(Mesh.single()), opened, toy_rules(6))
    fs.rm(f"bucket/models/n/{file}")
    fs.invalidate_cache()
    with pytest.raises(CheckpointError, match=rf"{file}.*no such file"):
        HubFolder("s3://bucket/models/n")


def test_a_remote_folder_is_exported(server: str, tmp_path: Path) -> None:
    """K1: the same weights and the same tokenizer bytes, on the disk of this machine."""
    join(server)
    export_folder(FOLDER, tmp_path / "out")
    after = HubFolder(tmp_path / "out")
    for name, tensor in hub_tensors(toy_rules(6)).items():
        assert torch.equal(after.read_slice(name), tensor)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == b'{"tok":\r\n 1}'
