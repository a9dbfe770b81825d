"""Optimisers beyond torch's AdamW: what they compute, in every layout, and after a resume."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_hubs import MIXTRAL
from torch.distributed.tensor import DTensor

from moe_tp.errors import ConfigError
from moe_tp.models import ModelConfig, build, save_pretrained
from moe_tp.models.decoder import Decoder
from moe_tp.parallel.layout import ParallelLayout, Runtime
from moe_tp.parallel.mesh import Mesh
from moe_tp.parallel.parameter import named_specs
from moe_tp.parallel.random import hash_normal, key_of
from moe_tp.parallel.shards import full_logical, local_index, to_local
from moe_tp.parallel.zero import reshard
from moe_tp.testing import run_ranks
from moe_tp.train.adamw import SmallAdamW, round_stochastic
from moe_tp.train.config import FinetuneConfig, TrainConfig
from moe_tp.train.loop import finetune
from moe_tp.train.muon import orthogonal
from moe_tp.train.optim import make_optimizer
from moe_tp.train.settings import from_mapping

HUB: dict[str, Any] = {**MIXTRAL, "num_hidden_layers": 1}


def make(
    layout: dict[str, int], dtype: torch.dtype, *, offload: bool = False, **hub: Any
) -> Decoder:
    split = torch.distributed.is_initialized()
    runtime = Runtime(master_dtype=dtype, offload=offload)
    mesh = Mesh(ParallelLayout(**layout), runtime) if split else Mesh.single(runtime)
    return build(ModelConfig.from_hub({**HUB, **hub}), mesh, seed=1, dtype=dtype)


def give_gradients(model: Decoder, step: int) -> None:
    """Gradients that are a function of the logical element."""
    reshard(model)
    for entry in named_specs(model):
        assert isinstance(entry.param, DTensor)
        number = torch.zeros((), dtype=torch.int64)
        for i, size in zip(local_index(entry.param, entry.spec), entry.spec.shape, strict=True):
            number = number.unsqueeze(-1) * size + i.clamp(min=0)
        values = hash_normal(key_of(entry.fqn, step), number).to(entry.param.dtype)
        for dim, i in enumerate(local_index(entry.param, entry.spec)):
            values = values.movedim(dim, 0).where((i >= 0).view(-1, *[1] * (values.dim() - 1)), 0)
            values = values.movedim(0, dim)
        grad = torch.zeros_like(entry.param)
        to_local(grad).copy_(values)
        entry.param.grad = grad


def updated(
    layout: dict[str, int],
    dtype: torch.dtype,
    settings: dict[str, Any],
    steps: int = 3,
    offload: bool = False,
    **hub: Any,
) -> dict[str, torch.Tensor]:
    """All logical weights after steps on made-up gradients."""
    model = make(layout, dtype, offload=offload, **hub)
    config = TrainConfig(
        steps=steps, lr=1e-2, router_lr=3e-3, weight_decay=0.1, eps=1e-6, **settings
    )
    optimizer = make_optimizer(model, config)
    for step in range(steps):
        give_gradients(model, step)
        optimizer.step()
    return {e.fqn: full_logical(e.param, e.spec, model.mesh) for e in named_specs(model)}


LAYOUTS = [
    {"tp": 2, "ep": 1, "etp": 2},
    {"dp": 2, "ep": 2, "zero": 3},
    pytest.param({"dp": 2, "zero": 1}, marks=pytest.mark.slow),
]
EXACT = [
    (torch.float64, {"optimizer": "muon", "momentum": 0.95}),
    (torch.bfloat16, {"moments": "bfloat16"}),
    (torch.float32, {"kernel": "fused"}),
    (torch.float32, {"kernel": "foreach"}),
]


def updated_in_turn(layout: dict[str, int]) -> list[dict[str, torch.Tensor]]:
    return [updated(layout, dtype, settings) for dtype, settings in EXACT]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_takes_the_same_step(layout: dict[str, int]) -> None:
    """G5, N2: Muon over split matrices; stochastic rounding, bit for bit; torch's kernels."""
    expected = updated_in_turn({})
    for found in run_ranks(updated_in_turn, 2, layout):
        for (dtype, settings), mine, other in zip(EXACT, expected, found, strict=True):
            for name in mine:
                if dtype == torch.bfloat16:
                    assert torch.equal(mine[name], other[name]), (settings, name)
                else:
                    error = float((mine[name] - other[name]).abs().max())
                    assert error < (1e-12 if dtype == torch.float64 else 1e-7), (settings, name)
    loop = updated({}, torch.float32, {"kernel": "loop"})
    for one in expected[2:]:
        assert all(torch.allclose(one[n], loop[n], rtol=0, atol=1e-6) for n in loop)


