"""The correction bias, its schedule, and the load metrics."""

from __future__ import annotations

import pytest
import torch

from moe_tp.errors import ConfigError
from moe_tp.routing import (
    RouterConfig,
    bias_rate_at,
    load_metrics,
    route,
    router_entropy,
    update_bias,
)


def test_sign_of_the_update() -> None:
    """L4, C14: a) exact steps; the given bias is left alone and needs no gradient."""
    bias = torch.zeros(4)
    new = update_bias(bias, torch.tensor([6, 2, 0, 0]), 1e-3)
    assert torch.equal(new, torch.tensor([-1e-3, 0, 1e-3, 1e-3]))
    assert not bias.any()
    assert new.dtype == torch.float32
    assert not new.requires_grad


def test_a_rate_is_a_step_towards_balance() -> None:
    """L4, F3: a negative rate would move the load away from it."""
    for rate in (-0.1, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="finite number >= 0"):
            update_bias(torch.zeros(2), torch.tensor([1, 3]), rate)


def test_counts_stay_apart() -> None:
    """L4, C14: b) counts that bf16 rounds to one number; half precision is refused."""
    new = update_bias(torch.zeros(2), torch.tensor([40840, 41080]), 1.0)
    assert new.tolist() == [1, -1]
    with pytest.raises(ConfigError, match="exactly"):
        update_bias(torch.zeros(2), torch.tensor([40840, 41080]).bfloat16(), 1.0)
    huge = torch.tensor([2**40, 2**40 + 2, 2**40 + 1])
    assert update_bias(torch.zeros(3), huge, 1.0).tolist() == [1, -1, 0]


def test_one_update_from_the_totals() -> None:
    """L4, C14: c) totals of the micro-batches, d) of the ranks, decide."""
    batches = [torch.tensor([3, 1]), torch.tensor([3, 1]), torch.tensor([0, 8])]
    assert update_bias(torch.zeros(2), torch.stack(batches).sum(0), 1.0).tolist() == [1, -1]
    ranks = torch.tensor([5, 1]) + torch.tensor([1, 5])
    assert update_bias(torch.zeros(2), ranks, 1.0).tolist() == [0, 0]
    assert update_bias(torch.zeros(2), torch.zeros(2, dtype=torch.int64), 1.0).tolist() == [0, 0]


def test_the_bias_is_never_bf16() -> None:
    """L4, C48: in bf16 the update would not move the bias at all."""
    assert update_bias(torch.ones(2), torch.tensor([0, 2]), 1e-3)[0] == torch.tensor(1.001)
    offset = torch.tensor([10.16, 10.17, 10.18, 10.20])
    assert torch.equal(update_bias(offset, torch.tensor([2, 2, 2, 2]), 1e-3), offset)
    with pytest.raises(ConfigError, match="float32"):
        update_bias(torch.ones(2, dtype=torch.bfloat16), torch.tensor([0, 2]), 1e-3)
    with pytest.raises(ConfigError, match="differ"):
        update_bias(torch.ones(3), torch.tensor([0, 2]), 1e-3)


def test_updates_even_the_load() -> None:
    """L4: repeated updates bring a skewed router near balance, weights untouched."""
    logits = torch.randn(512, 8, generator=torch.manual_seed(0)) + torch.linspace(2, -2, 8)
    config = RouterConfig(8, 2, score="sigmoid")
    bias = torch.zeros(8)
    before = load_metrics(route(logits, config).counts_E)
    for _ in range(600):
        bias = update_bias(bias, route(logits, config, bias_E=bias).chosen_E, 2e-3)
    after = load_metrics(route(logits, config, bias_E=bias).counts_E)
    assert before.max_ratio > 2.5
    assert after.max_ratio < 1.15


@pytest.mark.parametrize(
    ("schedule", "steps", "want"),
    [
        ("constant", None, [0.1, 0.1, 0.1, 0.1]),
        ("constant", 10, [0.1, 0.1, 0.02, 0.02]),
        ("linear", 10, [0.1, 0.06, 0.02, 0.02]),
        ("cosine", 10, [0.1, 0.06, 0.02, 0.02]),
    ],
)
def test_rate_schedule(schedule: str, steps: int | None, want: list[float]) -> None:
    """L4: the rate at steps 0, 5, 10 and 20; 0 for a frozen router."""
    settings = {
        "score": "sigmoid",
        "correction_bias": True,
        "bias_rate": 0.1,
        "bias_rate_end": 0.02,
        "bias_schedule": schedule,
        "bias_steps": steps,
    }
    config = RouterConfig(8, 2, **settings)  # type: ignore[arg-type]
    assert [bias_rate_at(config, step) for step in (0, 5, 10, 20)] == pytest.approx(want)
    assert bias_rate_at(RouterConfig(8, 2, frozen=True, **settings), 0) == 0  # type: ignore[arg-type]


def test_masked_tokens_move_no_bias() -> None:
    """R6: counts that the update uses hold real tokens only."""
    mask = torch.tensor([True, False, False])
    out = route(
        torch.tensor([[1.0, 0], [0, 1], [0, 1]]), RouterConfig(2, 1, normalize=False), mask_T=mask
    )
    assert out.chosen_E.tolist() == [1, 0]
    assert out.num_tokens == 1


def test_metrics() -> None:
    """R6: ratio, dead experts, entropies and the dropped share by hand; also by layer."""
    got = load_metrics(torch.tensor([6, 2, 0, 0]), chosen_E=torch.tensor([8, 2, 0, 0]))
    assert float(got.max_ratio) == pytest.approx(3.0)
    assert int(got.dead_experts) == 2
    assert float(got.dropped_share) == pytest.approx(0.2)
    assert float(got.load_entropy) == pytest.approx(0.5623351 / 1.3862944, rel=1e-5)
    layers = load_metrics(torch.tensor([[2, 2], [4, 0], [0, 0]]))
    assert layers.max_ratio.tolist() == [1.0, 2.0, 0.0]
    assert layers.load_entropy.tolist() == [1.0, 0.0, 0.0]
    mask = torch.tensor([True, True, False])
    for score in ("softmax", "sigmoid"):
        out = route(torch.zeros(3, 4), RouterConfig(4, 2, score=score), mask_T=mask)
        assert float(router_entropy(out)) == pytest.approx(2 * 1.3862944, rel=1e-6)
