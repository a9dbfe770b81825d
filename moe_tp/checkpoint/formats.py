"""Quantised formats on disk: fp8 blocks and MXFP4, decoded slice by slice, and encoded again.

What the rest of the library sees are logical tensors: a plain one is itself; an fp8 weight and its
`_scale_inv` are one bf16 tensor of the weight's name and shape; MXFP4 `_blocks`
`[..., R, K/32, 16]` and `_scales` `[..., R, K/32]` are one bf16 tensor `[..., K, R]`, the
orientation in which GPT-OSS keeps its bf16 form. Which format a folder has is said by
`quantization_config` in its config.json and never guessed.

fp8: `w = q * scale[r // 128, c // 128]` (DeepSeek-V3, arXiv 2412.19437, section 3.3.2).
MXFP4: OCP Microscaling Formats v1.0: E2M1 values, low nibble first, times `2 ** (scale - 127)` per
32 values.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from moe_tp.checkpoint.header import CODES, TensorInfo

Kind = Literal["plain", "fp8", "mxfp4"]

SCALE = "_scale_inv"
BLOCKS, SCALES = "_blocks", "_scales"
MX_SIZE = 32  # values under one scale
FP8_MAX = 448.0
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1_SIGNED = (*E2M1, *(-v for v in E2M1))
_QUANT = ("quantization_config", "compression_config")
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)


@dataclass(frozen=True, slots=True, kw_only=True)
class Logical:
    """A tensor as the model sees it, and what it is made of on disk.

    Args:
        name: its hub name (without `_blocks`).
        dtype: after decoding.
        shape: after decoding.
        kind: format on disk.
        data: the values on disk.
        scale: their scales, for quantised kinds.
        block: rows and columns under one scale, for fp8.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    kind: Kind
    data: TensorInfo
    scale: TensorInfo | None = None
    block: tuple[int, int] = (1, 1)

    @property
    def parts(self) -> tuple[TensorInfo, ...]:
        """The tensors on disk that it is made of."""
        return (self.data,) if self.scale is None else (self.data, self.scale)


def logical_tensors(
    tensors: Mapping[str, TensorInfo], config: Mapping[str, Any]
) -> tuple[dict[str, Logical], list[str]]:
    """Return the logical tensors of a folder and what is wrong with its quantised ones.

    Args:
        tensors: everything on disk by name.
        config: the folder's config.json.
    """
    entry = next((n for n in _QUANT if config.get(n)), _QUANT[0])
    quant = config.get(entry) or {}
    method = quant.get("quant_method") if isinstance(quant, dict) else repr(quant)
    problems: list[str] = []
    logical: dict[str, Logical] = {}
    if method not in (None, "fp8", "mxfp4"):
        problems.append(
            f"config.json: {entry}.quant_method={method!r}: expected fp8, mxfp4 or no "
            f"quantization; convert the folder to one of these first, or delete {entry} if its "
            f"weights are plain"
        )
    block = _fp8_block(quant, problems) if method == "fp8" else None
    taken: set[str] = set()
    for name, info in tensors.items():
        found: Logical | None = None
        if method == "mxfp4" and name.endswith(BLOCKS):
            found = _mxfp4(info, tensors.get(name[: -len(BLOCKS)] + SCALES), problems)
        elif info.dtype in _FP8:
            found = _fp8(info, tensors.get(name + SCALE), block, problems)
        if found is not None:
            taken.update(part.name for part in found.parts)
            logical[found.name] = found
    for name, info in tensors.items():
        if name in taken:
            continue
        if method == "mxfp4" and name.endswith(SCALES):
            problems.append(f"{info.file}: tensor {name!r}: found scales without {BLOCKS}")
        elif name.endswith(SCALE) and name[: -len(SCALE)] in tensors:
            weight = tensors[name[: -len(SCALE)]]
            if weight.dtype not in _FP8:
                problems.append(
                    f"{info.file}: tensor {name!r}: expected an fp8 weight beside these scales, "
                    f"found {weight.name!r} in {CODES[weight.dtype]}; remove the scales if the "
                    f"weight is already dequantised"
                )
        if name in logical:
            problems.append(f"{info.file}: tensor {name!r}: found both plain and in MXFP4")
        elif info.dtype not in _FP8:
            logical[name] = Logical(
                name=name, dtype=info.dtype, shape=info.shape, kind="plain", data=info
            )
    return logical, problems


