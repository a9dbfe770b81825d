"""The order of samples on every layout, resuming in it, and packed rows through the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moe_tp.errors import ConfigError, DataError
from moe_tp.models import ModelConfig, build
from moe_tp.parallel.layout import ParallelLayout
from moe_tp.parallel.mesh import Mesh
from moe_tp.testing import run_ranks
from moe_tp.train.config import DataConfig
from moe_tp.train.data import (
    DataStream,
    epoch_order,
    evaluation_batches,
    load_rows,
    warn_of_length,
)
from moe_tp.train.documents import Document
from moe_tp.train.rows import Rows, make_rows
from moe_tp.train.step import forward_backward

HUB: dict[str, Any] = {
    "model_type": "mixtral",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "router_aux_loss_coef": 0.0,
}
LENGTHS = [5, 9, 3, 17, 2, 12, 7, 4, 4, 11, 6, 13]


def documents(lengths: list[int]) -> list[Document]:
    generator = np.random.default_rng(0)
    made = [generator.integers(1, 61, n).tolist() for n in lengths]
    return [Document(ids=ids, labels=list(ids), splits=False) for ids in made]


def plain_rows(count: int) -> Rows:
    """Row n holds the tokens n, n."""
    docs = [Document(ids=[n, n], labels=[n, n], splits=False) for n in range(count)]
    return make_rows(docs, 2)


def taken(rows: Rows, dp: int, micro_batch: int, steps: int, start: int = 0) -> list[list[int]]:
    """Rows of each step in the order of micro-batch, rank, place; offsets checked on the way."""
    streams = [
        DataStream(rows, seed=3, global_batch=12, micro_batch=micro_batch, dp=dp, dp_rank=r)
        for r in range(dp)
    ]
    result = []
    for stream in streams:
        stream.restore({"position": 12 * start, "rows": len(rows), "seed": 3})
    for _ in range(steps):
        lists = [stream.next_step() for stream in streams]
        step: dict[int, int] = {}
        for batches in lists:
            for batch in batches:
                ids = batch["input_ids"]
                assert isinstance(ids, torch.Tensor)
                offset = int(batch["sample_offset"])
                step |= {offset + i: int(row[0]) for i, row in enumerate(ids)}
        assert sorted(step) == list(range(12))
        result.append([step[i] for i in range(12)])
    return result


@pytest.mark.parametrize(("dp", "micro_batch"), [(1, 1), (1, 12), (2, 3), (3, 2), (4, 3), (12, 1)])
def test_the_order_is_the_same_for_every_dp(dp: int, micro_batch: int) -> None:
    """K4, N2: sample number s of a step is one row, whatever rank computes it."""
    rows = plain_rows(31)
    assert taken(rows, dp, micro_batch, 6) == taken(rows, 1, 4, 6)


def test_the_union_of_a_micro_batch_depends_on_its_size_only() -> None:
    """L2: two ranks with 3 rows each see in call m what one rank with 6 rows sees."""
    rows = plain_rows(31)
    one = DataStream(rows, seed=3, global_batch=12, micro_batch=6).next_step()
    two = [
        DataStream(rows, seed=3, global_batch=12, micro_batch=3, dp=2, dp_rank=r).next_step()
        for r in range(2)
    ]
    for m, batch in enumerate(one):
        union = torch.cat([torch.as_tensor(lists[m]["input_ids"]) for lists in two])
        assert torch.equal(union, torch.as_tensor(batch["input_ids"]))


def test_each_epoch_holds_each_row_once_in_another_order() -> None:
    rows = plain_rows(31)
    flat = [row for step in taken(rows, 1, 1, 8) for row in step]
    first, second = flat[:31], flat[31:62]
    assert sorted(first) == sorted(second) == list(range(31))
    assert first != second
    assert first != list(range(31))
    assert epoch_order(31, 3, 0, shuffle=False).tolist() == list(range(31))
    assert epoch_order(31, 3, 0).tolist() != epoch_order(31, 4, 0).tolist()


def test_the_order_stays_what_it_was() -> None:
    """K4: a checkpoint's position means the same in every version."""
    assert epoch_order(8, 0, 0).tolist() == ORDER_0
    assert epoch_order(8, 0, 1).tolist() == ORDER_1


ORDER_0 = [4, 0, 1, 7, 6, 2, 5, 3]
ORDER_1 = [7, 0, 1, 6, 3, 4, 5, 2]


def test_resuming_goes_on_where_it_stopped() -> None:
    """K4: also under another dp."""
    rows = plain_rows(31)
    whole = taken(rows, 1, 4, 6)
    assert taken(rows, 1, 4, 4, start=2) == whole[2:]
    assert taken(rows, 3, 2, 4, start=2) == whole[2:]
    stream = DataStream(rows, seed=3, global_batch=12, micro_batch=1)
    stream.next_step()
    assert stream.state() == {"position": 12, "rows": 31, "seed": 3, "digest": ""}
    with pytest.raises(DataError, match="rows=30, this run's rows=31"):
        stream.restore({"position": 12, "rows": 30, "seed": 3})
    with pytest.raises(ConfigError, match="no multiple of micro_batch x dp = 5 x 1"):
        DataStream(rows, seed=3, global_batch=12, micro_batch=5)


