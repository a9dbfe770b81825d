"""What PEFT calls the factors of each parameter, and the shapes that it keeps them in.

Letters: D width · F expert hidden · E experts · r rank.

Names are those of transformers 5 in memory, which PEFT wraps, and not those on the hub, where one
family calls its experts otherwise. Experts are one parameter there, so PEFT adapts them through
`target_parameters` and stores all experts of a layer as two matrices: `lora_A [E * r, in]` with the
expert slowest and `lora_B [out, r * E]` with the expert fastest (`ParamWrapper.get_delta_weight`).
The gate and up halves of `out` lie as the family joins them: one after the other, or interleaved.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

from moe_tp.checkpoint.rules import Piece
from moe_tp.errors import CheckpointError, ConfigError
from moe_tp.models.decoder import Decoder
from moe_tp.train.lora import Factors
from moe_tp.train.lora_targets import group_of

ROOT = "base_model.model."
LENGTHS = "lora_magnitude_vector"
_KEY = re.compile(
    rf"(?:{re.escape(ROOT)})?(.+)\.(lora_A|lora_B|{LENGTHS})(?:\.(?!weight$)([^.]+))?(?:\.weight)?"
)


def plain_names(tensors: Mapping[str, torch.Tensor], where: str) -> dict[str, torch.Tensor]:
    """Return tensors by the names of a PEFT folder.

    A model's own state dict has the adapter's name in them (`lora_A.default.weight`), and some
    tools leave out `base_model.model.`; both mean the same, as long as there is one adapter.

    Args:
        tensors: by any of these names; other names stay as they are.
        where: the file, for messages.

    Raises:
        CheckpointError: there are several adapters, or two tensors of one name.
    """
    matches = {key: _KEY.fullmatch(key) for key in tensors}
    adapter_names = {match[3] for match in matches.values() if match is not None} - {None}
    if len(adapter_names) > 1:
        raise CheckpointError(
            f"{where} holds the adapters {', '.join(sorted(adapter_names))}; save one of them alone"
        )
    result: dict[str, torch.Tensor] = {}
    came: dict[str, str] = {}
    for key, match in matches.items():
        name = key
        if match is not None:
            name = f"{ROOT}{match[1]}.{match[2]}" + ("" if match[2] == LENGTHS else ".weight")
        if name in came:
            raise CheckpointError(
                f"{where}: {came[name]} and {key} are one adapter's tensor twice; keep one of them"
            )
        result[name], came[name] = tensors[key], key
    return result


def pack_experts(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return PEFT's `lora_A [E * r, in]` and `lora_B [out, r * E]`.

    Args:
        a: `[E, r, in]`.
        b: `[E, out, r]`.
    """
    return a.flatten(0, 1), b.permute(1, 2, 0).flatten(1)


def unpack_experts(
    a: torch.Tensor, b: torch.Tensor, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `[E, r, in]` and `[E, out, r]` of PEFT's two matrices; see `pack_experts`."""
    rank = a.shape[0] // num_experts
    return (
        a.view(num_experts, rank, a.shape[1]),
        b.view(b.shape[0], rank, num_experts).permute(2, 0, 1),
    )


def peft_name(model: Decoder, fqn: str, fqns: list[str]) -> tuple[str, str, bool]:
    """Return the name to target, the prefix of its factors, and whether it is a bare parameter.

    Args:
        model: the model.
        fqn: the adapted parameter.
        fqns: all adapted parameters: a second one of the same module nests in the first.

    Raises:
        ConfigError: its weight is a part of a hub tensor, which PEFT could not adapt by itself.
    """
    pieces, group = model.name_rules.pieces[fqn], group_of(fqn)
    layer = fqn.rsplit(".moe.", 1)[0]
    if group == "router":
        name = _live(pieces[0].hub_name)
        return name, name.removesuffix(".weight"), True
    if group == "experts":
        router = _live(model.name_rules.pieces[f"{layer}.moe.router.weight"][0].hub_name)
        module = router.removesuffix(".weight").rsplit(".", 1)[0] + ".experts"
        both = fqn.endswith("gate_up") and f"{layer}.moe.experts.down" in fqns
        _joined(model, fqn)
        parameter = "gate_up_proj" if fqn.endswith("gate_up") else "down_proj"
        return f"{module}.{parameter}", f"{module}.base_layer" if both else module, True
    if len(pieces) != 1 or pieces[0].hub_slices or pieces[0].param_index:
        raise ConfigError(
            f"{fqn} is a part of {pieces[0].hub_name} on disk, which PEFT adapts as one; "
            f"merge_lora(model) and save_pretrained write it instead"
        )
    name = pieces[0].hub_name.removesuffix(".weight")
    if group != "attention":
        # PEFT takes a module whose last name is gate_proj for the routed experts of the layer,
        # which were called so before transformers 5; as a bare parameter it is what it is
        return f"{name}.weight", name, True
    return name, name, False


def _is_per_expert(hub: str) -> bool:
    """Return whether a hub tensor is that of one expert."""
    return re.search(r"\.experts\.\d+\.", hub) is not None


def _live(hub_name: str) -> str:
    """Return the name in memory of a router's weight on the hub (transformers 5)."""
    name = hub_name.replace(".router.layer.", ".router.")
    return name.replace(".block_sparse_moe.gate.", ".mlp.gate.")


def _joined(model: Decoder, fqn: str) -> slice | None:
    """Return the places of the gate rows where gate and up interleave, None where they follow.

    Raises:
        ConfigError: the experts lie in a form that PEFT does not know.
    """
    piece: Piece = model.name_rules.pieces[fqn][0]
    if len(piece.hub_shape) == 2 and not _is_per_expert(piece.hub_name):
        raise ConfigError(
            f"experts in the form of {piece.hub_name} have no PEFT format; merge_lora(model) and "
            f"save_pretrained write them instead"
        )
    columns = piece.hub_slices[-1] if piece.hub_slices else None
    interleaved = isinstance(columns, slice) and columns.step == 2
    return columns if interleaved and isinstance(columns, slice) else None


def to_peft(
    model: Decoder, fqn: str, a: torch.Tensor, b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `lora_A` and `lora_B` of whole factors."""
    if group_of(fqn) != "experts":
        return a, b
    if fqn.endswith("gate_up"):
        b = b.transpose(1, 2) if _joined(model, fqn) else b  # [E, 2, F, r] or [E, F, 2, r]
        a, b = a.squeeze(1), b.flatten(1, 2)
    return pack_experts(a, b)


def from_peft(
    model: Decoder, factors: Factors, a: torch.Tensor, b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return whole factors of `lora_A` and `lora_B`; the inverse of `to_peft`."""
    if group_of(factors.fqn) != "experts":
        return a, b
    a, b = unpack_experts(a, b, factors.adapter.specs[factors.a].shape[0])
    if factors.name == "gate_up":
        experts, out, rank = b.shape
        if _joined(model, factors.fqn):
            b = b.reshape(experts, out // 2, 2, rank).transpose(1, 2)
        else:
            b = b.reshape(experts, 2, out // 2, rank)
        a = a.unsqueeze(1)
    return a, b
