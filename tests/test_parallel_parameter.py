"""Parameters: where they lie, what pads them, and that fp32 state never passes through bf16."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from moe_tp.errors import ConfigError
from moe_tp.parallel.layout import ParallelLayout, Runtime
from moe_tp.parallel.linear import ColumnParallelLinear, ReplicatedLinear
from moe_tp.parallel.mesh import Mesh
from moe_tp.parallel.parameter import (
    ParallelModule,
    initialise,
    materialise,
    mesh_of,
    named_specs,
    sharing_casts,
)
from moe_tp.parallel.sequence import RMSNorm
from moe_tp.parallel.shards import full_logical, gradient_placements, local_index, to_local
from moe_tp.parallel.spec import ONES, ParamSpec
from moe_tp.parallel.vocab import VocabParallelEmbedding
from moe_tp.testing import run_ranks

BIAS = [10.16, 10.17, 10.18, 10.20]


class Gate(ParallelModule):
    """A router in miniature, with a correction bias."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh)
        spec = ParamSpec(shape=(4, 6), partial=True, keep_fp32=True, role="router")
        self.add_parameter("weight", spec, torch.bfloat16)
        self.add_parameter("cast", ParamSpec(shape=(6,), init=ONES), torch.float32)
        self.register_fp32_buffer("correction", torch.tensor(BIAS))
        self.register_buffer("plain", torch.tensor(BIAS))


