"""One optimiser step: accumulation, ranks with unlike lists, the loss rule, router losses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from model_cases import error, hub_config
from test_models_decoder import mesh_for
from test_models_layouts import Layout, world_of

from moe_tp.checkpoint.gather import gather_named
from moe_tp.errors import ConfigError, DataError
from moe_tp.models.config import ModelConfig
from moe_tp.models.decoder import Decoder
from moe_tp.models.load import build
from moe_tp.parallel.gradients import clip_grad_norm, settle_gradients
from moe_tp.parallel.layout import Runtime
from moe_tp.parallel.mesh import Mesh
from moe_tp.testing import run_ranks
from moe_tp.train.step import count_targets, forward_backward

Batches = list[dict[str, torch.Tensor]]


def rows(*lengths: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return rows of these lengths, padded on the right."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for i, n in enumerate(lengths):
        ids[i, :n] = torch.randint(0, 61, (n,), generator=generator)
        mask[i, :n] = 1
    return {"input_ids": ids, "labels": ids.clone(), "attention_mask": mask}


def joined(*batches: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    width = max(b["input_ids"].shape[1] for b in batches)
    pad = [(0, width - b["input_ids"].shape[1]) for b in batches]
    return {
        name: torch.cat(
            [torch.nn.functional.pad(b[name], p) for b, p in zip(batches, pad, strict=True)]
        )
        for name in batches[0]
    }


def make(layout: Layout, **changes: Any) -> Decoder:
    config = ModelConfig.from_hub(hub_config("mixtral", **changes.pop("hub", {})))
    if changes:
        from dataclasses import replace

        router = replace(config.moe.router, **changes)
        config = replace(config, moe=replace(config.moe, router=router))
    return build(config, mesh_for(layout), seed=6, dtype=torch.float64)


def step_of(
    layout: Layout, lists: dict[int, Batches], changes: dict[str, Any], step: int = 0
) -> dict[str, Any]:
    model = make(layout, **changes)
    out = forward_backward(model, lists[model.mesh.coordinate("dp")], step=step)
    settle_gradients(model)
    return {
        "loss": float(out.loss),
        "aux": float(out.aux.loss),
        "targets": out.target_tokens,
        "counts": out.aux.counts_LE,
        "norm": clip_grad_norm(model, 1e9),
        "grads": gather_named(model, "grad"),
    }


def agree(got: dict[str, Any], expected: dict[str, Any]) -> None:
    assert got["loss"] == pytest.approx(expected["loss"], rel=1e-9)
    assert got["aux"] == pytest.approx(expected["aux"], rel=1e-9, abs=1e-12)
    assert got["targets"] == expected["targets"]
    assert torch.equal(got["counts"], expected["counts"])
    assert got["norm"] == pytest.approx(expected["norm"], rel=1e-9)
    for name, grad in expected["grads"].items():
        assert error(got["grads"][name], grad, expected["norm"]) < 1e-9, name


ONE, TWO, THREE = rows(2, seed=1), rows(4, seed=2), rows(3, 7, seed=3)
NO_AUX = {"balance_coef": 0.0}


@pytest.mark.parametrize(
    ("layout", "lists"),
    [
        ({}, {0: [ONE, TWO, THREE]}),
        ({"dp": 2}, {0: [ONE, TWO], 1: [THREE]}),
        ({"dp": 2, "tp": 2, "ep": 2}, {0: [ONE, TWO, THREE], 1: []}),
        ({"tp": 2, "etp": 2}, {0: [joined(ONE, TWO), THREE]}),
        ({"dp": 2, "ep": 2, "zero": 1}, {0: [ONE], 1: [TWO, THREE]}),
    ],
    ids=["accumulate", "dp2", "idle-rank", "tp2", "zero1"],
)
def test_loss_is_the_mean_over_the_steps_targets(layout: Layout, lists: dict[int, Batches]) -> None:
    """L1, C52, D2, G1: any split of the same tokens gives the one-batch loss and gradients.

    In fp64: C52's 1e-6 is what one fp32 rounding does to the smallest of these gradients.
    """
    expected = step_of({}, {0: [joined(ONE, TWO, THREE)]}, NO_AUX)
    assert expected["targets"] == 1 + 3 + 2 + 6
    if not layout:
        agree(step_of({}, lists, NO_AUX), expected)
        return
    for got in run_ranks(step_of, world_of(layout), layout, lists, NO_AUX):
        agree(got, expected)


def test_known_number() -> None:
    """C52: one target with loss a and three with mean loss b give (a + 3 b) / 4."""
    model = make({})
    with torch.no_grad():
        a, b = (float(model(**batch).loss) for batch in (ONE, TWO))
    out = forward_backward(model, [ONE, TWO], backward=False)
    assert float(out.loss) == pytest.approx((a + 3 * b) / 4, rel=1e-9)
    assert out.target_tokens == 4
    assert all(p.grad is None for p in model.parameters())


def test_count_targets_over_ranks() -> None:
    counts = run_ranks(count_of, 4, {"dp": 2, "tp": 2})
    assert counts == [1 + 3 + 8] * 4
    assert count_targets([ONE, TWO], Mesh.single()) == 4
    assert count_targets([], Mesh.single()) == 0
    assert count_targets((batch for batch in [ONE, TWO]), Mesh.single()) == 4


def count_of(layout: Layout) -> int:
    mesh = mesh_for(layout)
    return count_targets([[ONE, TWO], [THREE]][mesh.coordinate("dp")], mesh)


def test_no_target_gives_zero() -> None:
    """L1: not NaN, and gradients are zero."""
    batch = {**TWO, "labels": torch.full_like(TWO["labels"], -100)}
    got = step_of({}, {0: [batch]}, NO_AUX)
    assert got["loss"] == 0.0
    assert got["norm"] == 0.0
    empty = step_of({}, {0: []}, NO_AUX)
    assert empty["loss"] == 0.0
    assert empty["targets"] == 0


AUX = {"balance_coef": 0.5, "z_coef": 0.1}


@pytest.mark.parametrize("layout", [{}, {"dp": 1, "pp": 2}, {"dp": 2, "ep": 2}], ids=str)
def test_a_step_of_nothing_leaves_zero_gradients(layout: Layout) -> None:
    """D2, D3, L1: no micro-batch on any rank is a step whose loss and gradients are zero."""
    nothing: dict[int, Batches] = {0: [], 1: []}
    world = world_of(layout) * layout.get("pp", 1)
    for got in run_ranks(step_of, world, layout, nothing, {}, timeout=120):
        assert got["loss"] == got["aux"] == got["norm"] == got["targets"] == 0.0
        assert got["grads"], "gradients are missing"
        assert not any(bool(grad.any()) for grad in got["grads"].values())


@pytest.mark.parametrize("kind", ["micro_batch", "sequence"])
def test_router_losses_with_accumulation(kind: str) -> None:
    """L2, C17: the mean over micro-batches of each one's loss over the union of its ranks."""
    changes = {**AUX, "balance_kind": kind}
    first, second = rows(6, 2, seed=4), rows(3, 5, seed=5)
    expected = step_of({}, {0: [first, second]}, changes)
    split = {0: [rows_of(first, 0), rows_of(second, 0)], 1: [rows_of(first, 1), rows_of(second, 1)]}
    for layout in ({"dp": 2, "ep": 2}, {"dp": 2, "tp": 2, "etp": 2}):
        for got in run_ranks(step_of, world_of(layout), layout, split, changes):
            agree(got, expected)


