"""ZeRO over replicas of replicas (HSDP), in host memory, and what it sends."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_models_axes import compare, config, micro_batches
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

from moe_tp import (
    Mesh,
    MoE,
    ParallelLayout,
    Runtime,
    clip_grad_norm,
    forward_backward,
    settle_gradients,
)
from moe_tp.checkpoint import gather_named
from moe_tp.checkpoint.state import load_state, save_state
from moe_tp.errors import ConfigError
from moe_tp.models import build, from_pretrained, save_pretrained
from moe_tp.parallel.gradients import parameter_groups
from moe_tp.parallel.parameter import named_specs
from moe_tp.parallel.shards import splits, to_local
from moe_tp.routing import RouterConfig
from moe_tp.testing import run_ranks


def test_replicated_shards_equal_one_process() -> None:
    """G1, G2, G3, G5, D2: shards within a replica, sums over all; with ep and host memory.

    With dp 4 two of the ranks have empty batches.
    """
    compare(
        "mixtral",
        4,
        [
            ({"zero": 3, "ep": 2}, {"dp_replicate": 2, "offload": True}),
            ({"zero": 1, "ep": 4}, {"dp_replicate": 2}),
        ],
        layers=2,
    )


@pytest.mark.slow
def test_more_replicated_and_offloaded_layouts() -> None:
    """G1, G3, G5: HSDP and host memory with every stage, cp, pp and etp."""
    compare(
        "mixtral",
        4,
        [
            ({"zero": 1}, {"dp_replicate": 2}),
            ({"zero": 2, "tp": 2, "ep": 2}, {"dp_replicate": 2, "recompute": "selective"}),
            ({"zero": 2}, {"dp_replicate": 2, "recompute": "full"}),
            ({"zero": 3}, {"dp_replicate": 4}),
            ({"zero": 3, "cp": 2, "ep": 2}, {"dp_replicate": 2, "cp_kind": "ring"}),
            ({"zero": 1, "pp": 2, "ep": 2}, {"dp_replicate": 2}),
            ({"zero": 3, "tp": 2, "etp": 2}, {"dp_replicate": 2}),
            ({"zero": 1, "pp": 2}, {"offload": True}),
            ({"zero": 1, "tp": 2}, {"offload": True}),
            ({"zero": 2, "ep": 2}, {"offload": True}),
            ({"zero": 3, "cp": 2}, {"offload": True, "recompute": "full"}),
        ],
    )


def places() -> dict[str, Any]:
    mesh = Mesh(ParallelLayout(zero=3, ep=2), Runtime(dp_replicate=2))
    model = build(config("mixtral", layers=1), mesh, seed=3)
    found = {
        e.fqn: [(s.axis, s.size, s.rank) for s in splits(e.param) if s.size > 1]
        for e in named_specs(model)
    }
    axes = ("dp_replicate", "dp_shard", "edp_replicate", "edp_shard")
    return {
        "ranks": {axis: mesh.group(axis).ranks for axis in axes},
        "splits": found,
        "size": {e.fqn: to_local(e.param).numel() for e in named_specs(model)},
    }


def test_shards_lie_within_a_replica() -> None:
    """D11, G2: replicas are runs of neighbours; experts are replicated as often, over edp."""
    for rank, got in enumerate(run_ranks(places, 4)):
        node, other = 2 * (rank // 2), rank % 2
        assert got["ranks"] == {
            "dp_replicate": (other, other + 2),
            "dp_shard": (node, node + 1),
            "edp_replicate": (other, other + 2),
            "edp_shard": (rank,),
        }
        assert got["splits"]["head.weight"] == [("dp_shard", 2, other)]
        assert got["splits"]["layers.0.moe.experts.down"] == [("ep", 2, other)]
        whole = build(config("mixtral", layers=1), Mesh.single())
        sizes = {e.fqn: e.param.numel() for e in named_specs(whole)}
        assert got["size"]["head.weight"] * 2 == sizes["head.weight"]
        assert got["size"]["layers.0.moe.experts.down"] * 2 == sizes["layers.0.moe.experts.down"]


class Sent(TorchDispatchMode):
    """Bytes of what `fully_shard` hands to the back end, by operator."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        names = {"_allgather_base_": 1, "_reduce_scatter_base_": 0, "allreduce_": 0}
        name = func.__name__.split(".")[0]
        if func.namespace == "c10d" and name in names:
            # all-gather (out, in), reduce-scatter (out, in), all-reduce ([in]): the larger side
            moved = args[0][0] if name == "allreduce_" else args[1 - names[name]]
            self.bytes[name] = self.bytes.get(name, 0) + moved.nbytes
        return func(*args, **(kwargs or {}))