def test_rows_longer_than_the_model_knows(caplog: pytest.LogCaptureFixture) -> None:
    """Positions that no training has seen give worse answers without a word; so there is one."""
    warn_of_length(24, 24)
    assert not caplog.messages
    warn_of_length(25, 24)
    assert "data.seq_len=25 is more than the 24 positions" in caplog.text


@pytest.mark.parametrize(("dp", "micro_batch"), [(1, 4), (2, 2), (3, 5), (4, 1)])
def test_evaluation_holds_each_row_once(dp: int, micro_batch: int) -> None:
    rows = plain_rows(13)
    lists = [
        list(evaluation_batches(rows, micro_batch=micro_batch, dp=dp, dp_rank=r)) for r in range(dp)
    ]
    assert len({len(part) for part in lists}) == 1
    found = [
        int(row[0])
        for part in lists
        for batches in part
        for batch in batches
        for row in torch.as_tensor(batch["input_ids"])
    ]
    assert sorted(found) == list(range(13))


def test_packing_equals_documents_one_by_one() -> None:
    """C54: loss and gradients, 1e-6, fp64."""
    model = build(ModelConfig.from_hub(HUB), Mesh.single(), dtype=torch.float64)
    alone = make_rows(documents(LENGTHS), 24, packing=False)
    packed = make_rows(documents(LENGTHS), 24)
    assert len(packed) < len(alone) == len(LENGTHS)
    results = []
    for rows, batches in (
        (alone, [[n] for n in range(len(alone))]),
        (packed, [list(range(len(packed)))]),
    ):
        model.zero_grad()
        out = forward_backward(model, [rows.batch(numbers, length=None) for numbers in batches])
        grads = [p.grad.to_local().clone() for p in model.parameters()]  # type: ignore[union-attr]
        results.append((float(out.loss), out.target_tokens, grads))
    (loss_a, targets_a, grads_a), (loss_b, targets_b, grads_b) = results
    assert targets_a == targets_b == sum(n - 1 for n in LENGTHS)
    assert abs(loss_a - loss_b) < 1e-6
    for a, b in zip(grads_a, grads_b, strict=True):
        assert torch.allclose(a, b, rtol=1e-6, atol=1e-9)


def packed_logits(docs: list[list[int]], length: int | None = None) -> torch.Tensor:
    """Logits of documents packed in one row, on a sequence split over the ranks there are."""
    split = torch.distributed.is_initialized()
    mesh = Mesh(ParallelLayout(tp=2, ep=2)) if split else Mesh.single()
    model = build(ModelConfig.from_hub(HUB), mesh, dtype=torch.float64)
    rows = make_rows([Document(ids=d, labels=d, splits=False) for d in docs], 8)
    assert len(rows) == 1
    batch = rows.batch([0], length=length)
    del batch["labels"]
    with torch.no_grad():
        found: torch.Tensor = model(**batch).logits[0]
    return found


@pytest.mark.parametrize("length", [None, 8])
def test_packed_documents_do_not_see_each_other(length: int | None) -> None:
    """C54: docs [5,6,7] and [8,9]; the border inside a shard of two ranks; mask with padding."""
    alone = packed_logits([[8, 9]])
    for changed in (5, 4):
        docs = [[changed, 6, 7], [8, 9]]
        one = packed_logits(docs, length)
        two = run_ranks(packed_logits, 2, docs, length)
        for found in (one, *two):
            assert torch.allclose(found[3:5], alone, rtol=0, atol=1e-5)


def rows_of(path: str, cache: str) -> tuple[int, list[int]]:
    mesh = Mesh(ParallelLayout())
    config = DataConfig(train=(path,), seq_len=8)
    rows = load_rows(
        config, config.train, mesh, model_folder=cache, vocab_size=61, cache=Path(cache)
    )
    return len(rows), rows.tokens[:5].tolist()


def test_all_ranks_share_what_the_first_made(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = [json.dumps({"input_ids": d.ids}) for d in documents(LENGTHS)]
    path.write_text("\n".join(lines))
    first = run_ranks(rows_of, 2, str(path), str(tmp_path / "cache"))
    assert first[0] == first[1]
    (folder,) = (tmp_path / "cache").iterdir()
    stamp = (folder / "tokens.npy").stat().st_mtime_ns
    run_ranks(rows_of, 2, str(path), str(tmp_path / "cache"))
    assert (folder / "tokens.npy").stat().st_mtime_ns == stamp
    path.write_text("\n".join(lines[1:]))
    assert run_ranks(rows_of, 2, str(path), str(tmp_path / "cache")) != first


def refusal_of(path: str, cache: str) -> str:
    with pytest.raises(DataError) as raised:
        rows_of(path, cache)
    return str(raised.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [("", "is empty"), ('{"input_ids": [5, 61]}', "token id 61 lies outside")],
)
def test_bad_data_stops_every_rank(tmp_path: Path, content: str, said: str) -> None:
    """F1, F2: with the sentence of the rank that read it."""
    path = tmp_path / "a.jsonl"
    path.write_text(content)
    found = run_ranks(refusal_of, 2, str(path), str(tmp_path / "cache"), timeout=30.0)
    assert all(said in text for text in found)
