"""Pipeline, context, ZeRO and recompute against one process, in fp64 on whole models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from model_cases import BASE, CASES

from moe_tp import Mesh, ParallelLayout, Runtime, clip_grad_norm, forward_backward, settle_gradients
from moe_tp.checkpoint import gather_named
from moe_tp.errors import ConfigError
from moe_tp.models import ModelConfig, build
from moe_tp.parallel.collectives import raw_all_gather, record_traffic
from moe_tp.parallel.gradients import parameter_groups
from moe_tp.parallel.live import LiveBytes
from moe_tp.parallel.pipeline.stages import deal_layers, given_layers, holder_of, stages_of
from moe_tp.testing import run_ranks

STEPS = 2
LENGTH = 9  # odd, and no multiple of what cp and tp want

Case = tuple[dict[str, Any], dict[str, Any]]
LAYOUTS: dict[int, list[Case]] = {
    2: [
        ({"pp": 2}, {"pp_schedule": "zbv", "recompute": "full"}),
        ({"cp": 2}, {"cp_kind": "ring"}),
        ({"cp": 2, "ep": 2}, {"cp_kind": "ulysses", "recompute": "selective"}),
        ({"zero": 3, "ep": 2}, {"recompute": "selective"}),
    ],
    4: [
        ({"pp": 2, "ep": 2, "zero": 1}, {"pp_schedule": "interleaved_1f1b", "virtual_stages": 2}),
        ({"cp": 2, "tp": 2, "ep": 2, "etp": 2}, {"cp_kind": "ring"}),
        ({"cp": 2, "zero": 3, "ep": 4}, {"recompute": "full"}),
    ],
}
MORE: dict[int, list[Case]] = {
    2: [({"pp": 2}, {"pp_schedule": "gpipe"}), ({"zero": 2}, {})],
    4: [
        ({"pp": 2, "tp": 2, "etp": 2}, {"pp_schedule": "1f1b"}),
        ({"pp": 4}, {"pp_schedule": "1f1b"}),
        ({"cp": 2, "pp": 2, "zero": 1}, {"cp_kind": "ulysses"}),
        ({"tp": 2, "zero": 2, "ep": 2, "etp": 2}, {}),
    ],
}


def config(name: str, layers: int = 4, **changes: Any) -> ModelConfig:
    return ModelConfig.from_hub({**BASE, **CASES[name], "num_hidden_layers": layers, **changes})


def micro_batches(dp: int, rank: int) -> list[dict[str, torch.Tensor]]:
    """Four packed and masked micro-batches; rank r of dp takes every dp-th row of each."""
    g = torch.Generator().manual_seed(4)
    positions = torch.cat([torch.arange(4), torch.arange(LENGTH - 4)]).expand(2, LENGTH)
    result = []
    for m in range(4):
        ids = torch.randint(0, BASE["vocab_size"], (2, LENGTH), generator=g)
        mask = torch.ones_like(ids)
        mask[1, LENGTH - m :] = 0
        sample = {
            "input_ids": ids,
            "labels": ids,
            "attention_mask": mask,
            "position_ids": positions,
        }
        part: dict[str, Any] = {k: v[rank::dp] for k, v in sample.items()}
        part["sample_offset"] = 2 * m + rank
        result.append(part)
    return result


def train(
    name: str, layout: dict[str, Any], runtime: dict[str, Any], changes: dict[str, Any]
) -> dict[str, Any]:
    """Two SGD steps: losses, first gradients, weights after, and logits of the first batch."""
    mesh = Mesh(ParallelLayout(**layout), Runtime(**runtime))
    model = build(config(name, **changes), mesh, seed=3, dtype=torch.float64)
    optimiser = torch.optim.SGD(parameter_groups(model), lr=0.1, momentum=0.9)
    batches = micro_batches(mesh.size("dp"), mesh.coordinate("dp"))
    out: dict[str, Any] = {"losses": [], "norms": []}
    for step in range(STEPS):
        result = forward_backward(model, batches, step=step)
        settle_gradients(model)
        if step == 0:
            out["grads"] = gather_named(model, "grad")
        out["losses"] += [result.loss.item(), result.aux.loss.item()]
        out["norms"].append(clip_grad_norm(model, 1.0))
        optimiser.step()
        optimiser.zero_grad()
    evaluated = forward_backward(model, batches, backward=False)
    out["losses"] += [evaluated.loss.item(), evaluated.aux.loss.item()]
    out["counts"] = result.aux.counts_LE
    call = {k: v for k, v in batches[0].items() if k in ("input_ids", "position_ids")}
    with torch.no_grad():
        logits = model(**call).logits
    # Rank r of dp had every dp-th row; with dp 4 two ranks had none.
    missing = -(-2 // mesh.size("dp")) - len(logits)
    rows = raw_all_gather(F.pad(logits, (0, 0, 0, 0, 0, missing))[None], mesh.group("dp"))
    out["logits"] = rows.transpose(0, 1).flatten(0, 1)[:2]
    out["weights"] = gather_named(model, "param")
    return out


def relative(got: torch.Tensor, want: torch.Tensor, floor: float) -> float:
    return float((got - want).norm() / max(want.norm().item(), floor))


def compare(name: str, world: int, cases: list[Case], **changes: Any) -> None:
    """Run the cases and one process; `changes` are of the model's configuration."""
    reference = run_ranks(train, 1, name, {}, {}, changes)[0]
    for layout, runtime in cases:
        for result in run_ranks(train, world, name, layout, runtime, changes, timeout=120):
            where = f"{name} {layout} {runtime}"
            assert result["losses"] == pytest.approx(reference["losses"], rel=1e-9), where
            assert result["norms"] == pytest.approx(reference["norms"], rel=1e-9), where
            assert torch.equal(result["counts"], reference["counts"]), where
            assert relative(result["logits"], reference["logits"], 1e-9) < 1e-9, where
            for kind in ("grads", "weights"):
                assert result[kind].keys() == reference[kind].keys(), where
                for key, want in reference[kind].items():
                    assert relative(result[kind][key], want, 1e-6) < 1e-9, f"{where} {kind} {key}"


