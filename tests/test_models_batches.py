"""Ranks that were given unlike batches, or use a model unlike the others, are told so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from model_cases import hub_config

from moe_tp import Mesh, ParallelLayout, count_targets, forward_backward, settle_gradients
from moe_tp.errors import DataError, RankMismatchError
from moe_tp.infer import generate
from moe_tp.models import ModelConfig, build, save_pretrained
from moe_tp.testing import run_ranks

IDS = torch.arange(18).view(2, 9)
UNLIKE: dict[str, dict[str, Any]] = {
    "shapes or number of micro-batches": {"input_ids": IDS[:, :7], "labels": IDS[:, :7]},
    "input_ids": {"input_ids": IDS.flip(0), "labels": IDS},
    "labels": {"input_ids": IDS, "labels": IDS.masked_fill(IDS == 4, -100)},
    "attention_mask": {"input_ids": IDS, "labels": IDS, "attention_mask": IDS > 2},
    "position_ids": {"input_ids": IDS, "labels": IDS, "position_ids": IDS % 9 % 5},
    "step or sample offsets": {"input_ids": IDS, "labels": IDS, "sample_offset": 4},
}


def unlike(layout: dict[str, int], odd: int, batch: dict[str, Any]) -> list[str]:
    """Return what each way of giving a batch says where one rank has another."""
    mesh = Mesh(ParallelLayout(**layout))
    model = build(ModelConfig.from_hub(hub_config("mixtral")), mesh)
    like = {"input_ids": IDS, "labels": IDS}
    mine = batch if mesh.rank == odd else like
    unlabelled = {name: value for name, value in mine.items() if name != "labels"}
    calls = [
        lambda: forward_backward(model, [like, mine]),
        lambda: count_targets([mine], mesh),
        lambda: model(**unlabelled),
        lambda: mesh.size("cp") == 1 and generate(model, mine["input_ids"], max_new_tokens=2),
        lambda: mesh.size("pp") == 1 and model(**mine),
    ]
    return [said(call) for call in calls]


def said(call: Any) -> str:
    try:
        call()
    except RankMismatchError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", UNLIKE)
@pytest.mark.parametrize(
    ("layout", "odd", "pair"),
    [
        ({"tp": 2}, 1, "0 and 1"),
        ({"cp": 2, "dp": 2}, 3, "2 and 3"),
        ({"pp": 2, "tp": 2}, 2, "0 and 2"),
        ({"tp": 2, "ep": 4, "dp": 2}, 0, "0 and 1"),
    ],
    ids=str,
)
def test_unlike_batches(layout: dict[str, int], odd: int, pair: str, name: str) -> None:
    """F2: every rank is told which two differ and in what, before anything is computed."""
    size = 2 if "tp" in layout and len(layout) == 1 else 4
    said = f"ranks {pair} share a batch, but their {name} differ; deal out data by mesh.coordinate"
    for told in run_ranks(unlike, size, layout, odd, UNLIKE[name]):
        step, counted, plain, generated, labelled = told
        assert said in step
        assert said in counted
        assert said in labelled or "pp" in layout
        assert said in plain or name == "labels"
        if name == "input_ids" and "cp" not in layout:
            assert said.replace(name, "prompts") in generated


def fewer(layout: dict[str, int]) -> str:
    mesh = Mesh(ParallelLayout(**layout))
    model = build(ModelConfig.from_hub(hub_config("mixtral")), mesh)
    batch = {"input_ids": IDS, "labels": IDS}
    return said(lambda: forward_backward(model, [batch] * (1 + mesh.rank)))


def test_unlike_numbers_of_micro_batches() -> None:
    """F2: the rank with fewer would leave the others waiting; of dp ranks it is no error."""
    for text in run_ranks(fewer, 2, {"tp": 2}):
        assert "their shapes or number of micro-batches differ" in text
    assert run_ranks(fewer, 2, {"dp": 2}) == ["", ""]


def bad_without_labels(layout: dict[str, int]) -> str:
    mesh = Mesh(ParallelLayout(**layout))
    model = build(ModelConfig.from_hub(hub_config("mixtral")), mesh)
    with pytest.raises(DataError) as caught:
        model(IDS + 60 * mesh.coordinate("dp"))
    return str(caught.value)


def test_a_bad_batch_without_labels() -> None:
    """F1: ranks that share experts with the one that has it do not wait for it."""
    first, second = run_ranks(bad_without_labels, 2, {"ep": 2})
    assert "rank 1 was given a batch that cannot be used" in first
    assert "token id 77" in second


def frozen_on_one_rank(layout: dict[str, int]) -> str:
    mesh = Mesh(ParallelLayout(**layout))
    model = build(ModelConfig.from_hub(hub_config("mixtral")), mesh)
    model.layers["0"].requires_grad_(mesh.coordinate("stage") == 0)
    forward_backward(model, [{"input_ids": IDS, "labels": IDS}])
    return said(lambda: settle_gradients(model))


def test_ranks_that_train_unlike_parameters() -> None:
    """F2: the sums over replicas would be of unlike sizes, which aborts the process."""
    for text in run_ranks(frozen_on_one_rank, 2, {"ep": 2}):
        assert "ranks [1] disagree with rank 0 about which dense parameters are trained" in text
        assert "layers.0." in text


def saved_unlike(folder: str, own_folder: bool, size: str) -> str:
    mesh = Mesh(ParallelLayout(ep=2))
    model = build(ModelConfig.from_hub(hub_config("mixtral")), mesh)
    path = f"{folder}/{mesh.rank if own_folder else 'model'}"
    return said(lambda: save_pretrained(model, path, max_shard_size=size if mesh.rank else "5GB"))


def test_ranks_that_save_unlike_folders(tmp_path: Path) -> None:
    """F2: each waited for the other's files, in another folder or of another number."""
    for own_folder, size, word in ((True, "5GB", "/1'"), (False, "10kB", "max_shard_size=10kB")):
        for text in run_ranks(saved_unlike, 2, str(tmp_path), own_folder, size):
            assert "ranks [1] disagree with rank 0 about what save_pretrained writes" in text
            assert word in text
    assert list(tmp_path.iterdir()) == []
