"""Remote folders by range reads, and hub ids through the hub's client against a local server."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec
import pytest
import torch
from checkpoint_toy import Toy, hub_tensors, make_mesh, save, toy_rules, write_folder

from moe_tp.checkpoint import HubFolder, export_folder, load_into
from moe_tp.checkpoint.remote import FsspecStorage
from moe_tp.errors import CheckpointError
from moe_tp.parallel.mesh import Mesh
from moe_tp.parallel.shards import to_local
from moe_tp.testing import run_ranks

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TESTS = Path(__file__).parent


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[str]:
    """A folder of shards in fsspec's in-memory file system."""
    folder = write_folder(tmp_path / "m", hub_tensors(toy_rules(6)), shards=3)
    fs = fsspec.filesystem("memory")
    for file in folder.iterdir():
        fs.pipe_file(f"/bucket/m/{file.name}", file.read_bytes())
    yield "memory://bucket/m"
    fs.rm("/bucket", recursive=True)


def test_remote_folder(memory: str) -> None:
    """K2, K6: a URL is read like a folder: same weights, same errors, ranges only."""
    tensors = hub_tensors(toy_rules(6))
    folder = HubFolder(memory)
    model = Toy(Mesh.single())
    report = load_into(model, folder, toy_rules(6))
    assert torch.equal(to_local(model.q.weight), tensors["q.weight"])  # type: ignore[arg-type]
    wanted = sum(t.nbytes for n, t in tensors.items() if "mtp" not in n)
    assert folder.counter.slices == wanted
    assert report.passed_over == ("mtp.0.weight",)
    fs = fsspec.filesystem("memory")
    fs.rm("/bucket/m/model-00002-of-00003.safetensors")
    with pytest.raises(CheckpointError, match=r"memory://bucket/m: model-00002-of-00003.*no such"):
        HubFolder(memory)


def test_remote_folder_can_be_exported(memory: str, tmp_path: Path) -> None:
    """K1: files and passed-through tensors of a remote folder come along."""
    export_folder(memory, tmp_path / "out")
    before, after = HubFolder(memory), HubFolder(tmp_path / "out")
    assert before.logical.keys() == after.logical.keys()
    for name in before.logical:
        assert torch.equal(before.read_slice(name), after.read_slice(name))
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == b'{"tok":\r\n 1}'


def test_remote_errors_name_the_place() -> None:
    """K2: an unknown scheme and a missing folder, each in one sentence."""
    with pytest.raises(CheckpointError, match=r"nosuch://x: .*nosuch"):
        FsspecStorage("nosuch://x")
    with pytest.raises(CheckpointError, match=r"memory://void: FileNotFoundError"):
        HubFolder("memory://void")


