"""Which bytes a rank asks for, and how much it holds while it loads and saves."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_toy import Toy, hub_tensors, make_mesh, toy_rules, write_folder
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console
from safetensors.torch import save_file
from tiny_hubs import MIXTRAL

from moe_tp.checkpoint import HubFolder, load, load_into, save_hub, supply, writer
from moe_tp.checkpoint.progress import Bar
from moe_tp.models import ModelConfig, build, from_pretrained, save_pretrained
from moe_tp.parallel.mesh import Mesh
from moe_tp.parallel.shards import to_local
from moe_tp.testing import run_ranks


def watched(folder: HubFolder) -> list[int]:
    """Record the size of every read from now on."""
    sizes: list[int] = []
    read = folder.storage.read_into

    def note(file: str, offset: int, *out: memoryview) -> None:
        sizes.append(sum(map(len, out)))
        read(file, offset, *out)

    folder.storage.read_into = note  # type: ignore[method-assign]
    return sizes


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    """A matrix whose half rows lie more than a page apart, and a narrow one."""
    path = tmp_path_factory.mktemp("wide")
    tensors = {"w": torch.randn(40, 8192).bfloat16(), "n": torch.randn(40, 64).bfloat16()}
    write_folder(path, tensors)
    return path, tensors["w"]


def test_each_rank_asks_for_its_own_slice(wide: tuple[Path, torch.Tensor]) -> None:
    """K6: rows in one read; far columns one read a row and no byte more; near ones joined, with
    the bytes between them counted apart."""
    path, weight = wide
    folder = HubFolder(path)
    sizes = watched(folder)
    assert torch.equal(folder.read_slice("w", (slice(10, 20),)), weight[10:20])
    assert sizes == [10 * 8192 * 2]
    sizes.clear()
    before = folder.counter.slices
    half = folder.read_slice("w", (slice(None), slice(4096, None)))
    assert torch.equal(half, weight[:, 4096:])
    assert sizes == [4096 * 2] * 40
    assert folder.counter.slices - before == sum(sizes)
    assert folder.gap_bytes == 0
    sizes.clear()
    before = folder.counter.slices
    folder.read_slice("n", (slice(None), slice(0, 16)))
    assert len(sizes) == 1
    assert folder.counter.slices - before == 40 * 16 * 2
    assert folder.gap_bytes == sum(sizes) - 40 * 16 * 2


def test_rows_and_gaps_in_one_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """K6: joined rows go straight to their places, also where the system fills fewer buffers or
    bytes than it was asked to; empty buffers and more than a call may take are fine."""
    rows = torch.randn(1500, 64).bfloat16()
    folder = HubFolder(write_folder(tmp_path, {"w": rows}))
    calls = []
    preadv = os.preadv

    def short(file: int, views: list[memoryview], at: int) -> int:
        calls.append(len(views))
        room, kept = 5000, []
        for view in views:
            kept.append(view[:room])
            room -= len(kept[-1])
        return preadv(file, kept, at)

    monkeypatch.setattr(os, "preadv", short)
    assert torch.equal(folder.read_slice("w", (slice(None), slice(8, 40))), rows[:, 8:40])
    assert max(calls) == 1023  # 512 rows and the gaps between them
    whole = bytearray(rows.nbytes)
    views = [memoryview(whole)[at : at + 100] for at in range(0, len(whole), 100)]
    views.insert(1, memoryview(b""))
    info = folder.tensors["w"]
    folder.storage.read_into(info.file, info.offset, *views)
    assert whole == bytes(rows.view(torch.uint8).numpy())
    assert max(calls) == 1024


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_slices_equal_indexing(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """K6, K2: any slice of any shape and dtype is what indexing the whole gives."""
    shape = data.draw(st.lists(st.integers(0, 5), max_size=4))
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float32, torch.uint8, torch.bool]))
    whole = (torch.randn(shape) * 50).to(dtype) if shape else torch.tensor(3.0).to(dtype)
    path = tmp_path_factory.mktemp("s")
    save_file({"a": torch.ones(3), "t": whole}, path / "model.safetensors")
    index: list[int | slice] = []
    for size in shape[: data.draw(st.integers(0, len(shape)))]:
        start = data.draw(st.integers(0, size))
        stop = data.draw(st.integers(start, size))
        one = size > 0 and data.draw(st.booleans())
        step = data.draw(st.integers(1, 3))
        index.append(data.draw(st.integers(0, size - 1)) if one else slice(start, stop, step))
    found = HubFolder(path, need_config=False).read_slice("t", index)
    assert torch.equal(found, whole[tuple(index)])


def test_a_load_needs_its_shard_and_one_buffer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K6: what does not go straight to its place passes through parts of bounded size."""
    monkeypatch.setattr(load, "BUFFER", 256)
    for form, dtype in (("fused_interleaved", torch.bfloat16), ("per_expert", torch.float32)):
        rules = toy_rules(6, form)  # type: ignore[arg-type]
        tensors = hub_tensors(rules)
        folder = HubFolder(write_folder(tmp_path / form, tensors))
        sizes = watched(folder)
        model = Toy(Mesh.single(), 6, dtype)
        load_into(model, folder, rules)
        assert max(sizes) <= 256
        assert folder.counter.slices == sum(t.nbytes for n, t in tensors.items() if "mtp" not in n)
        o_weight = to_local(model.o.weight)  # type: ignore[arg-type]
        assert torch.equal(o_weight.bfloat16(), tensors["o.weight"])


