"""Capacity, expert choice, Sinkhorn, hash, random, balanced, noise, replay, plug-ins."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from moe_tp import log
from moe_tp.errors import ConfigError, RoutingError
from moe_tp.routing import (
    Assignment,
    RouterConfig,
    RoutingRecord,
    assign,
    jitter_input,
    load_balance_loss,
    route,
    router_logits,
    z_loss,
)
from moe_tp.routing.capacity import capacity_for
from moe_tp.routing.kinds import sinkhorn_plan

KINDS = ("top_k", "expert_choice", "sinkhorn", "hash", "random", "balanced")


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.manual_seed(seed))


def config_of(kind: str, experts: int = 8, k: int = 2, **more: Any) -> RouterConfig:
    return RouterConfig(experts, k, kind=kind, **more)  # type: ignore[arg-type]


def test_capacity_is_rounded_as_stated() -> None:
    """D7: exact ceiling (1.1 * 10 is 11, not 12), multiple, minimum; int and tensor alike."""
    cases = [
        ({"capacity_factor": 1.1}, 20, 11),
        ({"capacity_factor": 1.0}, 21, 11),
        ({"capacity_factor": 1.25, "capacity_multiple": 8}, 20, 16),
        ({"capacity_factor": 0.1, "min_capacity": 4}, 20, 4),
        ({"capacity_factor": 1.0}, 0, 1),
    ]
    for settings, tokens, want in cases:
        config = RouterConfig(4, 2, **settings)  # type: ignore[arg-type]
        assert capacity_for(tokens, config) == want
        assert int(capacity_for(torch.tensor(tokens), config)) == want


@pytest.mark.parametrize(
    ("policy", "want"),
    [
        ("weight", [[-1, 1], [0, -1], [0, -1], [1, -1]]),
        ("position", [[0, 1], [0, -1], [-1, -1], [1, -1]]),
    ],
)
def test_who_is_dropped(policy: str, want: list[list[int]]) -> None:
    """D7: by weight, or first choices before second ones and earlier rows before later ones."""
    logits = torch.tensor([[0.1, 0, -9], [3, 0, -9], [2, 0, -9], [0, 1, -9]])
    config = RouterConfig(3, 2, capacity_factor=0.75, drop_policy=policy)  # type: ignore[arg-type]
    assert capacity_for(4, config) == 2
    full = route(logits, RouterConfig(3, 2))
    out = route(logits, config)
    assert out.ids_TK.tolist() == want
    assert torch.equal(out.weights_TK[out.ids_TK >= 0], full.weights_TK[out.ids_TK >= 0])
    assert not out.weights_TK[out.ids_TK < 0].any()
    assert out.counts_E.tolist() == [2, 2, 0]
    assert out.chosen_E.tolist() == full.counts_E.tolist()
    assert torch.equal(out.chosen_TK, full.ids_TK)
    assert out.capacity == 2


def test_ties_for_a_place_go_to_the_earlier_row() -> None:
    """D7: equal weights: the earlier row, in both policies."""
    for policy in ("weight", "position"):
        config = RouterConfig(4, 2, capacity_factor=1.0, drop_policy=policy)  # type: ignore[arg-type]
        out = route(torch.zeros(6, 4), config)
        assert out.ids_TK.tolist() == [[0, 1]] * 3 + [[-1, -1]] * 3


def test_padding_takes_no_place() -> None:
    """D7, R6: capacity is that of the real tokens, and masked rows ask for nothing."""
    logits = randn(9, 4)
    mask = torch.tensor([False, True, True, False, True, True, False, True, False])
    for policy in ("weight", "position"):
        config = RouterConfig(4, 2, capacity_factor=0.8, drop_policy=policy)  # type: ignore[arg-type]
        padded, real = route(logits, config, mask_T=mask), route(logits[mask], config)
        assert torch.equal(padded.ids_TK[mask], real.ids_TK)
        assert torch.equal(padded.counts_E, real.counts_E)


def test_experts_choose_their_tokens() -> None:
    """R1, R6: every expert takes its number of real tokens, ties to the earlier; a warning once."""
    log._warned.discard("routing.expert_choice")
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign,assignment]
    logging.getLogger("moe_tp").addHandler(handler)
    logits = torch.tensor([[2.0, 0], [1, 0], [0, 2], [9, 9]])
    mask = torch.tensor([True, True, True, False])
    try:
        for _ in range(2):
            out = route(logits, config_of("expert_choice", 2, 1, normalize=False), mask_T=mask)
    finally:
        logging.getLogger("moe_tp").removeHandler(handler)
    assert out.ids_TK.tolist() == [[0, -1], [0, 1], [1, -1], [-1, -1]]
    assert out.counts_E.tolist() == [2, 2]
    want = torch.softmax(logits, -1)
    assert torch.equal(out.weights_TK[1], want[1])
    assert [r.getMessage() for r in records if "causal" in r.getMessage()] != []
    assert len(records) == 1
    tied = route(torch.zeros(5, 2), config_of("expert_choice", 2, 1, normalize=False))
    assert tied.ids_TK[:, 0].tolist() == [0, 0, 0, -1, -1]


def test_sinkhorn_evens_the_load() -> None:
    """R1, R6: the plan's rows sum to 1 and its columns are even; masked rows take no part."""
    logits = randn(200, 8) + torch.linspace(4, -4, 8)
    plan = sinkhorn_plan(logits.double(), config_of("sinkhorn", sinkhorn_iterations=50), None).exp()
    assert torch.allclose(plan.sum(1), torch.ones(200, dtype=torch.float64))
    assert torch.allclose(plan.sum(0), torch.full((8,), 25.0, dtype=torch.float64), rtol=1e-2)
    out = route(logits, config_of("sinkhorn", sinkhorn_iterations=50))
    assert route(logits, RouterConfig(8, 2)).counts_E.max() > 120
    assert out.counts_E.max() < 75
    mask = torch.arange(200) % 3 > 0
    config = config_of("sinkhorn")
    padded, real = route(logits, config, mask_T=mask), route(logits[mask], config)
    assert torch.equal(padded.ids_TK[mask], real.ids_TK)
    none = route(logits, config, mask_T=torch.zeros(200, dtype=torch.bool))
    assert int(none.counts_E.sum()) == 0
    logits[:, 3] = float("-inf")
    assert route(logits, config).counts_E[3] == 0


