"""The norm of the gradient: each element once, over ranks, stages and copies; clipping by it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from moe_tp.errors import ConfigError
from moe_tp.parallel.gradients import (
    clip_grad_norm,
    settle_gradients,
)
from moe_tp.parallel.layout import ParallelLayout
from moe_tp.parallel.mesh import Mesh
from moe_tp.parallel.parameter import ParallelModule, initialise, named_specs
from moe_tp.parallel.shards import to_local
from moe_tp.parallel.spec import ONES, ParamSpec
from moe_tp.testing import run_ranks


class Pair(ParallelModule):
    """C34's model: a dense vector and an expert vector, one expert a rank."""

    def __init__(self, mesh: Mesh, dense: ParamSpec, expert: bool, dtype: torch.dtype) -> None:
        super().__init__(mesh)
        self.add_parameter("dense", dense, dtype)
        if expert:
            spec = ParamSpec(shape=(2,), shards={"ep": 0}, domain="expert", init=ONES)
            self.add_parameter("expert", spec, dtype)


def c34(case: str, dtype: torch.dtype) -> Any:
    tp = case == "tp sharded"
    mesh = Mesh(ParallelLayout(tp=2, ep=2) if tp else ParallelLayout(ep=2))
    r = mesh.rank
    spec = ParamSpec(shape=(2,), shards={"tp": 0} if tp else {}, init=ONES)
    model = Pair(mesh, spec, expert=not (case == "no expert" and r == 1), dtype=dtype)
    initialise(model, 0)
    # The replicas' shares add up to [3, 4]; of the sharded vector each rank has its own number.
    share = [[3.0], [4.0]][r] if tp else [[1.0, 3.5], [2.0, 0.5]][r]
    loss = (model.local("dense") * torch.tensor(share, dtype=dtype)).sum()
    if "expert" in model.specs and not (case.startswith("none") and r == 1):
        bad = {"inf": math.inf, "nan": math.nan}.get(case.split()[0], 84.0)
        loss = loss + (model.local("expert") * (12.0, bad)[r]).sum()
    loss.backward()
    settle_gradients(model)
    kind = math.inf if case.endswith("max norm") else 2.0
    if case == "raise":
        model.dense.grad.mul_(math.inf)
        with pytest.raises(ConfigError, match="gradient norm is inf"):
            clip_grad_norm(model, 1.0, error_if_nonfinite=True)
    norm = clip_grad_norm(model, 1.0, norm_type=kind)
    grads = {e.fqn: to_local(e.param.grad).tolist() for e in named_specs(model)}
    return norm, grads


@pytest.mark.parametrize(
    ("case", "norm"),
    [
        ("plain", 85.0),
        ("tp sharded", 85.0),
        ("no expert", 13.0),
        ("none", 13.0),
        ("max norm", 84.0),
        ("none max norm", 12.0),
    ],
)
def test_the_norm_counts_each_element_once(case: str, norm: float) -> None:
    """G3, C34, D3: sqrt(3^2 + 4^2 + 12^2 + 84^2) = 85 on both ranks; one factor clips all."""
    for dtype in (torch.float32, torch.float64):
        results = run_ranks(c34, 2, case, dtype)
        for rank, (got, grads) in enumerate(results):
            assert got == pytest.approx(norm, rel=1e-7)
            want = {"dense": [3.0, 4.0], "expert": [(12.0, 84.0)[rank]]}
            if case == "tp sharded":
                want["dense"] = [(3.0, 4.0)[rank]]
            if case == "no expert" and rank == 1:
                del want["expert"]
            if case.startswith("none") and rank == 1:
                want["expert"] = [0.0]
            for name, values in want.items():
                assert grads[name] == pytest.approx([v / norm for v in values], rel=1e-6)
            assert len(grads) == len(want)
        assert results[0][0] == results[1][0]
    if case == "plain":
        assert results[0][1]["dense"] == pytest.approx([0.035294, 0.047059], abs=1e-6)


@pytest.mark.parametrize("case", ["inf", "nan", "inf max norm", "nan max norm", "raise"])
def test_a_gradient_that_is_not_finite_is_seen_by_all(case: str) -> None:
    """C34, F1: every rank finds the same non-finite norm and leaves its gradients, or raises."""
    for norm, grads in run_ranks(c34, 2, case, torch.float32):
        if case == "raise":
            assert norm == math.inf
            continue
        assert math.isnan(norm) if case.startswith("nan") else norm == math.inf
        assert grads["dense"] == [3.0, 4.0]


def stages() -> float:
    mesh = Mesh(ParallelLayout(pp=2, tp=2))
    module = ParallelModule(mesh)
    module.add_parameter("w", ParamSpec(shape=(1,), partial=True, init=ONES), torch.float32)
    initialise(module, 0)
    (module.local("w") * (1.5, 6.0)[mesh.stage]).sum().backward()
    settle_gradients(module)
    plain = nn.Linear(1, 1, bias=False)  # a host's own, reduced by the host
    plain.weight.grad = torch.full_like(plain.weight, 84.0)
    return clip_grad_norm(nn.ModuleList([module, plain]), 1e9)


def test_the_norm_over_stages_and_a_hosts_parameters() -> None:
    """G3, G6: stages hold different elements; a plain replicated parameter counts once."""
    for norm in run_ranks(stages, 4):
        assert norm == pytest.approx(math.sqrt(3**2 + 12**2 + 84**2))


def ends(pp: int) -> tuple[float, list[float] | None, tuple[int, ...]]:
    mesh = Mesh(ParallelLayout(pp=pp))
    module = ParallelModule(mesh)
    module.add_parameter("own", ParamSpec(shape=(1,), init=ONES), torch.float32)
    loss = module.local("own").sum() * 0
    at_end = mesh.stage in (0, pp - 1)
    if at_end:
        spec = ParamSpec(shape=(2,), init=ONES, copies=2)
        module.add_parameter("tied", spec, torch.float32)
    initialise(module, 0)
    if at_end:
        share = [1.0, 0.0] if mesh.stage == 0 else [2.0, 4.0]
        loss = loss + (module.local("tied") * torch.tensor(share)).sum()
    loss.backward()
    settle_gradients(module)
    norm = clip_grad_norm(module, 1e9)
    grad = to_local(module.tied.grad).tolist() if at_end else None
    return norm, grad, mesh.group("pp_ends").ranks


def test_a_tied_embedding_on_both_ends_of_the_pipeline() -> None:
    """C33, G2, G3: its two copies sum their gradients, keep them equal, and count once."""
    for pp in (2, 4):
        for rank, (norm, grad, ranks) in enumerate(run_ranks(ends, pp, pp)):
            assert norm == pytest.approx(5.0)
            inside = 0 < rank < pp - 1
            assert grad == (None if inside else [3.0, 4.0])
            assert ranks == ((rank,) if inside else (0, pp - 1))
