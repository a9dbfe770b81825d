"""Dropout of experts' adapters: keyed by the token, alike whatever brought the row there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from experts_cases import draw
from model_cases import hub_config
from test_experts_deepep import FakeBuffer
from test_train_lora import Layout, close, gather, randomise

from moe_tp import Mesh, MoE
from moe_tp.errors import ConfigError
from moe_tp.experts.deepep import DeepEPDispatcher
from moe_tp.experts.dispatch import Dispatcher, Received
from moe_tp.experts.dispatchers import make_dispatcher
from moe_tp.experts.local import LocalDispatcher
from moe_tp.experts.padded import PaddedDispatcher
from moe_tp.experts.row_dropout import RowDropout
from moe_tp.models import ModelConfig, build
from moe_tp.models.decoder import Decoder
from moe_tp.parallel.collectives import record_traffic
from moe_tp.parallel.gradients import settle_gradients
from moe_tp.parallel.layout import ParallelLayout, Runtime
from moe_tp.routing import Assignment, ExpertTable, RouterConfig, route
from moe_tp.testing import run_ranks
from moe_tp.train import LoRAConfig, apply_lora
from moe_tp.train.step import forward_backward

TARGETS = ("attention", "experts", "shared_experts")


def make(layout: Layout, runtime: dict[str, Any], **changes: Any) -> Decoder:
    """Return a DeepSeek with adapters on everything; `padded` in the layout pads to capacity."""
    layout = dict(layout)
    config = ModelConfig.from_hub(hub_config("deepseek_v3"))
    if layout.pop("padded", False):
        router = config.moe.router
        factor = router.num_experts / router.top_k  # room for every token
        router = replace(router, capacity_factor=factor, pad_to_capacity=True)
        config = replace(config, moe=replace(config.moe, router=router))
    kinds = Runtime(**runtime)
    mesh = Mesh(ParallelLayout(**layout), kinds) if layout else Mesh.single(kinds)
    model = build(config, mesh, seed=3, dtype=changes.pop("dtype", torch.float64))
    settings = {"rank": 3, "alpha": 5.0, "targets": TARGETS, "seed": 9, "dropout": 0.1}
    apply_lora(model, LoRAConfig(**(settings | changes)))
    randomise(model)
    return model


def batches(mesh: Mesh) -> list[dict[str, torch.Tensor]]:
    """Return this rank's two micro-batches; samples are numbered dp rank by dp rank."""
    ids = torch.randint(0, 61, (8, 9), generator=torch.Generator().manual_seed(1))
    mine = ids.chunk(mesh.size("dp"))[mesh.coordinate("dp")]
    return [{"input_ids": part, "labels": part} for part in mine.chunk(2)]


def step(layout: Layout, runtime: dict[str, Any], **changes: Any) -> dict[str, Any]:
    number = changes.pop("step", 4)
    model = make(layout, runtime, **changes)
    out = forward_backward(model, batches(model.mesh), step=number)
    settle_gradients(model)
    return {"loss": float(out.loss), "grads": gather(model, "grad")}


LAYOUTS: dict[str, tuple[int, Layout, dict[str, Any]]] = {
    "dp2": (2, {"dp": 2}, {}),
    "ep2": (2, {"dp": 2, "ep": 2}, {}),
    "tp2-ep2": (2, {"tp": 2, "ep": 2}, {}),
    "tp2-etp2": (2, {"tp": 2, "etp": 2}, {}),
    "cp2-ep2-selective": (2, {"cp": 2, "ep": 2}, {"recompute": "selective"}),
    "pp2-full": (2, {"pp": 2}, {"recompute": "full"}),
    "ep2-gathered": (2, {"dp": 2, "ep": 2}, {"dispatcher": "all_gather"}),
    "ep2-overlap": (2, {"dp": 2, "ep": 2}, {"overlap": True}),
    "ep2-padded": (2, {"dp": 2, "ep": 2, "padded": True}, {}),
    "ep2-etp2": (4, {"dp": 2, "tp": 2, "ep": 2, "etp": 2}, {}),
    "pp2-tp2-etp2-loop": (4, {"pp": 2, "tp": 2, "etp": 2}, {"experts": "loop"}),
    "ep2-etp2-pieces": (4, {"dp": 4, "ep": 2, "etp": 2}, {"dispatch_rows": 24, "overlap": True}),
    "ep2-etp2-gathered-pieces": (
        4,
        {"tp": 4, "ep": 2, "etp": 2},
        {"dispatch_rows": 8, "dispatcher": "all_gather"},
    ),
    "ep4-two-hops": (4, {"dp": 4, "ep": 4}, {"dispatcher": "two_hop"}),
    "zero1-etp2": (4, {"dp": 4, "etp": 2, "zero": 1}, {"recompute": "selective"}),
    "zero3-ep2": (4, {"dp": 4, "ep": 2, "zero": 3}, {"recompute": "full"}),
}
_ALONE: dict[str, dict[str, Any]] = {}


