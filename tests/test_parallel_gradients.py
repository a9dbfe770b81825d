"""What is owed, what it sums to, and what the optimiser makes of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from moe_tp.errors import ConfigError
from moe_tp.parallel import gradients
from moe_tp.parallel.collectives import all_gather, all_reduce, record_traffic, reduce_scatter
from moe_tp.parallel.gradients import (
    clip_grad_norm,
    gradient_norm,
    library_parameters,
    owed_axes,
    parameter_groups,
    settle_gradients,
)
from moe_tp.parallel.layout import ParallelLayout
from moe_tp.parallel.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from moe_tp.parallel.mesh import Mesh
from moe_tp.parallel.parameter import ParallelModule, initialise, named_specs
from moe_tp.parallel.sequence import RMSNorm
from moe_tp.parallel.shards import full_logical, to_local
from moe_tp.parallel.spec import ONES, ParamSpec
from moe_tp.testing import run_ranks

D, FF, E, F, PER_RANK = 6, 8, 4, 4, 2


class Layers(nn.Module):
    """One of each debt: sharded, replicated, owned tokens only, sliced, tied, expert."""

    def __init__(self, mesh: Mesh, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.mesh = mesh
        self.norm = RMSNorm(D, 1e-5, mesh, dtype=dtype)
        self.up = ColumnParallelLinear(D, FF, mesh, dtype=dtype, bias=True)
        self.down = RowParallelLinear(FF, D, mesh, dtype=dtype, bias=True)
        self.gate = ReplicatedLinear(D, 1, mesh, dtype=dtype, keep_fp32=True)
        self.experts = ParallelModule(mesh)
        for name, dim in (("first", 1), ("second", 2)):
            shape = (E, F, D) if name == "first" else (E, D, F)
            spec = ParamSpec(shape=shape, shards={"ep": 0, "etp": dim}, domain="expert")
            self.experts.add_parameter(name, spec, dtype)
        self.sliced = ParallelModule(mesh)
        self.sliced.add_parameter("weight", ParamSpec(shape=(FF,), partial=True), dtype)

    def forward(self, x_TD: torch.Tensor, kinds_T: torch.Tensor) -> torch.Tensor:
        """Return `[T, D]`; `kinds_T` says which expert a token goes to."""
        mesh = self.mesh
        hidden = self.up(self.norm(x_TD))
        # As a replicated KV head: at rest whole on every rank, in use the rank's own slice.
        share = FF // mesh.size("tp")
        hidden = hidden * self.sliced.local("weight")[mesh.coordinate("tp") * share :][:share]
        x_TD = x_TD + self.down(torch.tanh(hidden)) * torch.sigmoid(self.gate(x_TD))
        etp, ep = mesh.group("etp"), mesh.group("ep")
        rows, kinds = x_TD, kinds_T
        for group in (etp, ep):
            rows = all_gather(rows, group)
            kinds = all_gather(kinds, group)
        total = torch.zeros_like(rows)
        first, second = self.experts.local("first"), self.experts.local("second")
        for slot in range(E // ep.size):
            mine = (kinds == ep.rank * (E // ep.size) + slot).to(rows.dtype)[:, None]
            total = total + torch.tanh(rows @ first[slot].t()) @ second[slot].t() * mine
        for group in (ep, etp):
            total = reduce_scatter(total, group)
        return self.norm(x_TD + total)  # the norm is used twice: a tied parameter


def batch(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(4)
    x = torch.randn(tokens, D, generator=g, dtype=torch.float64)
    up = torch.randn(tokens, D, generator=g, dtype=torch.float64)
    return x, up, torch.randint(0, E - 1, (tokens,), generator=g)  # the last expert idles


def train(layout: ParallelLayout | None, tokens: int, steps: int, foreach: bool) -> dict[str, Any]:
    mesh = Mesh.single() if layout is None else Mesh(layout)
    model = Layers(mesh)
    initialise(model, 1)
    with torch.no_grad():
        for entry in named_specs(model):
            to_local(entry.param).mul_(20)
    groups = parameter_groups(model, weight_decay=0.1, lr=1e-2)
    optimiser = torch.optim.AdamW(groups, foreach=foreach)
    x, up, kinds = batch(tokens)
    stage = mesh.group("stage")
    owned = slice(stage.rank * tokens // stage.size, (stage.rank + 1) * tokens // stage.size)
    found: dict[str, Any] = {}
    for step in range(steps):
        optimiser.zero_grad()
        ((model(x[owned], kinds[owned]) - step) * up[owned]).sum().backward()
        ((model(x[owned] / 2, kinds[owned])) * up[owned]).square().sum().backward()
        settle_gradients(model)
        if step == 0:
            found["grads"] = {
                e.fqn: full_logical(e.param.grad, e.spec, mesh) for e in named_specs(model)
            }
        found["norm"] = clip_grad_norm(model, 0.5)
        optimiser.step()
    found["weights"] = {e.fqn: full_logical(e.param, e.spec, mesh) for e in named_specs(model)}
    found["local"] = {e.fqn: to_local(e.param) for e in named_specs(model)}
    return found


LAYOUTS = [
    ParallelLayout(),
    ParallelLayout(tp=2, ep=2),
    ParallelLayout(tp=2, ep=2, etp=2),
    ParallelLayout(tp=4, ep=4),
    ParallelLayout(cp=2, etp=2),
    ParallelLayout(tp=2, etp=4),
]


def test_gradients_norm_and_steps_are_those_of_one_process() -> None:
    """G1, G2, G3, G5, R2, D3: two backwards, clipped AdamW steps; replicas keep the same bits."""
    tokens = 4 * PER_RANK
    want = train(None, tokens, 3, foreach=False)
    assert not want["grads"]["experts.first"][-1].any()
    for number, layout in enumerate(LAYOUTS):
        results = run_ranks(train, 4, layout, tokens, 3, number % 2 == 0)
        for got in results:
            assert got["norm"] == pytest.approx(want["norm"], rel=1e-9)
            for kind in ("grads", "weights"):
                for name, value in want[kind].items():
                    torch.testing.assert_close(got[kind][name], value, rtol=1e-9, atol=1e-11)
            for name in ("norm.weight", "gate.weight", "down.bias", "sliced.weight"):
                assert torch.equal(got["local"][name], results[0]["local"][name]), name
        if layout == ParallelLayout():
            for name, value in results[0]["local"].items():
                assert torch.equal(value, results[3]["local"][name]), name


def book_keeping() -> dict[str, Any]:
    mesh = Mesh(ParallelLayout(tp=2, ep=2))
    model = Layers(mesh)
    initialise(model, 1)
    x, up, kinds = batch(PER_RANK)
    out: dict[str, Any] = {}

    def backward() -> None:
        (model(x + mesh.rank, kinds) * up).sum().backward()

    def grads() -> dict[str, torch.Tensor]:
        return {e.fqn: to_local(e.param.grad).clone() for e in named_specs(model)}

    backward()
    out["owed"] = {e.fqn: owed_axes(e.param.grad) for e in named_specs(model)}
    with pytest.raises(ConfigError, match=r"norm.weight still owes .*dp_cp.*settle_gradients"):
        clip_grad_norm(model, 1.0)
    settle_gradients(model)
    once = grads()
    assert not any(owed_axes(e.param.grad) for e in named_specs(model))
    with record_traffic() as log:
        settle_gradients(model)  # nothing is owed
    assert log.entries == []
    assert all(torch.equal(once[k], v) for k, v in grads().items())
    backward()
    settle_gradients(model)  # a backward after a settlement adds its own share
    for name, value in grads().items():
        torch.testing.assert_close(value, 2 * once[name], rtol=1e-12, atol=1e-12)
    model.zero_grad()
    for module in (model.experts, model.up):
        module.gradient_scale = 0.25
    backward()
    settle_gradients(model)
    settle_gradients(model)
    for name, value in grads().items():
        scale = 0.25 if name.startswith(("experts", "up")) else 1.0
        torch.testing.assert_close(value, scale * once[name], rtol=1e-12, atol=1e-12)
    model.zero_grad()
    settle_gradients(model)
    assert all((value == 0).all() for value in grads().values())
    assert float(gradient_norm(model)) == 0.0
    assert clip_grad_norm(model, 1.0) == 0.0
    model.gate.weight.requires_grad_(False)
    model.zero_grad()
    settle_gradients(model)
    assert model.gate.weight.grad is None
    out["library"] = len(library_parameters(model)) == len(list(model.parameters()))
    return out


def test_debts_are_paid_once() -> None:
    """G2, G6: what each gradient owes; settling twice, scaling, unused and frozen parameters."""
    for got in run_ranks(book_keeping, 4):
        dense = dict.fromkeys(("up.weight", "up.bias", "down.weight"), ("dp_cp",))
        partial = ("norm.weight", "gate.weight", "down.bias", "sliced.weight")
        expert = dict.fromkeys(("experts.first", "experts.second"), ("edp",))
        assert got["owed"] == dense | expert | dict.fromkeys(partial, ("dp_cp", "tp"))
        assert got["library"]


class Many(ParallelModule):
    """Parameters of two dtypes and of sizes around the border of a bucket."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh)
        sizes = [(3, torch.float32), (8, torch.float32), (100, torch.float32)]
        sizes += [(5, torch.bfloat16), (6, torch.bfloat16), (1, torch.float64)]
        for number, (size, dtype) in enumerate([*sizes, (2, torch.float32)]):
            self.add_parameter(f"p{number}", ParamSpec(shape=(size,), init=ONES), dtype)


