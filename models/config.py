"""What a model is: one frozen description, with a switch for everything that families differ in.

A configuration is read from a hub `config.json` by its family's file and written back by it.
Nothing in this room asks a configuration for a field that may not be there: every switch exists for
every family, with the value that switches it off.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from moe_tp.errors import ConfigError
from moe_tp.routing.config import RouterConfig

RopeKind = Literal["default", "linear", "llama3", "yarn"]
QKNorm = Literal["none", "head", "full"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding (arXiv:2104.09864) and how it is stretched.

    Args:
        theta: base of the wavelengths.
        kind: `default`, `linear` (positions divided by `factor`), `llama3` (long wavelengths
            stretched) or `yarn` (arXiv:2309.00071).
        partial: fraction of each head that is rotated.
        interleaved: pairs are neighbours (x0, x1) rather than halves (x0, x[d/2]).
        factor: how many times longer the context is than in pre-training.
        original_positions: context length of pre-training; needed by llama3 and yarn.
        low_freq_factor, high_freq_factor: borders of the stretched wavelengths (llama3).
        beta_fast, beta_slow: rotations over the original context at the borders of the ramp (yarn).
        mscale, mscale_all_dim: strength of the attention temperature (yarn); 0 where not given.
        attention_factor: factor on cos and sin (yarn); None derives it from the others.
        truncate: round the borders of the ramp to whole dimensions (yarn).
    """

    theta: float = 10000.0
    kind: RopeKind = "default"
    partial: float = 1.0
    interleaved: bool = False
    factor: float = 1.0
    original_positions: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        if self.kind not in get_args(RopeKind):
            raise ConfigError(
                f"rope_type={self.kind!r} is not supported; it can be "
                f"{', '.join(get_args(RopeKind))}"
            )
        if not 0.0 < self.partial <= 1.0:
            raise ConfigError(f"partial_rotary_factor={self.partial} must lie in (0, 1]")
        for name in ("theta", "factor"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"rope_{name}={getattr(self, name)} must be above 0")
        if self.kind in ("llama3", "yarn") and not self.original_positions:
            raise ConfigError(
                f"rope_type={self.kind!r} needs original_max_position_embeddings; add it to the "
                f"rope parameters"
            )

    def rotated(self, head_dim: int) -> int:
        """Return how many elements of a head are rotated."""
        return int(head_dim * self.partial)


