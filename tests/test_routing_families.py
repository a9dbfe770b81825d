"""Routers of the hub's families: the same experts, weights and gradients as transformers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.granitemoe.modeling_granitemoe import GraniteMoeTopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter

from moe_tp.routing import RouterConfig, route, router_logits
from moe_tp.routing.route import choose
from moe_tp.routing.select import stable_top_k

HUB: dict[str, Any] = {
    "num_experts_per_tok": 3,
    "num_local_experts": 12,
    "num_experts": 12,
    "hidden_size": 16,
    "norm_topk_prob": False,
    "routed_scaling_factor": 2.5,
    "n_group": 4,
    "topk_group": 2,
    "topk_method": "group_limited_greedy",
}
GROUPS: dict[str, Any] = {"num_groups": 4, "top_groups": 2, "scale": 2.5}
FAMILIES: dict[str, tuple[type[nn.Module], dict[str, Any], RouterConfig]] = {
    "mixtral": (MixtralTopKRouter, {}, RouterConfig(12, 3)),
    "qwen2_moe": (Qwen2MoeTopKRouter, {}, RouterConfig(12, 3, normalize=False)),
    "qwen3_moe": (Qwen2MoeTopKRouter, {"norm_topk_prob": True}, RouterConfig(12, 3)),
    "granitemoe": (GraniteMoeTopKRouter, {}, RouterConfig(12, 3, score="softmax_topk")),
    "gpt_oss": (GptOssTopKRouter, {}, RouterConfig(12, 3, score="softmax_topk", linear_bias=True)),
    "deepseek_v2": (
        DeepseekV2TopkRouter,
        {},
        RouterConfig(12, 3, normalize=False, group_score="max", **GROUPS),
    ),
    "deepseek_v3": (
        DeepseekV3TopkRouter,
        {"norm_topk_prob": True},
        RouterConfig(12, 3, score="sigmoid", correction_bias=True, **GROUPS),
    ),
}


def by_expert(ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Return weights by expert: the order within a row is nobody's promise in transformers."""
    return torch.zeros(len(ids_TK), 12).scatter(1, ids_TK, weights_TK)


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_transformers(family: str) -> None:
    """R3: order of softmax, renormalising, scale, groups and bias follow the family."""
    module, changes, config = FAMILIES[family]
    router = module(SimpleNamespace(**{**HUB, **changes}))
    generator = torch.manual_seed(0)
    for tensor in [*router.parameters(), *router.buffers()]:
        nn.init.normal_(tensor, std=0.5, generator=generator)
    x = torch.randn(50, 16, generator=generator)
    _, want_weights, want_ids = router(x)
    weight = router.weight
    logits = router_logits(x, weight, router.bias if config.linear_bias else None)  # type: ignore[arg-type]
    bias = router.e_score_correction_bias if config.correction_bias else None
    out = route(logits, config, bias_E=bias)  # type: ignore[arg-type]
    ours, theirs = by_expert(out.ids_TK, out.weights_TK), by_expert(want_ids, want_weights)
    assert torch.allclose(ours, theirs, atol=1e-6)
    probe = torch.randn(50, 12, generator=generator)
    (mine,) = torch.autograd.grad((ours * probe).sum(), weight)  # type: ignore[arg-type]
    (grad,) = torch.autograd.grad((theirs * probe).sum(), weight)  # type: ignore[arg-type]
    assert torch.allclose(mine, grad, atol=1e-5)
    assert mine.abs().sum() > 0.1


@pytest.mark.parametrize("family", FAMILIES)
def test_choices_alone_are_those_of_an_assignment(family: str) -> None:
    """R1, R3: `choose` has the ids and weights of `route`, bit by bit, for few rows and many."""
    config = FAMILIES[family][2]
    torch.manual_seed(0)
    bias_E = torch.randn(12) if config.correction_bias else None
    logits_TE = torch.randn(7, 12).round(decimals=1)  # with ties
    whole = route(logits_TE, config, bias_E=bias_E)
    ids_TK, weights_TK = choose(logits_TE, config, bias_E=bias_E)
    assert torch.equal(ids_TK, whole.ids_TK)
    assert torch.equal(weights_TK, whole.weights_TK)


def test_few_rows_rank_as_many_do() -> None:
    """R1: where there are few numbers they are sorted, and the answer is that of the other way."""
    torch.manual_seed(0)
    values_RE = torch.randn(200, 64).round(decimals=1)
    values_RE[0, :5] = torch.tensor([0.0, -0.0, float("-inf"), 0.0, float("inf")])
    many = stable_top_k(values_RE, 8)
    for start in range(0, 200, 8):
        assert torch.equal(stable_top_k(values_RE[start : start + 8], 8), many[start : start + 8])
