"""Hub names of everything that families spell alike, and the few places where they differ.

A family gives a `HubNames`; `name_rules` turns it into the pieces of every parameter.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from moe_tp.checkpoint.rules import (
    ExpertFormat,
    NameRules,
    Piece,
    expert_down,
    expert_gate_up,
    expert_gate_up_bias,
    whole,
)
from moe_tp.models.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class HubNames:
    """Names below `model.layers.N.` where families differ, and the layout of fused experts.

    Args:
        router: the router's weight.
        router_bias: the bias on its logits.
        correction_bias: the bias that chooses experts.
        layout: how experts lie on disk.
        gate_up: hub names of gate and up, with `{e}` where there is one tensor an expert.
        down: hub name of down.
        gate_up_bias, down_bias: biases of the experts.
        shared: prefix of the shared expert.
        shared_gate: weight of its gate.
        down_layout: layout of down where it is not that of gate and up.
    """

    router: str
    layout: ExpertFormat
    gate_up: tuple[str, ...]
    down: str
    router_bias: str = ""
    correction_bias: str = ""
    gate_up_bias: str = ""
    down_bias: str = ""
    shared: str = ""
    shared_gate: str = ""
    fp32: tuple[str, ...] = field(default=(r".*e_score_correction_bias",))


QWEN_EXPERTS = HubNames(
    router="mlp.gate.weight",
    layout="per_expert",
    gate_up=("mlp.experts.{e}.gate_proj.weight", "mlp.experts.{e}.up_proj.weight"),
    down="mlp.experts.{e}.down_proj.weight",
    correction_bias="mlp.gate.e_score_correction_bias",
)


def fused_experts(names: HubNames, prefix: str, *, router: str = "") -> HubNames:
    """Return the names of transformers 5's fused form, `[E, 2F, D]` and `[E, D, F]`.

    Args:
        names: the per-expert form.
        prefix: where the fused tensors lie, such as `mlp.experts`.
        router: the router's weight, where it is named otherwise in this form.
    """
    return replace(
        names,
        layout="fused",
        gate_up=(f"{prefix}.gate_up_proj",),
        down=f"{prefix}.down_proj",
        router=router or names.router,
    )


def choose(tensors: Collection[str], *forms: HubNames) -> HubNames:
    """Return the form whose expert tensors the folder holds; the first one where none is there.

    Args:
        tensors: hub names in the folder; empty for a model that is not read from one.
        forms: the form that this family writes, then others that it reads.
    """
    for form in forms:
        pattern = re.compile(
            r"model\.layers\.\d+\." + re.escape(form.down).replace(re.escape("{e}"), r"\d+")
        )
        if any(pattern.fullmatch(name) for name in tensors):
            return form
    return forms[0]


def name_rules(config: ModelConfig, names: HubNames) -> NameRules:
    """Return how every parameter of the model lies in a hub folder."""
    dim, vocab = config.dim, config.vocab_size
    pieces: dict[str, tuple[Piece, ...]] = {
        "embed.weight": whole("model.embed_tokens.weight", (vocab, dim)),
        "norm.weight": whole("model.norm.weight", (dim,)),
    }
    optional = [r".*\.rotary_emb\.inv_freq"]
    if config.tie_embeddings:
        optional.append(r"lm_head\.weight")
    else:
        pieces["head.weight"] = whole("lm_head.weight", (vocab, dim))
    for layer in range(config.num_layers):
        pieces.update(_layer_pieces(config, names, layer))
    extra = range(config.num_layers, config.num_layers + config.num_mtp_layers)
    return NameRules(
        pieces=pieces,
        passthrough=tuple(rf"model\.layers\.{i}\..*" for i in extra),
        optional=tuple(optional),
        fp32_names=names.fp32,
        hints={
            r"lm_head\.weight": "tie_word_embeddings",
            r".*experts.*": "the number of experts",
            r"model\.layers\..*": "num_hidden_layers",
        },
    )


def _layer_pieces(
    config: ModelConfig, names: HubNames, layer: int
) -> Mapping[str, tuple[Piece, ...]]:
    here, there = f"layers.{layer}.", f"model.layers.{layer}."
    result = {
        f"{here}attention_norm.weight": whole(f"{there}input_layernorm.weight", (config.dim,)),
        f"{here}mlp_norm.weight": whole(f"{there}post_attention_layernorm.weight", (config.dim,)),
    }
    parts = _attention_shapes(config)
    if config.is_dense(layer):
        parts |= _mlp_shapes("mlp", "mlp", config.dense_dim, config.dim)
    for fqn, (hub, shape) in parts.items():
        result[here + fqn] = whole(there + hub, shape)
    if not config.is_dense(layer):
        result.update(_moe_pieces(config, names, here, there))
    return result


def _mlp_shapes(
    fqn: str, hub: str, hidden: int, dim: int
) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {
        f"{fqn}.gate.weight": (f"{hub}.gate_proj.weight", (hidden, dim)),
        f"{fqn}.up.weight": (f"{hub}.up_proj.weight", (hidden, dim)),
        f"{fqn}.down.weight": (f"{hub}.down_proj.weight", (dim, hidden)),
    }


def _attention_shapes(config: ModelConfig) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return parameter -> (hub name, shape) of one layer's attention."""
    attention, dim = config.attention, config.dim
    heads, kv_heads, size = attention.num_heads, attention.num_kv_heads, attention.head_dim
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
    biased: dict[str, tuple[str, int]] = {}
    if attention.mla is not None:
        mla = attention.mla
        wide, latent = heads * mla.qk_dim, mla.kv_rank + mla.rope_dim
        if mla.q_rank is None:
            shapes["q.weight"] = ("q_proj.weight", (wide, dim))
        else:
            shapes["q_a.weight"] = ("q_a_proj.weight", (mla.q_rank, dim))
            shapes["q_a_norm.weight"] = ("q_a_layernorm.weight", (mla.q_rank,))
            shapes["q_b.weight"] = ("q_b_proj.weight", (wide, mla.q_rank))
            biased["q_a"] = ("q_a_proj", mla.q_rank)
        shapes["kv_a.weight"] = ("kv_a_proj_with_mqa.weight", (latent, dim))
        shapes["kv_a_norm.weight"] = ("kv_a_layernorm.weight", (mla.kv_rank,))
        up = heads * (mla.nope_dim + mla.value_dim)
        shapes["kv_b.weight"] = ("kv_b_proj.weight", (up, mla.kv_rank))
        shapes["o.weight"] = ("o_proj.weight", (dim, heads * mla.value_dim))
        biased["kv_a"] = ("kv_a_proj_with_mqa", latent)
    else:
        for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            shapes[f"{name}.weight"] = (f"{name}_proj.weight", (count * size, dim))
            biased[name] = (f"{name}_proj", count * size)
        shapes["o.weight"] = ("o_proj.weight", (dim, heads * size))
        for name, count in (("q", heads), ("k", kv_heads)):
            if attention.qk_norm != "none":
                width = size if attention.qk_norm == "head" else count * size
                shapes[f"{name}_norm.weight"] = (f"{name}_norm.weight", (width,))
    if attention.qkv_bias:
        shapes |= {f"{n}.bias": (f"{hub}.bias", (width,)) for n, (hub, width) in biased.items()}
    if attention.out_bias:
        shapes["o.bias"] = ("o_proj.bias", (dim,))
    if attention.sinks:
        shapes["sinks.weight"] = ("sinks", (heads,))
    return {f"attention.{n}": (f"self_attn.{hub}", s) for n, (hub, s) in shapes.items()}