@dataclass(frozen=True, slots=True, kw_only=True)
class MLAConfig:
    """Multi-head latent attention (arXiv:2405.04434, section 2.1).

    Args:
        q_rank: width of the query latent; None projects queries directly.
        kv_rank: width of the latent that keys and values share.
        nope_dim: elements of each query and key head without position.
        rope_dim: rotated elements; the key's are shared by all heads.
        value_dim: elements of each value head.
    """

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int

    @property
    def qk_dim(self) -> int:
        """Elements of a query or key head."""
        return self.nope_dim + self.rope_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """Attention of one layer.

    Args:
        num_heads: query heads.
        num_kv_heads: key and value heads; divides `num_heads`.
        head_dim: elements of a head (of the rotated part with `mla`).
        mla: latent attention instead of grouped queries.
        qkv_bias: biases on the query, key and value projections (on the latents' with `mla`).
        out_bias: a bias on the output projection.
        qk_norm: RMSNorm on queries and keys: none, over each head, or over the full width.
        clip_qkv: bound on the absolute value of queries, keys and values.
        sinks: a learned logit for each head joins the softmax and takes no value.
        scale: factor on the scores; None is one over the root of the head size.
        dropout: probability of dropping an attention weight in training; above 0 a slow exact
            path is taken.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    mla: MLAConfig | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: QKNorm = "none"
    clip_qkv: float | None = None
    sinks: bool = False
    scale: float | None = None
    dropout: float = 0.0

    @property
    def rope_size(self) -> int:
        """Elements of a head that rope is about."""
        return self.head_dim if self.mla is None else self.mla.rope_dim

    def __post_init__(self) -> None:
        for name, size in (("num_attention_heads", self.num_heads), ("head_dim", self.head_dim)):
            if size < 1:
                raise ConfigError(f"{name}={size} must be at least 1")
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_key_value_heads={self.num_kv_heads} does not divide "
                f"num_attention_heads={self.num_heads}; choose one of its divisors"
            )
        if self.qk_norm not in get_args(QKNorm):
            raise ConfigError(f"qk_norm={self.qk_norm!r} must be none, head or full")
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigError(f"attention_dropout={self.dropout} must lie in [0, 1)")


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """Experts and router of every MoE layer.

    Args:
        router: how tokens choose experts, and the losses that keep them even.
        expert_dim: hidden size of an expert.
        activation: name of the experts' activation.
        activation_alpha, activation_limit: constants of `clamped_swiglu`.
        expert_bias: biases on both projections of an expert.
        shared_dim: hidden size of the shared expert; 0 for none.
        shared_gate: the shared expert's output is scaled by a sigmoid gate.
    """

    router: RouterConfig
    expert_dim: int
    activation: str = "silu"
    activation_alpha: float = 1.702
    activation_limit: float = 7.0
    expert_bias: bool = False
    shared_dim: int = 0
    shared_gate: bool = False

    def __post_init__(self) -> None:
        if self.expert_dim < 1:
            raise ConfigError(
                f"the experts' hidden size is {self.expert_dim}; it must be at least 1"
            )
        if self.shared_dim < 0:
            raise ConfigError(f"the shared expert's hidden size {self.shared_dim} is negative")
        if self.shared_gate and not self.shared_dim:
            raise ConfigError("a gate of the shared expert needs a shared expert")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder-only MoE language model.

    Args:
        model_type: the hub's name of the family.
        vocab_size: tokens.
        dim: width of the residual stream.
        num_layers: decoder layers, without multi-token-prediction ones.
        attention: attention of every layer.
        rope: rotary embedding.
        moe: experts of every MoE layer.
        dense_dim: hidden size of the MLP in dense layers.
        dense_layers: numbers of the layers with a dense MLP instead of experts.
        windows: sliding window of each layer in tokens, 0 for full attention; empty for none.
        norm_eps: added to the mean square in norms.
        tie_embeddings: the head is the embedding.
        max_positions: context length.
        init_std: standard deviation of initial weights.
        residual_dropout: probability of dropping an element before it joins the residual.
        embedding_scale, residual_scale, logit_scale: constant factors on the embedding, on what
            joins the residual, and on the logits.
        num_mtp_layers: multi-token-prediction layers in the folder; carried, not computed.
        dtype: dtype on disk as torch names it, or None where the folder does not say.
        hub_config: the `config.json` it was read from, for the keys this class does not know.
    """

    model_type: str
    vocab_size: int
    dim: int
    num_layers: int
    attention: AttentionConfig
    rope: RopeConfig
    moe: MoEConfig
    dense_dim: int = 0
    dense_layers: tuple[int, ...] = ()
    windows: tuple[int, ...] = ()
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    max_positions: int = 4096
    init_std: float = 0.02
    residual_dropout: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    num_mtp_layers: int = 0
    dtype: str | None = None
    hub_config: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("vocab_size", "dim", "num_layers", "max_positions"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        if not self.norm_eps >= 0:
            raise ConfigError(f"rms_norm_eps={self.norm_eps} must not be negative")
        if any(window < 0 for window in self.windows):
            raise ConfigError(f"sliding_window={min(self.windows)} must not be negative")
        if not 0.0 <= self.residual_dropout < 1.0:
            raise ConfigError(f"residual_dropout={self.residual_dropout} must lie in [0, 1)")
        if self.windows and len(self.windows) != self.num_layers:
            raise ConfigError(
                f"layer_types names {len(self.windows)} layers, but num_hidden_layers is "
                f"{self.num_layers}"
            )
        if self.dense_layers and self.dense_dim < 1:
            raise ConfigError(
                f"intermediate_size={self.dense_dim} must be at least 1, because layers "
                f"{list(self.dense_layers)} are dense"
            )

    @classmethod
    def from_hub(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Return the configuration that a hub `config.json` describes.

        Raises:
            ConfigError: the family, or something it asks for, is not supported.
        """
        from moe_tp.models.families import family_of

        return family_of(config).from_hub(config)

    def to_hub(self) -> dict[str, Any]:
        """Return a `config.json` in old and new spelling, with the keys it was read with."""
        from moe_tp.models.families import family

        return family(self.model_type).to_hub(self)

    def is_dense(self, layer: int) -> bool:
        """Return whether a layer has a dense MLP instead of experts."""
        return layer in self.dense_layers

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Numbers of the layers with experts."""
        return tuple(i for i in range(self.num_layers) if i not in self.dense_layers)

    def window(self, layer: int) -> int:
        """Return the sliding window of a layer in tokens, 0 for full attention."""
        return self.windows[layer] if self.windows else 0

    def num_params(self) -> int:
        """Return the parameters of the model, a tied head counted once."""
        from moe_tp.models.counts import count_params

        return count_params(self).total

    def num_active_params(self) -> int:
        """Return the parameters that one token meets: all but the experts it does not choose."""
        from moe_tp.models.counts import count_params

        return count_params(self).active
