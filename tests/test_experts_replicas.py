"""Hot experts in several slots: the answer of one process, one gradient for all replicas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from experts_cases import (
    LAYOUTS,
    draw,
    gradients,
    joined,
    layer_step,
    mesh_of_layout,
    replicas_are_equal,
    worst_error,
)
from model_cases import BASE, CASES

from moe_tp import MoE, clip_grad_norm, forward_backward, settle_gradients
from moe_tp.checkpoint import gather_named
from moe_tp.errors import CheckpointError, ConfigError
from moe_tp.experts.placement import place
from moe_tp.experts.two_hop import TwoHopDispatcher
from moe_tp.models import ModelConfig, build
from moe_tp.parallel.collectives import record_traffic
from moe_tp.parallel.gradients import gradient_norm
from moe_tp.parallel.parameter import named_specs
from moe_tp.parallel.shards import to_local
from moe_tp.routing import ExpertTable, RouterConfig, first_table
from moe_tp.testing import run_ranks
from moe_tp.train import LoRAConfig, apply_lora, merge_lora
from moe_tp.train.config import TrainConfig
from moe_tp.train.optim import make_optimizer

ROUTER = {"balance_coef": 0.1, "z_coef": 0.01}
OPTIONS = {"num_shared": 1, "expert_bias": True}
SHARED_OUT = [case for case in LAYOUTS if case[1].get("ep", 1) > 1]


@pytest.mark.parametrize(("world", "layout", "tokens"), SHARED_OUT, ids=str)
@pytest.mark.parametrize("dispatcher", ["all_to_all", "all_gather"])
def test_replicas_give_the_answer_of_one_process(
    world: int, layout: dict[str, int], tokens: list[int], dispatcher: str
) -> None:
    """D1, D2, G1, G2, G3, issue 5: outputs, every gradient, the norm; unequal tokens, biases."""
    for experts, spare in ((5, 1), (6, 2)):
        args = (tokens, experts, OPTIONS, ROUTER)
        want = layer_step(None, {"experts": "loop"}, *args)
        runtime = {"dispatcher": dispatcher, "spare_slots": spare}
        got = joined(run_ranks(layer_step, world, layout, runtime, *args))
        assert worst_error(got, want) < 1e-12


def test_replicas_under_other_ways_of_sending() -> None:
    """D1, D10: in pieces, two-hop, padded; three slots of one expert, two on one rank."""
    args = ([3, 0, 5, 2], 6)
    want = layer_step(None, {}, *args, {}, ROUTER)
    for rows in (None, 2):
        got = run_ranks(_two_hop, 4, rows, *args, ROUTER)
        assert worst_error(joined(got), want) < 1e-12
    table = ExpertTable(6, 2, (0, 0, 1, 2, 3, 0, 4, 5, -1, 1))
    want = layer_step(None, {}, *([3, 4], 6), {}, ROUTER)
    got = run_ranks(layer_step, 2, {"ep": 2}, {}, [3, 4], 6, {"table": table}, ROUTER)
    assert worst_error(joined(got), want) < 1e-12
    router = {"capacity_factor": 6.0, "pad_to_capacity": True}
    args = ([4, 4, 4, 4], 6, {}, router)
    want = layer_step(None, {}, *args)
    got = run_ranks(layer_step, 4, {"ep": 4}, {"spare_slots": 1}, *args)
    assert worst_error(joined(got), want) < 1e-12


def _two_hop(
    rows: int | None, tokens: list[int], experts: int, router: dict[str, Any]
) -> dict[str, torch.Tensor]:
    mesh = mesh_of_layout({"ep": 4}, dispatch_rows=rows)
    table = first_table(experts, 4, 1)
    options = {"table": table, "dispatcher": TwoHopDispatcher(mesh, table, node_ranks=2)}
    return layer_step({"ep": 4}, {}, tokens, experts, options, router, mesh=mesh)


TRAINED: list[tuple[int, dict[str, Any]]] = [
    (2, {"ep": 2}),
    (4, {"tp": 2, "ep": 2, "etp": 2}),
    (4, {"dp": 4, "ep": 2, "zero": 3}),
]
MORE: list[tuple[int, dict[str, Any]]] = [
    (4, {"tp": 2, "ep": 4}),
    (4, {"dp": 4, "ep": 2, "zero": 1}),
    (4, {"dp": 4, "ep": 2, "zero": 2}),
    (4, {"pp": 2, "ep": 2, "zero": 1}),
    (8, {"dp": 8, "ep": 2, "zero": 3}),  # ZeRO deals the slots themselves over edp
]


@pytest.mark.parametrize("kind", ["adamw", pytest.param("lora", marks=pytest.mark.slow)])
def test_training_with_replicas(kind: str) -> None:
    """R2, G2, G3, G5, K1: three steps, the experts placed anew within; bitwise equal replicas."""
    _same_as_one_process(kind, TRAINED)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["adamw", "lora"])
def test_training_with_replicas_in_more_layouts(kind: str) -> None:
    """R2, G2, G3, G5, K1: likewise, every ZeRO stage, pipelines, eight ranks."""
    _same_as_one_process(kind, MORE)


def _same_as_one_process(kind: str, layouts: list[tuple[int, dict[str, Any]]]) -> None:
    want = _train(None, kind, None)
    for world, layout in layouts:
        for got in run_ranks(_train, world, layout, kind, None):
            assert got["norms"] == pytest.approx(want["norms"], rel=1e-9)
            assert got["equal"]
            assert got["replicas"]
            assert got["weights"].keys() == want["weights"].keys()
            for name, value in want["weights"].items():
                assert torch.allclose(got["weights"][name], value, rtol=1e-8, atol=1e-11), name


@pytest.mark.parametrize(
    "kind",
    ["bfloat16"]
    + [pytest.param(k, marks=pytest.mark.slow) for k in ("adamw", "fused", "muon", "sgd")],
)
def test_replicas_stay_equal_in_low_precision(kind: str) -> None:
    """R2: fp32 with fused AdamW, moments in bf16 rounded stochastically, Muon, SGD."""
    for got in run_ranks(_train, 4, {"dp": 4, "ep": 2, "zero": 3}, kind, torch.float32):
        assert got["equal"]
        assert got["replicas"]


def _train(layout: dict[str, Any] | None, kind: str, dtype: torch.dtype | None) -> dict[str, Any]:
    odd = {"hidden_size": 30, "head_dim": 8, "intermediate_size": 24}
    config = ModelConfig.from_hub(
        {**BASE, **CASES["mixtral"], **odd, "router_aux_loss_coef": 0.0, "num_local_experts": 6}
    )
    mesh = mesh_of_layout(layout, spare_slots=1)
    model = build(config, mesh, seed=4, dtype=dtype or torch.float64)
    if kind == "lora":
        apply_lora(model, LoRAConfig(rank=2, alpha=4.0, targets=("experts",)))
    settings: dict[str, dict[str, Any]] = {
        "fused": {"kernel": "fused"}, "bfloat16": {"moments": "bfloat16"},
        "muon": {"optimizer": "muon"}, "sgd": {"optimizer": "sgd"},
    }  # fmt: skip
    options = settings.get(kind, {})
    optim = make_optimizer(model, TrainConfig(steps=4, lr=1e-2, eps=1e-4, **options), seed=0)
    ids = torch.randint(0, 61, (3, 8, 6), generator=torch.Generator().manual_seed(0))
    real = torch.arange(6) < torch.tensor([6, 0, 4, 1, 6, 2, 0, 3])[:, None]
    mine = slice(mesh.coordinate("dp"), None, mesh.size("dp"))
    norms = []
    for step in range(3):
        batch = {"input_ids": ids[step, mine], "labels": ids[step, mine],
                 "attention_mask": real[mine].long()}  # fmt: skip
        forward_backward(model, [batch], step=step)
        settle_gradients(model)
        norms.append(clip_grad_norm(model, 0.1))
        if step == 1 and mesh.size("ep") > 1:
            _place_hot(model, optim)
        optim.step()
        optim.zero_grad()
    tables = [module.table for module in model.modules() if isinstance(module, MoE)]
    equal = replicas_are_equal(model, optim)
    if kind == "lora":
        merge_lora(model)
    return {
        "weights": gather_named(model), "norms": norms, "equal": equal,
        "replicas": all(table.replicated for table in tables),
    }  # fmt: skip


def _place_hot(model: torch.nn.Module, optim: torch.optim.Optimizer) -> None:
    """Give other experts the spare slots, expert 5 one on each rank."""
    for layer in model.modules():
        if isinstance(layer, MoE):
            ep, size = layer.table.ep, layer.table.slots_per_rank
            slots = [5, *range(5), *[5] * (ep * size - 6)] if ep == 2 else [
                5, 0, 1, 5, 2, -1, 5, 3, -1, 5, 4, -1]  # fmt: skip
            assert len(slots) == len(layer.table.slots)
            place(layer, ExpertTable(6, ep, tuple(slots)), optim)


def test_what_is_owed_is_said_and_paid_once() -> None:
    """G2: settling twice changes nothing; a norm, a gather or a move before it is refused."""
    for zero in (0, 2):
        for said, same in run_ranks(_owed, 4, zero):
            assert all("settle_gradients" in text for text in said)
            assert same


def _owed(zero: int) -> tuple[list[str], bool]:
    config = ModelConfig.from_hub({**BASE, **CASES["mixtral"]})
    mesh = mesh_of_layout({"dp": 4, "ep": 2, "zero": zero}, spare_slots=1)
    model = build(config, mesh, seed=4)
    ids = torch.randint(0, 61, (1, 6), generator=torch.Generator().manual_seed(mesh.rank))
    forward_backward(model, [{"input_ids": ids, "labels": ids}])
    said = []
    layer = next(module for module in model.modules() if isinstance(module, MoE))
    experts = layer.experts
    if zero:  # ZeRO has paid the rest
        for entry in named_specs(model):
            if entry.spec.partial or entry.spec.keep_fp32:
                entry.param.grad = torch.zeros_like(entry.param)
    for act in (
        lambda: gradient_norm(model), lambda: gather_named(model, "grad"),
        lambda: place(layer, layer.table),
    ):  # fmt: skip
        with pytest.raises((ConfigError, CheckpointError)) as caught:
            act()
        said.append(str(caught.value))
    settle_gradients(model)
    before = [to_local(experts.get_parameter(n).grad).clone() for n in experts.specs]
    settle_gradients(model)
    norm = clip_grad_norm(model, 1e-3)
    settle_gradients(model)
    after = [to_local(experts.get_parameter(n).grad) for n in experts.specs]
    scale = 1e-3 / (norm + 1e-6)
    same = all(torch.allclose(b * scale, a) for b, a in zip(before, after, strict=True))
    return said, same


def test_what_a_rank_holds_and_sends_is_the_formula() -> None:
    """D11: slots x an expert's elements; the replicas' gradients go once over ep, in fp32."""
    for held, sent in run_ranks(_counted, 4):
        dim, hidden, slots = 8, 12, 3
        many = 6  # of 12 slots the spare ones: every expert is there twice
        assert held == slots * 3 * dim * hidden
        assert sent == 2 * 3 * many * 3 * dim * hidden * 4 // 4


def _counted() -> tuple[int, int]:
    mesh = mesh_of_layout({"ep": 4}, spare_slots=1)
    layer = MoE(8, 12, RouterConfig(6, 2), mesh, seed=3)
    layer(draw(3, 8, dtype=torch.float32))[0].sum().backward()
    with record_traffic() as log:
        settle_gradients(layer)
    sent = log.total(axis="ep")
    return sum(to_local(p).numel() for p in layer.experts.parameters()), sent


def test_a_token_finds_the_same_replica_whatever_else_is_there() -> None:
    """R1, D1: a pure function of owner and row; every owner begins with another."""
    table = first_table(6, 2, 1)
    assert table.replicated
    assert first_table(6, 1, 3).slots == tuple(range(6))
    visited = set()
    for owner in range(2):
        slots_ER, replicas_E = table.lookup(owner=owner)
        visited.add(int(slots_ER[0, 0]))
        assert sorted(slots_ER[0, : replicas_E[0]].tolist()) == list(table.replicas[0])
    assert visited == set(table.replicas[0])


def test_frozen_experts_stay_frozen_where_they_go() -> None:
    """D3, G1: which experts train is kept by number, not by place."""
    for moved in run_ranks(_frozen, 2):
        assert moved == {0, 5}


def _frozen() -> set[int]:
    mesh = mesh_of_layout({"ep": 2}, spare_slots=1)
    layer = MoE(8, 12, RouterConfig(6, 6), mesh, seed=3)
    for name in layer.experts.specs:
        layer.experts.trained_rows[name] = frozenset({0, 5})
    place(layer, ExpertTable(6, 2, (5, 0, 1, 2, 5, 0, 3, 4)))
    layer(draw(3, 8, dtype=torch.float32))[0].square().sum().backward()
    settle_gradients(layer)
    grad = gradients(layer)["experts.down"]
    return {e for e in range(6) if bool(grad[e].abs().sum() > 0)}
