"""Scores and weights: order of softmax, bias, scale, precision, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from moe_tp.errors import ConfigError
from moe_tp.routing import RouterConfig, route, router_logits, switch_config
from moe_tp.routing.scores import position_free_sigmoid


def weights(logits: list[float], config: RouterConfig, bias: list[float] | None = None) -> Tensor:
    bias_E = None if bias is None else torch.tensor(bias, dtype=torch.float32)
    out = route(torch.tensor([logits], dtype=torch.float32), config, bias_E=bias_E)
    return out.weights_TK[0]


@pytest.mark.parametrize(
    ("config", "want"),
    [
        (RouterConfig(4, 2, normalize=False), [0.643914, 0.236883]),
        (RouterConfig(4, 2), [0.731059, 0.268941]),
        (RouterConfig(4, 2, score="softmax_topk"), [0.731059, 0.268941]),
    ],
)
def test_softmax_before_or_after_top_k(config: RouterConfig, want: list[float]) -> None:
    """R3, C02: the exact weights of the case."""
    out = route(torch.tensor([[2.0, 1, 0, -1]]), config)
    assert out.ids_TK.tolist() == [[0, 1]]
    assert out.weights_TK[0].tolist() == pytest.approx(want, abs=1e-6)


def test_the_bias_chooses_and_does_not_weigh() -> None:
    """R3, C04: choice by sigmoid + bias, weights from the sigmoid, also when the bias is large."""
    config = RouterConfig(4, 2, score="sigmoid")
    bias = torch.tensor([0.3, -0.5, 0, 0.6])
    out = route(torch.tensor([[0.0, 2, 1, -1]]), config, bias_E=bias)
    assert out.ids_TK.tolist() == [[3, 0]]
    assert out.weights_TK[0].tolist() == pytest.approx([0.349755, 0.650245], abs=1e-6)
    large = weights([-17, -18], RouterConfig(2, 2, score="sigmoid"), [12, 12])
    assert large.tolist() == pytest.approx([0.731059, 0.268941], abs=1e-6)


def test_the_bias_of_a_softmax_router() -> None:
    """R3: ERNIE's softmax router with a bias chooses by probability + bias, floors the divisor."""
    config = RouterConfig(4, 2, eps_use="floor", normalize_eps=1e-12)
    logits = torch.tensor([[2.0, 1, 0, -1]])
    out = route(logits, config, bias_E=torch.tensor([0.0, 0, 0, 0.9]))
    probability = torch.softmax(logits[0], 0)
    assert out.ids_TK.tolist() == [[3, 0]]
    want = probability[[3, 0]] / probability[[3, 0]].sum()
    assert torch.allclose(out.weights_TK[0], want)


@pytest.mark.parametrize(
    ("normalize", "want", "output"),
    [(True, [1.827646, 0.672354], 4.155293), (False, [1.609785, 0.592208], 4.017578)],
)
def test_scale_is_applied_once(normalize: bool, want: list[float], output: float) -> None:
    """R3, C06: with normalising on and off, and not to the shared expert."""
    got = weights([2, 1, 0, -1], RouterConfig(4, 2, normalize=normalize, scale=2.5))
    assert got.tolist() == pytest.approx(want, abs=1e-5)
    assert float(got @ torch.tensor([1.0, -1.0]) + 3) == pytest.approx(output, abs=1e-5)


def test_deepseek_epsilon() -> None:
    """R3: the divisor is sum + 1e-20, so vanishing sigmoids do not give NaN."""
    got = weights([-46.0, -46.0, -200.0], RouterConfig(3, 2, score="sigmoid"))
    score = float(torch.exp(torch.tensor(-46.0, dtype=torch.float64)))
    assert got.tolist() == pytest.approx([score / (2 * score + 1e-20)] * 2, rel=1e-4)
    assert weights([-200.0] * 3, RouterConfig(3, 2, score="sigmoid")).tolist() == [0, 0]


