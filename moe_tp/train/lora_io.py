"""Adapters as a PEFT folder: `adapter_config.json` and `adapter_model.safetensors`.

Names and shapes there are those of `lora_names`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import nn

from moe_tp.checkpoint.agree import together
from moe_tp.checkpoint.storage import local_path
from moe_tp.errors import CheckpointError, ConfigError
from moe_tp.models.decoder import Decoder
from moe_tp.parallel.shards import local_index, to_local
from moe_tp.train.lora import LoRAConfig, adapters, attach, lora_config
from moe_tp.train.lora_legacy import join_experts
from moe_tp.train.lora_names import (
    LENGTHS,
    ROOT,
    from_peft,
    pack_experts,
    peft_name,
    plain_names,
    to_peft,
)
from moe_tp.train.lora_targets import GROUPS, choose_parameters, group_of

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
# what changes an adapter's meaning in PEFT and is not computed here
_UNKNOWN = (
    "lora_bias",
    "modules_to_save",
    "fan_in_fan_out",
    "megatron_config",
    "trainable_token_indices",
    "alora_invocation_tokens",
    "use_qalora",
)


def save_adapter(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write a model's adapters as a PEFT folder, from any layout; collective.

    Args:
        model: with adapters.
        path: the folder; its two files are replaced.

    Raises:
        ConfigError: the model has no adapters, or one that PEFT's format cannot hold.
        CheckpointError: the folder cannot be written; on every rank.

    Collectives: all-gathers of each adapter over the axes that split it, an exchange over the
    pipeline, an agreement over the world.
    """
    config = lora_config(model)
    if config is None:
        raise ConfigError("the model has no adapters to save; apply_lora(model, config) adds them")
    assert isinstance(model, Decoder)
    fqns = choose_parameters(model.name_rules, config.targets)
    names = {fqn: peft_name(model, fqn, fqns) for fqn in fqns}  # before anything is sent
    tensors: dict[str, torch.Tensor] = {}
    for factors in adapters(model):
        a, b = to_peft(model, factors.fqn, *factors.whole())
        prefix = ROOT + names[factors.fqn][1]
        tensors[f"{prefix}.lora_A.weight"] = a.cpu().contiguous()
        tensors[f"{prefix}.lora_B.weight"] = b.cpu().contiguous()
        if config.dora:
            tensors[f"{prefix}.{LENGTHS}"] = factors.whole_lengths().cpu()
    mesh = model.mesh
    pipeline = mesh.group("pp")
    if pipeline.size > 1:
        every: list[Any] = [None] * pipeline.size
        dist.all_gather_object(every, tensors, group=pipeline.process_group)
        tensors = {name: value for part in every for name, value in part.items()}

    def write() -> None:
        if mesh.rank != 0:
            return
        folder = local_path(path)
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(_config_json(model, config, names), indent=2, sort_keys=True)
        # weights first: a folder with a configuration is complete
        (folder / CONFIG).unlink(missing_ok=True)
        for name, data in ((WEIGHTS, save(tensors, {"format": "pt"})), (CONFIG, text.encode())):
            work = folder / f".{name}.unfinished"
            work.write_bytes(data)
            os.replace(work, folder / name)

    together(write, mesh.group("world"), mesh.device)


