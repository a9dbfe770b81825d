"""What ZeRO leaves behind: shards at rest after every use, and sums that no cast has rounded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_models_axes import config, micro_batches
from torch.distributed.tensor import DTensor

from moe_tp import Mesh, ParallelLayout, Runtime, forward_backward, settle_gradients
from moe_tp.checkpoint.state import save_state
from moe_tp.infer import generate
from moe_tp.models import build, save_pretrained
from moe_tp.parallel.gradients import parameter_groups
from moe_tp.parallel.parameter import ParallelModule, initialise
from moe_tp.parallel.shards import to_local
from moe_tp.parallel.spec import ONES, ParamSpec
from moe_tp.parallel.zero import apply_zero
from moe_tp.testing import run_ranks


def _at_rest(model: torch.nn.Module) -> dict[str, tuple[int, tuple[Any, ...]]]:
    """Return the elements that each parameter holds here, and how it is placed."""
    assert all(isinstance(param, DTensor) for param in model.parameters())
    return {
        name: (to_local(param).numel(), tuple(param.placements))
        for name, param in model.named_parameters()
        if isinstance(param, DTensor)
    }


def uses(zero: int, folder: str) -> list[str]:
    """Return the parameters that are not at rest, by what was done before."""
    mesh = Mesh(ParallelLayout(tp=2, zero=zero))
    model = build(config("mixtral", layers=2), mesh, seed=3)
    optimiser = torch.optim.AdamW(parameter_groups(model))
    batches = micro_batches(mesh.size("dp"), mesh.coordinate("dp"))
    before = _at_rest(model)
    found: list[str] = []

    def check(what: str) -> None:
        after = _at_rest(model)
        found.extend(f"{what}: {name}" for name in before if after[name] != before[name])

    forward_backward(model, batches, backward=False)
    check("an evaluation")
    generate(model, [[1, 2, 3]], max_new_tokens=2)
    check("a generation")
    save_pretrained(model, folder + "/hub")
    check("an export")
    forward_backward(model, batches)
    settle_gradients(model)
    optimiser.step()
    check("a step")
    save_state(model, optimiser, Path(folder) / "state", {})
    check("a checkpoint")
    with torch.no_grad():
        model(batches[0]["input_ids"])
    check("a forward without gradients")
    save_pretrained(model, folder + "/again")
    check("an export after a forward")
    return found


@pytest.mark.parametrize("zero", [2, 3])
def test_parameters_are_at_rest_after_every_use(zero: int, tmp_path: Path) -> None:
    """G3, issue 3: evaluation, generation, a step and saves leave no parameter whole."""
    for found in run_ranks(uses, 4, zero, str(tmp_path), timeout=120):
        assert not found


class _Two(ParallelModule):
    """A norm-like vector whose sum over tp is owed, and a weight that tp splits."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh)
        norm = ParamSpec(shape=(2,), partial=True, keep_fp32=True, init=ONES)
        self.add_parameter("norm", norm, torch.float32)
        split = ParamSpec(shape=(4, 2), shards={"tp": 0}, init=ONES)
        self.add_parameter("weight", split, torch.float32)

    def forward(self, scale: float) -> torch.Tensor:
        norm, weight = self.local("norm"), self.local("weight")
        return (norm.float().sum() + weight.float().sum()) * scale


def sums(zero: int) -> tuple[list[float], list[float]]:
    mesh = Mesh(ParallelLayout(tp=2, zero=zero), Runtime(compute_dtype=torch.bfloat16))
    model = _Two(mesh)
    initialise(model, 0)
    apply_zero(model, mesh, [])
    same = mesh.coordinate("dp") == mesh.coordinate("tp")
    for _ in range(2):  # 256 and 1 on the two tp ranks of a replica, 1 and 256 in the other
        model(256.0 if same else 1.0).backward()
    settle_gradients(model)
    grads = [param.grad for param in model.parameters()]
    return tuple(g.full_tensor().flatten().tolist() for g in grads)  # type: ignore[union-attr]


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_sums_of_gradients_are_taken_in_fp32(zero: int) -> None:
    """R4, D6: bf16 compute; over tp and replicas 1028 and 514, of which bf16 has 1024 and 512."""
    for norm, weight in run_ranks(sums, 4, zero):
        assert norm == [1028.0, 1028.0]
        assert weight == [514.0] * 8
