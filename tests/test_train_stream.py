"""Streamed data: same order in every layout, exact resume, windows made ahead and deleted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moe_tp.errors import ConfigError, DataError
from moe_tp.models import ModelConfig, build, save_pretrained
from moe_tp.parallel.layout import ParallelLayout
from moe_tp.parallel.mesh import Mesh
from moe_tp.testing import run_ranks
from moe_tp.train.config import DataConfig, FinetuneConfig
from moe_tp.train.loop import finetune
from moe_tp.train.settings import from_mapping
from moe_tp.train.stream import WindowStream

HUB: dict[str, Any] = {
    "model_type": "mixtral",
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
}
DOCUMENTS = 23


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """23 documents in two files: number n holds only the token n + 1, the last has no target."""
    root = tmp_path_factory.mktemp("stream")
    save_pretrained(build(ModelConfig.from_hub(HUB), Mesh.single(), seed=1), root / "model")
    lines = [json.dumps({"input_ids": [n + 1] * (2 + 3 * n % 7)}) for n in range(DOCUMENTS - 1)]
    lines.append(json.dumps({"input_ids": [60]}))
    (root / "a.jsonl").write_text("\n".join(lines[:9]))
    (root / "b.jsonl").write_text("\n".join(lines[9:]))
    return root


def stream_of(root: Path, name: str, layout: dict[str, int], **data: Any) -> WindowStream:
    files = (str(root / "a.jsonl"), str(root / "b.jsonl"))
    given = {"train": files, "seq_len": 8, "packing": False, "streaming": True, "stream_window": 4}
    split = torch.distributed.is_initialized()
    mesh = Mesh(ParallelLayout(**layout)) if split else Mesh.single()
    return WindowStream(
        DataConfig(**{**given, **data}),
        mesh,
        model_folder=str(root / "model"),
        vocab_size=61,
        cache=root / name,
        seed=3,
        global_batch=4,
        micro_batch=1 if layout.get("dp") == 4 else 2,
    )


def taken(stream: WindowStream, steps: int) -> list[list[tuple[int, int]]]:
    """(sample of the step, document) of this rank's rows, step by step."""
    found = []
    for _ in range(steps):
        rows = []
        for batch in stream.next_step():
            offset = batch["sample_offset"]
            ids = batch["input_ids"]
            assert isinstance(offset, int)
            assert isinstance(ids, torch.Tensor)
            rows += [(offset + i, int(row[0])) for i, row in enumerate(ids)]
        found.append(rows)
    return found


def taken_on_ranks(root: Path, layout: dict[str, int], steps: int) -> list[list[tuple[int, int]]]:
    return taken(stream_of(root, f"ranks-{layout}", layout), steps)


def test_every_document_comes_once_an_epoch(root: Path) -> None:
    """In another order each epoch, within windows of four; none lost at the end of an epoch."""
    found = [doc for step in taken(stream_of(root, "once", {}), 12) for _, doc in step]
    epochs = [found[:22], found[22:44]]
    for epoch in epochs:
        assert sorted(epoch) == list(range(1, 23))
        for window in range(5):
            part = epoch[4 * window : 4 * window + 4]
            assert sorted(part) == list(range(4 * window + 1, 4 * window + 5))
    assert epochs[0] != epochs[1]
    in_order = taken(stream_of(root, "in-order", {}, shuffle=False), 5)
    assert [doc for step in in_order for _, doc in step] == list(range(1, 21))


@pytest.mark.parametrize(("world", "layout"), [(2, {"tp": 2, "ep": 2}), (4, {"dp": 4})])
def test_every_layout_takes_the_same_samples(
    root: Path, world: int, layout: dict[str, int]
) -> None:
    """L1: sample by sample, over the end of an epoch."""
    expected = taken(stream_of(root, "one", {}), 7)
    ranks = run_ranks(taken_on_ranks, world, root, layout, 7)
    for step, mine in enumerate(expected):
        union = sorted({pair for rank in ranks for pair in rank[step]})
        assert union == sorted(mine)


@pytest.mark.parametrize("stop", [1, 5, 6, 9])
def test_a_position_is_exact(root: Path, stop: int) -> None:
    """K4: in a window, at its end, and in the second epoch."""
    whole = taken(stream_of(root, "whole", {}), 12)
    first = stream_of(root, "first", {})
    taken(first, stop)
    state = json.loads(json.dumps(first.state()))
    second = stream_of(root, "second", {})
    second.restore(state)
    assert taken(second, 12 - stop) == whole[stop:]
    with pytest.raises(DataError, match="has seed=9, this run's seed=3"):
        second.restore({**state, "seed": 9})
    with pytest.raises(DataError, match="this run's files="):
        second.restore({**state, "files": "of another run"})


def test_windows_are_counted_and_deleted(root: Path) -> None:
    """What was cut or left out is told; no more than four windows lie on the disk."""
    stream = stream_of(root, "counted", {}, seq_len=4, long="truncate")
    taken(stream, 5)
    assert stream.counts.documents == 20
    assert stream.counts.truncated > 0
    stream.close()
    assert len(list((root / "counted").iterdir())) <= 4


def test_a_bad_record_is_named(root: Path, tmp_path: Path) -> None:
    """F1: the file and line, also where it is met in the midst of a run."""
    path = tmp_path / "bad.jsonl"
    path.write_text('{"input_ids": [1, 2]}\n' * 9 + '{"input_ids": [1, 99]}\n')
    stream = stream_of(root, "bad", {}, train=(str(path),))
    with pytest.raises(DataError, match=r"bad\.jsonl line 10"):
        taken(stream, 5)
    (tmp_path / "none.jsonl").write_text('{"input_ids": [1]}\n')
    stream = stream_of(root, "none", {}, train=(str(tmp_path / "none.jsonl"),))
    with pytest.raises(DataError, match="nothing to learn, in a whole pass"):
        taken(stream, 1)


def test_a_run_streams_and_resumes(root: Path) -> None:
    """K4: bit for bit; packing within windows; epochs are refused."""
    curves = []
    for output, stops in (("run", [6]), ("parts", [3, 6])):
        for steps in stops:
            tree = {
                "model": str(root / "model"),
                "output": str(root / output),
                "data": {
                    "train": [str(root / "a.jsonl"), str(root / "b.jsonl")],
                    "seq_len": 16,
                    "streaming": True,
                    "stream_window": 6,
                },
                "train": {
                    "steps": steps,
                    "global_batch_tokens": 32,
                    "schedule": "constant",
                    "lr": 1e-2,
                    "save_every": 3,
                },
            }
            config = from_mapping(FinetuneConfig, tree, "test")
            assert config.train.global_batch == 2
            finetune(config, Mesh.single(), quiet=True, resume=steps != stops[0])
        lines = (root / output / "metrics.jsonl").read_text().splitlines()
        curves.append([json.loads(line)["loss"] for line in lines])
    assert len(curves[0]) == 6
    assert curves[0] == curves[1]
    assert np.isfinite(curves[0]).all()
    train = {"epochs": 1, "global_batch_tokens": 32}
    with pytest.raises(ConfigError, match=r"give train\.steps instead of train\.epochs"):
        from_mapping(FinetuneConfig, {**tree, "train": train}, "test")
    train = {"steps": 1, "global_batch_tokens": 40}
    with pytest.raises(ConfigError, match=r"global_batch_tokens=40 is no multiple of .*choose 32"):
        from_mapping(FinetuneConfig, {**tree, "train": train}, "test")