def widest_round(source: str, target: str, window: int) -> int:
    writer.WINDOW, writer._LEAST = window, 1
    model = Toy(make_mesh(2, ep=2, etp=1))
    rules = toy_rules(6)
    load_into(model, HubFolder(source), rules)
    most = 0
    exchange = supply.ModelSupply.exchange

    def noted(self: supply.ModelSupply, packed: supply.Packed) -> torch.Tensor:
        nonlocal most
        received = exchange(self, packed)
        most = max(most, packed.data.nbytes, received.nbytes)
        return received

    supply.ModelSupply.exchange = noted  # type: ignore[method-assign]
    try:
        save_hub(model, target, rules, {}, max_shard_size=1500)
    finally:
        supply.ModelSupply.exchange = exchange  # type: ignore[method-assign]
        writer.WINDOW, writer._LEAST = 32 << 20, 1 << 20
    return most


def test_a_save_needs_its_shard_and_its_windows(tmp_path: Path) -> None:
    """K6: no rank sends or receives more than the windows of one round (padded to 8 bytes a
    contribution), and small windows write the same bytes as large ones."""
    source = write_folder(tmp_path / "in", hub_tensors(toy_rules(6), mtp=False))
    found = []
    for window in (128, 64 << 20):
        target = tmp_path / str(window)
        most = run_ranks(widest_round, 2, str(source), str(target), window)
        assert max(most) <= 2 * window
        found.append({f.name: f.read_bytes() for f in target.iterdir()})
    assert found[0] == found[1]


def test_progress_reaches_its_end(tmp_path: Path) -> None:
    """Progress of a load and a save grows to the bytes announced."""
    source = write_folder(tmp_path / "in", hub_tensors(toy_rules(6), mtp=False))
    model = Toy(Mesh.single())
    for run in (
        lambda p: load_into(model, HubFolder(source), toy_rules(6), progress=p),
        lambda p: save_hub(model, tmp_path / "out", toy_rules(6), {}, progress=p),
    ):
        seen: list[tuple[int, int]] = []
        run(lambda done, total, seen=seen: seen.append((done, total)))  # type: ignore[misc]
        assert [done for done, _ in seen] == sorted(done for done, _ in seen)
        assert seen[-1][0] == seen[-1][1] > 0


def test_progress_of_the_public_functions(tmp_path: Path) -> None:
    """from_pretrained and save_pretrained tell the bytes of the folder to a function given."""
    model = build(ModelConfig.from_hub(MIXTRAL), Mesh.single())
    saved: list[tuple[int, int]] = []
    save_pretrained(model, tmp_path, progress=lambda *now: saved.append(now))
    size = (tmp_path / "model.safetensors").stat().st_size
    assert saved[-1] == (size, size)
    loaded: list[tuple[int, int]] = []
    from_pretrained(tmp_path, Mesh.single(), progress=lambda *now: loaded.append(now))
    weights = sum(p.numel() * 4 for p in model.parameters())
    assert loaded[-1] == (weights, weights)


def shown(terminal: bool, progress: bool | None, rank: int = 0, **options: Any) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=100)
    with Bar("loading", rank, progress, console=console, **options) as bar:
        for done in range(0, 5_000_000_001, 500_000_000):
            bar(done, 5_000_000_000)
    return out.getvalue()


def test_a_bar_shows_bytes_and_time_left() -> None:
    """Bytes done and in all, and the time left: in a terminal or on request, on rank 0 only."""
    bar = shown(True, None, delay=0.0)
    assert "loading" in bar
    assert "5.0 GB" in bar
    assert "0:00:00" in bar
    lines = shown(False, True, every=0.0).splitlines()
    assert lines[1] == "loading: 500 MB of 5 GB, 0 s left"
    assert len(lines) == 11
    assert shown(False, True, every=60.0).splitlines() == ["loading: 5 GB of 5 GB, 0 s left"]
    for quiet in (shown(False, None), shown(True, False), shown(True, True, rank=1)):
        assert quiet == ""
    assert shown(True, None, delay=60.0) == ""  # done before anybody waits
