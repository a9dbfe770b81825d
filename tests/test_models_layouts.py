"""Every layout gives the one-process answer: loss, logits, router losses, gradients, norm."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from model_cases import CASES, error, hub_config

from moe_tp.checkpoint.gather import gather_named
from moe_tp.models.config import ModelConfig
from moe_tp.models.decoder import Decoder
from moe_tp.models.load import build, from_pretrained, save_pretrained
from moe_tp.parallel.gradients import clip_grad_norm, settle_gradients
from moe_tp.parallel.layout import ParallelLayout, Runtime
from moe_tp.parallel.mesh import Mesh
from moe_tp.parallel.parameter import named_specs
from moe_tp.parallel.shards import to_local
from moe_tp.testing import run_ranks

LENGTHS = (7, 5, 3, 9, 1, 6)
SPLITS = {1: (6,), 2: (4, 2), 4: (3, 0, 2, 1)}  # samples of each dp rank; one of them has none
Layout = dict[str, int]


def layout_id(layout: Any) -> str:
    return (
        "".join(f"{k}{v}" for k, v in layout.items()) if isinstance(layout, dict) else str(layout)
    )


def world_of(layout: Layout) -> int:
    return layout.get("dp", 1) * layout.get("tp", 1)


def batch_of(samples: list[int], seed: int = 0) -> dict[str, torch.Tensor]:
    """Return samples padded on the right to the longest, with a mask."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(0, 61, (n,), generator=generator) for n in LENGTHS]
    width = max((LENGTHS[s] for s in samples), default=4)
    ids = torch.zeros(len(samples), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for i, sample in enumerate(samples):
        ids[i, : LENGTHS[sample]], mask[i, : LENGTHS[sample]] = rows[sample], 1
    labels = ids.clone()
    labels[:, 4:5] = -100
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def own_samples(dp: int, rank: int) -> list[int]:
    start = sum(SPLITS[dp][:rank])
    return list(range(start, start + SPLITS[dp][rank]))


def perturb(model: Decoder) -> None:
    """Give biases, sinks and norms values that would show if they were added twice."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for entry in named_specs(model):
            local = to_local(entry.param)
            if entry.spec.role in ("bias", "norm") or local.dim() == 1:
                local += 0.3 * torch.randn(local.shape, generator=generator)


@cache
def folder_of(case: str, root: str) -> str:
    model = build(ModelConfig.from_hub(hub_config(case)), Mesh.single(), seed=5)
    perturb(model)
    path = Path(root, f"folder-{case}")
    save_pretrained(model, path)
    return str(path)


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("models"))


def measure(model: Decoder, batch: dict[str, torch.Tensor], **extra: Any) -> dict[str, Any]:
    out = model(**batch, return_logits=True, **extra)
    assert out.loss is not None
    assert out.logits is not None
    (out.loss + out.aux.loss).backward()
    settle_gradients(model)
    return {
        "loss": float(out.loss.detach()),
        "aux": float(out.aux.loss.detach()),
        "counts": out.aux.counts_LE,
        "logits": out.logits.detach(),
        "norm": clip_grad_norm(model, 1e9),
        "grads": gather_named(model, "grad"),
    }


def run_layout(folder: str, layout: Layout) -> dict[str, Any]:
    mesh = Mesh(ParallelLayout(**layout), Runtime(loss_chunk=8))
    model = from_pretrained(folder, mesh)
    return measure(model, batch_of(own_samples(mesh.size("dp"), mesh.coordinate("dp"))))


@cache
def one_process(folder: str) -> dict[str, Any]:
    return measure(from_pretrained(folder, Mesh.single()), batch_of(own_samples(1, 0)))


def compare(results: list[dict[str, Any]], expected: dict[str, Any], dp: int) -> None:
    tp = len(results) // dp
    for rank, got in enumerate(results):
        assert got["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert got["aux"] == pytest.approx(expected["aux"], rel=1e-5, abs=1e-9)
        assert got["norm"] == pytest.approx(expected["norm"], rel=1e-5)
        assert torch.equal(got["counts"], expected["counts"])
        for row, sample in enumerate(own_samples(dp, rank // tp)):
            real = slice(0, LENGTHS[sample])
            assert error(got["logits"][row, real], expected["logits"][sample, real]) < 1e-5
        assert got["grads"].keys() == expected["grads"].keys()
        for name, grad in expected["grads"].items():
            assert error(got["grads"][name], grad, expected["norm"]) < 1e-5, name


MIXTRAL_LAYOUTS: list[Layout] = [
    {"dp": 2},
    {"tp": 2},
    {"dp": 2, "ep": 2},
    {"dp": 2, "etp": 2},
    {"tp": 2, "ep": 2},
    {"tp": 2, "etp": 2},
    {"tp": 4},
    {"dp": 4, "ep": 4},
    {"dp": 4, "ep": 2, "etp": 2},
    {"dp": 2, "tp": 2},
    {"dp": 2, "tp": 2, "ep": 4},
    {"dp": 2, "tp": 2, "etp": 4},
    {"dp": 2, "tp": 2, "ep": 2, "etp": 2},
    {"tp": 4, "ep": 2, "etp": 2},
    {"tp": 4, "ep": 4},
]
OTHER_LAYOUTS: list[Layout] = [
    {"tp": 2},
    {"dp": 2, "ep": 2},
    {"tp": 2, "etp": 2},
    {"tp": 4, "ep": 2},
    {"dp": 2, "tp": 2, "ep": 4},
    {"dp": 2, "tp": 2, "ep": 2, "etp": 2},
]


@pytest.mark.parametrize("layout", MIXTRAL_LAYOUTS, ids=layout_id)
def test_mixtral(layout: Layout, root: str) -> None:
    """G1, G2, G3, L1, L2, D2, D3, D4, D9, R6, C19, C33: 6 experts, 2 KV heads, an empty rank."""
    folder = folder_of("mixtral", root)
    results = run_ranks(run_layout, world_of(layout), folder, layout)
    compare(results, one_process(folder), layout.get("dp", 1))


@pytest.mark.parametrize("layout", OTHER_LAYOUTS, ids=layout_id)
@pytest.mark.parametrize("case", [case for case in CASES if case != "mixtral"])
def test_families(case: str, layout: Layout, root: str) -> None:
    """G1, G3, D8, D9: norms over the full width, latents, sinks, biases, shared experts."""
    folder = folder_of(case, root)
    results = run_ranks(run_layout, world_of(layout), folder, layout)
    compare(results, one_process(folder), layout.get("dp", 1))


def run_odd_heads(layout: Layout, changes: dict[str, Any]) -> dict[str, Any]:
    mesh = Mesh(ParallelLayout(**layout)) if layout else Mesh.single()
    model = build(
        ModelConfig.from_hub(hub_config("mixtral", **changes)), mesh, seed=8, dtype=torch.float64
    )
    perturb_by_layout(model)
    return measure(model, batch_of(list(range(6))))


def perturb_by_layout(model: Decoder) -> None:
    """Spread the first values, so that attention is far from uniform in every layout."""
    with torch.no_grad():
        for entry in named_specs(model):
            if entry.spec.role == "weight":
                to_local(entry.param).mul_(3.0)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tp"), [(12, 3, 4), (12, 6, 4), (4, 1, 2), (6, 2, 2), (8, 4, 4)]
)
def test_head_counts(heads: int, kv_heads: int, tp: int) -> None:
    """D9, G3: KV heads that divide over tp, are fewer, or straddle the ranks' queries."""
    changes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 4}
    expected = run_odd_heads({}, changes)
    compare(run_ranks(run_odd_heads, tp, {"tp": tp}, changes), expected, 1)