def traffic(zero: int, replicate: int, batches: int) -> tuple[dict[str, int], int]:
    mesh = Mesh(ParallelLayout(zero=zero), Runtime(dp_replicate=replicate))
    model = build(config("mixtral", layers=1), mesh, seed=3)
    sharded = [e for e in named_specs(model) if e.spec.zero_sharded]
    size = sum(math.prod(e.param.shape) for e in sharded) * 4
    rows = micro_batches(mesh.size("dp"), mesh.coordinate("dp"))[:batches]
    with Sent() as sent:
        forward_backward(model, rows)
    return sent.bytes, size


@pytest.mark.parametrize(("zero", "replicate"), [(1, 1), (2, 1), (3, 1), (1, 2), (2, 2), (3, 2)])
def test_what_zero_sends_in_a_step(zero: int, replicate: int) -> None:
    """D11: gathers of parameters and sums of gradients a step, in times the sharded bytes P.

    Stages 1 and 2 gather once a step, stage 3 twice a micro-batch (what the root holds once);
    gradients are summed once a step at stage 1, once a micro-batch at 2 and 3, and across the
    replicas of HSDP once a step.
    """
    world, batches = 2 * replicate, 3
    sent, size = run_ranks(traffic, world, zero, replicate, batches)[0]
    gathers = {1: 1, 2: 1, 3: 2 * batches}[zero]
    sums = {1: 1, 2: batches, 3: batches}[zero]
    assert sent["_allgather_base_"] == pytest.approx(gathers * size, rel=1e-3)
    assert sent["_reduce_scatter_base_"] == pytest.approx(sums * size, rel=1e-3)
    across = sent.get("allreduce_", 0)
    assert across == pytest.approx(size / 2 if replicate > 1 else 0, rel=1e-3)


def resume(folder: str) -> dict[str, Any]:
    path = Path(folder)
    results = []
    for layout, runtime in (
        ({"zero": 3, "ep": 2}, {"dp_replicate": 2, "offload": True}),
        ({"zero": 2, "tp": 2}, {"dp_replicate": 2}),
        ({"tp": 2, "ep": 4}, {}),
    ):
        mesh = Mesh(ParallelLayout(**layout), Runtime(**runtime))
        model = build(config("mixtral", layers=1), mesh, seed=3, dtype=torch.float64)
        optimiser = torch.optim.AdamW(parameter_groups(model), lr=0.01)
        start = 0
        if results:
            start = load_state(model, optimiser, path / f"state{len(results) - 1}")["step"]
        batches = micro_batches(mesh.size("dp"), mesh.coordinate("dp"))
        forward_backward(model, batches, step=start)
        settle_gradients(model)
        clip_grad_norm(model, 1.0)
        optimiser.step()
        optimiser.zero_grad()
        save_state(model, optimiser, path / f"state{len(results)}", {"step": start + 1})
        save_pretrained(model, path / f"hub{len(results)}")
        read = from_pretrained(path / f"hub{len(results)}", Mesh(ParallelLayout(ep=2)))
        results.append((gather_named(model, "param"), gather_named(read, "param")))
    return {"results": results}


def straight() -> list[dict[str, torch.Tensor]]:
    model = build(config("mixtral", layers=1), Mesh.single(), seed=3, dtype=torch.float64)
    optimiser = torch.optim.AdamW(parameter_groups(model), lr=0.01)
    found = []
    for step in range(3):
        forward_backward(model, micro_batches(1, 0), step=step)
        settle_gradients(model)
        clip_grad_norm(model, 1.0)
        optimiser.step()
        optimiser.zero_grad()
        found.append(gather_named(model, "param"))
    return found


def test_resume_and_export_from_replicated_shards(tmp_path: Path) -> None:
    """K1, K4: a state saved under HSDP goes on under other layouts; its export is exact."""
    want = straight()
    results = run_ranks(resume, 4, str(tmp_path), timeout=120)[0]["results"]
    for step, (weights, exported) in enumerate(results):
        for name, value in weights.items():
            torch.testing.assert_close(value, want[step][name], rtol=1e-9, atol=1e-12)
            assert torch.equal(value, exported[name]), name