def rows_of(batch: dict[str, torch.Tensor], row: int) -> dict[str, torch.Tensor]:
    return {name: value[row : row + 1] for name, value in batch.items()}


def test_same_strength_for_every_number_of_like_micro_batches() -> None:
    """C17: two like micro-batches, or two ranks with the same tokens, change nothing."""
    expected = step_of({}, {0: [THREE]}, AUX)
    for lists in ([THREE, THREE], [joined(THREE, THREE)]):
        got = step_of({}, {0: lists}, AUX)
        assert got["aux"] == pytest.approx(expected["aux"], rel=1e-9)
        for name, grad in expected["grads"].items():
            assert error(got["grads"][name], grad, expected["norm"]) < 1e-9, name


def test_global_batch_is_the_same_on_every_layout() -> None:
    """L2: the estimate over the step so far does not depend on how ranks split micro-batches."""
    changes = {**AUX, "balance_kind": "global_batch"}
    first, second = rows(6, 2, seed=4), rows(3, 5, seed=5)
    expected = step_of({}, {0: [first, second]}, changes)
    split = {0: [rows_of(first, 0), rows_of(second, 0)], 1: [rows_of(first, 1), rows_of(second, 1)]}
    for got in run_ranks(step_of, 2, {"dp": 2, "ep": 2}, split, changes):
        agree(got, expected)