def buckets(limit: int) -> tuple[dict[str, torch.Tensor], list[int]]:
    before = gradients._BUCKET_BYTES
    gradients._BUCKET_BYTES = limit
    try:
        mesh = Mesh(ParallelLayout())
        model = Many(mesh)
        initialise(model, 0)
        for name in model.specs:
            value = (256.0, 1.0, 1.0, 1.0)[mesh.rank]
            (model.local(name) * value).sum().backward()
        with record_traffic() as log:
            settle_gradients(model)
    finally:
        gradients._BUCKET_BYTES = before
    sent = [entry[3] for entry in log.entries]
    return {e.fqn: to_local(e.param.grad) for e in named_specs(model)}, sent


@pytest.mark.parametrize("limit", [1, 44, 48, 1 << 26])
def test_buckets_change_nothing(limit: int) -> None:
    """G1, D6, D11: any bucket size gives the sums; bf16 travels in fp32: 259, not 256."""
    sizes = {1: [3, 8, 100, 5, 6, 2, 2], 44: [11, 100, 11, 2, 2], 48: [11, 100, 11, 2, 2]}
    want = sizes.get(limit, [111, 11, 2, 2])  # in units of 4 bytes; the 1 of fp64 counts 2
    for grads, sent in run_ranks(buckets, 4, limit):
        for name, grad in grads.items():
            narrow = grad.dtype is torch.bfloat16
            assert (grad == (260.0 if narrow else 259.0)).all(), name
        assert sent == [2 * 4 * n * 3 // 4 for n in want]


class Mixed(nn.Module):
    """Library and plain parameters of several dtypes side by side."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.layers = Layers(mesh, torch.float32)
        self.narrow = ColumnParallelLinear(D, D, mesh, dtype=torch.bfloat16)
        self.router = ParallelModule(mesh)
        spec = ParamSpec(shape=(3, D), partial=True, role="router", keep_fp32=True)
        self.router.add_parameter("weight", spec, torch.float32)
        self.plain = nn.Linear(D, D)
        self.frozen = nn.Linear(D, D).requires_grad_(False)


def optimise(options: dict[str, Any]) -> tuple[dict[str, torch.Tensor], list[Any]]:
    mesh = Mesh(ParallelLayout(ep=2))
    model = Mixed(mesh)
    initialise(model, 0)
    groups = parameter_groups(model, weight_decay=0.5, lr=0.1, router_lr=0.01)
    names = {id(p): n for n, p in model.named_parameters()}
    summary = []
    for group in groups:
        kinds = {
            (p.device_mesh.mesh_dim_names if isinstance(p, DTensor) else None, p.dtype)
            for p in group["params"]
        }
        members = [names[id(p)] for p in group["params"]]
        summary.append((len(kinds), group["weight_decay"], group["lr"], members))
    optimiser = torch.optim.AdamW(groups, **options)
    for step in range(3):
        for param in model.parameters():
            if param.requires_grad:
                param.grad = torch.full_like(param, 0.5 - step)
        optimiser.step()
    return {n: to_local(p).clone() for n, p in model.named_parameters()}, summary


def test_optimisers_take_the_groups() -> None:
    """G5, G6, R2: AdamW foreach and fused take every group; norms and biases do not decay."""
    want, summary = run_ranks(optimise, 2, {"foreach": False})[0]
    assert all(kinds == 1 for kinds, *_ in summary)
    members = {name: (decay, rate) for _, decay, rate, names in summary for name in names}
    assert len(members) == sum(len(names) for *_, names in summary)
    for name in ("layers.norm.weight", "layers.up.bias", "layers.down.bias", "plain.bias"):
        assert members[name] == (0.0, 0.1), name
    for name in ("layers.up.weight", "layers.experts.first", "plain.weight", "narrow.weight"):
        assert members[name] == (0.5, 0.1), name
    assert members["router.weight"] == (0.5, 0.01)
    assert set(members) | {"frozen.weight", "frozen.bias"} == set(want)
    for options in ({"foreach": True}, {"fused": True}):
        for got, _ in run_ranks(optimise, 2, options):
            for name, value in want.items():
                if not name.startswith(("plain", "frozen", "layers.experts")):
                    tolerance = 1e-2 if value.dtype is torch.bfloat16 else 1e-6
                    torch.testing.assert_close(
                        got[name], value, rtol=tolerance, atol=tolerance / 10
                    )
    groups = parameter_groups(Mixed(Mesh.single()))
    assert all(set(group) == {"params"} for group in groups)


class Scalar(ParallelModule):
    """One weight; the loss of a token is weight x its number."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh)
        spec = ParamSpec(shape=(1,), partial=True, init=ONES)
        self.add_parameter("weight", spec, torch.float64)


def token_weighted(layout: ParallelLayout | None, batches: list[list[float]]) -> Any:
    """Run micro-batches: with dp, each dp rank has its own ones; tp ranks own every other token."""
    mesh = Mesh.single() if layout is None else Mesh(layout)
    model = Scalar(mesh)
    initialise(model, 0)
    dp, tp, stage = mesh.group("dp"), mesh.group("tp"), mesh.group("stage")
    mine = [torch.tensor(b, dtype=torch.float64)[tp.rank :: tp.size] for b in batches]
    mine = mine[dp.rank :: dp.size]
    count = all_reduce(torch.tensor(sum(len(b) for b in mine)), stage)
    total = 0.0
    for tokens in mine:
        loss = all_reduce((model.local("weight") * tokens).sum() / count, stage)
        loss.backward()
        total += loss.item()
    if dp.size == 1:
        assert len(mine) == len(batches)
    settle_gradients(model)
    return total, int(count), to_local(model.weight.grad).item()


def test_losses_are_weighted_by_tokens() -> None:
    """L1, C52: (4 + 2 + 2 + 2) / 4 = 2.5 in loss and gradient, however the tokens are split."""
    batches = [[4.0], [2.0, 2.0, 2.0]]
    want = token_weighted(None, [[4.0, 2.0, 2.0, 2.0]])
    assert want == (2.5, 4, 2.5)
    assert token_weighted(None, batches) == pytest.approx(want, rel=1e-12)
    for world, layout in (
        (2, ParallelLayout()),
        (2, ParallelLayout(tp=2)),
        (4, ParallelLayout(tp=2)),
        (4, ParallelLayout(tp=2, ep=2)),
        (4, ParallelLayout(tp=4, ep=2)),
    ):
        for got in run_ranks(token_weighted, world, layout, batches):
            assert got == pytest.approx(want, rel=1e-12), layout