QUICK = ("tp2-ep2", "cp2-ep2-selective", "ep2-gathered", "ep2-overlap", "ep2-etp2")
SWEEP = [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in LAYOUTS]


@pytest.mark.parametrize("name", SWEEP)
def test_masks_of_one_process_on_every_layout(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """N2: loss and every adapter's gradient at dropout 0.1, fp64, whatever moves the rows."""
    world, layout, runtime = LAYOUTS[name]
    if not _ALONE:
        _ALONE["one"] = step({}, {})
    one = _ALONE["one"]
    if "two-hops" in name:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    seen: set[str] = set()
    for got in run_ranks(step, world, layout, runtime):
        assert got["loss"] == pytest.approx(one["loss"], rel=1e-10)
        for fqn, grad in got["grads"].items():
            assert close(grad, one["grads"][fqn]), fqn
        seen |= got["grads"].keys()
    assert seen == one["grads"].keys()
    assert any(".shared." in n for n in seen)
    assert any(n.endswith(".experts.adapter.down_b") for n in seen)


@pytest.mark.parametrize("backend", ["sliced", "grouped_mm"])
def test_the_kernels_drop_what_the_reference_drops(backend: str) -> None:
    """D1, N2: values and gradients of the plain loop under autograd."""
    changes = {"dtype": torch.float32, "targets": ("experts",)}
    want = step({}, {"experts": "loop"}, **changes)
    got = step({}, {"experts": backend}, **changes)
    assert got["loss"] == pytest.approx(want["loss"], rel=1e-6)
    for fqn, grad in want["grads"].items():
        assert float((got["grads"][fqn] - grad).norm()) < 1e-5 * float(grad.norm()), fqn


def test_gate_and_up_and_down_are_dropped_each() -> None:
    """N2: a step differs from the next one, and from one without dropout, in each projection."""
    for name in ("gate_up", "down"):
        targets = tuple(f"layers.{layer}.moe.experts.{name}" for layer in (1, 2))
        plain, one, same, other = (
            step({}, {}, targets=targets, dropout=p, step=n)["loss"]
            for p, n in ((0.0, 4), (0.1, 4), (0.1, 4), (0.1, 5))
        )
        assert one == same
        assert abs(one - plain) > 1e-8
        assert abs(one - other) > 1e-8


def test_masks_differ_by_token_expert_and_site() -> None:
    """N2: and by nothing else: neither row, nor slot, nor what splits F."""
    drop = RowDropout(
        p=0.25, gate_up=11, down=12, expert_e=torch.arange(4), first=0,
        identity_R=torch.tensor([7, 1 << 33, 7]),
    )  # fmt: skip
    rows, ones = torch.tensor([0, 1, 2]), torch.ones(3, 4000)
    masks = [drop.input(ones, rows, torch.tensor([e])) for e in (0, 1)]
    masks.append(drop.hidden(ones, rows, torch.tensor([0])))
    for number, mask in enumerate(masks):
        assert torch.equal(mask[0], mask[2])
        assert ((mask == 0).float().mean(1) - 0.25).abs().max() < 0.03
        assert mask.unique().tolist() == pytest.approx([0.0, 1 / 0.75])
        others = [mask[1], *(m[0] for m in masks[:number])]
        assert all(0.55 < (mask[0] == o).float().mean() < 0.7 for o in others)  # 0.625 by chance
    half = replace(drop, first=2000).hidden(ones[:, 2000:], rows, torch.tensor([0]))
    assert torch.equal(half, masks[2][:, 2000:])


# --- what carries the identity ------------------------------------------------------------------


def carried(kind: str, ask: bool) -> dict[str, Any]:
    """Return the identity of each row that arrives, the rows, and the bytes that were sent."""
    world = 4 if kind == "two_hop" else 2
    runtime = Runtime(dispatcher=kind if kind in ("all_gather", "two_hop") else "auto")
    mesh = Mesh(ParallelLayout(dp=world, ep=world), runtime)
    table = ExpertTable(8, world)
    dispatcher: Any
    if kind == "deepep":
        FakeBuffer.num_local = table.slots_per_rank
        dispatcher = DeepEPDispatcher(mesh, table, FakeBuffer)
    elif kind == "padded":
        dispatcher = PaddedDispatcher(mesh, table)
    else:
        dispatcher = make_dispatcher(mesh, table)
    # a token's identity is its first element, and needs more than 32 bits
    number = torch.arange(6) + 6 * mesh.rank
    x = torch.stack([number.float(), *torch.zeros(511, 6)], 1)
    padded = {"capacity_factor": 4.0} if kind == "padded" else {}
    logits = draw(6, 8, dtype=torch.float32, seed=mesh.rank)
    assignment = route(logits, RouterConfig(8, 2, **padded))
    if ask:
        assignment = replace(assignment, identity_T=number + (1 << 33))
    with record_traffic() as log:
        received: Received = dispatcher.dispatch(x, assignment)
    count = getattr(dispatcher, "wire", None)
    return {
        "identity": received.identity_R,
        "rows": received.rows_RD[:, 0],
        "used": received.pair_row_P[: int(received.counts_e.sum())].unique(),
        "traffic": sum(size for *_, size in log.entries),
        "wire": None if count is None else count(received),
    }


@pytest.mark.parametrize("kind", ["all_to_all", "all_gather", "two_hop", "padded", "deepep"])
def test_rows_bring_their_tokens_identity(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """N2, D11: only where it is asked for, in at most 2 % more bytes, which are counted."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    world = 4 if kind == "two_hop" else 2
    for asked, plain in zip(
        run_ranks(carried, world, kind, True), run_ranks(carried, world, kind, False), strict=True
    ):
        assert plain["identity"] is None
        identity, rows = asked["identity"], asked["rows"]
        assert identity.dtype == torch.int64
        assert torch.equal((identity - (1 << 33))[asked["used"]].float(), rows[asked["used"]])
        if kind == "deepep":
            continue
        more = asked["traffic"] - plain["traffic"]
        assert 0 < more <= 0.02 * plain["traffic"]
        assert asked["wire"].rows_sent == plain["wire"].rows_sent
        told = asked["wire"].bytes_sent - plain["wire"].bytes_sent
        assert told == 8 * asked["wire"].rows_sent


class Forgetful(LocalDispatcher):
    """A dispatcher of a user's own that hands no identity on."""

    def dispatch(self, x_TD: torch.Tensor, assignment: Assignment) -> Received:
        return replace(super().dispatch(x_TD, assignment), identity_R=None)


def test_a_dispatcher_that_brings_no_identity_is_refused() -> None:
    """N2: never a mask by the place of the row."""
    model = make({}, {})
    for module in model.modules():
        if isinstance(module, MoE):
            dispatcher: Dispatcher = Forgetful(model.mesh, module.table)
            module.dispatcher = dispatcher
    with pytest.raises(ConfigError, match="identity_R"):
        model(torch.arange(6).view(1, 6))
    model.eval()
    model(torch.arange(6).view(1, 6))