def test_dropout_follows_the_sample() -> None:
    """N2: rows numbered dp rank by dp rank get the same masks however they are split."""
    changes = {**NO_AUX, "hub": {"residual_dropout": 0.2}}
    batches = [rows(5, seed=7), rows(4, seed=8), rows(6, seed=9)]
    expected = step_of({}, {0: batches}, changes, 2)
    for lists in ({0: batches[:2], 1: batches[2:]}, {0: batches[:1], 1: batches[1:]}):
        for got in run_ranks(step_of, 2, {"dp": 2}, lists, changes, 2):
            agree(got, expected)


def bad_step(layout: Layout) -> str:
    model = make(layout)
    batch = rows(4)
    if model.mesh.coordinate("dp") == 1:
        batch["input_ids"] = batch["input_ids"] + 60
    with pytest.raises(DataError) as caught:
        forward_backward(model, [rows(3), batch])
    return str(caught.value)


def test_a_bad_batch_stops_every_rank_before_anything_is_sent() -> None:
    """F1: named where it is, told to the others."""
    texts = run_ranks(bad_step, 4, {"dp": 2, "tp": 2})
    assert all("micro-batch 1" in text and "token id" in text for text in texts[2:])
    assert all("rank 2 was given a batch that cannot be used" in text for text in texts[:2])


def test_logits_of_each_micro_batch() -> None:
    model = make({})
    out = forward_backward(model, [ONE, THREE], backward=False, return_logits=True)
    assert [tuple(x.shape) for x in out.logits] == [(1, 2, 61), (2, 7, 61)]
    with pytest.raises(DataError, match="input_ids"):
        forward_backward(model, [{"labels": ONE["labels"]}])


def test_what_is_no_micro_batch_is_refused_by_name() -> None:
    """F3: a dict in place of the list, and an argument that is none; no bound of a norm."""
    model = build(ModelConfig.from_hub(hub_config("mixtral")), Mesh.single())
    batch = rows(4)
    with pytest.raises(DataError, match="micro-batch 0: it is of type str"):
        forward_backward(model, batch)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="it is of type str"):
        count_targets(batch, Mesh.single())  # type: ignore[arg-type]
    with pytest.raises(DataError, match="input_ids is of type list"):
        model([[1, 2]])
    with pytest.raises(DataError, match="'target_tokens', which is no argument"):
        forward_backward(model, [{**batch, "target_tokens": torch.tensor(3)}])
    for bound in (-1.0, 0.0, float("nan")):
        with pytest.raises(ConfigError, match="max_norm="):
            clip_grad_norm(model, bound)


def test_gradients_in_fp16_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """F3: nothing scales the loss, so that small ones are 0; a loss alone may be in fp16."""
    mesh = Mesh.single(runtime=Runtime(compute_dtype=torch.float16))
    model = build(ModelConfig.from_hub(hub_config("mixtral")), mesh)
    forward_backward(model, [rows(4)], backward=False)
    assert "float16" not in caplog.text
    forward_backward(model, [rows(4)])
    assert "compute_dtype=float16 computes gradients without loss scaling" in caplog.text
