"""Frozen expert weights in 8 or 4 bits, taken back to numbers one expert at a time.

Letters: e experts on this rank · N rows · K columns of an expert's matrix · G blocks of a row.

A row is cut into blocks of `block` neighbouring columns; a block has one scale s in bf16, and an
element is q s with whole q in [-127, 127] or [-7, 7] (symmetric, by the largest element, as
torchao's affine primitives do it, which choose s and q). 8 bits take 1 byte and 4 bits half of one,
and the scale 2 bytes a block. q s is exact in fp32, so that only the cast to the compute dtype
rounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import nn

from moe_tp.errors import ConfigError

Kind = Literal["int8", "int4"]
BITS: dict[str, int] = {"int8": 8, "int4": 4}
BLOCKS = (64, 32, 16)
SCALE_BYTES = 2


def blocks_of(dim: int, expert_dim: int, etp: int, kind: str) -> dict[str, int]:
    """Return the block size of each projection: a function of the model, never of the layout.

    Args:
        dim: D, what gate and up take in.
        expert_dim: F, what down takes in, which etp splits.
        etp: its ranks.
        kind: for the message.

    Raises:
        ConfigError: no block size fits, or etp cuts through blocks.
    """
    found = {}
    for name, columns, ranks in (("gate_up", dim, 1), ("down", expert_dim, etp)):
        block = next((block for block in BLOCKS if columns % block == 0), None)
        if block is None or (columns // ranks) % block:
            raise ConfigError(
                f"base={kind!r} scales blocks of {block or BLOCKS} neighbouring weights, which do "
                f"not divide the {columns} inputs of {name} over {ranks} ranks of etp; choose a "
                "smaller etp, or leave base out"
            )
        found[name] = block
    return found


def bytes_of(elements: int, kind: str, block: int) -> float:
    """Return the bytes of so many elements with their scales."""
    return elements * (BITS[kind] / 8 + SCALE_BYTES / block)


class QuantizedStack(nn.Module):
    """A stack `[e, N, K]` of frozen matrices; not a parameter, and in no state dict.

    Args:
        weight_eNK: what is quantised, on the device where it stays.
        kind: `int8` or `int4`.
        block: columns that share a scale; divides K.

    Raises:
        ConfigError: torchao is not installed.
    """

    codes: torch.Tensor
    scale_eNG: torch.Tensor

    def __init__(self, weight_eNK: torch.Tensor, kind: Kind, block: int) -> None:
        super().__init__()
        self.bits, self.block = BITS[kind], block
        self.shape, self.dtype = weight_eNK.shape, weight_eNK.dtype
        experts, rows, columns = self.shape
        self.register_buffer(
            "codes",
            torch.empty(
                experts, rows, columns * self.bits // 8,
                dtype=torch.int8 if self.bits == 8 else torch.uint8, device=weight_eNK.device,
            ),
            persistent=False,
        )  # fmt: skip
        self.register_buffer(
            "scale_eNG",
            torch.empty(
                experts, rows, columns // block, dtype=torch.bfloat16, device=weight_eNK.device
            ),
            persistent=False,
        )
        for place, weight_NK in enumerate(weight_eNK.unbind(0)):
            codes_NK, scale_NG = _quantize(weight_NK, self.bits, block)
            self.scale_eNG[place] = scale_NG.view(rows, -1)  # torchao squeezes a single block
            if self.bits == 4:  # the even column of a pair in the low half
                low, high = (codes_NK[:, start::2] + 8 for start in (0, 1))
                codes_NK = (low | (high << 4)).to(torch.uint8)
            self.codes[place] = codes_NK

    def matrix(self, place: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the matrix `[N, K]` of one expert, made anew.

        Args:
            place: its local slot.
            dtype: of the result.
        """
        codes = self.codes[place]
        if self.bits == 4:
            codes = torch.stack([codes & 15, codes >> 4], dim=-1).view(torch.int8) - 8
        exact = torch.promote_types(dtype, torch.float32)
        blocks_NGB = codes.reshape(self.shape[1], -1, self.block).to(exact)
        blocks_NGB *= self.scale_eNG[place, :, :, None].to(exact)
        return blocks_NGB.view(self.shape[1:]).to(dtype)

    def matrices(
        self, first: int, counts: Sequence[int], dtype: torch.dtype, *, transposed: bool
    ) -> Iterator[torch.Tensor]:
        """Yield the matrices of neighbouring experts, each made when it is asked for.

        Args:
            first: local slot of the first.
            counts: rows that each is to be multiplied with; one without rows is not made.
            dtype: of the result.
            transposed: `[K, N]` instead of `[N, K]`.
        """
        for place, count in enumerate(counts, start=first):
            if count:
                matrix = self.matrix(place, dtype)
            else:
                matrix = self.scale_eNG.new_zeros((), dtype=dtype).expand(self.shape[1:])
            yield matrix.t() if transposed else matrix


def _quantize(weight_NK: torch.Tensor, bits: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int8 codes `[N, K]` and bf16 scales `[N, G]`, by torchao."""
    try:
        from torchao.quantization.quant_primitives import (
            MappingType,
            choose_qparams_affine,
            quantize_affine,
        )
    except ImportError as error:
        raise ConfigError(
            f"lora base='int{bits}' needs torchao, which is not installed; pip install "
            "'moe-tp[torchao]', or leave base out"
        ) from error
    most, size = 2 ** (bits - 1) - 1, (1, block)
    value_NK = weight_NK.to(torch.promote_types(weight_NK.dtype, torch.float32))
    scale_NG, zero_NG = choose_qparams_affine(
        value_NK,
        MappingType.SYMMETRIC,
        size,
        torch.int8,
        -most,
        most,
        eps=1e-30,
        scale_dtype=torch.bfloat16,
        zero_point_dtype=torch.int8,
    )
    codes = quantize_affine(
        value_NK, size, scale_NG.to(value_NK.dtype), zero_NG, torch.int8, -most, most
    )
    return codes, scale_NG