def test_close_logits_stay_apart() -> None:
    """R4, C07: bf16 probabilities would tie, and a bf16 product would be 8.00 twice."""
    near = torch.tensor([[1.0000, 1.0004, 0.9, 0.0]])
    config = RouterConfig(4, 1, normalize=False)
    weight = torch.ones(2, 4, dtype=torch.bfloat16)
    weight[1, 3] = 1.0078125
    x = torch.tensor([[1.0, 2.0, 2.44, 2.56]], dtype=torch.bfloat16)
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            assert route(near, config).ids_TK.tolist() == [[1]]
            logits = router_logits(x, weight)
            assert logits.dtype == torch.float32
            assert 0 < float(logits[0, 1] - logits[0, 0]) < 0.03
            out = route(logits, RouterConfig(2, 1, normalize=False))
        assert out.ids_TK.tolist() == [[1]]
        assert out.weights_TK.dtype == out.scores_TE.dtype == torch.float32


def test_precision_never_falls_below_fp32() -> None:
    """R4: bf16 logits are scored in fp32, fp64 stays, and fp64 can be asked for."""
    logits = torch.randn(6, 8, generator=torch.manual_seed(0))
    out = route(logits.bfloat16(), RouterConfig(8, 2))
    assert torch.equal(
        out.weights_TK, route(logits.bfloat16().float(), RouterConfig(8, 2)).weights_TK
    )
    assert route(logits.double(), RouterConfig(8, 2)).weights_TK.dtype == torch.float64
    assert route(logits, RouterConfig(8, 2, dtype="float64")).weights_TK.dtype == torch.float64
    got = router_logits(torch.randn(3, 4).bfloat16(), torch.randn(8, 4), dtype="float64")
    assert got.dtype == torch.float64


def test_sigmoid_is_the_sigmoid() -> None:
    """R1, R4: same values as torch's to rounding, and bits that do not depend on the position."""
    x = torch.cat([torch.linspace(-120, 120, 4001), torch.zeros(1)])
    assert torch.allclose(position_free_sigmoid(x), torch.sigmoid(x), rtol=2e-6, atol=1e-38)
    y = torch.randn(7, 37, generator=torch.manual_seed(3)) * 4
    assert torch.equal(position_free_sigmoid(y)[3:4], position_free_sigmoid(y[3:4].clone()))
    wide = torch.randn(50, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(position_free_sigmoid, wide)
    edge = torch.tensor([-200.0, -50.0, 0.0, 200.0], requires_grad=True)
    position_free_sigmoid(edge).sum().backward()
    assert torch.isfinite(edge.grad).all()  # type: ignore[arg-type]
    assert edge.grad[2] == 0.25  # type: ignore[index]


@pytest.mark.parametrize(
    "setting",
    [
        {"normalize": True},
        {"score": "sigmoid", "normalize": True},
        {"score": "softmax_topk", "normalize": False},
    ],
)
def test_constant_top_1_is_refused(setting: dict[str, object]) -> None:
    """R5: a weight that is 1 by construction never teaches the router."""
    with pytest.raises(ConfigError, match="never learn"):
        RouterConfig(4, 1, **setting)  # type: ignore[arg-type]
    RouterConfig(4, 1, frozen=True, **setting)  # type: ignore[arg-type]


def test_switch_has_a_gradient() -> None:
    """R5: the Switch router's weight is its probability, which the logits can change."""
    logits = torch.randn(5, 4, generator=torch.manual_seed(0), requires_grad=True)
    out = route(logits, switch_config(4, capacity_factor=None))
    assert torch.equal(out.weights_TK[:, 0], torch.softmax(logits, -1).amax(-1))
    out.weights_TK.sum().backward()
    assert logits.grad.abs().sum() > 0.1  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("setting", "word"),
    [
        ({"num_experts": 0, "top_k": 1}, "num_experts=0"),
        ({"num_experts": 4, "top_k": 5}, "top_k <= 4"),
        ({"num_experts": 10, "top_k": 2, "num_groups": 4}, "num_groups=4"),
        ({"num_experts": 8, "top_k": 2, "num_groups": 2, "top_groups": 3}, "top_groups"),
        ({"num_experts": 8, "top_k": 3, "num_groups": 4, "top_groups": 1}, "top_k=3"),
        ({"num_experts": 8, "top_k": 2, "score": "relu"}, "sigmoid"),
        ({"num_experts": 8, "top_k": 2, "kind": "magic"}, "expert_choice"),
        ({"num_experts": 8, "top_k": 2, "scale": 0.0}, "scale"),
        ({"num_experts": 8, "top_k": 2, "scale": float("nan")}, "finite"),
        ({"num_experts": 8, "top_k": 2, "capacity_factor": 0.0}, "capacity_factor"),
        ({"num_experts": 8, "top_k": 2, "pad_to_capacity": True}, "capacity_factor"),
        ({"num_experts": 8, "top_k": 2, "bias_rate": 0.1}, "correction_bias"),
        ({"num_experts": 8, "top_k": 2, "input_jitter": 1.0}, "input_jitter"),
        ({"num_experts": 8, "top_k": 2, "bias_schedule": "linear"}, "bias_steps"),
        ({"num_experts": 8, "top_k": 2, "kind": "hash", "num_groups": 2}, "num_groups"),
        ({"num_experts": 8, "top_k": 2, "kind": "hash", "expert_dropout": 0.5}, "expert_dropout"),
        ({"num_experts": 8, "top_k": 2, "kind": "sinkhorn", "correction_bias": True}, "bias"),
        ({"num_experts": 8, "top_k": 2, "sinkhorn_iterations": 0}, "sinkhorn_iterations"),
        ({"num_experts": 8, "top_k": 2, "normalize": "false"}, "normalize='false'"),
        ({"num_experts": 8, "top_k": 2, "frozen": 1}, "frozen=1"),
        ({"num_experts": 8, "top_k": 2, "scale": None}, "scale=None"),
        ({"num_experts": 8, "top_k": 2, "capacity_factor": "1.5"}, "capacity_factor='1.5'"),
        ({"num_experts": 8, "top_k": 2, "capacity_factor": True}, "capacity_factor=True"),
        ({"num_experts": 8, "top_k": 2, "bias_steps": 2.5}, "bias_steps=2.5"),
        ({"num_experts": 8, "top_k": 2, "seed": "x"}, "seed='x'"),
    ],
)
def test_a_config_checks_itself(setting: dict[str, object], word: str) -> None:
    """F3: what cannot work is refused when the config is made, with the fix named."""
    with pytest.raises(ConfigError) as caught:
        RouterConfig(**setting)  # type: ignore[arg-type]
    assert word in str(caught.value)