class Model(nn.Module):
    """Library modules inside a plain one, with a plain linear beside them and a tied head."""

    def __init__(self, mesh: Mesh, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = VocabParallelEmbedding(7, 6, mesh, dtype=dtype)
        self.norm = RMSNorm(6, 1e-5, mesh, dtype=dtype)
        self.gate = Gate(mesh)
        self.head = nn.Module()
        self.plain = nn.Linear(3, 3)

    def tie(self) -> None:
        self.head.weight = self.embed.weight


@pytest.mark.parametrize(
    "cast",
    [
        lambda m: m.to(torch.bfloat16),
        lambda m: m.bfloat16(),
        lambda m: m.half(),
        lambda m: m.to("cpu", torch.float16),
        lambda m: m.double(),
        lambda m: m.double().bfloat16().float(),
        lambda m: m.to("cpu"),
        lambda m: m.bfloat16().to(torch.float32),
        lambda m: m.to(torch.float8_e4m3fn),
    ],
)
def test_fp32_state_survives_every_cast(cast: Any) -> None:
    """R4, L4, C48: router, norm and correction bias keep their fp32 values bitwise; ties stay."""
    model = Model(Mesh.single())
    model.tie()
    initialise(model, 0)
    model.norm.weight.grad = torch.ones_like(model.norm.weight)
    names = [name for name, _ in model.named_parameters()]
    kept = {"gate.weight": model.gate.weight, "norm.weight": model.norm.weight}
    before = {name: to_local(value).clone() for name, value in kept.items()}
    dtype = cast(nn.Linear(1, 1)).weight.dtype
    cast(model)
    wide = torch.promote_types(dtype, torch.float32) if dtype.itemsize > 1 else torch.float32
    for name, value in kept.items():
        now = to_local(model.get_parameter(name))
        assert now.dtype in (wide, torch.float64), name  # .double() widens and is not undone
        assert torch.equal(now.float(), before[name]), name
        assert model.get_parameter(name) is value, name
    assert model.norm.weight.grad is not None
    assert model.norm.weight.grad.dtype == model.norm.weight.dtype
    correction = model.gate.correction
    assert torch.equal(correction.float(), torch.tensor(BIAS))
    assert correction.dtype in (wide, torch.float64)
    assert "gate.correction" in model.state_dict()
    assert model.embed.weight.dtype is dtype
    assert model.gate.cast.dtype is dtype
    assert model.plain.weight.dtype is dtype
    assert model.gate.plain.dtype is dtype
    assert model.head.weight is model.embed.weight
    assert [name for name, _ in model.named_parameters()] == names
    moved = model.gate.correction + 1e-3
    assert (moved > model.gate.correction).all()


def test_local_casts_to_the_compute_dtype_only_what_may_be() -> None:
    """R4: under compute_dtype=bf16 weights run in bf16, router and norms in fp32; grads return."""
    mesh = Mesh.single(runtime=Runtime(compute_dtype=torch.bfloat16))
    model = Model(mesh)
    initialise(model, 0)
    assert model.embed.local("weight").dtype is torch.bfloat16
    assert model.gate.local("cast").dtype is torch.bfloat16
    assert model.gate.local("weight").dtype is torch.float32
    assert model.norm.local("weight").dtype is torch.float32
    (model.embed.local("weight").float().sum() + model.gate.local("weight").sum()).backward()
    for param in (model.embed.weight, model.gate.weight):
        assert isinstance(param.grad, DTensor)
        assert param.grad.dtype is torch.float32
        assert (to_local(param.grad) == 1).all()
    gate = ReplicatedLinear(6, 2, mesh, keep_fp32=True, dtype=torch.bfloat16)
    initialise(gate, 0)
    assert gate.weight.dtype is torch.float32
    assert gate(torch.ones(3, 6, dtype=torch.bfloat16)).dtype is torch.float32


def test_meta_then_materialise_is_the_same_model() -> None:
    """N1, C33: built on meta, allocated and filled: bitwise the directly built one, tie and all."""
    direct = Model(Mesh.single())
    with torch.device("meta"):
        late = Model(Mesh.single())
        late.tie()
    assert all(p.is_meta for p in late.parameters())
    materialise(late, torch.device("cpu"))
    for model in (direct, late):
        initialise(model, 3)
    pairs = zip(named_specs(direct), named_specs(late), strict=True)
    for a, b in pairs:
        assert a.fqn == b.fqn
        assert torch.equal(to_local(a.param), to_local(b.param))
        assert b.param.device.type == "cpu"
    assert late.head.weight is late.embed.weight
    assert [e.fqn for e in named_specs(late)] == [
        "embed.weight",
        "norm.weight",
        "gate.weight",
        "gate.cast",
    ]
    assert mesh_of(late) is late.embed.mesh
    with pytest.raises(ConfigError, match="no module of this library"):
        mesh_of(nn.Linear(1, 1))


SPECS = {
    "column": ParamSpec(shape=(8, 5), shards={"tp": 0}),
    "row": ParamSpec(shape=(5, 8), shards={"tp": 1}),
    "words": ParamSpec(shape=(5, 2), shards={"tp": 0}, pad=True),
    "gate": ParamSpec(shape=(3, 5), partial=True, keep_fp32=True),
    "uneven": ParamSpec(
        shape=(3, 4), shards={"ep": 0, "etp": 1}, domain="expert", slots=(0, 1, 2, -1)
    ),
    "copied": ParamSpec(shape=(3, 4), shards={"ep": 0}, domain="expert", slots=(2, 0, 1, 2)),
    "both": ParamSpec(shape=(12,), shards={"ep": 0, "etp": 0}, domain="expert"),
}


class Some(ParallelModule):
    """One parameter of each kind of sharding."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh)
        for name, spec in SPECS.items():
            self.add_parameter(name, spec, torch.float32)


def lie(layout: ParallelLayout) -> dict[str, Any]:
    mesh = Mesh(layout)
    model = Some(mesh)
    found: dict[str, Any] = {"place": {a: mesh.coordinate(a) for a in ("tp", "ep", "etp")}}
    for name, spec in SPECS.items():
        param = getattr(model, name)
        index = local_index(param, spec)
        local = to_local(param)
        assert tuple(local.shape) == tuple(len(i) for i in index)
        # Each element becomes its own logical number, so that a gather must undo every split.
        number = torch.zeros(local.shape)
        for dim, places in enumerate(index):
            shape = [-1 if d == dim else 1 for d in range(local.dim())]
            number = number * spec.shape[dim] + places.clamp(min=0).view(shape)
        with torch.no_grad():
            local.copy_(number)
        placements = gradient_placements(param, spec)
        grid = param.device_mesh.mesh_dim_names
        owed = tuple(a for a, p in zip(grid, placements, strict=True) if p.is_partial())
        found[name] = ([i.tolist() for i in index], full_logical(param, spec, mesh), owed)
    return found


@pytest.mark.parametrize(
    ("layout", "tp", "ep", "etp"),
    [
        (ParallelLayout(), 1, 1, 1),
        (ParallelLayout(tp=2, ep=2, etp=2), 2, 2, 2),
        (ParallelLayout(tp=4, ep=4), 4, 4, 1),
        (ParallelLayout(cp=2, tp=2, etp=2), 2, 1, 2),
    ],
)
def test_where_each_element_lies(layout: ParallelLayout, tp: int, ep: int, etp: int) -> None:
    """D9, D11, G2: local indices, padding, slots and gathers; what each gradient owes."""

    def part(values: list[int], size: int, rank: int) -> list[int]:
        share = len(values) // size
        return values[rank * share : (rank + 1) * share]

    for got in run_ranks(lie, 4, layout):
        at = got["place"]
        t, e, f = at["tp"], at["ep"], at["etp"]
        padded = [*range(5), *[-1] * (-5 % tp)]
        want = {
            "column": [part([*range(8)], tp, t), [*range(5)]],
            "row": [[*range(5)], part([*range(8)], tp, t)],
            "words": [part(padded, tp, t), [0, 1]],
            "gate": [[0, 1, 2], [*range(5)]],
            "uneven": [part([0, 1, 2, -1], ep, e), part([*range(4)], etp, f)],
            "copied": [part([2, 0, 1, 2], ep, e), [*range(4)]],
            "both": [part(part([*range(12)], ep, e), etp, f)],
        }
        for name, spec in SPECS.items():
            index, full, owed = got[name]
            assert index == want[name], name
            numbers = torch.arange(float(full.numel())).view(spec.shape)
            assert torch.equal(full, numbers), name
            axes = {"dense": ("dp_cp",), "expert": ("edp",)}[spec.domain]
            assert owed == ((*axes, "tp") if spec.partial else axes), name


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (ParamSpec(shape=(6, 4), shards={"tp": 0}), ["dimension 0", "[6, 4]", "tp=4", "divisors"]),
        (ParamSpec(shape=(4, 6), shards={"tp": 1}, pad=True), ["dimension 1", "tp=4", "of 6"]),
        (
            ParamSpec(shape=(4, 6), shards={"ep": 0, "etp": 1}, domain="expert", slots=(0, 1, 2)),
            ["dimension 0", "ep=2", "divisors of 3"],
        ),
        (
            ParamSpec(shape=(6,), shards={"ep": 0, "etp": 0}, domain="expert"),
            ["dimension 0", "ep*etp=4", "divisors of 6"],
        ),
    ],
)
def test_what_does_not_split_is_refused(spec: ParamSpec, words: list[str]) -> None:
    """D9, F3: a dimension that its axes do not divide is refused with the fix, unallocated."""
    for text in run_ranks(refusal, 4, spec):
        for word in words:
            assert word in text, word


def refusal(spec: ParamSpec) -> str:
    module = ParallelModule(Mesh(ParallelLayout(tp=4, ep=2, etp=2)))
    try:
        module.add_parameter("weight", spec, torch.float32)
    except ConfigError as error:
        assert not list(module.parameters())
        return str(error)
    return "no error"


def test_column_linear_of_one_process_is_plain() -> None:
    """D2: on one process a parameter is still a DTensor whose local part is the whole."""
    layer = ColumnParallelLinear(4, 6, Mesh.single(), bias=True)
    initialise(layer, 0)
    assert isinstance(layer.weight, DTensor)
    assert tuple(to_local(layer.weight).shape) == (6, 4)
    x = torch.randn(5, 4)
    weight, bias = to_local(layer.weight), to_local(layer.bias)
    torch.testing.assert_close(layer(x), torch.nn.functional.linear(x, weight, bias))


class Sum(ParallelModule):
    """Two vectors that are added, and a matrix."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh)
        for name in ("first", "second"):
            self.add_parameter(name, ParamSpec(shape=(3,), role="bias", init=ONES), torch.float32)
        self.add_parameter("matrix", ParamSpec(shape=(3, 3)), torch.float32)


def test_terms_of_a_sum_do_not_share_a_gradient() -> None:
    """G1, G3: a sum gives its terms one gradient; what clips one must not clip the other."""
    model = Sum(Mesh.single())
    initialise(model, 0)
    x = torch.tensor([1.0, 2.0, 3.0])
    for _ in range(3):
        ((model.local("first") + model.local("second")) * x).sum().backward()
    first, second = (model.get_parameter(name).grad for name in ("first", "second"))
    assert first is not None
    assert second is not None
    assert torch.equal(to_local(first), 3 * x)
    to_local(first).mul_(0.5)
    assert torch.equal(to_local(second), 3 * x)


def test_micro_batches_in_flight_share_one_cast() -> None:
    """G1, D11: fp32 weights, bf16 compute: one copy whatever is in flight, and none kept after."""
    model = Sum(Mesh.single(Runtime(compute_dtype=torch.bfloat16)))
    initialise(model, 0)
    matrix = model.get_parameter("matrix")
    weight = to_local(matrix)
    x = torch.ones(2, 3, dtype=torch.bfloat16, requires_grad=True)
    losses, casts = [], set()
    with sharing_casts():
        for _ in range(3):
            cast = model.local("matrix")
            assert cast.dtype is torch.bfloat16
            casts.add(cast.data_ptr())
            losses.append((x @ cast.t()).sum())
            del cast
        assert len(casts) == 1
        with torch.no_grad():
            assert not model.local("matrix").requires_grad
        for loss in losses:
            loss.backward()
    assert matrix.grad is not None
    torch.testing.assert_close(to_local(matrix.grad), torch.full((3, 3), 6.0))
    held = (x @ model.local("matrix").t()).sum()  # a graph that outlives the optimiser's step
    with torch.no_grad():
        weight.add_(1.0)
    torch.testing.assert_close(model.local("matrix").float(), weight, rtol=1e-2, atol=1e-2)
    assert held.requires_grad
