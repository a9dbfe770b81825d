"""The layer inside a user's own model, under DDP and FSDP2, in hosts that sum or average."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from experts_cases import draw, mesh_of_layout, own_rows
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from moe_tp import MoE, clip_grad_norm, parameter_groups, settle_gradients
from moe_tp.errors import ConfigError, RankMismatchError
from moe_tp.experts.host import library_parameters, prepare_for_ddp
from moe_tp.parallel.mesh import Mesh
from moe_tp.parallel.parameter import named_specs
from moe_tp.parallel.shards import full_logical
from moe_tp.routing import RouterConfig
from moe_tp.testing import run_ranks

TOKENS = {1: [12], 2: [6, 6], 4: [3, 3, 3, 3]}


class Host(nn.Module):
    def __init__(self, mesh: Mesh, gradient: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(8, 8, dtype=torch.float64)
        config = RouterConfig(5, 2, balance_coef=0.2, z_coef=0.1)
        self.moe = MoE(
            8, 8, config, mesh, gradient=gradient, dtype=torch.float64, seed=0, num_shared=1
        )
        self.outer = nn.Linear(8, 8, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, aux = self.moe(torch.tanh(self.inner(x)))
        return self.outer(x + y), aux.loss


def _train(layout: dict[str, int] | None, wrapper: str, gradient: str) -> dict[str, torch.Tensor]:
    """Return all weights after two AdamW steps whose loss is a mean over all tokens."""
    mesh = mesh_of_layout(layout, experts="loop")
    host = Host(mesh, gradient)
    model: Any = host
    if wrapper == "ddp":
        model = DistributedDataParallel(prepare_for_ddp(host))
    elif wrapper == "fsdp":
        model = fully_shard(host, ignored_params=set(library_parameters(host)))
    # a large eps, so that gradients of wrong size show in the weights (G5)
    optimiser = torch.optim.AdamW(parameter_groups(host), lr=0.05, eps=1e-2, foreach=True)
    ranks = mesh.world_size
    x = draw(12, 8, dtype=torch.float64)[own_rows(TOKENS[ranks], mesh.rank)]
    for _ in range(2):
        y, aux = model(x)
        # mean host: each rank's own mean; sum host: the rank's share of the global mean
        loss = y.square().sum() / (len(x) if gradient == "mean" else 12)
        (loss + aux).backward()
        settle_gradients(host)
        if wrapper == "none" and ranks > 1:
            for name, param in host.named_parameters():
                if not isinstance(param, DTensor):
                    assert not name.startswith("moe")
                    torch.distributed.all_reduce(param.grad)
                    if gradient == "mean":
                        param.grad /= ranks
        clip_grad_norm(host, 0.1)
        optimiser.step()
        optimiser.zero_grad()
    ours = {entry.fqn: entry for entry in named_specs(host)}
    return {
        name: full_logical(param, ours[name].spec, mesh)
        if name in ours
        else (param.full_tensor() if isinstance(param, DTensor) else param).detach()
        for name, param in host.named_parameters()
    }


@pytest.mark.parametrize(
    ("wrapper", "gradient"), [("none", "sum"), ("none", "mean"), ("ddp", "mean"), ("fsdp", "mean")]
)
def test_hosts_that_sum_and_that_average(wrapper: str, gradient: str) -> None:
    """G6, G2, G3: weights after two clipped steps equal one process; a foreach optimiser."""
    want = _train(None, "none", "sum")
    for world, layout in ((2, {"ep": 2}), (4, {"ep": 2}), (4, {"ep": 2, "etp": 2})):
        for got in run_ranks(_train, world, layout, wrapper, gradient):
            for name, value in want.items():
                assert torch.allclose(got[name], value, rtol=1e-9, atol=1e-12), name


def test_wrapped_without_preparation_is_refused() -> None:
    """G6, F3: neither wrapper takes the parameters in silence; each refuses when it wraps."""
    for messages in run_ranks(_unprepared, 2):
        assert "DTensor" in messages[0]
        assert "overlapping meshes" in messages[1]


def _unprepared() -> list[str]:
    host = Host(mesh_of_layout({"ep": 2}), "mean")
    ranks = init_device_mesh("cpu", (2,), mesh_dim_names=("host",))
    messages = []
    for wrap in (DistributedDataParallel, lambda model: fully_shard(model, mesh=ranks)):
        with pytest.raises(RuntimeError) as info:
            wrap(host)
        messages.append(str(info.value))
    return messages


def test_gradient_convention_is_checked() -> None:
    """F3."""
    with pytest.raises(ConfigError, match="choose 'sum' or 'mean'"):
        MoE(8, 8, RouterConfig(4, 2), Mesh.single(), gradient="average")  # type: ignore[arg-type]


UNLIKE: dict[str, tuple[dict[str, Any], str]] = {
    "dim": ({"dim": 12}, "dim=12"),
    "expert_dim": ({"expert_dim": 16}, "expert_dim=16"),
    "router": ({"router": RouterConfig(4, 3)}, "top_k=3"),
    "function": ({"router": RouterConfig(4, 2, function=min)}, "function=min"),
    "shared": ({"num_shared": 1}, "hidden=8"),
    "seed": ({"seed": 7}, "seed=7"),
    "activation": ({"activation": "gelu"}, "activation="),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_ranks_that_make_unlike_layers(name: str) -> None:
    """F2: told when the layer is made; other choices would mix, other widths abort the process."""
    changes, word = UNLIKE[name]
    for text in run_ranks(_unlike, 2, changes):
        assert "ranks [1] disagree with rank 0 about the settings of an MoE layer" in text
        assert word in text


def _unlike(changes: dict[str, Any]) -> str:
    mesh = mesh_of_layout({"ep": 2})
    settings = {"dim": 8, "expert_dim": 8, "router": RouterConfig(4, 2), "seed": 1}
    with pytest.raises(RankMismatchError) as caught:
        MoE(**settings | (changes if mesh.rank else {}), mesh=mesh)
    return str(caught.value)


def _functions(mesh: Mesh) -> None:
    def of_my_own(*args: Any, **named: Any) -> Any:
        raise NotImplementedError

    MoE(8, 8, RouterConfig(4, 2, function=of_my_own), mesh)


def test_stages_may_hold_other_layers() -> None:
    """F2: only ranks that hold a layer compare it, and a function not by where it lies."""
    run_ranks(_stages, 4)


def _stages() -> None:
    mesh = mesh_of_layout({"pp": 2, "ep": 2})
    for _ in range(1 + mesh.stage):
        MoE(8 + mesh.stage, 8, RouterConfig(4, 2), mesh)
    _functions(mesh)


def test_layers_differ_and_replicas_do_not() -> None:
    """C36, N1, R2: two layers draw unlike values; all ranks draw the same, whatever their seed."""
    for first, second in run_ranks(_unseeded, 2):
        assert not torch.equal(first, second)
    results = run_ranks(_unseeded, 2)
    assert torch.equal(results[0][0], results[1][0])


def _unseeded() -> tuple[torch.Tensor, torch.Tensor]:
    mesh = mesh_of_layout({"ep": 2})
    torch.manual_seed(mesh.rank)
    layers = [MoE(8, 8, RouterConfig(4, 2), mesh) for _ in range(2)]
    values = [full_logical(m.experts.gate_up, m.experts.specs["gate_up"], mesh) for m in layers]
    assert len({tuple(v.flatten().tolist()) for v in values[0]}) == 4  # no two experts are alike
    return values[0], copy.deepcopy(values[1])


@pytest.mark.parametrize(
    ("layout", "tokens", "dispatcher", "frozen"),
    [
        ({"ep": 2}, [3, 4], "all_to_all", False),
        ({"ep": 2}, [5, 0], "all_to_all", True),
        ({"ep": 2}, [0, 5], "all_gather", False),
        ({"tp": 2, "etp": 2}, [3, 4], "auto", True),
    ],
)
def test_tokens_with_and_without_a_gradient(
    layout: dict[str, int], tokens: list[int], dispatcher: str, frozen: bool
) -> None:
    """D2, C19: activations on rank 0, and on rank 1 what no gradient is wanted of (an idle rank's
    zeros, say): no rank waits for ever, and every gradient is that of one process.
    """
    want = _half_of_it(None, tokens, "auto", frozen)
    for got in run_ranks(_half_of_it, 2, layout, tokens, dispatcher, frozen, timeout=40):
        assert want.keys() - got.keys() <= {"x"}
        for name, value in got.items():
            assert torch.allclose(value, want[name], rtol=1e-9, atol=1e-12), name


def _half_of_it(
    layout: dict[str, int] | None, tokens: list[int], dispatcher: str, frozen: bool
) -> dict[str, torch.Tensor]:
    mesh = mesh_of_layout(layout, dispatcher=dispatcher, timeout=20.0)
    config = RouterConfig(4, 2, balance_coef=0.0 if frozen else 0.3, frozen=frozen)
    moe = MoE(8, 8, config, mesh, dtype=torch.float64, seed=0, num_shared=1)
    first, second = draw(sum(tokens), 8, dtype=torch.float64).split(tokens)
    first.requires_grad_()
    x = torch.cat([first, second])
    if layout is not None:
        x = second if mesh.rank else first
    y, aux = moe(x)
    assert y.requires_grad
    (y.square().sum() + aux.loss).backward()
    settle_gradients(moe)
    assert second.grad is None
    grads = {
        entry.fqn: full_logical(entry.param.grad, entry.spec, mesh)
        for entry in named_specs(moe)
        if entry.param.grad is not None
    }
    if mesh.rank == 0:
        assert first.grad is not None
        grads["x"] = first.grad
    return grads