@pytest.mark.parametrize("world", [2, 4])
def test_mixtral_equals_one_process(world: int) -> None:
    """G1, G3, G5, L1, L2, L3, N1, N3, D2, D4, C54: losses, gradients, norms, weights, logits."""
    compare("mixtral", world, LAYOUTS[world])


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_mixtral_equals_one_process_on_more_layouts(world: int) -> None:
    """G1, G3, G5: a stage a rank, and pipeline with tensor and context parallelism."""
    compare("mixtral", world, MORE[world])


def test_tied_windowed_model_with_dropout() -> None:
    """N2, N3, C33: a tied head on two stages, a window under cp, masks replayed in recompute."""
    compare(
        "mixtral-window-tied",
        2,
        [
            ({"pp": 2}, {"pp_schedule": "1f1b", "recompute": "full"}),
            ({"cp": 2}, {"cp_kind": "ring", "recompute": "full"}),
            ({"cp": 2, "zero": 3}, {"recompute": "selective"}),
        ],
        residual_dropout=0.1,
    )


@pytest.mark.parametrize(
    "name",
    ["deepseek_v3"]
    + [
        pytest.param(name, marks=pytest.mark.slow)
        for name in (
            "gpt_oss",
            "qwen3_moe",
            "qwen2_moe",
            "olmoe",
            "granitemoe",
            "deepseek_v2",
            "glm4_moe",
        )
    ],
)
def test_families_under_pipeline_context_and_zero(name: str) -> None:
    """G1: latent attention, sinks, windows, dense first layers and shared experts."""
    compare(
        name,
        2,
        [
            ({"pp": 2}, {}),
            ({"cp": 2}, {"cp_kind": "ring"}),
            ({"cp": 2}, {"cp_kind": "ulysses"}),
            ({"zero": 3}, {}),
        ],
        layers=2,
    )