def test_it_is_adamw() -> None:
    """Against torch's, fp64: `SmallAdamW` with moments as wide as the weights."""
    model = make({}, torch.float64)
    groups = make_optimizer(model, TrainConfig(steps=1, lr=1e-2, weight_decay=0.1)).param_groups
    kept = ("params", "lr", "weight_decay")
    mine = SmallAdamW(
        [{k: g[k] for k in kept} for g in groups], named_specs(model), lr=1.0, betas=(0.8, 0.9)
    )
    other = make({}, torch.float64)
    pairs = dict(zip(model.parameters(), other.parameters(), strict=True))
    theirs = torch.optim.AdamW(
        [{**{k: g[k] for k in kept}, "params": [pairs[p] for p in g["params"]]} for g in groups],
        betas=(0.8, 0.9),
    )
    for step in range(4):
        give_gradients(model, step)
        give_gradients(other, step)
        mine.step()
        theirs.step()
    for one, two in pairs.items():
        assert torch.allclose(to_local(one), to_local(two), rtol=0, atol=1e-14)


OFFLOADED = [
    (torch.float32, {"optimizer": "muon", "momentum": 0.95}),
    (torch.bfloat16, {"moments": "bfloat16"}),
    (torch.float32, {"moments": "8bit"}),
]


def offloaded(layout: dict[str, int]) -> list[bool]:
    """Whether weights in host memory take the same step, bit for bit."""
    found = []
    for dtype, settings in OFFLOADED:
        if settings.get("moments") == "8bit" and importlib.util.find_spec("torchao") is None:
            continue
        beside = updated(layout, dtype, settings)
        apart = updated(layout, dtype, settings, offload=True)
        found.append(all(torch.equal(apart[n], beside[n]) for n in beside))
    return found


@pytest.mark.parametrize("layout", [{"dp": 2, "ep": 2, "zero": 3}, {"dp": 2, "zero": 1}], ids=str)
def test_each_optimiser_steps_in_host_memory(layout: dict[str, int]) -> None:
    """Offload with Muon, with weights and moments in bf16, and with moments of 8 bits."""
    for rank in run_ranks(offloaded, 2, layout):
        assert all(rank)


@pytest.mark.parametrize("moments", ["bfloat16", "8bit"])
@pytest.mark.parametrize("settings", [{}, {"optimizer": "muon", "momentum": 0.95}], ids=str)
def test_narrow_moments_beside_fp64_weights(settings: dict[str, Any], moments: str) -> None:
    """Weights of fp64 are updated in fp64, whatever their moments are kept in."""
    if moments == "8bit":
        pytest.importorskip("torchao")
    sizes = {"hidden_size": 64, "intermediate_size": 32}
    start = {e.fqn: to_local(e.param) for e in named_specs(make({}, torch.float64, **sizes))}
    wide = updated({}, torch.float64, settings, **sizes)
    found = updated({}, torch.float64, {**settings, "moments": moments}, **sizes)
    moved = torch.cat([(wide[n] - start[n]).flatten() for n in wide])
    off = torch.cat([(wide[n] - found[n]).flatten() for n in wide])
    assert all(value.dtype == torch.float64 for value in found.values())
    assert 0 < float(off.norm() / moved.norm()) < 0.05


