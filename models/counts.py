"""Parameter counts from the configuration alone, equal to those of the built model."""

from __future__ import annotations

from dataclasses import dataclass

from moe_tp.models.config import AttentionConfig, ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamCounts:
    """Numbers of parameters, buffers (the router's correction bias) left out.

    Args:
        embedding: embedding and head, a tied head counted once.
        attention: attention of all layers.
        dense: dense MLPs, routers, shared experts and norms of all layers, and the final norm.
        experts: routed experts of all layers.
        active_experts: those of them that one token meets.
    """

    embedding: int
    attention: int
    dense: int
    experts: int
    active_experts: int

    @property
    def total(self) -> int:
        """All parameters."""
        return self.embedding + self.attention + self.dense + self.experts

    @property
    def active(self) -> int:
        """Parameters that one token meets."""
        return self.total - self.experts + self.active_experts


def attention_params(attention: AttentionConfig, dim: int) -> int:
    """Return the parameters of one layer's attention, its q and k norms included.

    Args:
        attention: the attention.
        dim: width of the residual stream.
    """
    heads, kv_heads, size = attention.num_heads, attention.num_kv_heads, attention.head_dim
    if attention.mla is not None:
        mla = attention.mla
        wide = heads * mla.qk_dim
        latent = mla.kv_rank + mla.rope_dim
        if mla.q_rank is None:
            count = dim * wide
        else:
            count = dim * mla.q_rank + mla.q_rank + mla.q_rank * wide
            count += mla.q_rank if attention.qkv_bias else 0
        count += dim * latent + mla.kv_rank + (latent if attention.qkv_bias else 0)
        count += mla.kv_rank * heads * (mla.nope_dim + mla.value_dim)
        count += heads * mla.value_dim * dim
    else:
        count = dim * size * (2 * heads + 2 * kv_heads)
        count += size * (heads + 2 * kv_heads) if attention.qkv_bias else 0
        count += {"none": 0, "head": 2 * size, "full": size * (heads + kv_heads)}[attention.qk_norm]
    count += dim if attention.out_bias else 0
    return count + (heads if attention.sinks else 0)


def expert_params(config: ModelConfig) -> int:
    """Return the parameters of one routed expert."""
    width = config.moe.expert_dim
    bias = 2 * width + config.dim if config.moe.expert_bias else 0
    return 3 * config.dim * width + bias


def count_params(config: ModelConfig) -> ParamCounts:
    """Return the parameter counts of the whole model."""
    moe, router = config.moe, config.moe.router
    sparse, dense = len(config.moe_layers), len(config.dense_layers)
    routers = router.num_experts * (config.dim + (1 if router.linear_bias else 0))
    shared = 3 * config.dim * moe.shared_dim + (config.dim if moe.shared_gate else 0)
    one = expert_params(config)
    return ParamCounts(
        embedding=config.vocab_size * config.dim * (1 if config.tie_embeddings else 2),
        attention=config.num_layers * attention_params(config.attention, config.dim),
        dense=sparse * (routers + shared)
        + dense * 3 * config.dim * config.dense_dim
        + (2 * config.num_layers + 1) * config.dim,
        experts=sparse * router.num_experts * one,
        active_experts=sparse * min(router.top_k, router.num_experts) * one,
    )


def layer_flops(config: ModelConfig, layer: int, length: int) -> float:
    """Return the floating-point operations of one layer's forward for one token.

    Args:
        config: the model.
        layer: number of the layer.
        length: tokens a sequence; on average half of them are attended to.
    """
    attention, moe = config.attention, config.moe
    weights = attention_params(attention, config.dim)
    if config.is_dense(layer):
        weights += 3 * config.dim * config.dense_dim
    else:
        weights += min(moe.router.top_k, moe.router.num_experts) * expert_params(config)
        weights += 3 * config.dim * moe.shared_dim + moe.router.num_experts * config.dim
    mla = attention.mla
    width = 2 * attention.head_dim if mla is None else mla.qk_dim + mla.value_dim
    return 2.0 * weights + length * attention.num_heads * width