def empty_ranks(layout: dict[str, Any], runtime: dict[str, Any]) -> tuple[float, float]:
    mesh = Mesh(ParallelLayout(**layout), Runtime(**runtime))
    model = build(config("mixtral"), mesh, seed=3, dtype=torch.float64)
    batches = micro_batches(1, 0)
    if mesh.size("dp") > 1:
        batches = {0: batches[:3], 1: batches[3:]}.get(mesh.coordinate("dp"), [])
    result = forward_backward(model, batches)
    settle_gradients(model)
    return result.loss.item(), clip_grad_norm(model, 1e9)


def test_ranks_with_fewer_micro_batches() -> None:
    """D2, L1, C19, C52: a dp rank with one micro-batch beside one with three."""
    cases: list[Case] = [({"pp": 2}, {}), ({"zero": 3}, {}), ({"cp": 2, "zero": 1}, {})]
    losses = {run_ranks(empty_ranks, 1, {}, {})[0][0]}
    for layout, runtime in cases:
        losses |= {round(r[0], 9) for r in run_ranks(empty_ranks, 4, layout, runtime)}
    assert max(losses) - min(losses) < 1e-8


def few(layout: dict[str, Any], runtime: dict[str, Any], count: int) -> tuple[list[float], Any]:
    """Losses, norm, load and gradients of `count` micro-batches, the same for every layout."""
    mesh = Mesh(ParallelLayout(**layout), Runtime(**runtime))
    model = build(config("mixtral", router_aux_loss_coef=0.1), mesh, seed=3, dtype=torch.float64)
    dp = (mesh.size("dp"), mesh.coordinate("dp"))
    batches = (micro_batches(*dp) * 2)[:count]
    result = forward_backward(model, batches)
    settle_gradients(model)
    numbers = [result.loss.item(), result.aux.loss.item(), clip_grad_norm(model, 1e9)]
    return numbers + result.aux.counts_LE.flatten().tolist(), gather_named(model, "grad")


FEW: list[tuple[int, dict[str, Any], dict[str, Any], int]] = [
    (2, {"pp": 2}, {"pp_schedule": "1f1b"}, 1),
    (2, {"pp": 2}, {"pp_schedule": "interleaved_1f1b", "virtual_stages": 2}, 5),
    (2, {"pp": 2}, {"pp_schedule": "zbv"}, 1),
]
FEW_ON_FOUR: list[tuple[int, dict[str, Any], dict[str, Any], int]] = [
    (4, {"pp": 4}, {"pp_schedule": "1f1b"}, 3),
    (4, {"pp": 4}, {"pp_schedule": "gpipe"}, 2),
    (2, {"pp": 2}, {"pp_schedule": "interleaved_1f1b", "virtual_stages": 2}, 1),
    (2, {"pp": 2}, {"pp_schedule": "zbv"}, 3),
    (4, {"pp": 2, "ep": 2}, {"pp_schedule": "interleaved_1f1b", "virtual_stages": 2}, 7),
]


@pytest.mark.parametrize("cases", [FEW, pytest.param(FEW_ON_FOUR, marks=pytest.mark.slow)])
def test_any_number_of_micro_batches_goes_through_a_pipeline(
    cases: list[tuple[int, dict[str, Any], dict[str, Any], int]],
) -> None:
    """G1, L1, L3, N1: fewer than stages, or no multiple of the rounds of interleaved 1F1B."""
    for world, layout, runtime, count in cases:
        want, grads = run_ranks(few, 1, {}, {}, count)[0]
        for got, found in run_ranks(few, world, layout, runtime, count):
            where = f"{layout} {runtime} {count}"
            assert got == pytest.approx(want, rel=1e-9), where
            for key, value in grads.items():
                assert relative(found[key], value, 1e-6) < 1e-9, f"{where} {key}"


