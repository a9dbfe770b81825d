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
from moe_tp.checkpoint.sized import LAYERS, Sized
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
    dim, vocab = _dim(config), Sized(config.vocab_size, ("vocab_size",))
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
    layers = "num_hidden_layers"
    if config.moe.router.correction_bias:  # families with layers of multi-token prediction
        layers += ", num_nextn_predict_layers"
    return NameRules(
        pieces=pieces,
        passthrough=tuple(rf"model\.layers\.{i}\..*" for i in extra),
        optional=tuple(optional),
        fp32_names=names.fp32,
        hints={
            r"lm_head\.weight": "tie_word_embeddings",
            r".*\.experts\..*": _experts(config).fields[0],
            LAYERS: layers,
        },
    )


def _field(config: ModelConfig, *names: str) -> tuple[str, ...]:
    """Return the name that the model's config.json has, the last one where it has none."""
    return (next((name for name in names if name in config.hub_config), names[-1]),)


def _dim(config: ModelConfig) -> Sized:
    return Sized(config.dim, ("hidden_size",))


def _experts(config: ModelConfig) -> Sized:
    names = _field(config, "n_routed_experts", "num_experts", "num_local_experts")
    return Sized(config.moe.router.num_experts, names)


def _expert_dim(config: ModelConfig) -> Sized:
    names = _field(config, "moe_intermediate_size", "intermediate_size")
    return Sized(config.moe.expert_dim, names)


def _shared_dim(config: ModelConfig) -> Sized:
    one = "shared_expert_intermediate_size"
    if one in config.hub_config:
        return Sized(config.moe.shared_dim, (one,))
    return Sized(config.moe.shared_dim, ("n_shared_experts", *_expert_dim(config).fields))


def _layer_pieces(
    config: ModelConfig, names: HubNames, layer: int
) -> Mapping[str, tuple[Piece, ...]]:
    here, there = f"layers.{layer}.", f"model.layers.{layer}."
    dim = _dim(config)
    result = {
        f"{here}attention_norm.weight": whole(f"{there}input_layernorm.weight", (dim,)),
        f"{here}mlp_norm.weight": whole(f"{there}post_attention_layernorm.weight", (dim,)),
    }
    parts = _attention_shapes(config)
    if config.is_dense(layer):
        hidden = Sized(config.dense_dim, ("intermediate_size",))
        parts |= _mlp_shapes("mlp", "mlp", hidden, dim)
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
    attention, dim = config.attention, _dim(config)
    heads = Sized(attention.num_heads, ("num_attention_heads",))
    kv_heads = Sized(attention.num_kv_heads, ("num_key_value_heads",))
    split = ("head_dim",) if config.hub_config.get("head_dim") else (*dim.fields, *heads.fields)
    size = Sized(attention.head_dim, split)
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
    biased: dict[str, tuple[str, int]] = {}
    if attention.mla is not None:
        mla = attention.mla
        rope_dim = Sized(mla.rope_dim, ("qk_rope_head_dim",))
        nope_dim = Sized(mla.nope_dim, ("qk_nope_head_dim",))
        value_dim = Sized(mla.value_dim, ("v_head_dim",))
        kv_rank = Sized(mla.kv_rank, ("kv_lora_rank",))
        wide, latent = heads * (nope_dim + rope_dim), kv_rank + rope_dim
        if mla.q_rank is None:
            shapes["q.weight"] = ("q_proj.weight", (wide, dim))
        else:
            q_rank = Sized(mla.q_rank, ("q_lora_rank",))
            shapes["q_a.weight"] = ("q_a_proj.weight", (q_rank, dim))
            shapes["q_a_norm.weight"] = ("q_a_layernorm.weight", (q_rank,))
            shapes["q_b.weight"] = ("q_b_proj.weight", (wide, q_rank))
            biased["q_a"] = ("q_a_proj", q_rank)
        shapes["kv_a.weight"] = ("kv_a_proj_with_mqa.weight", (latent, dim))
        shapes["kv_a_norm.weight"] = ("kv_a_layernorm.weight", (kv_rank,))
        up = heads * (nope_dim + value_dim)
        shapes["kv_b.weight"] = ("kv_b_proj.weight", (up, kv_rank))
        shapes["o.weight"] = ("o_proj.weight", (dim, heads * value_dim))
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
    moe, dim = config.moe, _dim(config)
    experts, hidden = _experts(config), _expert_dim(config)
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
        shared = _mlp_shapes("moe.shared", names.shared, _shared_dim(config), dim)
        result |= {here + fqn: whole(there + hub, shape) for fqn, (hub, shape) in shared.items()}
    if moe.shared_gate:
        result[f"{here}moe.shared_gate.weight"] = whole(there + names.shared_gate, (1, dim))
    return result
