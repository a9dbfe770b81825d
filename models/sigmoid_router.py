"""What DeepSeek-V3 and GLM-4.5 share: the sigmoid router, shared experts, dense first layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from moe_tp.models.config import ModelConfig, MoEConfig
from moe_tp.models.hub import HubFields
from moe_tp.models.names import QWEN_EXPERTS
from moe_tp.routing.config import RouterConfig

SHARED_NAMES = replace(QWEN_EXPERTS, shared="mlp.shared_experts")


def read_sigmoid_moe(
    fields: HubFields, *, experts: int, scale: float, groups: int, top_groups: int
) -> MoEConfig:
    """Return experts behind a sigmoid router with a correction bias (arXiv:2412.19437, 2.1.2).

    Args:
        fields: the config.
        experts, scale, groups, top_groups: the family's defaults.
    """
    fields.must_be("scoring_func", ("sigmoid",), "sigmoid")
    fields.must_be("topk_method", ("noaux_tc",), "noaux_tc")
    expert_dim = fields.integer("moe_intermediate_size")
    return MoEConfig(
        router=RouterConfig(
            allow_constant=True,
            num_experts=fields.experts(("n_routed_experts", "num_local_experts"), experts),
            top_k=fields.integer("num_experts_per_tok", 8),
            score="sigmoid",
            normalize=fields.flag("norm_topk_prob", True),
            scale=fields.number("routed_scaling_factor", scale),
            num_groups=_groups(fields, "n_group", groups),
            top_groups=_groups(fields, "topk_group", top_groups),
            group_score="top2_sum",
            correction_bias=True,
        ),
        expert_dim=expert_dim,
        shared_dim=expert_dim * fields.integer("n_shared_experts", 1),
    )


def _groups(fields: HubFields, name: str, default: int) -> int:
    """Return a number of groups; null says that there are none, unlike a key that is absent."""
    null = name in fields.config and fields.config[name] is None
    return 1 if null else fields.integer(name, default)


def write_shared_moe(config: ModelConfig) -> dict[str, Any]:
    """Return the fields of experts with ungated shared ones and dense first layers."""
    moe, router = config.moe, config.moe.router
    return {
        "intermediate_size": config.dense_dim,
        "moe_intermediate_size": moe.expert_dim,
        "n_routed_experts": router.num_experts,
        "n_shared_experts": moe.shared_dim // moe.expert_dim,
        "num_experts_per_tok": router.top_k,
        "norm_topk_prob": router.normalize,
        "routed_scaling_factor": router.scale,
        "n_group": router.num_groups,
        "topk_group": router.top_groups,
        "first_k_dense_replace": len(config.dense_layers),
    }


def read_first_dense(fields: HubFields, default: int) -> tuple[int, ...]:
    """Return the dense layers that `first_k_dense_replace` names."""
    first = fields.integer("first_k_dense_replace", default)
    return tuple(range(min(first, fields.integer("num_hidden_layers"))))