def refused(layout: dict[str, Any], runtime: dict[str, Any]) -> str:
    try:
        Mesh(ParallelLayout(**layout), Runtime(**runtime))
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("layout", "runtime", "words"),
    [
        ({}, {"dp_replicate": 2}, ("zero=0", "zero=1, 2 or 3")),
        ({"zero": 1, "tp": 2}, {"dp_replicate": 4}, ("dp=2", "divisors of 2")),
        ({"zero": 1, "ep": 2}, {"dp_replicate": 4}, ("edp=2", "lower ep")),
        ({"ep": 2}, {"offload": True}, ("zero=0", "zero=1, 2 or 3")),
        ({"zero": 1, "ep": 4}, {"dp_replicate": 4}, ()),
    ],
)
def test_sharding_that_cannot_be_is_refused(
    layout: dict[str, Any], runtime: dict[str, Any], words: tuple[str, ...]
) -> None:
    """F3: by every rank, before a group is made, with the way out."""
    for sentence in run_ranks(refused, 4, layout, runtime):
        assert bool(sentence) == bool(words)
        assert all(word in sentence for word in words)


def lone_layer() -> str:
    mesh = Mesh(ParallelLayout(zero=1))
    moe = MoE(8, 6, RouterConfig(num_experts=4, top_k=2), mesh, seed=0)
    y, aux = moe(torch.randn(3, 8))
    (y.sum() + aux.loss).backward()
    try:
        settle_gradients(moe)
    except ConfigError as error:
        return str(error)
    return ""


def test_a_layer_that_nothing_shards_is_refused() -> None:
    """G2, G6, F3: on a mesh with ZeRO a layer outside `build` would not be summed over edp."""
    for sentence in run_ranks(lone_layer, 2):
        assert "experts.gate_up was laid out for zero=1" in sentence
        assert "zero=0" in sentence


def test_one_process_refuses_what_needs_ranks() -> None:
    """F3: settings of ZeRO are not taken and ignored without it."""
    for runtime in (Runtime(dp_replicate=2), Runtime(offload=True)):
        with pytest.raises(ConfigError, match="zero=0"):
            Mesh.single(runtime)


def steps_alone(run: Callable[..., Any] | None = None) -> tuple[float, bool, int]:
    mesh = Mesh(ParallelLayout(zero=3), Runtime(offload=True))
    model = build(config("mixtral", layers=1), mesh, seed=3)
    forward_backward(model, micro_batches(1, 0))
    settle_gradients(model)
    optimiser = torch.optim.AdamW(parameter_groups(model), lr=0.01)
    norm = clip_grad_norm(model, 1.0)
    optimiser.step()
    on_host = all(p.device.type == "cpu" for p in model.parameters())
    return norm, on_host, sum(isinstance(m, FSDPModule) for m in model.modules())


def test_offload_on_one_rank() -> None:
    """G3: a world of one rank may keep its parameters in host memory too."""
    norm, on_host, wrapped = run_ranks(steps_alone, 1)[0]
    model = build(config("mixtral", layers=1), Mesh.single(), seed=3)
    forward_backward(model, micro_batches(1, 0))
    settle_gradients(model)
    assert norm == pytest.approx(clip_grad_norm(model, 1.0), rel=1e-5)
    assert on_host
    assert wrapped >= 4


def _scaled_logits(layout: dict[str, Any]) -> tuple[dict[str, torch.Tensor], list[str]]:
    mesh = Mesh(ParallelLayout(**layout)) if layout else Mesh.single()
    model = build(config("mixtral"), mesh, seed=3)
    ids = torch.arange(12).view(2, 6) % 7
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        logits = model(ids).logits
        assert logits is not None
        logits.mul_(0.5)
        (logits.sin().sum() / mesh.size("dp")).backward()
    settle_gradients(model)
    return gather_named(model, "grad"), [str(w.message) for w in seen if "view" in str(w.message)]


def test_logits_may_be_changed_in_place() -> None:
    """G1: no part of the gradient is lost where ZeRO hangs the start of backward onto logits."""
    expected, _ = _scaled_logits({})
    for layout in ({"dp": 2, "zero": 3}, {"dp": 1, "tp": 2, "zero": 3}):
        for grads, said in run_ranks(_scaled_logits, 2, layout):
            assert not said, said
            for name, grad in expected.items():
                assert (grads[name] - grad).norm() <= 1e-5 * grad.norm(), name
