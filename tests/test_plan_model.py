"""The planner's counts against models that are built and steps that are run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from model_cases import BASE, CASES

from moe_tp.models import ModelConfig, build
from moe_tp.models.families import preset
from moe_tp.parallel.collectives import record_traffic
from moe_tp.parallel.gradients import clip_grad_norm, settle_gradients
from moe_tp.parallel.layout import ParallelLayout, Runtime
from moe_tp.parallel.mesh import Mesh
from moe_tp.parallel.parameter import named_specs
from moe_tp.parallel.shards import to_local
from moe_tp.plan.activations import rows_per_token
from moe_tp.plan.job import Job
from moe_tp.plan.memory import Planner
from moe_tp.plan.traffic import step_traffic
from moe_tp.testing import run_ranks

# between them: uneven experts, tied embeddings, full-width norms, gates, latents, biases and sinks
FAMILIES = {
    2: ("mixtral", "mixtral-window-tied", "deepseek_v3", "gpt_oss"),
    4: ("mixtral", "olmoe"),
}
LAYOUTS = {
    2: [
        {"tp": 2},
        {"ep": 2, "zero": 3},
        {"pp": 2},
    ],
    4: [
        {"tp": 4, "ep": 4},
        {"zero": 3, "tp": 2, "etp": 2},
        {"pp": 2, "zero": 1, "ep": 2},
    ],
}


def config_of(name: str) -> ModelConfig:
    found = {**BASE, **CASES[name]}
    return ModelConfig.from_hub(found)


def built_elements(
    names: tuple[str, ...], layouts: list[dict[str, int]], spare_slots: int = 0
) -> dict[Any, int]:
    found: dict[Any, int] = {}
    for name in names:
        for number, degrees in enumerate(layouts):
            mesh = Mesh(ParallelLayout(**degrees), Runtime(spare_slots=spare_slots))
            model = build(config_of(name), mesh)
            seen = {id(entry.param): to_local(entry.param).numel() for entry in named_specs(model)}
            found[name, number] = sum(seen.values())
    return found


@pytest.mark.parametrize(
    ("world", "spare_slots"), [(2, 0), (4, 0), (2, 1)], ids=["2", "4", "2-spare"]
)
def test_elements_per_rank_equal_the_built_model(world: int, spare_slots: int) -> None:
    args = (FAMILIES[world], LAYOUTS[world], spare_slots)
    results = run_ranks(built_elements, world, *args, timeout=120.0)
    wrong = []
    for name in FAMILIES[world]:
        for number, degrees in enumerate(LAYOUTS[world]):
            layout = ParallelLayout(**degrees).resolve(world)
            planner = Planner(config_of(name), Job(spare_slots=spare_slots))
            per_stage = world // layout.pp
            for stage in planner.stages(layout):
                ranks = range(stage.rank * per_stage, (stage.rank + 1) * per_stage)
                most = max(results[rank][name, number] for rank in ranks)
                counted = planner.elements(layout, stage)
                if counted != most:
                    wrong.append((name, degrees, stage.rank, counted, most))
    assert not wrong


def logged_step(name: str, degrees: dict[str, int], length: int, lora: bool) -> dict[str, int]:
    mesh = Mesh(ParallelLayout(**degrees), Runtime())
    config = config_of(name)
    model = build(config, mesh)
    if lora:
        from moe_tp.train import LoRAConfig, apply_lora

        apply_lora(model, LoRAConfig(rank=4, alpha=8))
    generator = torch.Generator().manual_seed(mesh.coordinate("dp"))
    ids = torch.randint(0, config.vocab_size, (2, length), generator=generator)
    from moe_tp.train.step import forward_backward

    with record_traffic() as log:
        forward_backward(model, [{"input_ids": ids, "labels": ids}] * 2)
        settle_gradients(model)
        clip_grad_norm(model, 1.0)
    found: dict[str, int] = {}
    for axis, op, phase, sent in log.entries:
        key = f"{axis} {op} {phase}"
        found[key] = found.get(key, 0) + sent
    return {key: sent for key, sent in found.items() if sent}


@pytest.mark.parametrize("degrees", [{"tp": 2}, {"dp": 2}])
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "olmoe", "deepseek_v3"])
def test_traffic_equals_the_log(name: str, degrees: dict[str, int], lora: bool) -> None:
    length = 12
    logged = run_ranks(logged_step, 2, name, degrees, length, lora)
    layout = ParallelLayout(**degrees).resolve(2)
    job = Job(
        seq_len=length,
        micro_batch=2,
        global_batch=4 * (layout.dp or 1),
        compute_bytes=4,
        mode="lora" if lora else "full",
        lora_rank=4,
    )
    planner = Planner(config_of(name), job)
    counted: dict[str, int] = {}
    for flow in step_traffic(planner, layout, planner.stages(layout)[0]):
        key = f"{flow.axis} {flow.op} {flow.phase}"
        counted[key] = counted.get(key, 0) + int(flow.sent)
    for found in logged:
        assert counted == found


def test_rows_of_a_token_are_the_expected_ones() -> None:
    config = preset("qwen3_moe", "30b-a3b")  # 128 experts, 8 choices
    assert rows_per_token(config, 1) == 1.0
    assert rows_per_token(config, 8) == pytest.approx(5.3, abs=0.2)
    assert rows_per_token(config, 128) == pytest.approx(8.0)
    grouped = preset("deepseek_v3", "v3")  # 8 groups of 32, 4 of them, 8 choices
    assert rows_per_token(grouped, 8) < 4.0001
    assert rows_per_token(grouped, 256) == pytest.approx(8.0)