def uneven_lengths(layout: dict[str, Any], runtime: dict[str, Any]) -> tuple[list[float], Any]:
    """Rows of 13 and of 5 tokens: padded to one batch in one process, as they are on two."""
    mesh = Mesh(ParallelLayout(**layout), Runtime(**runtime))
    model = build(config("mixtral", 2), mesh, seed=3, dtype=torch.float64)
    g = torch.Generator().manual_seed(5)
    long = torch.randint(0, BASE["vocab_size"], (1, 13), generator=g)
    short = torch.randint(0, BASE["vocab_size"], (2, 5), generator=g)
    if mesh.size("dp") > 1:
        own = (long, short)[mesh.coordinate("dp")]
        batch = {"input_ids": own, "labels": own}
    else:
        ids = torch.cat([long, F.pad(short, (0, 8))])
        mask = torch.ones_like(ids)
        mask[1:, 5:] = 0
        batch = {"input_ids": ids, "labels": ids, "attention_mask": mask}
    batch["sample_offset"] = mesh.coordinate("dp")  # type: ignore[assignment]
    out = forward_backward(model, [batch])
    settle_gradients(model)
    return [out.loss.item(), out.aux.loss.item(), clip_grad_norm(model, 1e9)], gather_named(
        model, "grad"
    )


@pytest.mark.parametrize(
    "cases",
    [
        [(2, {"ep": 2, "zero": 3}, {})],
        pytest.param(
            [
                (4, {"pp": 2, "ep": 2}, {"pp_schedule": "gpipe"}),
                (4, {"tp": 2, "zero": 2}, {}),
                (4, {"cp": 2, "ep": 4}, {}),
            ],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_dp_ranks_with_different_sequence_lengths(
    cases: list[tuple[int, dict[str, Any], dict[str, Any]]],
) -> None:
    """L1, L2, G1, D4: rows of 13 tokens on one dp rank and of 5 on the other."""
    want, grads = run_ranks(uneven_lengths, 1, {}, {})[0]
    for world, layout, runtime in cases:
        for got, found in run_ranks(uneven_lengths, world, layout, runtime):
            assert got == pytest.approx(want, rel=1e-9), layout
            for key, value in grads.items():
                assert relative(found[key], value, 1e-6) < 1e-9, f"{layout} {key}"


def traffic(zero: int) -> dict[str, int]:
    mesh = Mesh(ParallelLayout(zero=zero))
    model = build(config("mixtral", layers=1), mesh, seed=3)
    with record_traffic() as log:
        forward_backward(model, micro_batches(2, mesh.coordinate("dp")))
        before, whole = log.total(axis="dp_cp") + log.total(axis="edp"), log.total()
        settle_gradients(model)
    return {"before": before, "after": log.total() - whole}


def test_no_gradient_travels_before_the_last_micro_batch() -> None:
    """G2, D11: at zero 0 the replicas exchange gradients once a step, in `settle_gradients`."""
    result = run_ranks(traffic, 2, 0)[0]
    model = build(config("mixtral", layers=1), Mesh.single(), seed=3)
    size = sum(p.numel() for p in model.parameters()) * 4
    assert result["before"] == 0
    assert result["after"] == size  # 2 x size x (n - 1) / n with n = 2


def refused(
    layout: dict[str, Any], runtime: dict[str, Any], changes: dict[str, Any]
) -> tuple[str, int]:
    """What `build` says, and the bytes of tensors that it had made by then."""
    with LiveBytes() as live:
        try:
            mesh = Mesh(ParallelLayout(**layout), Runtime(**runtime))
            build(config("mixtral", **changes), mesh)
        except ConfigError as error:
            return str(error), live.peak
    return "", live.peak


ODD = {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 8}
REFUSED: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any], tuple[str, ...]]] = [
    ({"pp": 2, "zero": 3}, {}, {}, ("zero=3", "zero=1")),
    ({"pp": 2, "zero": 2}, {}, {}, ("zero=2", "pp=1")),
    ({"pp": 2}, {"virtual_stages": 4, "pp_schedule": "interleaved_1f1b"}, {}, ("8", "4 layers")),
    ({"pp": 2}, {"virtual_stages": 2}, {}, ("virtual_stages=2", "interleaved")),
    ({"pp": 2}, {"pp_schedule": "interleaved_1f1b"}, {}, ("at least 2", "1f1b")),
    ({"pp": 2}, {"pp_schedule": "zbv", "recompute": "selective"}, {}, ("zbv", "full")),
    ({"pp": 2}, {"stage_layers": (1, 1)}, {}, ("stage_layers", "4 layers")),
    ({"cp": 2}, {"cp_kind": "ulysses"}, ODD, ("ring", "cp=2")),
    ({"cp": 2}, {}, {"attention_dropout": 0.1}, ("attention_dropout", "cp=1")),
    ({"tp": 2}, {}, ODD, ("3", "tp")),
    ({"etp": 2}, {}, {"intermediate_size": 25}, ("25", "etp")),
    ({"ep": 2}, {}, {"num_local_experts": 1, "num_experts_per_tok": 1}, ("ep=2", "1")),
    ({}, {"dp_replicate": 2}, {}, ("zero=0", "zero=1")),
    ({"zero": 1, "tp": 2}, {"dp_replicate": 2}, {}, ("dp=1", "divisors")),
    ({}, {"offload": True}, {}, ("zero=0", "zero=1")),
    ({"cp": 2}, {"cp_kind": "ulysses"}, {}, ()),
]  # fmt: skip