def _moe_pieces(
    config: ModelConfig, names: HubNames, here: str, there: str
) -> Mapping[str, tuple[Piece, ...]]:
    moe, dim = config.moe, config.dim
    experts, hidden = moe.router.num_experts, moe.expert_dim
    gate_up = [there + name for name in names.gate_up]
    result = {
        f"{here}moe.router.weight": whole(there + names.router, (experts, dim)),
        f"{here}moe.experts.gate_up": expert_gate_up(
            names.layout, gate_up, num_experts=experts, hidden=hidden, dim=dim
        ),
        f"{here}moe.experts.down": expert_down(
            names.layout, there + names.down, num_experts=experts, hidden=hidden, dim=dim
        ),
    }
    if moe.expert_bias:
        result[f"{here}moe.experts.gate_up_bias"] = expert_gate_up_bias(
            names.layout, there + names.gate_up_bias, num_experts=experts, hidden=hidden
        )
        result[f"{here}moe.experts.down_bias"] = whole(there + names.down_bias, (experts, dim))
    if moe.router.linear_bias:
        result[f"{here}moe.router.bias"] = whole(there + names.router_bias, (experts,))
    if moe.router.correction_bias:
        result[f"{here}moe.router.correction_bias"] = whole(
            there + names.correction_bias, (experts,)
        )
    if moe.shared_dim:
        shared = _mlp_shapes("moe.shared", names.shared, moe.shared_dim, dim)
        result |= {here + fqn: whole(there + hub, shape) for fqn, (hub, shape) in shared.items()}
    if moe.shared_gate:
        result[f"{here}moe.shared_gate.weight"] = whole(there + names.shared_gate, (1, dim))
    return result
