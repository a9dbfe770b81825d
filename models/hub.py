"""Reading and writing hub `config.json` fields: names, types, null values, old and new spelling."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moe_tp.checkpoint.rules import NameRules
from moe_tp.errors import ConfigError
from moe_tp.models.config import ModelConfig, RopeConfig

_REQUIRED: Any = object()
_TIE = "tie_word_embeddings"


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What is particular to one family of models.

    Args:
        model_type: the hub's name.
        from_hub: configuration of a hub `config.json`.
        to_hub: the reverse.
        name_rules: how parameters lie on disk, given the hub names in the folder (empty for a
            model that is written first).
        presets: hub configs of published sizes, and `tiny`.
    """

    model_type: str
    from_hub: Callable[[Mapping[str, Any]], ModelConfig]
    to_hub: Callable[[ModelConfig], dict[str, Any]]
    name_rules: Callable[[ModelConfig, Collection[str]], NameRules]
    presets: Mapping[str, Mapping[str, Any]]


class HubFields:
    """Typed access to a hub config; a field that is null counts as absent.

    Args:
        config: the decoded `config.json`.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.model_type = str(config.get("model_type"))

    def raw(self, name: str, default: Any = _REQUIRED) -> Any:
        """Return a field as it is.

        Raises:
            ConfigError: it is absent or null and has no default.
        """
        value = self.config.get(name)
        if value is None and name == _TIE:  # wrappers keep this flag with their language model
            value = (self.config.get("text_config") or {}).get(name)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise ConfigError(
                f"config.json of model_type={self.model_type!r} has no {name!r}, which this "
                f"family needs; add it"
            )
        return default

    def _typed(self, name: str, default: Any, kinds: tuple[type, ...], word: str) -> Any:
        value = self.raw(name, default)
        wrong_bool = isinstance(value, bool) and bool not in kinds
        if value is not default and (wrong_bool or not isinstance(value, kinds)):
            raise ConfigError(f"config.json: {name}={value!r} must be {word}")
        return value

    def integer(self, name: str, default: Any = _REQUIRED) -> int:
        """Return a whole number."""
        value = self._typed(name, default, (int, float), "a whole number")
        if not math.isfinite(value) or value != int(value):
            raise ConfigError(f"config.json: {name}={value!r} must be a whole number")
        return int(value)

    def number(self, name: str, default: Any = _REQUIRED) -> float:
        """Return a number."""
        value = float(self._typed(name, default, (int, float), "a number"))
        if not math.isfinite(value):
            raise ConfigError(f"config.json: {name}={value!r} must be a finite number")
        return value

    def flag(self, name: str, default: Any = _REQUIRED) -> bool:
        """Return true or false."""
        return bool(self._typed(name, default, (bool,), "true or false"))

    def text(self, name: str, default: Any = _REQUIRED) -> str:
        """Return a string."""
        return str(self._typed(name, default, (str,), "a string"))

    def optional_integer(self, name: str) -> int | None:
        """Return a whole number, or None where the field is absent or null."""
        return None if self.config.get(name) is None else self.integer(name)

    def optional_number(self, name: str) -> float | None:
        """Return a number, or None where the field is absent or null."""
        return None if self.config.get(name) is None else self.number(name)

    def integers(self, name: str) -> tuple[int, ...]:
        """Return a list of whole numbers, empty where the field is absent or null."""
        value = self.raw(name, ())
        if not isinstance(value, Sequence) or not all(isinstance(i, int) for i in value):
            raise ConfigError(f"config.json: {name}={value!r} must be a list of whole numbers")
        return tuple(value)

    def mapping(self, name: str) -> Mapping[str, Any]:
        """Return a field of fields, empty where it is absent or null."""
        value = self._typed(name, {}, (Mapping,), "a mapping")
        assert isinstance(value, Mapping)
        return value

    def kv_heads(self, heads: int, default: int) -> int:
        """Return the key and value heads: null is one a query head, as it was in older configs.

        Args:
            heads: query heads.
            default: where the field is absent and the default divides `heads`.
        """
        absent = "num_key_value_heads" not in self.config and heads % default == 0
        return self.integer("num_key_value_heads", default if absent else heads)

    def experts(self, names: Sequence[str], default: Any = _REQUIRED) -> int:
        """Return the number of experts, which other families and versions spell otherwise.

        Args:
            names: the spellings, the family's own one first.
            default: where none is given.

        Raises:
            ConfigError: two spellings differ.
        """
        given = {name: self.integer(name) for name in names if self.config.get(name) is not None}
        if len(set(given.values())) > 1:
            listed = " and ".join(f"{name}={value}" for name, value in given.items())
            raise ConfigError(
                f"config.json: {listed} are one number in two spellings; make them equal"
            )
        return next(iter(given.values())) if given else self.integer(names[0], default)

    def must_be(self, name: str, allowed: Sequence[Any], default: Any) -> None:
        """Check a field whose other values this library does not compute.

        Raises:
            ConfigError: names the values that are supported.
        """
        value = self.raw(name, default)
        if value not in allowed:
            listed = " or ".join(repr(a) for a in allowed)
            raise ConfigError(
                f"config.json: {name}={value!r} is not supported for "
                f"model_type={self.model_type!r}; supported: {listed}"
            )

    def dtype(self) -> str | None:
        """Return the dtype on disk, under its new or old name."""
        value = self.raw("dtype", self.raw("torch_dtype", None))
        return None if value is None else str(value).removeprefix("torch.")

    def head_dim(self) -> int:
        """Return the explicit head size, or the width split over the heads."""
        explicit = self.optional_integer("head_dim")
        if explicit is not None:
            return explicit
        dim, heads = self.integer("hidden_size"), self.integer("num_attention_heads")
        if heads < 1:
            raise ConfigError(f"num_attention_heads={heads} must be at least 1")
        if dim % heads:
            raise ConfigError(
                f"hidden_size={dim} does not divide over num_attention_heads={heads} and "
                f"head_dim is not given; add head_dim"
            )
        return dim // heads


def read_rope(
    fields: HubFields,
    *,
    theta: float = 10000.0,
    partial: float | None = None,
    interleaved: bool = False,
    scaling: Mapping[str, Any] | None = None,
) -> RopeConfig:
    """Return the rotary embedding of a config in the old or the new spelling.

    Where both are there the old one decides, as in transformers, which then reads nothing of the
    new one.

    Args:
        fields: the config.
        theta, scaling: the family's defaults.
        partial: likewise; None for a family that rotates whole heads, whatever the config says.
        interleaved: the family's pairing.

    Raises:
        ConfigError: a kind that is not supported, or not named beside a factor; a value that stands
            only in the new spelling while the old one decides; a part of each head in a family that
            rotates the whole.
    """
    new, old = fields.mapping("rope_parameters"), fields.mapping("rope_scaling")
    whole, partial = partial is None, partial or 1.0
    if old:
        _check_lost(fields, old, new, {"rope_theta": theta, "partial_rotary_factor": partial})
    given = dict(old or new or scaling or {})
    kind = _rope_kind(given)
    if given.get("rope_theta") is None:
        given["rope_theta"] = fields.raw("rope_theta", theta)
    fraction = given.get("partial_rotary_factor")
    if fraction is None:
        fraction = fields.number("partial_rotary_factor", partial)
    if whole and fraction != 1:
        raise ConfigError(
            f"config.json: partial_rotary_factor={fraction!r} is not supported for model_type="
            f"{fields.model_type!r}, which rotates whole heads; delete it"
        )
    values = HubFields({**given, "model_type": fields.model_type})
    trained = fields.optional_integer("original_max_position_embeddings")
    if trained is None:
        trained = values.optional_integer("original_max_position_embeddings")
    if trained is None and kind in ("llama3", "yarn"):
        trained = fields.integer("max_position_embeddings")
    factor = values.optional_number("factor")
    if factor is None and kind == "yarn" and trained:
        factor = fields.integer("max_position_embeddings") / trained
    return RopeConfig(
        theta=values.number("rope_theta"),
        kind=kind,  # type: ignore[arg-type]  # checked by the class itself
        partial=float(fraction),
        interleaved=interleaved,
        factor=1.0 if factor is None else factor,
        original_positions=trained,
        low_freq_factor=values.number("low_freq_factor", 1.0),
        high_freq_factor=values.number("high_freq_factor", 4.0),
        beta_fast=values.number("beta_fast", 32.0) or 32.0,
        beta_slow=values.number("beta_slow", 1.0) or 1.0,
        mscale=values.number("mscale", 0.0),
        mscale_all_dim=values.number("mscale_all_dim", 0.0),
        attention_factor=values.optional_number("attention_factor"),
        truncate=values.flag("truncate", True),
    )


def _rope_kind(given: Mapping[str, Any]) -> str:
    """Return how positions are stretched; a factor says by how much, and does nothing alone."""
    kind, factor = given.get("rope_type") or given.get("type"), given.get("factor")
    if kind is None and factor not in (None, 1):
        raise ConfigError(
            f"config.json: the rope parameters have factor={factor!r} but no rope_type, so nothing "
            f"would be stretched; add rope_type ('linear' or 'yarn', say), or delete the factor"
        )
    if kind in ("linear", "llama3") and factor is None:
        raise ConfigError(
            f"config.json: rope_type={kind!r} needs a factor; add it to the rope parameters"
        )
    return str(kind or "default")


def _check_lost(
    fields: HubFields,
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    defaults: Mapping[str, float],
) -> None:
    """Refuse a value of `rope_parameters` for which transformers would take a default instead."""
    for name, default in defaults.items():
        elsewhere = old.get(name) is not None or fields.raw(name, None) is not None
        if not elsewhere and new.get(name) not in (None, default):
            raise ConfigError(
                f"config.json: rope_scaling decides over rope_parameters, as in transformers, but "
                f"{name}={new[name]!r} stands only in rope_parameters and would be lost; put "
                f"{name} into rope_scaling too, or delete one of the two fields"
            )


def read_step_layers(fields: HubFields) -> tuple[int, ...]:
    """Return the dense layers that `decoder_sparse_step` and `mlp_only_layers` name."""
    step = fields.integer("decoder_sparse_step", 1)
    if step < 1:
        raise ConfigError(f"config.json: decoder_sparse_step={step} must be at least 1")
    listed = set(fields.integers("mlp_only_layers"))
    layers = range(fields.integer("num_hidden_layers"))
    return tuple(i for i in layers if i in listed or (i + 1) % step)


def write_step_layers(config: ModelConfig) -> dict[str, Any]:
    """Return the fields that name dense layers, as they were read where that still holds."""
    given = {"decoder_sparse_step": 1, "mlp_only_layers": [], **config.hub_config}
    given["num_hidden_layers"] = config.num_layers
    if read_step_layers(HubFields(given)) == config.dense_layers:
        return {name: given[name] for name in ("decoder_sparse_step", "mlp_only_layers")}
    return {"decoder_sparse_step": 1, "mlp_only_layers": list(config.dense_layers)}


def read_windows(fields: HubFields, window: int, default: Sequence[bool]) -> tuple[int, ...]:
    """Return the sliding window of each layer from `layer_types`, empty where none has one.

    Args:
        fields: the config.
        window: tokens of a sliding layer.
        default: which layers slide where `layer_types` is not given.
    """
    kinds = fields.raw("layer_types", None)
    known = ("sliding_attention", "full_attention")
    if kinds is not None and any(kind not in known for kind in kinds):
        raise ConfigError(f"config.json: layer_types={kinds!r} may hold {known[0]} and {known[1]}")
    slides = default if kinds is None else [kind == known[0] for kind in kinds]
    windows = tuple(window if slide else 0 for slide in slides)
    return windows if any(windows) else ()


def layer_types(config: ModelConfig) -> list[str]:
    """Return `layer_types` of a model."""
    return [
        "sliding_attention" if config.window(i) else "full_attention"
        for i in range(config.num_layers)
    ]


def write_rope(rope: RopeConfig) -> dict[str, Any]:
    """Return the fields of a rotary embedding in both spellings."""
    scaling: dict[str, Any] = {}
    if rope.kind != "default":
        scaling["factor"] = rope.factor
    if rope.kind in ("llama3", "yarn"):
        scaling["original_max_position_embeddings"] = rope.original_positions
    if rope.kind == "llama3":
        scaling["low_freq_factor"] = rope.low_freq_factor
        scaling["high_freq_factor"] = rope.high_freq_factor
    if rope.kind == "yarn":
        scaling["beta_fast"], scaling["beta_slow"] = rope.beta_fast, rope.beta_slow
        if rope.mscale:
            scaling["mscale"] = rope.mscale
        if rope.mscale_all_dim:
            scaling["mscale_all_dim"] = rope.mscale_all_dim
        if rope.attention_factor is not None:
            scaling["attention_factor"] = rope.attention_factor
        scaling["truncate"] = rope.truncate
    parameters = {"rope_type": rope.kind, "rope_theta": rope.theta, **scaling}
    result: dict[str, Any] = {
        "rope_theta": rope.theta,
        "rope_scaling": {"type": rope.kind, "rope_type": rope.kind, **scaling} if scaling else None,
    }
    if rope.partial != 1.0:
        result["partial_rotary_factor"] = parameters["partial_rotary_factor"] = rope.partial
    result["rope_parameters"] = parameters
    return result


def write_common(config: ModelConfig, architecture: str) -> dict[str, Any]:
    """Return the fields that all families spell alike, over the keys the config was read with."""
    result = dict(config.hub_config)
    # A rope that was read and not changed is written as it was, beside the other spelling.
    result.update(
        model_type=config.model_type,
        architectures=result.get("architectures") or [architecture],
        vocab_size=config.vocab_size,
        hidden_size=config.dim,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.attention.num_heads,
        max_position_embeddings=config.max_positions,
        initializer_range=config.init_std,
        rms_norm_eps=config.norm_eps,
        tie_word_embeddings=config.tie_embeddings,
        hidden_act="silu",
        attention_dropout=config.attention.dropout,
        **write_rope(config.rope),
    )
    if config.residual_dropout or "residual_dropout" in result:
        result["residual_dropout"] = config.residual_dropout
    if config.dtype is not None:
        result["dtype"] = result["torch_dtype"] = config.dtype
    return result


def common_fields(fields: HubFields) -> dict[str, Any]:
    """Return the arguments of `ModelConfig` that all families spell alike."""
    fields.must_be("hidden_act", ("silu", "swish"), "silu")
    return {
        "model_type": fields.text("model_type"),
        "vocab_size": fields.integer("vocab_size"),
        "dim": fields.integer("hidden_size"),
        "num_layers": fields.integer("num_hidden_layers"),
        "init_std": fields.number("initializer_range", 0.02),
        "residual_dropout": fields.number("residual_dropout", 0.0),
        "dtype": fields.dtype(),
        "hub_config": dict(fields.config),
    }