def test_each_expert_is_a_matrix_of_its_own_to_muon() -> None:
    """G5: against torch.optim.Muon on every matrix; AdamW for embedding, head, norms, router."""
    if not hasattr(torch.optim, "Muon"):
        pytest.fail("this torch has no Muon to compare with")
    model = make({}, torch.float32)
    before = {e.fqn: to_local(e.param).clone() for e in named_specs(model)}
    after = updated({}, torch.float32, {"optimizer": "muon", "momentum": 0.95}, steps=1)
    adamw = updated({}, torch.float32, {}, steps=1)
    give_gradients(model, 0)
    seen = 0
    for entry in named_specs(model):
        if entry.fqn in ("embed.weight", "head.weight") or entry.spec.role in ("norm", "router"):
            assert torch.allclose(after[entry.fqn], adamw[entry.fqn], rtol=0, atol=1e-7)
            continue
        rows, columns = before[entry.fqn].shape[-2:]
        grads = to_local(entry.param.grad).reshape(-1, rows, columns)  # type: ignore[arg-type]
        for n, start in enumerate(before[entry.fqn].reshape(-1, rows, columns)):
            one = torch.nn.Parameter(start.clone())
            one.grad = grads[n]
            torch.optim.Muon(
                [one], lr=1e-2, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"
            ).step()  # in bf16
            moved = after[entry.fqn].reshape(-1, rows, columns)[n] - start
            error = (moved - (one.detach() - start)).norm() / moved.norm()
            assert error < 6e-2, entry.fqn
            seen += 1
    assert seen == 4 + 6 * 3  # q k v o, and three matrices an expert


def test_singular_values_are_moved_near_one() -> None:
    """G5: five times the polynomial on each singular value, taken from an SVD (fp64)."""
    for shape in ((3, 8, 5), (2, 4, 16)):
        x = torch.randn(shape, dtype=torch.float64)
        u, values, v = torch.linalg.svd(x, full_matrices=False)
        values = values / values.norm(dim=-1, keepdim=True)
        for _ in range(5):
            values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
        assert float(values.min()) > 0.6
        assert float(values.max()) < 1.3
        expected = u * values.unsqueeze(-2) @ v
        assert torch.allclose(orthogonal(x), expected, rtol=0, atol=1e-10)
    assert not orthogonal(torch.zeros(2, 3, 4)).any()


def test_stochastic_rounding_is_right_on_average() -> None:
    """The mean of many draws is the value; what bf16 holds stays; infinities stay."""
    value = torch.full((200_000,), 1.0 + 2**-10)  # an eighth of the way to the next bf16
    bits = torch.arange(len(value)) * 0x9E3779B9 % (1 << 32)
    rounded = round_stochastic(value, bits).float()
    assert set(rounded.tolist()) == {1.0, 1.0 + 2**-7}
    assert float(rounded.double().mean()) == pytest.approx(1.0 + 2**-10, abs=1e-4)
    exact = torch.tensor([1.5, -3.0, 0.0, float("inf"), -float("inf")])
    assert torch.equal(round_stochastic(exact, torch.full((5,), -1)).float(), exact)
    assert torch.isnan(round_stochastic(torch.tensor([float("nan")]), torch.tensor([3]))).all()


def test_bf16_weights_do_not_lose_small_updates() -> None:
    """300 updates of a 1000th of a unit of the last place: round-to-nearest would stand still."""
    model = make({}, torch.bfloat16)
    (entry,) = [e for e in named_specs(model) if e.fqn == "layers.0.attention.q.weight"]
    with torch.no_grad():
        to_local(entry.param).fill_(1.0)
    optimizer = SmallAdamW(
        [{"params": [entry.param]}], [entry], lr=2**-7 / 100, moments="bfloat16", seed=3
    )
    for _ in range(300):
        entry.param.grad = torch.ones_like(entry.param)
        optimizer.step()
    moved = 1.0 - float(to_local(entry.param).double().mean())
    assert moved == pytest.approx(3 * 2**-7, rel=0.2)
    kinds = {optimizer.state[entry.param][name].dtype for name in ("exp_avg", "exp_avg_sq")}
    assert kinds == {torch.bfloat16}


