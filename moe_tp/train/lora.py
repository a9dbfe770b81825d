"""LoRA (arXiv:2106.09685) on a model of any layout: adapters, merging, and PEFT folders.

An adapter stands beside its weight and holds no copy of it; see `moe_tp.train.lora_layers`. Its
first values are a function of seed and name, so that they are alike in every layout, and merging is
done element by element in one order, so that merged weights have the bits of one process.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from moe_tp.errors import ConfigError
from moe_tp.experts.layer import GroupedExperts
from moe_tp.experts.quantized import BITS
from moe_tp.experts.router import Router
from moe_tp.models.blocks import Block
from moe_tp.models.decoder import Decoder
from moe_tp.parallel.parameter import ParallelModule
from moe_tp.parallel.random import fill_normal, key_of
from moe_tp.parallel.shards import full_logical, local_index, to_local
from moe_tp.parallel.zero import reshard
from moe_tp.train.freeze import check_experts, train_rows
from moe_tp.train.lora_dora import lengths
from moe_tp.train.lora_fold import fold_lengths, fold_weight
from moe_tp.train.lora_layers import ExpertLowRank, LinearLowRank
from moe_tp.train.lora_targets import choose_parameters, group_of, layer_of, warn_of_rank

_STATE = "_lora"  # beside the module tree of an adapted model


@dataclass(frozen=True, slots=True)
class LoRAConfig:
    """Settings of the adapters.

    Args:
        rank: r.
        alpha: the term is scaled by alpha / r, or alpha / sqrt r with `rslora`.
        targets: groups (`attention`, `experts`, `shared_experts`, `router`), `all-linear` (all but
            the router), or patterns over hub names (`q_proj`, `model.layers.0.*`).
        dropout: probability of dropping an element of an adapter's input, by the token's place in
            the global batch and, of experts, the expert; not for routers.
        seed: of A's first values.
        rslora: scale by alpha / sqrt r (arXiv:2312.03732).
        dora: train the length of each output apart from its direction (arXiv:2402.09353); for
            attention alone: PEFT defines it for modules, and adapts the rest of an MoE as bare
            parameters.
        experts: numbers of the experts whose adapters are trained, the others' stay zero; none:
            all.
        base: keep the frozen weights of the routed experts in `int8` or `int4`, in blocks with a
            scale; needs torchao and zero=0. None: as they were loaded.

    Raises:
        ConfigError: a value is out of range.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] = ("attention", "experts")
    dropout: float = 0.0
    seed: int = 0
    _: KW_ONLY
    rslora: bool = False
    dora: bool = False
    experts: tuple[int, ...] | None = None
    base: str | None = None

    def __post_init__(self) -> None:
        given: object = self.targets  # a single name is often given without its tuple
        names = (given,) if isinstance(given, str) else tuple(self.targets)
        object.__setattr__(self, "targets", names)
        if self.experts is not None:
            object.__setattr__(self, "experts", tuple(self.experts))
        if not isinstance(self.rank, int) or self.rank < 1:
            raise ConfigError(f"lora rank={self.rank} is no size; choose a whole number from 1 on")
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise ConfigError(f"lora alpha={self.alpha} is no scale; choose a number above 0")
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigError(f"lora dropout={self.dropout} is out of range; choose from [0, 1)")
        if self.base not in (None, *BITS):
            raise ConfigError(f"lora base={self.base!r} is not known; choose int8, int4 or none")
        if not self.targets:
            raise ConfigError("lora targets are empty; name 'attention', 'experts' or a pattern")

    @property
    def scale(self) -> float:
        """What the product of B and A is multiplied by."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


class Factors(NamedTuple):
    """The adapter of one parameter that this rank holds."""

    fqn: str  # of the base parameter
    base: ParallelModule
    name: str  # of the base parameter in `base`
    adapter: ParallelModule
    a: str
    b: str

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters of the adapter that are this one's: A, B, and DoRA's lengths."""
        return (self.a, self.b, *(["m"] if "m" in self.adapter.specs else []))

    @property
    def sizes(self) -> tuple[int, int]:
        """Outputs and inputs of the matrix that is adapted, of one expert."""
        a, b = (self.adapter.specs[name].shape for name in (self.a, self.b))
        experts = a[0] if len(a) > 2 else 1  # gate and up, which share A, are one matrix
        return math.prod(b[:-1]) // experts, a[-1]

    def whole_lengths(self) -> torch.Tensor:
        """Return DoRA's m over all ranks.

        Collectives: an all-gather over the axis that splits it.
        """
        param = self.adapter.get_parameter("m")
        return full_logical(param, self.adapter.specs["m"], self.adapter.mesh)

    def whole_base(self) -> torch.Tensor:
        """Return the base parameter over all ranks.

        Collectives: all-gathers over the axes that split it.
        """
        spec = self.base.specs[self.name]
        return full_logical(self.base.get_parameter(self.name), spec, self.base.mesh)

    def whole(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return A and B over all ranks: `[.., r, in]` and `[.., out, r]`.

        Collectives: all-gathers over the axes that split them.
        """
        return tuple(  # type: ignore[return-value]
            full_logical(self.adapter.get_parameter(n), self.adapter.specs[n], self.adapter.mesh)
            for n in (self.a, self.b)
        )


@dataclass(slots=True, kw_only=True)
class _State:
    """What `merge_lora` puts back."""

    config: LoRAConfig
    trained: list[nn.Parameter]  # what was trainable before
    routers: dict[str, Any]  # name -> its configuration before
    hooks: list[Any]


def lora_config(model: nn.Module) -> LoRAConfig | None:
    """Return the settings of a model's adapters, or None without any."""
    state: _State | None = model.__dict__.get(_STATE)
    return None if state is None else state.config


def apply_lora(model: nn.Module, config: LoRAConfig) -> None:
    """Add adapters to a model in place and freeze all else; B is zero, so it computes the same.

    Routers' correction biases stand still too. Apply before the optimiser is made. A rank above the
    smaller size of a matrix is warned of.

    Args:
        model: from `build` or `from_pretrained`.
        config: the settings, alike on all ranks.

    Raises:
        ConfigError: a target names nothing, dropout is asked for where it is not defined, the
            model has adapters already, or its experts cannot be quantised.

    Collectives: an exchange of the settings through the store.
    """
    attach(model, config)
    decoder = _decoder(model)
    sizes = {factors.fqn: factors.sizes for factors in adapters(decoder)}
    warn_of_rank(decoder.name_rules, config.rank, sizes)


def attach(model: nn.Module, config: LoRAConfig) -> None:
    """Do what `apply_lora` does, for adapters whose rank was chosen before."""
    decoder = _decoder(model)
    if _STATE in decoder.__dict__:
        raise ConfigError("the model has adapters already; merge_lora(model) folds them in first")
    chosen = choose_parameters(decoder.name_rules, config.targets)
    _check(config, chosen, decoder)
    decoder.mesh.agree("the LoRA settings", repr(config))
    reshard(decoder)
    if config.base is not None:
        _quantize(decoder, config.base)
    state = _State(
        config=config,
        trained=[p for p in decoder.parameters() if p.requires_grad],
        routers={n: m.config for n, m in decoder.named_modules() if isinstance(m, Router)},
        hooks=[],
    )
    decoder.requires_grad_(False)
    for name in state.routers:
        router = decoder.get_submodule(name)
        assert isinstance(router, Router)
        router.config = replace(router.config, frozen=True)
    wanted = set(chosen)
    for block in decoder.blocks:
        here = {fqn for fqn in wanted if layer_of(fqn) == block.layer}
        _adapt(decoder, block, here, config, state)
    decoder.__dict__[_STATE] = state
    for factors in adapters(decoder):
        for name in factors.names:
            _fill(factors, name, config.seed)
        if config.experts is not None and group_of(factors.fqn) == "experts":
            for name in factors.names:
                train_rows(factors.adapter, name, config.experts)


def _check(config: LoRAConfig, chosen: list[str], decoder: Decoder) -> None:
    """Check that what is asked for is defined for the parameters that are adapted."""
    groups = {group_of(fqn) for fqn in chosen}
    for name, value, off, never in (
        ("dropout", config.dropout, "dropout=0", {"router"}),
        ("dora", config.dora, "dora=false", groups - {"attention"}),
    ):
        undefined = sorted(str(g) for g in groups & never)
        if value and undefined:
            raise ConfigError(
                f"lora {name}={value} is not defined for {' and '.join(undefined)}, whose "
                f"adapters PEFT folds into the weight too; choose {off} or leave them out of "
                f"targets={list(config.targets)}"
            )
    if config.experts is not None:
        check_experts(decoder, config.experts, "lora experts")
        if "experts" not in groups:
            raise ConfigError(
                f"lora experts={list(config.experts)} chooses among experts, which "
                f"targets={list(config.targets)} does not adapt; add 'experts' to them"
            )


def _quantize(decoder: Decoder, base: str) -> None:
    """Keep the weights of all routed experts in few bits."""
    zero = decoder.mesh.layout.zero
    if zero:
        raise ConfigError(
            f"lora base={base!r} is not sharded by zero={zero}, and adapters are not either; "
            "choose zero=0, and raise ep, etp or pp where a rank's part is too large"
        )
    for module in decoder.modules():
        if isinstance(module, GroupedExperts):
            module.quantize(base)  # type: ignore[arg-type]  # checked by the settings


def _adapt(
    decoder: Decoder, block: Block, fqns: set[str], config: LoRAConfig, state: _State
) -> None:
    """Put the adapters of one layer beside its weights."""
    keyed: list[LinearLowRank | ExpertLowRank] = []
    for fqn in sorted(fqns):
        if group_of(fqn) == "experts":
            continue
        module = decoder.get_submodule(fqn.rsplit(".", 1)[0])
        assert isinstance(module, ParallelModule)
        low_rank = LinearLowRank(
            module,
            config.rank,
            config.scale,
            drop=config.dropout,
            layer=block.layer,
            site=fqn,
            dora=config.dora,
        )
        low_rank.train(module.training)
        module.low_rank = low_rank
        keyed.append(low_rank)
    prefix = f"layers.{block.layer}.moe.experts."
    gate_up, down = prefix + "gate_up" in fqns, prefix + "down" in fqns
    if gate_up or down:
        experts = block.moe.experts
        adapter = ExpertLowRank(
            experts, config.rank, config.scale,
            gate_up=gate_up, down=down, drop=config.dropout, layer=block.layer,
        )  # fmt: skip
        adapter.train(experts.training)
        experts.adapter = adapter
        keyed.append(adapter)
    if keyed and config.dropout:
        hook = functools.partial(_pass_call, keyed)
        state.hooks.append(block.register_forward_pre_hook(hook))


def _pass_call(
    keyed: list[LinearLowRank | ExpertLowRank], block: nn.Module, args: tuple[Any, ...]
) -> None:
    """Tell the adapters of a block which tokens it is about to see."""
    for adapter in keyed:
        adapter.call = args[1]


def _fill(factors: Factors, name: str, seed: int) -> None:
    """Fill one factor by (seed, name, logical element)."""
    param, spec = factors.adapter.get_parameter(name), factors.adapter.specs[name]
    with torch.no_grad():
        local = to_local(param)
        if name == "m":
            whole = lengths(factors.whole_base().to(local.dtype))
            (places,) = local_index(param, spec)
            local.copy_(whole[places.to(whole.device)])
        elif spec.init.kind == "constant":
            local.fill_(spec.init.value)
        else:
            key = key_of(seed, "lora", factors.fqn)
            fill_normal(local, key, local_index(param, spec), spec.shape, spec.init.value)


def adapters(model: nn.Module) -> Iterator[Factors]:
    """Yield the adapter of every adapted parameter that this rank holds, in layer order."""
    for prefix, module in list(model.named_modules()):
        if not isinstance(module, ParallelModule):
            continue
        if isinstance(module.low_rank, LinearLowRank):
            yield Factors(f"{prefix}.weight", module, "weight", module.low_rank, "a", "b")
        if isinstance(module, GroupedExperts) and isinstance(module.adapter, ExpertLowRank):
            for name in ("gate_up", "down"):
                if f"{name}_a" in module.adapter.specs:
                    fqn, a, b = f"{prefix}.{name}", f"{name}_a", f"{name}_b"
                    yield Factors(fqn, module, name, module.adapter, a, b)


def merge_lora(model: nn.Module) -> None:
    """Fold `s B A` into the weights in place, take the adapters off, and unfreeze.

    The sum over r is taken element by element in fp32 (fp64 for fp64), so that merged weights have
    the same bits in every layout. A quantised base is taken back first, with the values that it was
    trained with.

    Raises:
        ConfigError: the model has no adapters.

    Collectives: all-gathers of each adapter over the axes that split it; with DoRA of each adapted
    weight too, one at a time.
    """
    decoder = _decoder(model)
    state = _state(decoder)
    reshard(decoder)
    for module in decoder.modules():
        if isinstance(module, GroupedExperts) and module.quantized is not None:
            module.dequantize()
    with torch.no_grad():
        for factors in adapters(decoder):
            fold = fold_lengths if "m" in factors.adapter.specs else fold_weight
            fold(factors, state.config.scale)
    for module in decoder.modules():
        if isinstance(module, ParallelModule) and module.low_rank is not None:
            del module.low_rank
            module.low_rank = None
        if isinstance(module, GroupedExperts) and module.adapter is not None:
            del module.adapter
            module.adapter = None
    for hook in state.hooks:
        hook.remove()
    for name, config in state.routers.items():
        router = decoder.get_submodule(name)
        assert isinstance(router, Router)
        router.config = config
    for param in state.trained:
        param.requires_grad_(True)
    del decoder.__dict__[_STATE]


def _decoder(model: nn.Module) -> Decoder:
    if not isinstance(model, Decoder):
        raise ConfigError(
            f"LoRA adapts models of build and from_pretrained, not {type(model).__name__}"
        )
    return model


def _state(model: Decoder) -> _State:
    state: _State | None = model.__dict__.get(_STATE)
    if state is None:
        raise ConfigError("the model has no adapters; apply_lora(model, config) adds them")
    return state
