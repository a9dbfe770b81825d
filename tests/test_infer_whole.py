"""Steps of generation whose tokens every rank of tp holds whole: two sums a layer, no dispatch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from model_cases import error, hub_config
from test_infer_generate import PROMPTS, draw_biases

from moe_tp.errors import RankMismatchError
from moe_tp.experts.serving import WholeDispatcher
from moe_tp.infer import generate
from moe_tp.infer.steps import keeps_whole
from moe_tp.models.config import ModelConfig
from moe_tp.models.load import build, from_pretrained, save_pretrained
from moe_tp.parallel.collectives import record_traffic
from moe_tp.parallel.layout import ParallelLayout, Runtime
from moe_tp.parallel.mesh import Mesh
from moe_tp.parallel.parameter import named_specs
from moe_tp.parallel.shards import to_local
from moe_tp.parallel.whole import sum_whole
from moe_tp.routing.table import first_table
from moe_tp.testing import run_ranks
from moe_tp.train import LoRAConfig, apply_lora

Found = tuple[bool, list[list[int]], list[torch.Tensor], int, set[str]]


def in_layout(path: str, layout: dict[str, int], runtime: dict[str, Any], lora: bool) -> Found:
    """Return whether steps are whole, tokens, logits, and messages of a step and their axes."""
    model = from_pretrained(path, Mesh(ParallelLayout(**layout), Runtime(**runtime)))
    if lora:
        apply_lora(model, LoRAConfig(rank=2, alpha=4.0, seed=3))
        with torch.no_grad():
            for entry in named_specs(model):
                if entry.name == "b" or entry.name.endswith("_b"):
                    to_local(entry.param).fill_(0.1)
    logs = []
    for new in (2, 5, 6):  # the first call makes what is kept
        with record_traffic() as log:
            got = generate(model, PROMPTS, max_new_tokens=new, stop_ids=(), return_logits=True)
        logs.append([axis for axis, *_ in log.entries])
    assert got.logits is not None
    axes = {axis for axis in set(logs[2]) if logs[2].count(axis) > logs[1].count(axis)}
    return keeps_whole(model), got.tokens, got.logits, len(logs[2]) - len(logs[1]), axes


def check(path: Path, layout: dict[str, int], runtime: dict[str, Any], lora: bool = False) -> Found:
    """Compare a layout's tokens and logits with one process's, and return what rank 0 found."""
    ((_, tokens, logits, _, _),) = run_ranks(in_layout, 1, str(path), {}, {}, lora)
    found = run_ranks(in_layout, max(layout.values()), str(path), layout, runtime, lora)
    for _, got, parts, _, _ in found:
        assert got == tokens
        assert max(map(error, parts, logits)) < 1e-9
    return found[0]


def saved(case: str, path: Path) -> Path:
    model = build(
        ModelConfig.from_hub(hub_config(case)), Mesh.single(), seed=1, dtype=torch.float64
    )
    draw_biases(model)
    save_pretrained(model, path)
    return path


@pytest.mark.parametrize(
    ("layout", "runtime"),
    [({"tp": 2, "ep": 2}, {}), ({"tp": 4, "ep": 2}, {"spare_slots": 1})],
    ids=str,
)
def test_a_layer_has_two_sums(
    layout: dict[str, int], runtime: dict[str, Any], tmp_path: Path
) -> None:
    """D1, D8: experts split, in two places, or both; biases once; nothing is dispatched."""
    whole, _, _, messages, axes = check(saved("gpt_oss", tmp_path), layout, runtime)
    layers = ModelConfig.from_hub(hub_config("gpt_oss")).num_layers
    # of the embedding, of each layer, of the choice of a token, of the logits kept for the check
    assert (whole, messages, axes) == (True, 1 + 2 * layers + 2, {"tp"})


@pytest.mark.slow
@pytest.mark.parametrize("case", ["gpt_oss", "deepseek_v3", "qwen2_moe"])
@pytest.mark.parametrize(
    ("layout", "runtime"),
    [
        ({"tp": 4}, {}),
        ({"tp": 4, "etp": 2}, {}),
        ({"tp": 4, "ep": 2, "etp": 2}, {"experts": "loop"}),
        ({"tp": 4, "ep": 2}, {"experts": "loop", "spare_slots": 1}),
    ],
    ids=str,
)
def test_more_layouts_have_whole_tokens(
    case: str, layout: dict[str, int], runtime: dict[str, Any], tmp_path: Path
) -> None:
    """D1: the experts' shards and copies, by the short way and by kernel."""
    if case != "gpt_oss" and (layout, runtime) == ({"tp": 4}, {}):
        pytest.skip("tests/test_infer_generate.py has it")
    assert check(saved(case, tmp_path), layout, runtime)[0]


def test_adapters_and_experts_of_other_ranks_have_shares(tmp_path: Path) -> None:
    """G4: adapters share out tokens; so do layouts whose experts lie beyond tp."""
    path = saved("mixtral", tmp_path)
    assert check(path, {"tp": 2, "ep": 2}, {}, lora=True)[0] is False
    assert run_ranks(keeps_in, 2, {"ep": 2}) == [False] * 2


def keeps_in(layout: dict[str, int]) -> bool:
    mesh = Mesh(ParallelLayout(**layout))
    return keeps_whole(build(ModelConfig.from_hub(hub_config("mixtral")), mesh))


def unlike_choices() -> tuple[torch.Tensor, str]:
    mesh = Mesh(ParallelLayout(tp=2, ep=2))
    dispatcher = WholeDispatcher(mesh, first_table(4, 2))
    part, ids = torch.full((2, 3), float(1 + mesh.rank)), torch.tensor([[0, 3], [1, 2]])
    total = dispatcher.scatter(part, ids)
    with pytest.raises(RankMismatchError) as caught:
        dispatcher.scatter(part, ids + mesh.rank)
    return total, str(caught.value)


def test_ranks_that_choose_unlike_are_told() -> None:
    """F2: each expert's owner is another rank, so unlike choices would lose one in silence."""
    for total, said in run_ranks(unlike_choices, 2):
        assert torch.equal(total, torch.full((2, 3), 3.0))
        assert "ranks [0, 1] of tp chose unlike experts" in said
        assert "[[[0, 3], [1, 2]], [[1, 4], [2, 3]]]" in said


def sums() -> list[torch.Tensor]:
    group = Mesh(ParallelLayout(tp=4)).group("tp")
    ordered = torch.tensor([[1e8, 1.0, -1e8, 1.0][group.rank]])
    narrow = torch.tensor([[1.0, 2**-8, 2**-8, 2**-8][group.rank]]).bfloat16()
    return [sum_whole(ordered, group), sum_whole(narrow, group)]


def test_whole_sums_are_fp32_in_rank_order() -> None:
    """D6: the same bits on every rank; in bf16 each term alone would be rounded away."""
    for ordered, narrow in run_ranks(sums, 4):
        assert ordered.item() == 1.0
        assert narrow.dtype == torch.bfloat16
        assert narrow.item() == 1.0 + 2**-6  # 1 + 3/256 to the even neighbour