class Hub(BaseHTTPRequestHandler):
    """As much of the hub's protocol as its client needs for one repository."""

    folder: Path
    log: list[str]

    def do_HEAD(self) -> None:
        self.answer(False)

    def do_GET(self) -> None:
        self.answer(True)

    def answer(self, body: bool) -> None:
        path = self.path.split("?")[0]
        self.log.append(f"{self.command} {path} {self.headers.get('Range', '')}".strip())
        if self.headers.get("Authorization") == "Bearer bad":
            return self.send(401, b"{}", {"X-Error-Message": "Invalid credentials"})
        if re.fullmatch(r"/api/models/owner/name(/revision/[^/]+)?", path):
            return self.send(200, json.dumps(self.info()).encode(), {})
        match = re.fullmatch(r"/api/models/owner/name/(tree|paths-info)/[^/]+/?(.*)", path)
        if match:
            return self.send(200, json.dumps(self.tree()).encode(), {})
        match = re.fullmatch(r"/owner/name/resolve/[^/]+/(.+)", path)
        file = self.folder / (match[1] if match else "")
        if match is None or not file.is_file():
            headers = {"X-Error-Code": "EntryNotFound" if match else "RepoNotFound"}
            return self.send(404, b"", headers)
        data = file.read_bytes()
        headers = {
            "ETag": f'"{hashlib.sha256(data).hexdigest()}"',
            "X-Repo-Commit": COMMIT,
            "Accept-Ranges": "bytes",
        }
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if span:
            stop = min(int(span[2]) + 1 if span[2] else len(data), len(data))
            headers["Content-Range"] = f"bytes {span[1]}-{stop - 1}/{len(data)}"
            return self.send(206, data[int(span[1]) : stop], headers, body)
        return self.send(200, data, headers, body)

    def info(self) -> dict[str, Any]:
        files = sorted(f for f in self.folder.rglob("*") if f.is_file())
        siblings = [
            {"rfilename": str(f.relative_to(self.folder)), "size": f.stat().st_size} for f in files
        ]
        return {"_id": "1", "id": "owner/name", "modelId": "owner/name", "sha": COMMIT} | {
            "siblings": siblings,
            "private": False,
            "tags": [],
            "downloads": 0,
            "likes": 0,
        }

    def tree(self) -> list[dict[str, Any]]:
        return [
            {"type": "file", "path": f.name, "size": f.stat().st_size, "oid": f.name}
            for f in sorted(self.folder.iterdir())
        ]

    def send(self, code: int, data: bytes, headers: dict[str, str], body: bool = True) -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[tuple[str, list[str]]]:
    folder = write_folder(tmp_path / "m", hub_tensors(toy_rules(6)), shards=3)
    handler = type("Handler", (Hub,), {"folder": folder, "log": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", handler.log  # type: ignore[attr-defined]
    server.shutdown()
    server.server_close()


@contextlib.contextmanager
def joined(endpoint: str, cache: str, offline: bool = False) -> Iterator[None]:
    """Point the hub's client of this process at a server and a cache of its own."""
    from huggingface_hub import HfFileSystem, close_session, constants

    settings = {
        "ENDPOINT": endpoint,
        "HUGGINGFACE_CO_URL_TEMPLATE": endpoint + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_CACHE": cache,
        "HF_HUB_OFFLINE": offline,
        "HF_HUB_DISABLE_XET": True,
    }
    environment = {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    with mock.patch.multiple(constants, **settings), mock.patch.dict(os.environ, environment):
        HfFileSystem.clear_instance_cache()
        close_session()
        try:
            yield
        finally:
            HfFileSystem.clear_instance_cache()
            close_session()


def load_all(endpoint: str, cache: str, offline: bool = False) -> str:
    """Load the repository's folder; return where it says that it came from."""
    with joined(endpoint, cache, offline):
        folder = HubFolder("owner/name")
        model = Toy(Mesh.single())
        load_into(model, folder, toy_rules(6))
    wanted = hub_tensors(toy_rules(6))["q.weight"]
    assert torch.equal(to_local(model.q.weight), wanted)  # type: ignore[arg-type]
    return folder.where


def needs_one_shard(endpoint: str, cache: str) -> list[str]:
    """Read a tensor of one shard on both ranks; return the weight files in the cache."""
    mesh = make_mesh(2, tp=2)
    with joined(endpoint, cache):
        folder = HubFolder("owner/name")
        file = folder.find("q.weight").data.file
        folder.storage.prepare([file], mesh.group("world"), mesh.device)
        assert torch.equal(folder.read_slice("q.weight"), hub_tensors(toy_rules(6))["q.weight"])
    cached = Path(cache).glob("models--owner--name/snapshots/*/*.safetensors")
    return [entry.name for entry in cached]


def test_hub_id(hub: tuple[str, list[str]], tmp_path: Path) -> None:
    """K6: headers by range, each shard once, later from the cache, also with the hub gone."""
    endpoint, log = hub
    cache = str(tmp_path / "cache")
    assert load_all(endpoint, cache) == "owner/name"
    whole = [line for line in log if line.startswith("GET") and line.endswith(".safetensors")]
    assert len(whole) == len(set(whole)) == 3
    assert any("bytes=0-" in line for line in log)
    log.clear()
    load_all(endpoint, cache)
    assert not [line for line in log if line.startswith("GET") and "safetensors" in line]
    log.clear()
    load_all(endpoint, cache, offline=True)
    assert not log


def test_hub_downloads_once_for_all_ranks_and_only_what_they_need(
    hub: tuple[str, list[str]], tmp_path: Path
) -> None:
    """K6: two ranks of one machine, one shard needed: one download, one file in the cache."""
    endpoint, log = hub
    for cached in run_ranks(needs_one_shard, 2, endpoint, str(tmp_path / "cache")):
        assert len(cached) == 1
        assert re.fullmatch(r"model-0000\d-of-00003\.safetensors", cached[0])
    assert len([x for x in log if x.startswith("GET") and x.endswith(".safetensors")]) == 1


def carried_from_hub(endpoint: str, cache: str, target: str) -> None:
    with joined(endpoint, cache):
        folder = HubFolder("owner/name")
        model = Toy(Mesh.single())
        load_into(model, folder, toy_rules(6))
        save(model, target, carry_from=folder)


def test_hub_folders_of_other_formats_stay(hub: tuple[str, list[str]], tmp_path: Path) -> None:
    """K1: a repository's sub-folders are no part of the model (GPT-OSS has `original/` and
    `metal/`, DeepSeek-V3 has `figures/`), but for the chat templates."""
    templates = "additional_chat_templates/tool.jinja"
    for name in ("original/deep/params.json", "figures/a.png", "tokenizer.json", templates):
        (tmp_path / "m" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "m" / name).write_bytes(name.encode())
    target = tmp_path / "out"
    for _ in range(2):  # a folder with sub-folders would not be replaced
        run_ranks(carried_from_hub, 1, hub[0], str(tmp_path / "cache"), str(target))
    assert (target / "tokenizer.json").read_bytes() == b"tokenizer.json"
    assert (target / templates).read_bytes() == templates.encode()
    assert not {"original", "figures"} & {entry.name for entry in target.iterdir()}
    assert not any("/original/" in line or "/figures/" in line for line in hub[1])


def test_hub_settings_come_from_the_environment(hub: tuple[str, list[str]], tmp_path: Path) -> None:
    """K2: in a process of its own, by HF_ENDPOINT: an unknown repository is one sentence."""
    endpoint, log = hub
    settings = {
        **os.environ,
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "PYTHONPATH": str(TESTS.parent),
        "NO_PROXY": "127.0.0.1",
    }
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "ALL_PROXY", "HF_TOKEN"):
        settings.pop(name, None)
    code = "from moe_tp.checkpoint import HubFolder\nHubFolder('owner/other')"
    done = subprocess.run(
        [sys.executable, "-c", code], env=settings, capture_output=True, text=True, timeout=120
    )
    assert done.returncode != 0
    assert re.search(r"CheckpointError: owner/other: \w*NotFound", done.stderr), done.stderr
    assert log