def test_a_config_of_numpy_integers() -> None:
    """F3: they are integers, and become Python's, which JSON can hold."""
    config = RouterConfig(np.int64(8), np.int32(2))  # type: ignore[arg-type]
    assert config == RouterConfig(8, 2)
    assert type(config.num_experts) is type(config.top_k) is int


def test_layout_dependence_is_marked() -> None:
    """R1: kinds that look across tokens say so, and say why."""
    free = [
        RouterConfig(8, 2),
        RouterConfig(8, 2, kind="hash"),
        RouterConfig(8, 2, score="sigmoid"),
    ]
    assert not any(config.layout_dependent for config in free)
    for kind in ("expert_choice", "sinkhorn", "random", "balanced"):
        config = RouterConfig(8, 2, kind=kind)  # type: ignore[arg-type]
        assert config.layout_dependent
        assert kind in str(config.layout_dependence)
    assert "capacity" in str(RouterConfig(8, 2, capacity_factor=1.0).layout_dependence)


def test_pieces_of_the_input_give_the_whole_gradient() -> None:
    """R4: a bf16 input is widened some rows at a time; 600 rows of 512 make three pieces."""
    torch.manual_seed(0)
    x, weight = torch.randn(600, 512).bfloat16(), torch.randn(8, 512)
    bias, grad = torch.randn(8), torch.randn(600, 8)
    found = []
    for cast in (torch.bfloat16, torch.float32):
        leaves = [v.clone().requires_grad_() for v in (x.to(cast), weight, bias)]
        logits = router_logits(*leaves)
        logits.backward(grad)
        found.append([logits.detach(), *(leaf.grad for leaf in leaves)])
    for got, want in zip(*found, strict=True):
        assert got is not None
        assert want is not None
        torch.testing.assert_close(got, want.to(got.dtype), rtol=1e-5, atol=1e-4)