def test_hash_depends_on_the_token_id_alone() -> None:
    """R1: different experts, even over ids and over pairs, another seed another hash; a table."""
    ids = torch.arange(20000)
    config = config_of("hash")
    out = route(randn(20000, 8), config, token_ids_T=ids)
    assert (out.ids_TK[:, 0] != out.ids_TK[:, 1]).all()
    pairs = torch.bincount(out.ids_TK[:, 0] * 8 + out.ids_TK[:, 1], minlength=64).float()
    used = pairs[pairs > 0]
    assert len(used) == 56
    assert (used / used.mean() - 1).abs().max() < 0.25
    some = torch.tensor([5, 19999, 5, 7])
    again = route(randn(4, 8, seed=9), config, token_ids_T=some)
    assert torch.equal(again.ids_TK, out.ids_TK[some])
    other = route(randn(20000, 8), config_of("hash", seed=1), token_ids_T=ids)
    assert (other.ids_TK != out.ids_TK).any(1).float().mean() > 0.9
    table = torch.tensor([[1, 2], [3, 0]])
    fixed = route(randn(3, 8), config, token_ids_T=torch.tensor([1, 0, 1]), table_VK=table)
    assert fixed.ids_TK.tolist() == [[3, 0], [1, 2], [3, 0]]
    with pytest.raises(RoutingError, match="token_ids_T"):
        route(randn(3, 8), config)


def test_benchmark_kinds() -> None:
    """R6: balanced counts differ by one at most; random is even and follows its generator."""
    mask = torch.arange(101) != 50
    out = route(randn(101, 8), config_of("balanced", k=3), mask_T=mask)
    assert out.counts_E.max() - out.counts_E.min() <= 1
    assert int(out.counts_E.sum()) == 300
    for generator in (None, torch.Generator().manual_seed(3)):
        got = route(randn(8000, 8), config_of("random"), generator=generator)
        share = got.counts_E / got.counts_E.sum() * 8
        assert (share - 1).abs().max() < 0.1
        assert (got.ids_TK[:, 0] != got.ids_TK[:, 1]).all()
    again = route(randn(8000, 8), config_of("random"), generator=torch.Generator().manual_seed(3))
    assert torch.equal(again.ids_TK, got.ids_TK)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_passes_a_gradient(kind: str) -> None:
    """R5: the weights depend on the logits whatever chose the experts."""
    for k in (1, 2):
        logits = randn(6, 8).requires_grad_()
        config = config_of(kind, k=k, normalize=k > 1)
        out = route(logits, config, token_ids_T=torch.arange(6))
        (out.weights_TK * torch.arange(1.0, out.weights_TK.shape[1] + 1)).sum().backward()
        assert logits.grad.abs().sum() > 1e-3  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", KINDS)
