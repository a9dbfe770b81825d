"""The router inside the layer: precision, noise, losses over ranks, counters, recompute."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
from experts_cases import draw, mesh_of_layout, own_rows
from torch.utils.checkpoint import checkpoint

from moe_tp import Mesh, MoE, parameter_groups, settle_gradients, update_router_bias
from moe_tp.errors import ConfigError, RoutingError
from moe_tp.experts.moe import Router, Sequences
from moe_tp.parallel.random import DropoutKey
from moe_tp.parallel.shards import full_logical, to_local
from moe_tp.routing import RouterConfig, load_balance_loss, route
from moe_tp.testing import run_ranks


def test_close_scores_do_not_collapse() -> None:
    """C07, R4: 1.0004 beats 1.0000 as probability, 8.02 beats 8.00 as logit; autocast and bf16."""
    config = RouterConfig(4, 1, normalize=False)
    logits = torch.tensor([[1.0, 1.0004, 0.9, 0.0]])
    router = Router(2, config, Mesh.single())
    with torch.no_grad():
        to_local(router.weight).zero_()[0] = torch.tensor([8.0, 0.0])
        to_local(router.weight)[1] = torch.tensor([8.0, 0.02])
    x = torch.ones(3, 2, dtype=torch.bfloat16)
    router = router.to(torch.bfloat16)
    assert router.weight.dtype == torch.float32
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            assert route(logits, config).ids_TK.item() == 1
            out = router(x)
        assert out.ids_TK.flatten().tolist() == [1, 1, 1]
        assert out.weights_TK.dtype == out.scores_TE.dtype == out.logits_TE.dtype == torch.float32
    # a weight that bf16 cannot hold
    with torch.no_grad():
        to_local(router.weight)[1] = torch.tensor([8.02, 0.0])
    assert router(x).ids_TK[0].item() == 1


@pytest.mark.parametrize(("normalize", "want"), [(True, 4.155293), (False, 4.017578)])
def test_the_scale_leaves_the_shared_expert_alone(normalize: bool, want: float) -> None:
    """C06: weights times 2.5 over experts that give 1 and -1, and a shared one that gives 3."""
    config = RouterConfig(4, 2, normalize=normalize, scale=2.5)
    layer = MoE(4, 4, config, Mesh.single(), num_shared=1, expert_bias=True, seed=0)
    shared = layer.shared
    assert shared is not None
    with torch.no_grad():
        for param in layer.parameters():
            to_local(param).zero_()
        to_local(layer.router.weight)[:, 0] = torch.tensor([2.0, 1.0, 0.0, -1.0])
        to_local(layer.experts.get_parameter("down_bias"))[:2] = torch.tensor([[1.0], [-1.0]])
        to_local(shared.gate.get_parameter("weight"))[0, 0] = 1.0
        to_local(shared.up.get_parameter("weight"))[0, 0] = 1.0
        to_local(shared.down.get_parameter("weight"))[:, 0] = 3 * (1 + math.exp(-1))
    y, _ = layer(torch.tensor([[1.0, 0.0, 0.0, 0.0]]))
    assert y[0].tolist() == pytest.approx([want] * 4, abs=1e-5)


def test_the_balance_loss_of_a_layer_is_of_its_logits() -> None:
    """C12: 3.791660, as of raw logits; softmax of what the router returns is its probabilities."""
    layer = MoE(4, 4, RouterConfig(4, 1, normalize=False, balance_coef=1.0), Mesh.single(), seed=0)
    with torch.no_grad():
        to_local(layer.router.weight).zero_()[0, 0] = 4.0
    x = torch.tensor([[1.0, 0.0, 0.0, 0.0]]).repeat(4, 1)
    out = layer.router(x)
    assert torch.equal(out.logits_TE, torch.tensor([[4.0, 0.0, 0.0, 0.0]]).repeat(4, 1))
    assert torch.allclose(torch.softmax(out.logits_TE, -1), out.scores_TE)
    assert layer(x)[1].loss.item() == pytest.approx(3.791660, abs=1e-5)


def test_jitter_reaches_the_choice_only() -> None:
    """C09: with a zero router noise changes nothing; the input is left alone; eval repeats."""
    x = draw(6, 8, dtype=torch.float32)
    before = x.clone()
    outputs = []
    for jitter, training in ((0.3, True), (0.0, True), (0.3, False), (0.3, False)):
        layer = MoE(8, 8, RouterConfig(4, 2, input_jitter=jitter), Mesh.single(), seed=0)
        with torch.no_grad():
            to_local(layer.router.weight).zero_()
        outputs.append(layer.train(training)(x)[0])
        assert torch.equal(x, before)
    assert all(torch.equal(y, outputs[0]) for y in outputs)

    layer = MoE(8, 8, RouterConfig(4, 2, input_jitter=0.3), Mesh.single(), seed=0)
    with torch.no_grad():
        to_local(layer.router.weight).mul_(50)
    quiet = layer.eval()(x)[0]
    assert torch.equal(layer(x)[0], quiet)
    layer.train()
    keys = [_key(seed, torch.arange(6)) for seed in (1, 1, 2)]
    noisy = [layer(x, key=key)[0] for key in keys]
    assert torch.equal(noisy[0], noisy[1])
    assert not torch.equal(noisy[0], noisy[2])
    # only through routing: the experts see the input without its noise
    for key, y in ((keys[0], noisy[0]), (keys[2], noisy[2])):
        out = layer.router(x, key=key)
        gate_up, down = (to_local(layer.experts.get_parameter(n)) for n in ("gate_up", "down"))
        hidden = torch.einsum("tkgfd,td->tkgf", gate_up[out.ids_TK], x)
        hidden = torch.nn.functional.silu(hidden[:, :, 0]) * hidden[:, :, 1]
        clean = torch.einsum("tkdf,tkf,tk->td", down[out.ids_TK], hidden, out.weights_TK)
        assert torch.allclose(y, clean, rtol=1e-5, atol=1e-6)


def _key(seed: int, token_ids: torch.Tensor) -> DropoutKey:
    return DropoutKey(seed=seed, step=0, layer=0, site="router", token_ids_T=token_ids)


@pytest.mark.parametrize(
    "noise", [{"input_jitter": 0.3}, {"noise_std": 0.5}, {"expert_dropout": 0.3},
              {"kind": "random"}], ids=str
)  # fmt: skip
def test_noise_is_the_same_in_every_layout(noise: dict[str, Any]) -> None:
    """N3: a function of seed, step and token, wherever the token lies."""
    whole = _noisy_ids(noise, 0, 1)
    halves = [_noisy_ids(noise, rank, 2) for rank in range(2)]
    assert torch.equal(torch.cat(halves), whole)
    assert not torch.equal(whole, _noisy_ids(noise, 0, 1, seed=9))


def _noisy_ids(noise: dict[str, Any], rank: int, ranks: int, seed: int = 1) -> torch.Tensor:
    layer = MoE(8, 8, RouterConfig(6, 2, **noise), Mesh.single(), seed=0)
    x = draw(16, 8, dtype=torch.float32)
    rows = slice(rank * 16 // ranks, (rank + 1) * 16 // ranks)
    return layer.router(x[rows], key=_key(seed, torch.arange(16)[rows])).ids_TK


C17_VALUE, C17_GRAD = 1.226287, [[0.101647, 0.033882], [-0.101647, -0.033882]]
C17_ROWS = [[3.0, 0.0], [3.0, 0.0], [3.0, 0.0], [0.0, 3.0]]


@pytest.mark.parametrize(
    ("world", "layout", "shares", "micro_batches"),
    [(1, None, [4], 1), (1, None, [4], 2), (2, {"dp": 2, "ep": 2}, [8, 8], 1),
     (2, {"tp": 2}, [2, 2], 1), (2, {"cp": 2}, [2, 2], 1), (4, {"tp": 2, "ep": 2}, [1, 3, 0, 0], 1),
     (2, {"tp": 2}, [1, 3], 2)],
    ids=str,
)  # fmt: skip
def test_balance_loss_has_one_strength(
    world: int, layout: dict[str, int] | None, shares: list[int], micro_batches: int
) -> None:
    """C17, L2: value and gradient whatever the split into ranks and micro-batches."""
    if layout is None:
        results = [_balance(None, shares, micro_batches, C17_ROWS)]
    else:
        results = run_ranks(_balance, world, layout, shares, micro_batches, C17_ROWS)
    for value, grad in results:
        assert value == pytest.approx(C17_VALUE, rel=1e-5)
        assert torch.allclose(grad, torch.tensor(C17_GRAD), rtol=1e-5, atol=1e-6)


def test_balance_loss_of_an_even_load() -> None:
    """C17 e: over both ranks the load is even; value 1 and no gradient at all."""
    rows = [[3.0, 0.0], [3.0, 0.0], [0.0, 3.0], [0.0, 3.0]]
    for value, grad in run_ranks(_balance, 2, {"tp": 2}, [2, 2], 1, rows):
        assert value == pytest.approx(1.0, rel=1e-6)
        assert grad.abs().max() < 1e-7


def _balance(
    layout: dict[str, int] | None, shares: list[int], micro_batches: int, rows: list[list[float]]
) -> tuple[float, torch.Tensor]:
    mesh = mesh_of_layout(layout)
    config = RouterConfig(2, 1, normalize=False, balance_coef=1.0)
    layer = MoE(2, 4, config, mesh, seed=0)
    with torch.no_grad():
        to_local(layer.router.weight).copy_(torch.eye(2))
    copies = sum(shares) // 4
    x = torch.tensor(rows).repeat(copies, 1)[own_rows(shares, mesh.rank)]
    value = 0.0
    for _ in range(micro_batches):
        y, aux = layer(x, step_tokens=micro_batches * sum(shares))
        (aux.loss + 0 * y.sum()).backward()
        value += aux.loss.item()
    settle_gradients(layer)
    return value, full_logical(layer.router.weight.grad, layer.router.specs["weight"], mesh)


def test_unlike_micro_batches_weigh_by_their_tokens() -> None:
    """L2, C17: the step's loss is the mean over tokens of each micro-batch's own loss."""
    layer = MoE(4, 4, RouterConfig(3, 2, balance_coef=1.0, z_coef=0.5), Mesh.single(), seed=0)
    parts = draw(10, 4, dtype=torch.float32).split([3, 7])
    means = [layer(part)[1].loss for part in parts]
    shares = [layer(part, step_tokens=10)[1].loss for part in parts]
    assert sum(shares).item() == pytest.approx((3 * means[0] + 7 * means[1]).item() / 10, rel=1e-6)


@pytest.mark.parametrize("kind", ["micro_batch", "sequence", "global_batch"])
def test_balance_kinds_over_ranks(kind: str) -> None:
    """L2: sequences cut between ranks, counts of earlier micro-batches; value and gradient."""
    want = _kinds(None, kind)
    for got in run_ranks(_kinds, 4, {"dp": 2, "tp": 2, "ep": 2}, kind):
        assert got[0] == pytest.approx(want[0], rel=1e-9)
        assert torch.allclose(got[1], want[1], rtol=1e-9, atol=1e-12)


def _kinds(layout: dict[str, int] | None, kind: str) -> tuple[float, torch.Tensor]:
    mesh = mesh_of_layout(layout)
    config = RouterConfig(4, 2, balance_coef=0.5, z_coef=0.1, balance_kind=kind)
    layer = MoE(4, 4, config, mesh, dtype=torch.float64, seed=0)
    # four sequences of 3 tokens, two a data-parallel rank, each rank of tp holds half the tokens
    rank = mesh.rank
    rows = slice(None) if layout is None else slice(3 * rank, 3 * rank + 3)
    number = torch.arange(4).repeat_interleave(3)
    count = 4 if layout is None else 2
    value = 0.0
    for micro_batch in range(2):
        x = draw(12, 4, dtype=torch.float64, seed=micro_batch)[rows]
        sequences = Sequences(sequence_T=number[rows] % count, count=count)
        y, aux = layer(x, sequences=sequences)
        (aux.loss + 0 * y.sum()).backward()
        value += aux.loss.item()
    settle_gradients(layer)
    return value, full_logical(layer.router.weight.grad, layer.router.specs["weight"], mesh)


def test_sequence_loss_needs_sequences() -> None:
    """F3: told, not guessed."""
    config = RouterConfig(4, 2, balance_coef=0.5, balance_kind="sequence")
    with pytest.raises(ConfigError, match="pass sequences="):
        MoE(4, 4, config, Mesh.single(), seed=0)(torch.randn(3, 4))


def test_masked_tokens_count_nowhere() -> None:
    """R6, D4: padding adds nothing to output, load, losses or gradients, whatever it holds."""
    config = RouterConfig(4, 2, balance_coef=0.5, z_coef=0.1, correction_bias=True)
    results = []
    for padding in (0, 3):
        layer = MoE(4, 8, config, Mesh.single(), seed=0, num_shared=1)
        x = torch.cat([draw(5, 4, dtype=torch.float32), torch.full((padding, 4), 1e4)])
        mask = torch.arange(5 + padding) < 5
        y, aux = layer(x, mask=mask)
        assert not y[5:].any()
        (y.square().sum() + aux.loss).backward()
        grads = [to_local(p.grad) for p in layer.parameters() if p.requires_grad]
        results.append([y[:5], aux.loss, aux.counts_E, layer.router.step_counts_E, *grads])
    for a, b in zip(*results, strict=True):
        assert torch.allclose(a, b, rtol=1e-5)


def test_a_nan_names_rank_layer_and_token() -> None:
    """R7, F1: on the rank that has it."""
    with pytest.raises(RoutingError, match=r"rank 1, layer 7, token 2: .*NaN"):
        run_ranks(_nan, 2)


def _nan() -> None:
    mesh = mesh_of_layout({"ep": 2})
    layer = MoE(4, 4, RouterConfig(4, 2), mesh, layer=7, seed=0)
    x = torch.zeros(4, 4)
    if mesh.rank == 1:
        x[2, 1] = torch.nan
    layer(x)


@pytest.mark.parametrize("layout", [None, {"ep": 2}], ids=str)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("router", [{"zero": True}, {"input_jitter": 0.1}], ids=str)
def test_recompute_routes_alike_and_counts_once(
    layout: dict[str, int] | None, reentrant: bool, router: dict[str, Any]
) -> None:
    """C26, L3, N3: all ties, and jitter; loss, gradients and counters bitwise the same."""
    plain, again = (
        _recompute(layout, mode, router) if layout is None
        else run_ranks(_recompute, 2, layout, mode, router)
        for mode in (None, reentrant)
    )  # fmt: skip
    for a, b in zip(plain, again, strict=True) if layout else [(plain, again)]:
        assert a.keys() == b.keys()
        for name in a:
            assert torch.equal(a[name], b[name]), name
        assert a["step_counts"].sum() == 2 * 16 * 2 // (1 if layout is None else 2)


def _recompute(
    layout: dict[str, int] | None, reentrant: bool | None, router: dict[str, Any]
) -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    mesh = mesh_of_layout(layout)
    router = dict(router)
    zero = router.pop("zero", False)
    config = RouterConfig(8, 2, balance_coef=0.1, correction_bias=True, bias_rate=0.01, **router)
    layer = MoE(8, 8, config, mesh, seed=0)
    if zero:
        with torch.no_grad():
            to_local(layer.router.weight).zero_()

    def call(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, aux = layer(torch.nn.functional.dropout(x, 0.1))
        return y, aux.loss

    result = {}
    for micro_batch in range(2):
        share = [16] if layout is None else [8, 8]
        x = draw(16, 8, dtype=torch.float32, seed=micro_batch)[own_rows(share, mesh.rank)]
        x.requires_grad_()
        if reentrant is None:
            y, loss = call(x)
        else:
            y, loss = checkpoint(call, x, use_reentrant=reentrant)
        (y.square().sum() + loss).backward()
        result |= {f"dx{micro_batch}": x.grad, f"aux{micro_batch}": loss.detach()}
    settle_gradients(layer)
    result["step_counts"] = layer.router.step_counts_E.clone()
    update_router_bias(layer)
    result["bias"] = to_local(layer.router.correction_bias)
    for name, param in layer.named_parameters():
        if param.grad is not None:
            result[name] = to_local(param.grad)
    return result


@pytest.mark.parametrize(
    ("loads", "want"),
    # by itself rank 1 would move the other way; together they are even; two alike
    [([[5, 1], [1, 3]], -1e-3), ([[5, 1], [1, 5]], 0.0), ([[5, 1], [5, 1]], -1e-3)],
    ids=str,
)
def test_the_bias_moves_once_by_the_load_of_all_ranks(loads: list[list[int]], want: float) -> None:
    """L4, C14: fp32 after a cast, one update a step, equal on all ranks, none in evaluation."""
    for bias, counts in run_ranks(_bias, 2, loads):
        assert torch.equal(bias, torch.tensor([want, -want]))
        assert not counts.any()


def _bias(loads: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    mesh = mesh_of_layout({"ep": 2})
    config = RouterConfig(2, 1, normalize=False, correction_bias=True, bias_rate=1e-3)
    off = MoE(2, 4, RouterConfig(2, 1, normalize=False), mesh, seed=0)
    layer = MoE(2, 4, config, mesh, seed=0)
    both = torch.nn.ModuleList([off, layer]).to(torch.bfloat16)
    assert layer.router.correction_bias.dtype == torch.float32
    assert not layer.router.correction_bias.requires_grad
    with torch.no_grad():
        to_local(layer.router.weight).copy_(torch.eye(2))
    first, second = loads[mesh.rank]
    rows = [[3.0, 0.0]] * first + [[0.0, 3.0]] * second
    x = torch.tensor(rows, dtype=torch.bfloat16)
    with torch.no_grad():
        layer(x)
    layer.eval()(x)[0].sum().backward()
    assert not layer.router.step_counts_E.any()
    layer.train()
    for part in x.split(2):
        layer(part)[0].sum().backward()
    if len(x) == 4:  # both ranks make the same number of calls
        layer(x[:0])[0].sum().backward()
    assert layer.router.step_counts_E.tolist() == [first, len(rows) - first]
    update_router_bias(both)
    return to_local(layer.router.correction_bias), layer.router.step_counts_E


def test_a_forgotten_update_warns(caplog: pytest.LogCaptureFixture) -> None:
    """L4: the router was optimised, and its load lies there still."""
    caplog.set_level(logging.WARNING, logger="moe_tp")
    config = RouterConfig(4, 2, correction_bias=True, bias_rate=1e-3)
    for update in (True, False):
        layer = MoE(4, 4, config, Mesh.single(), seed=0)
        optimiser = torch.optim.SGD(parameter_groups(layer), lr=0.1)
        for _ in range(2):
            for _ in range(2):
                layer(torch.randn(3, 4))[0].square().sum().backward()
            settle_gradients(layer)
            optimiser.step()
            optimiser.zero_grad()
            if update:
                update_router_bias(layer)
        assert ("call update_router_bias" in caplog.text) is not update


def test_a_frozen_router_stays() -> None:
    """A frozen router has no gradient, and its bias does not move."""
    config = RouterConfig(4, 2, correction_bias=True, bias_rate=0.1, frozen=True)
    layer = MoE(4, 4, config, Mesh.single(), seed=0)
    layer(torch.randn(3, 4))[0].sum().backward()
    update_router_bias(layer)
    assert layer.router.weight.grad is None
    assert not to_local(layer.router.correction_bias).any()


def test_losses_equal_the_pure_functions() -> None:
    """L2: what the layer reports is what `moe_tp.routing` computes."""
    config = RouterConfig(4, 2, balance_coef=0.5)
    layer = MoE(4, 4, config, Mesh.single(), seed=0)
    x = draw(9, 4, dtype=torch.float32)
    aux = layer(x)[1]
    want = load_balance_loss(layer.router(x))
    assert torch.allclose(aux.balance_loss, want)
    assert torch.allclose(aux.loss, 0.5 * want)
    assert aux.counts_E.sum() == 18
    assert aux.num_tokens == 9


def test_a_router_of_its_own_learning_rate() -> None:
    """Issue 5: `lr_scale` reaches the optimiser's groups, or says what it lacks."""
    config = RouterConfig(4, 2, lr_scale=0.25, linear_bias=True)
    layer = MoE(4, 4, config, Mesh.single(), seed=0)
    rates = {}
    for group in parameter_groups(layer, lr=0.1):
        rates.update({id(param): group["lr"] for param in group["params"]})
    for name, param in layer.named_parameters():
        assert rates[id(param)] == pytest.approx(0.025 if "router" in name else 0.1), name
    with pytest.raises(ConfigError, match="pass lr= to parameter_groups"):
        parameter_groups(layer)
