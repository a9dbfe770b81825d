"""PEFT folders from before transformers 5, where each expert's matrix was a module of its own.

Letters: E experts · r rank · D width · F expert hidden.

Their adapters become those of one parameter a layer, which PEFT now writes. Gate and up had an A
each and share one now, so it has twice the rank: `A = [A_gate; A_up]`, and B has zeros where a half
meets the other's rows. Experts without an adapter get zeros.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from moe_tp.checkpoint.rules import NameRules, Piece
from moe_tp.train.lora_targets import group_of

_ONE = re.compile(r".*\.experts\.\d+\..*")
Name = Callable[[str, list[str]], tuple[str, str]]
Pack = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def join_experts(
    rules: NameRules,
    settings: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    *,
    root: str,
    name: Name,
    pack: Pack,
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return settings and tensors of a folder as PEFT writes them now.

    Args:
        rules: name rules of the model.
        settings: adapter_config.json.
        tensors: of the folder.
        root: what names in the file start with.
        name: of a parameter and all adapted ones: what PEFT calls it, and the start of its names.
        pack: PEFT's two matrices of factors `[E, r, in]` and `[E, out, r]`.
    """
    settings, tensors = dict(settings), dict(tensors)
    found: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for fqn, pieces in rules.pieces.items():
        if group_of(fqn) == "experts" and _ONE.fullmatch(pieces[0].hub_name):
            pairs = {_place(p): pair for p in pieces if (pair := _take(tensors, root, p))}
            if pairs:
                found[fqn] = _joined(pairs, pieces)
    if not found:
        return settings, tensors
    settings["target_parameters"] = list(settings.get("target_parameters") or [])
    for key in ("rank_pattern", "alpha_pattern"):
        settings[key] = dict(settings.get(key) or {})
    for fqn, (a, b) in found.items():
        target, prefix = name(fqn, list(found))
        tensors[f"{root}{prefix}.lora_A.weight"], tensors[f"{root}{prefix}.lora_B.weight"] = pack(
            a, b
        )
        settings["target_parameters"].append(target)
        if fqn.endswith("gate_up"):
            longer = math.sqrt(2.0) if settings.get("use_rslora") else 2.0
            pattern = re.escape(target)
            settings["rank_pattern"][pattern] = 2 * settings["r"]
            settings["alpha_pattern"][pattern] = longer * settings["lora_alpha"]
    return settings, tensors


def _place(piece: Piece) -> tuple[int, int]:
    """Return the expert of a matrix, and 1 for up."""
    expert, *half = (place for place in piece.param_index if isinstance(place, int))
    return expert, half[0] if half else 0


def _take(
    tensors: dict[str, torch.Tensor], root: str, piece: Piece
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return A and B of one expert's matrix, taken out of the tensors; None without them."""
    start = root + piece.hub_name.removesuffix(".weight")
    names = [f"{start}.lora_{letter}.weight" for letter in "AB"]
    if not all(name in tensors for name in names):
        return None
    return tensors.pop(names[0]), tensors.pop(names[1])


def _joined(
    pairs: Mapping[tuple[int, int], tuple[torch.Tensor, torch.Tensor]], pieces: tuple[Piece, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return A `[E, r, in]` and B `[E, out, r]` of all experts, gate and up one after the other."""
    places = [_place(piece) for piece in pieces]
    experts, halves = (1 + max(place[i] for place in places) for i in (0, 1))
    (rank, width), (out, _) = (factor.shape for factor in next(iter(pairs.values())))
    a = next(iter(pairs.values()))[0].new_zeros(experts, halves, rank, width)
    b = a.new_zeros(experts, halves, out, halves, rank)
    for (expert, half), (one_a, one_b) in pairs.items():
        a[expert, half], b[expert, half, :, half] = one_a, one_b
    return a.flatten(1, 2), b.flatten(3, 4).flatten(1, 2)
