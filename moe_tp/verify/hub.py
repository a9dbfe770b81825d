"""Tensors and config of a hub folder, read whole with the safetensors package and nothing else."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from moe_tp.errors import CheckpointError

__all__ = ["read_config", "read_tensors"]


def read_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the folder's `config.json`.

    Args:
        path: a hub-format folder.
    """
    file = Path(path) / "config.json"
    try:
        config = json.loads(file.read_text())
    except FileNotFoundError:
        raise CheckpointError(
            f"{file} does not exist, so {path} is no model folder; give a folder in hub format"
        ) from None
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{file} is not JSON ({error}); write it again") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{file} holds no JSON object; write it again")
    return config


def read_tensors(path: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """Return every tensor of the folder by its hub name, as stored.

    Args:
        path: a hub-format folder with `model.safetensors`, or shards and
            `model.safetensors.index.json`.
    """
    folder = Path(path)
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
        files = sorted(set(weight_map.values()))
    else:
        files = ["model.safetensors"]
    tensors: dict[str, torch.Tensor] = {}
    for name in files:
        if not (folder / name).exists():
            raise CheckpointError(f"{folder / name} is missing; copy the whole folder")
        with safe_open(folder / name, framework="pt") as handle:
            for key in handle.keys():  # noqa: SIM118 - a handle of safetensors, not a dict
                tensors[key] = handle.get_tensor(key)
    return tensors
