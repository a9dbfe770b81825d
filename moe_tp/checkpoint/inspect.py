"""What a folder holds, without loading it."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from typing import Any, TypedDict

import torch

from moe_tp.checkpoint.blocks import split
from moe_tp.checkpoint.formats import Logical
from moe_tp.checkpoint.header import CODES
from moe_tp.checkpoint.load import BUFFER, differences
from moe_tp.checkpoint.reader import HubFolder
from moe_tp.checkpoint.rules import NameRules
from moe_tp.checkpoint.storage import Storage

# The spellings of hub configs, first one found.
_LAYERS = ("num_hidden_layers", "n_layers", "n_layer", "num_layers")
_EXPERTS = (
    "num_local_experts",
    "num_experts",
    "n_routed_experts",
    "moe_num_experts",
    "num_moe_experts",
)
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_top_k", "top_k")
_SHARED = re.compile(r"shared")
_EXPERT = re.compile(r"(^|\.)experts(\.|$)")


class Inspection(TypedDict):
    """What `inspect_folder` returns; the JSON of `moe-tp inspect`.

    `params_total` and `params_active` count elements after decoding; `bytes` are those on disk;
    `dtypes` gives elements for each dtype on disk.
    """

    model_type: str | None
    layers: int | None
    experts: int | None
    top_k: int | None
    params_total: int
    params_active: int
    bytes: int
    dtypes: dict[str, int]
    tensors: int
    files: int
    quantised: str | None
    problems: list[str]


def inspect_folder(
    path: str | os.PathLike[str] | Storage,
    *,
    rules: NameRules | None = None,
    values: bool = False,
) -> Inspection:
    """Return what a folder holds and all that is wrong with it, read from its headers.

    Args:
        path: the folder.
        rules: name rules of its family, to find missing, extra and misshapen tensors.
        values: also read every weight and report those with NaN or infinite values.

    Raises:
        CheckpointError: there is no such folder.
    """
    folder = HubFolder(path, strict=False)
    try:
        problems = folder.problems + folder.doubts
        used = dict(folder.logical)
        if rules is not None:
            problems += differences(folder, rules) if folder.logical else []
            used = {n: t for n, t in used.items() if not rules.matches("passthrough", n)}
        if values and not folder.problems:
            problems += [p for name in folder.logical for p in nonfinite(folder, name)]
    finally:
        folder.close()
    config = text_config(folder.config)
    experts, top_k = _first(config, _EXPERTS), _first(config, _TOP_K)
    total = sum(math.prod(t.shape) for t in used.values())
    dtypes: dict[str, int] = {}
    for info in folder.tensors.values():
        code = CODES[info.dtype]
        dtypes[code] = dtypes.get(code, 0) + info.numel
    quant = folder.config.get("quantization_config")
    model_type = folder.config.get("model_type")
    return Inspection(
        model_type=model_type if isinstance(model_type, str) else None,
        layers=_first(config, _LAYERS),
        experts=experts,
        top_k=top_k,
        params_total=total,
        params_active=total - _idle(used, experts, top_k),
        bytes=sum(folder.files.values()),
        dtypes=dict(sorted(dtypes.items())),
        tensors=len(folder.tensors),
        files=len(folder.files),
        quantised=str(quant.get("quant_method")) if isinstance(quant, dict) else None,
        problems=problems,
    )


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a hub config that speaks of the language model."""
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config


def nonfinite(folder: HubFolder, name: str) -> list[str]:
    """Return one sentence if a tensor has NaN or infinite values, reading it in parts."""
    tensor = folder.find(name)
    if not tensor.dtype.is_floating_point:
        return []
    for part in split([range(n) for n in tensor.shape], BUFFER // 16):
        if not bool(torch.isfinite(folder.read(name, part).float()).all()):
            return [
                f"{tensor.data.file}: tensor {name!r}: expected finite values, found NaN or "
                f"infinity"
            ]
    return []


def _idle(tensors: Mapping[str, Logical], experts: int | None, top_k: int | None) -> int:
    """Return the parameters that a token does not meet: those of the experts it is not sent to."""
    if not experts or not top_k:
        return 0
    routed = 0
    for name, tensor in tensors.items():
        if _SHARED.search(name):
            continue
        fused = len(tensor.shape) == 3 and tensor.shape[0] == experts
        if _EXPERT.search(name) or fused:
            routed += math.prod(tensor.shape)
    return routed - routed * min(top_k, experts) // experts


def _first(config: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None