@pytest.mark.parametrize(
    ("train", "runtime"),
    [
        ({"moments": "bfloat16"}, {"master_dtype": "bfloat16"}),
        ({"optimizer": "muon", "momentum": 0.95}, {}),
        ({"moments": "8bit"}, {}),
    ],
    ids=["bf16", "muon", "8bit"],
)
def test_a_resume_keeps_all_state(
    tmp_path: Path, train: dict[str, Any], runtime: dict[str, Any]
) -> None:
    """K4: the losses after a resume are bit for bit those of the run that never stopped; in 8 bits,
    whose blocks are scaled anew, they are near."""
    if train.get("moments") == "8bit" and importlib.util.find_spec("torchao") is None:
        with pytest.raises(ConfigError, match="needs torchao, which is not installed"):
            make_optimizer(make({}, torch.float32), TrainConfig(steps=1, moments="8bit"))
        return
    wide = {**HUB, "hidden_size": 32, "intermediate_size": 64}
    save_pretrained(build(ModelConfig.from_hub(wide), Mesh.single(), seed=1), tmp_path / "model")
    lines = [json.dumps({"input_ids": [(7 * n + 3 * i) % 61 for i in range(24)]}) for n in range(9)]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    curves = []
    for output, stops in (("whole", [6]), ("parts", [3, 6])):
        tree = {
            "model": str(tmp_path / "model"),
            "output": str(tmp_path / output),
            "data": {"train": str(tmp_path / "train.jsonl"), "seq_len": 24},
            "runtime": runtime,
            "train": {"schedule": "constant", "lr": 1e-2, "global_batch": 2, "save_every": 3},
        }
        for steps in stops:
            tree["train"] = {**tree["train"], **train, "steps": steps}  # type: ignore[dict-item]
            config = from_mapping(FinetuneConfig, tree, "test")
            finetune(config, Mesh.single(config.runtime), quiet=True, resume=steps != stops[0])
        text = (tmp_path / output / "metrics.jsonl").read_text().splitlines()
        curves.append([json.loads(line)["loss"] for line in text])
    assert len(curves[0]) == 6
    if train.get("moments") == "8bit":
        assert curves[0][:4] == curves[1][:4]
        assert curves[0] == pytest.approx(curves[1], abs=0.02)
    else:
        assert curves[0] == curves[1]
    assert curves[0][-1] < curves[0][0]


def test_moments_of_8_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of the memory, and updates within a few per cent of fp32's; refused without."""
    monkeypatch.setitem(sys.modules, "torchao.optim.subclass_8bit", None)
    with pytest.raises(ConfigError, match="needs torchao, which is not installed"):
        make_optimizer(make({}, torch.float32), TrainConfig(steps=1, moments="8bit"))
    monkeypatch.undo()
    if importlib.util.find_spec("torchao") is None:
        return
    found = {}
    for moments in ("float32", "8bit"):
        model = make({}, torch.float32, hidden_size=64, intermediate_size=32)
        entries = [e for e in named_specs(model) if e.fqn.endswith("experts.gate_up")]
        optimizer = SmallAdamW(
            [{"params": [e.param for e in entries]}], entries, lr=1e-2, moments=moments
        )
        start = to_local(entries[0].param).clone()
        for step in range(5):
            give_gradients(model, step)
            optimizer.step()
        found[moments] = to_local(entries[0].param) - start
        if moments == "8bit":
            assert optimizer.state[entries[0].param]["exp_avg"].codes.dtype == torch.uint8
    error = (found["8bit"] - found["float32"]).norm() / found["float32"].norm()
    assert error < 0.05


def test_settings_that_do_not_go_together_are_refused() -> None:
    """F3."""
    with pytest.raises(ConfigError, match=r"train\.kernel='fused' is one of AdamW"):
        TrainConfig(steps=1, kernel="fused", moments="bfloat16")
    with pytest.raises(ConfigError, match=r"train\.moments='8bit' is for adamw and muon"):
        TrainConfig(steps=1, optimizer="sgd", moments="8bit")