def _fp8_block(quant: Mapping[str, Any], problems: list[str]) -> tuple[int, int] | None:
    block = quant.get("weight_block_size")
    if (
        isinstance(block, list)
        and len(block) == 2
        and all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in block)
    ):
        return block[0], block[1]
    problems.append(
        f"config.json: quantization_config.weight_block_size={block!r}: expected two sizes such as "
        f"[128, 128]; only fp8 with block scales is supported"
    )
    return None


def _fp8(
    info: TensorInfo,
    scale: TensorInfo | None,
    block: tuple[int, int] | None,
    problems: list[str],
) -> Logical | None:
    where = f"{info.file}: tensor {info.name!r}"
    if block is None:
        problems.append(
            f"{where}: found {CODES[info.dtype]}, expected quantization_config in config.json with "
            f"quant_method fp8 and a weight_block_size"
        )
        return None
    if scale is None:
        problems.append(f"{where}: expected its scales {info.name + SCALE!r}, found none")
        return None
    if len(info.shape) < 2:
        problems.append(f"{where}: expected a matrix in fp8, found shape {list(info.shape)}")
        return None
    expected = (
        *info.shape[:-2],
        -(-info.shape[-2] // block[0]),
        -(-info.shape[-1] // block[1]),
    )
    if scale.shape != expected or scale.dtype not in _SCALE_DTYPES:
        problems.append(
            f"{scale.file}: tensor {scale.name!r}: expected scales of shape {list(expected)} for a "
            f"weight {list(info.shape)} in blocks of {list(block)}, found {CODES[scale.dtype]} "
            f"{list(scale.shape)}"
        )
        return None
    return Logical(
        name=info.name,
        dtype=torch.bfloat16,
        shape=info.shape,
        kind="fp8",
        data=info,
        scale=scale,
        block=block,
    )


def _mxfp4(info: TensorInfo, scale: TensorInfo | None, problems: list[str]) -> Logical | None:
    where = f"{info.file}: tensor {info.name!r}"
    name = info.name[: -len(BLOCKS)]
    if scale is None:
        problems.append(f"{where}: expected its scales {name + SCALES!r}, found none")
        return None
    if len(info.shape) < 3 or info.shape[-1] != MX_SIZE // 2 or info.dtype != torch.uint8:
        problems.append(
            f"{where}: expected U8 blocks [..., rows, columns/32, 16], found {CODES[info.dtype]} "
            f"{list(info.shape)}"
        )
        return None
    if scale.shape != info.shape[:-1] or scale.dtype != torch.uint8:
        problems.append(
            f"{scale.file}: tensor {scale.name!r}: expected U8 scales {list(info.shape[:-1])}, "
            f"found {CODES[scale.dtype]} {list(scale.shape)}"
        )
        return None
    *lead, rows, blocks, _ = info.shape
    return Logical(
        name=name,
        dtype=torch.bfloat16,
        shape=(*lead, blocks * MX_SIZE, rows),
        kind="mxfp4",
        data=info,
        scale=scale,
    )


def block_ranges(of: range, size: int) -> range:
    """Return the blocks of `size` that hold a dense range of elements."""
    return range(of.start // size, -(-of.stop // size))


def decode_fp8(
    q: torch.Tensor, scale: torch.Tensor, ranges: Sequence[range], block: tuple[int, int]
) -> torch.Tensor:
    """Return the bf16 values of a slice of an fp8 weight.

    Args:
        q: the slice.
        scale: the scales of all blocks that the slice touches.
        ranges: where the slice lies in the weight.
        block: rows and columns under one scale.
    """
    factor = scale.float()
    for dim, (r, size) in enumerate(zip(ranges[-2:], block, strict=True), start=-2):
        place = torch.arange(r.start, r.stop) // size - r.start // size
        factor = factor.index_select(dim, place)
    return factor.mul_(q.float()).to(torch.bfloat16)


def decode_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return bf16 `[..., R, K]` from blocks `[..., R, K/32, 16]` and scales `[..., R, K/32]`.

    bf16 holds every product exactly: three bits of mantissa, and an exponent in its range.
    """
    table = torch.tensor(_E2M1_SIGNED)
    pairs = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
    values = table[pairs.long()]
    power = torch.ldexp(values, (scales.int() - 127).unsqueeze(-1))
    return power.flatten(-2).to(torch.bfloat16)


def encode_fp8(values: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return e4m3 values and their fp32 scales, the largest of each block mapped to 448.

    Args:
        values: `[..., R, C]`; R starts on a block border.
        block: rows and columns under one scale.
    """
    rows, columns = values.shape[-2:]
    padded = torch.nn.functional.pad(values.float(), (0, -columns % block[1], 0, -rows % block[0]))
    high, wide = padded.shape[-2] // block[0], padded.shape[-1] // block[1]
    tiles = padded.view(*padded.shape[:-2], high, block[0], wide, block[1])
    peak = tiles.abs().amax(dim=(-3, -1), keepdim=True)
    scale = torch.where(peak > 0, peak / FP8_MAX, torch.ones_like(peak))
    q = (tiles / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    # Slicing goes through bytes: not every operator knows fp8.
    whole = q.view(torch.uint8).flatten(-4, -3).flatten(-2, -1)[..., :rows, :columns]
    return whole.contiguous().view(torch.float8_e4m3fn), scale.squeeze(-1).squeeze(-2)


def encode_mxfp4(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return blocks `[..., R, K/32, 16]` and scales `[..., R, K/32]` for `[..., R, K]`.

    The shared exponent is that of the block's largest value less 2, the exponent of E2M1's largest
    (OCP MX v1.0, section 6.3); values round to the nearest, ties to the even code. Values that came
    from MXFP4 come back bit for bit in value.
    """
    tiles = values.float().reshape(*values.shape[:-1], -1, MX_SIZE)
    peak = tiles.abs().amax(dim=-1, keepdim=True)
    exponent = torch.frexp(peak).exponent - 1 - 2
    exponent = torch.where(peak > 0, exponent, torch.zeros_like(exponent)).clamp(-127, 127)
    size = torch.ldexp(tiles.abs(), -exponent).contiguous()
    bounds = torch.tensor([(a + b) / 2 for a, b in itertools.pairwise(E2M1)])
    low = torch.bucketize(size, bounds, right=False)
    high = torch.bucketize(size, bounds, right=True)
    code = torch.where(low % 2 == 0, low, high)  # they differ on a tie only
    code = (code + 8 * torch.signbit(tiles).int()).to(torch.uint8)
    blocks = code[..., 0::2] | (code[..., 1::2] << 4)
    return blocks, (exponent.squeeze(-1) + 127).to(torch.uint8)


def encoded_shapes(
    kind: Kind, name: str, shape: Sequence[int], block: tuple[int, int]
) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
    """Return (name, dtype, shape) of the tensors on disk that a logical one becomes."""
    if kind == "fp8":
        scales = (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))
        return [
            (name, torch.float8_e4m3fn, tuple(shape)),
            (name + SCALE, torch.float32, scales),
        ]
    assert kind == "mxfp4"
    assert shape[-2] % MX_SIZE == 0, f"{name} {list(shape)}"
    *lead, columns, rows = shape
    blocks = (*lead, rows, columns // MX_SIZE)
    return [
        (name + BLOCKS, torch.uint8, (*blocks, MX_SIZE // 2)),
        (name + SCALES, torch.uint8, blocks),
    ]