def test_no_host_synchronisation(kind: str) -> None:
    """C58: without the check nothing reads a tensor: fake tensors hold no data to read."""
    for settings in ({}, {"capacity_factor": 1.0}, {"score": "sigmoid"}):
        config = config_of(kind, 32, 4, **settings)
        with FakeTensorMode():
            mask = torch.ones(10, dtype=torch.bool)
            out = route(
                torch.randn(10, 32, requires_grad=True),
                config,
                bias_E=torch.zeros(32) if kind == "top_k" else None,
                mask_T=mask,
                token_ids_T=torch.zeros(10, dtype=torch.int64),
                check=False,
            )
            loss = load_balance_loss(out) + z_loss(out.logits_TE, mask_T=mask)
            sequence = torch.zeros(10, dtype=torch.int64)
            loss = loss + load_balance_loss(out, kind="sequence", sequence_T=sequence)
            loss.backward()


def test_compiles_into_one_graph() -> None:
    """C58: routing and its loss without the check, for several T of one graph, values equal."""
    config = RouterConfig(32, 4, score="sigmoid", num_groups=4, top_groups=2)

    def step(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        out = route(logits, config, check=False)
        return out.ids_TK, out.weights_TK, load_balance_loss(out)

    compiled = torch.compile(step, fullgraph=True, backend="eager", dynamic=True)
    for rows in (5, 7, 1, 0):
        logits = randn(rows, 32)
        for got, want in zip(compiled(logits), step(logits), strict=True):
            assert torch.equal(got, want)


def tiny_layer(
    x: Tensor, weight: Tensor, config: RouterConfig, generator: torch.Generator | None
) -> Tensor:
    """Return a dense MoE layer's output, its experts fixed random matrices."""
    experts = randn(config.num_experts, x.shape[1], x.shape[1], seed=7)
    logits = router_logits(jitter_input(x, config, generator=generator), weight)
    out = route(logits, config, generator=generator)
    gate = torch.zeros(len(x), config.num_experts).scatter(1, out.ids_TK, out.weights_TK)
    return torch.einsum("te,tef->tf", gate, torch.einsum("td,edf->tef", x, experts))


def test_jitter_reaches_the_choice_alone() -> None:
    """C09: with a zero router all four outputs are bitwise equal, and the input is unchanged."""
    x = randn(6, 8)
    kept = x.clone()
    noisy, quiet = RouterConfig(4, 2, input_jitter=0.3), RouterConfig(4, 2)
    zero = torch.zeros(4, 8)
    outs = [
        tiny_layer(x, zero, noisy, torch.Generator().manual_seed(1)),
        tiny_layer(x, zero, quiet, torch.Generator().manual_seed(1)),
        tiny_layer(x, zero, noisy, None),
        tiny_layer(x, zero, noisy, None),
    ]
    assert all(torch.equal(out, outs[0]) for out in outs)
    assert torch.equal(x, kept)
    weight = randn(4, 8, seed=2)
    quiet_out = tiny_layer(x, weight, quiet, None)
    assert torch.equal(tiny_layer(x, weight, noisy, None), quiet_out)
    first = tiny_layer(x, weight, noisy, torch.Generator().manual_seed(1))
    second = tiny_layer(x, weight, noisy, torch.Generator().manual_seed(2))
    assert not torch.equal(first, second)
    drawn = jitter_input(x, noisy, generator=torch.Generator().manual_seed(1))
    assert ((drawn / x - 1).abs() <= 0.3 + 1e-6).all()


def test_noise_only_with_a_source() -> None:
    """R1, N3, C09: no source, no noise; the same draws, the same routing; learnt scale."""
    logits = randn(400, 8) * 0.1
    config = RouterConfig(8, 2, noise_std=1.0)
    quiet = route(logits, config)
    assert torch.equal(quiet.ids_TK, route(logits, RouterConfig(8, 2)).ids_TK)
    drawn = route(logits, config, generator=torch.Generator().manual_seed(0))
    assert not torch.equal(drawn.ids_TK, quiet.ids_TK)
    assert torch.equal(drawn.logits_TE, logits)
    uniform = torch.rand(400, 8, generator=torch.manual_seed(5))
    first = route(logits, config, uniform_TE=uniform)
    assert torch.equal(first.ids_TK, route(logits, config, uniform_TE=uniform).ids_TK)
    alone = route(logits[9:12], config, uniform_TE=uniform[9:12])
    assert torch.equal(alone.ids_TK, first.ids_TK[9:12])
    scale = torch.full((400, 8), -40.0)
    still = route(logits, RouterConfig(8, 2), uniform_TE=uniform, noise_logits_TE=scale)
    assert torch.equal(still.ids_TK, quiet.ids_TK)
    learnt = torch.zeros(400, 8, requires_grad=True)
    out = route(logits, RouterConfig(8, 2), uniform_TE=uniform, noise_logits_TE=learnt)
    out.weights_TK.square().sum().backward()
    assert learnt.grad.abs().sum() > 0  # type: ignore[union-attr]
    edges = route(logits[:1], config, uniform_TE=torch.tensor([[0.0, 1 - 2**-24, *[0.5] * 6]]))
    assert torch.isfinite(edges.weights_TK).all()
    assert edges.ids_TK[0, 0] == 1


def test_expert_dropout() -> None:
    """R1: dropped experts get nothing, at least K stay, and evaluation drops none."""
    logits = randn(50, 8)
    config = RouterConfig(8, 2, expert_dropout=0.5)
    generator = torch.Generator().manual_seed(0)
    outs = [route(logits, config, generator=generator) for _ in range(5)]
    assert len({tuple((out.counts_E == 0).tolist()) for out in outs}) > 1
    assert all(int(out.counts_E.sum()) == 100 for out in outs)
    hard = RouterConfig(8, 2, expert_dropout=0.999)
    assert int((route(logits, hard, generator=generator).counts_E > 0).sum()) == 2
    assert torch.equal(route(logits, config).ids_TK, route(logits, RouterConfig(8, 2)).ids_TK)
    kept = torch.tensor([True] * 3 + [False] * 5)
    for kind in ("top_k", "expert_choice", "sinkhorn"):
        out = route(logits, config_of(kind, expert_dropout=0.5), kept_E=kept)
        assert not out.counts_E[3:].any()
        assert out.counts_E[:3].all()


def test_replay_uses_recorded_choices() -> None:
    """N3, R1: ids come from the record, weights and gradients from the present logits."""
    config = RouterConfig(8, 2, capacity_factor=1.0)
    record = RoutingRecord()
    first = route(randn(10, 8), config)
    record.add(first, layer=3, call=1)
    record.add(first, layer=3, call=1)
    assert list(record) == [(3, 1)]
    tensors = record.to_tensors()
    assert tensors["layer.3.call.1"].dtype == torch.int16
    loaded = RoutingRecord.from_tensors(tensors)
    logits = randn(10, 8, seed=8).requires_grad_()
    out = route(logits, config, replay_TK=loaded.ids(layer=3, call=1))
    assert torch.equal(out.chosen_TK, first.chosen_TK)
    assert not torch.equal(out.weights_TK, first.weights_TK)
    out.weights_TK.square().sum().backward()
    assert logits.grad.abs().sum() > 0  # type: ignore[union-attr]
    same = route(randn(10, 8), config, replay_TK=loaded.ids(layer=3, call=1))
    assert torch.equal(same.ids_TK, first.ids_TK)
    assert torch.equal(same.weights_TK, first.weights_TK)
    with pytest.raises(RoutingError, match="layer 4"):
        loaded.ids(layer=4)
    with pytest.raises(RoutingError, match="name"):
        RoutingRecord.from_tensors({"x": tensors["layer.3.call.1"]})
    with pytest.raises(RoutingError, match="ids"):
        RoutingRecord.from_tensors({"layer.0.call.0": torch.zeros(3, 2)})
    with pytest.raises(ConfigError, match="replay_TK"):
        route(randn(9, 8), config, replay_TK=loaded.ids(layer=3, call=1))
    with pytest.raises(RoutingError, match="token 2"):
        route(randn(4, 8), config, replay_TK=torch.tensor([[0, 1], [1, 2], [3, 8], [0, 9]]))


def second_best(logits_TE: Tensor, config: RouterConfig, **rest: Any) -> Assignment:
    """A user's own routing: skip the best expert."""
    ids_TK = logits_TE.argsort(dim=-1, descending=True, stable=True)[:, 1 : 1 + config.top_k]
    return assign(ids_TK, logits_TE, config, mask_T=rest["mask_T"])


def test_a_users_own_function_plugs_in() -> None:
    """R6, R7: it gets checked logits in fp32, and its result fits dispatch and losses."""
    config = RouterConfig(4, 2, function=second_best)
    mask = torch.tensor([True, False])
    logits = torch.tensor([[3.0, 2, 1, 0], [float("nan"), 0, 0, 0]]).bfloat16()
    out = route(logits, config, mask_T=mask)
    assert out.ids_TK.tolist() == [[1, 2], [-1, -1]]
    assert out.weights_TK.dtype == torch.float32
    assert float(load_balance_loss(out)) > 0
    again = route(logits, config, mask_T=mask, replay_TK=out.chosen_TK.flip(0).flip(0))
    assert torch.equal(again.weights_TK, out.weights_TK)
    assert config.layout_dependent
    assert not RouterConfig(
        4, 2, function=second_best, function_looks_across=False
    ).layout_dependent
    with pytest.raises(RoutingError, match="token 1"):
        route(logits, config)
    bad = RouterConfig(4, 2, function=lambda logits_TE, config, **rest: logits_TE)  # type: ignore[arg-type,return-value]
    with pytest.raises(RoutingError, match="returned Tensor"):
        route(torch.zeros(2, 4), bad)
    short = RouterConfig(
        4, 2, function=lambda x, config, **rest: second_best(x[:1], config, mask_T=None)
    )
    with pytest.raises(RoutingError, match="2 tokens"):
        route(torch.zeros(2, 4), short)


def test_a_table_of_experts_is_checked() -> None:
    """R6, R7: padding may have any id; a real token without a row, a row without an expert."""
    config, table = config_of("hash"), torch.tensor([[0, 1], [1, 2], [2, 3]])
    mask = torch.tensor([True, False, True])
    ids = torch.tensor([2, -100, 0])
    logits = torch.randn(3, config.num_experts)
    out = route(logits, config, token_ids_T=ids, mask_T=mask, table_VK=table)
    assert out.ids_TK.tolist() == [[2, 3], [-1, -1], [0, 1]]
    with pytest.raises(RoutingError, match="token id -100 has no row"):
        route(logits, config, token_ids_T=ids, table_VK=table)
    with pytest.raises(RoutingError, match="token id 3 has no row"):
        route(logits, config, token_ids_T=torch.tensor([0, 3, 1]), table_VK=table)
    with pytest.raises(RoutingError, match="names expert 96"):
        route(logits, config, token_ids_T=torch.tensor([0, 1, 1]), table_VK=table + 96)
    with pytest.raises(ConfigError, match="does not fit top_k=2"):
        route(logits, config, token_ids_T=torch.tensor([0, 1, 1]), table_VK=table[:, :1])


def test_a_table_of_experts_is_looked_through_once() -> None:
    """R6, R7: and again where it was written to, or serves fewer experts."""
    config, table = config_of("hash"), torch.tensor([[0, 1], [1, 2], [2, 3]])
    logits, ids = torch.randn(3, config.num_experts), torch.tensor([0, 1, 1])
    seen = []

    class Compared(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
            seen.extend(arg for arg in args if arg is table and "lt" in str(func))
            return func(*args, **(kwargs or {}))

    with Compared():
        for _ in range(3):
            route(logits, config, token_ids_T=ids, table_VK=table)
    assert len(seen) == 1
    few = dataclasses.replace(config, num_experts=3)
    with pytest.raises(RoutingError, match="names expert 3"):
        route(logits[:, :3], few, token_ids_T=ids, table_VK=table)
    table[2, 0] = config.num_experts
    with pytest.raises(RoutingError, match=f"names expert {config.num_experts}"):
        route(logits, config, token_ids_T=ids, table_VK=table)
    with torch.inference_mode():
        table = torch.tensor([[0, 1], [1, 2], [2, 3]])
        route(logits, config, token_ids_T=ids, table_VK=table)
        table[2, 0] = -2
        with pytest.raises(RoutingError, match="names expert -2"):
            route(logits, config, token_ids_T=ids, table_VK=table)