def load_adapter(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Read a PEFT folder into a model, with adapters added where it has none; collective.

    Args:
        model: from `build` or `from_pretrained`.
        path: a folder of `save_adapter`, or of PEFT for the same parameters.

    Raises:
        ConfigError: the model has adapters of another shape or place.
        CheckpointError: the folder is not complete or does not fit; on every rank.

    Collectives: an exchange of the settings through the store, an agreement over the world.
    """
    if not isinstance(model, Decoder):
        raise ConfigError(
            f"load_adapter reads into models of build and from_pretrained, not "
            f"{type(model).__name__}"
        )
    mesh = model.mesh
    world = mesh.group("world")
    folder = local_path(path)
    read, tensors = together(lambda: _read(model, folder), world, mesh.device)
    mine = lora_config(model)
    if mine is None:
        attach(model, read)
    elif (mine.rank, mine.scale, mine.dora) != (read.rank, read.scale, read.dora):
        one, other = (f"rank={c.rank}, scale={c.scale:g}, dora={c.dora}" for c in (mine, read))
        raise ConfigError(
            f"the model's adapters have {one}, but those of {path} {other}; merge_lora(model) "
            "first, or load into a model without adapters"
        )
    together(lambda: _fill(model, tensors, folder), world, mesh.device)


def _read(model: Decoder, folder: Path) -> tuple[LoRAConfig, dict[str, torch.Tensor]]:
    """Return the settings and tensors of a PEFT folder, with the parameters it names as targets."""
    missing = [name for name in (CONFIG, WEIGHTS) if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(f"{folder} is no complete PEFT folder: it lacks {missing[0]}")
    try:
        settings = json.loads((folder / CONFIG).read_text())
        tensors = plain_names(load_file(folder / WEIGHTS), f"{folder}/{WEIGHTS}")
    except (ValueError, SafetensorError) as error:
        raise CheckpointError(f"{folder}: a file of it cannot be read: {error}") from error
    if not isinstance(settings, dict) or settings.get("peft_type", "LORA") != "LORA":
        raise CheckpointError(f"{folder}/{CONFIG} does not describe an adapter of peft_type LORA")
    for name, value in tensors.items():
        if not value.dtype.is_floating_point:
            raise CheckpointError(
                f"{folder}/{WEIGHTS}: {name} holds {value.dtype}, which is no adapter's; save "
                "the adapter in float32 or bfloat16"
            )
        if not value.isfinite().all():
            raise CheckpointError(
                f"{folder}/{WEIGHTS}: {name} holds values that are not finite, as after a run that "
                "diverged; take an earlier checkpoint of the adapter"
            )
    for key in ("r", "lora_alpha"):
        if not isinstance(settings.get(key), int | float):
            raise CheckpointError(f"{folder}/{CONFIG}: {key}={settings.get(key)!r} is no number")
    for key in _UNKNOWN:
        if settings.get(key):
            raise CheckpointError(f"{folder}/{CONFIG}: {key}={settings[key]} is not supported")
    settings, tensors = join_experts(
        model.name_rules,
        settings,
        tensors,
        root=ROOT,
        name=lambda fqn, fqns: peft_name(model, fqn, fqns)[:2],
        pack=pack_experts,
    )
    every = [f for f in model.name_rules.pieces if group_of(f) is not None]
    # The file says which parameters have adapters; but where one of a layer's two parameters of
    # experts has, its name there does not say which, and the settings do.
    bare = settings.get("target_parameters") or []
    found = [
        f
        for f in every
        for target, prefix, _ in [peft_name(model, f, [])]
        if (
            _named(bare, target)
            if group_of(f) == "experts"
            else f"{ROOT}{prefix}.lora_A.weight" in tensors
        )
    ]
    known = {f"{ROOT}{peft_name(model, f, found)[1]}" for f in found}
    strange = [n for n in tensors if n.rsplit(".lora_", 1)[0] not in known]
    if strange or not found:
        name = strange[0] if strange else WEIGHTS
        raise CheckpointError(f"{folder}: {name} belongs to no parameter of this model")
    targets = []
    for group in GROUPS:
        members = [f for f in every if group_of(f) == group]
        mine = [f for f in members if f in found]
        named = group != "mlp" and len(mine) == len(members) > 0
        targets += [group] if named else mine
    config = LoRAConfig(
        rank=settings["r"],
        alpha=settings["lora_alpha"],
        targets=tuple(targets),
        dropout=settings.get("lora_dropout", 0.0),
        rslora=bool(settings.get("use_rslora")),
        dora=bool(settings.get("use_dora")),
    )
    return _of_one_rank(model, config, settings, found, tensors, folder), tensors


def _of_one_rank(
    model: Decoder,
    config: LoRAConfig,
    settings: Mapping[str, Any],
    found: list[str],
    tensors: dict[str, torch.Tensor],
    folder: Path,
) -> LoRAConfig:
    """Return settings of one rank and scale for adapters of several, the scales put into B.

    The rank is the largest; `_fill` makes up for smaller ones with zeros, which change no product.

    Raises:
        CheckpointError: an adapter has not the rank that the settings give it.
    """

    def of(setting: str, name: str, default: float) -> float:
        for pattern, value in (settings.get(setting) or {}).items():
            if re.match(rf"(.*\.)?({pattern})$", name):
                return float(value)
        return default

    ranks = {}
    for fqn in found:
        target, prefix, _ = peft_name(model, fqn, found)
        own = replace(
            config,
            rank=int(of("rank_pattern", target, config.rank)),
            alpha=of("alpha_pattern", target, config.alpha),
        )
        ranks[fqn] = own.rank
        matrix = tensors.get(f"{ROOT}{prefix}.lora_A.weight")
        if matrix is None:
            raise CheckpointError(f"{folder}/{WEIGHTS} lacks {prefix}.lora_A.weight")
        rows = matrix.shape[0]
        experts = model.config.moe.router.num_experts if group_of(fqn) == "experts" else 1
        if rows != own.rank * experts:
            raise CheckpointError(
                f"{folder}: {prefix}.lora_A.weight has {rows} rows, but {CONFIG} says rank "
                f"{own.rank}{f' for each of {experts} experts' if experts > 1 else ''}"
            )
        if own.scale != config.scale:
            name = f"{ROOT}{prefix}.lora_B.weight"
            tensors[name] = tensors[name] * (own.scale / config.scale)
    rank = max(ranks.values())
    if rank == config.rank:
        return config
    return replace(config, rank=rank, alpha=config.scale * rank, rslora=False)


def _named(targets: list[str], name: str) -> bool:
    """Return whether PEFT's `target_parameters` name it."""
    return any(name == target or name.endswith(f".{target}") for target in targets)


def _fill(model: Decoder, tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Copy this rank's parts of all adapters out of whole tensors."""
    config = lora_config(model)
    assert config is not None
    fqns = choose_parameters(model.name_rules, config.targets)
    for factors in adapters(model):
        prefix = ROOT + peft_name(model, factors.fqn, fqns)[1]
        pair = []
        for letter in "AB":
            name = f"{prefix}.lora_{letter}.weight"
            if name not in tensors:
                raise CheckpointError(f"{folder}/{WEIGHTS} lacks {name}, which the model adapts")
            pair.append(tensors[name])
        a, b = from_peft(model, factors, *pair)
        missing = config.rank - a.shape[-2]
        if missing:
            a, b = F.pad(a, (0, 0, 0, missing)), F.pad(b, (0, missing))
        values = [(factors.a, a), (factors.b, b)]
        if config.dora:
            if f"{prefix}.{LENGTHS}" not in tensors:
                raise CheckpointError(f"{folder}/{WEIGHTS} lacks {prefix}.{LENGTHS}")
            values.append(("m", tensors[f"{prefix}.{LENGTHS}"]))
        for name, value in values:
            spec = factors.adapter.specs[name]
            if tuple(value.shape) != spec.shape:
                raise CheckpointError(
                    f"{folder}: the adapter of {factors.fqn} has shape {list(value.shape)}, but "
                    f"the model's has {list(spec.shape)}"
                )
            param = factors.adapter.get_parameter(name)
            for dim, places in enumerate(local_index(param, spec)):
                value = value.index_select(dim, places.clamp(min=0))
            with torch.no_grad():
                to_local(param).copy_(value)


def _config_json(
    model: Decoder, config: LoRAConfig, names: Mapping[str, tuple[str, str, bool]]
) -> dict[str, Any]:
    """Return what PEFT reads as `LoraConfig`."""
    source = model.source
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None if source is None else str(source),
        "inference_mode": True,
        "r": config.rank,
        "lora_alpha": config.alpha,
        # PEFT knows no dropout on bare parameters, and none is applied to a trained adapter
        "lora_dropout": 0.0 if any(whole for *_, whole in names.values()) else config.dropout,
        "use_rslora": config.rslora,
        "use_dora": config.dora,
        "bias": "none",
        "target_modules": sorted(name for name, _, whole in names.values() if not whole),
        "target_parameters": sorted(name for name, _, whole in names.values() if whole) or None,
    }