def test_combinations_that_do_not_work_say_so() -> None:
    """F3: each row of docs/layouts.md, refused with the way out before anything is allocated."""
    for layout, runtime, changes, words in REFUSED:
        for sentence, allocated in run_ranks(refused, 2, layout, runtime, changes):
            assert bool(sentence) == bool(words), (layout, runtime, changes)
            for word in words:
                assert word in sentence, sentence
            assert not words or allocated < 16_000, (layout, runtime, allocated)


@pytest.mark.parametrize(
    ("layout", "runtime"),
    [
        ({"tp": 2, "ep": 2}, {"recompute": "full"}),
        pytest.param({"zero": 3, "ep": 2}, {"recompute": "selective"}, marks=pytest.mark.slow),
        pytest.param({"pp": 2}, {"pp_schedule": "zbv"}, marks=pytest.mark.slow),
        pytest.param({"cp": 2, "etp": 2}, {"cp_kind": "ring"}, marks=pytest.mark.slow),
    ],
)
def test_two_runs_are_bitwise_equal(layout: dict[str, Any], runtime: dict[str, Any]) -> None:
    """D6, R2: in deterministic mode every gradient and weight has the same bits twice."""
    runtime = {**runtime, "deterministic": True}
    first, second = (run_ranks(train, 2, "mixtral", layout, runtime, {})[0] for _ in range(2))
    assert first["losses"] == second["losses"]
    for kind in ("grads", "weights"):
        for key, value in first[kind].items():
            assert torch.equal(value, second[kind][key]), key


def test_layers_are_dealt_by_cost() -> None:
    """Stages of equal cost where the layers allow it; every layer once; ends weighed."""
    runs = deal_layers([1.0] * 6, 3, last=2.0)
    assert [len(run) for run in runs] in ([3, 2, 1], [2, 3, 1])
    assert [layer for run in runs for layer in run] == list(range(6))
    assert [len(r) for r in deal_layers([5.0, 1.0, 1.0, 1.0], 2)] == [1, 3]
    assert given_layers([1, 3], 4, 2) == [range(1), range(1, 4)]
    for schedule, virtual in (("1f1b", 1), ("interleaved_1f1b", 3), ("zbv", 2)):
        layout = ParallelLayout(dp=1, pp=4)
        runtime = Runtime(pp_schedule=schedule, virtual_stages=virtual)  # type: ignore[arg-type]
        held = {s: r for r in range(4) for s in stages_of(layout, runtime, r)}
        assert held == {s: holder_of(layout, runtime, s) for s in held}
        assert sorted(held) == list(range(4 * virtual))
