"""What rows look like on the wire.

Letters: R rows · D width.

By default rows travel in the dtype of the layer's input and partial sums in fp32 (bf16 on request,
one rounding of at most 2^-9 of each partial sum). With `float8_e4m3fn` rows are sent to the experts
with 8 bits an element and one fp32 scale a row, and partial sums come back in bf16. The scale puts
the largest element of a row at 448, so an element x of a row with largest element m is off by at
most max(2^-4 |x|, 2^-10 m / 448). Gradients travel in the dtype of the input in any case.
"""

from __future__ import annotations

import torch

from moe_tp.errors import ConfigError
from moe_tp.experts.hop import pack_bytes, unpack_bytes

FP8 = torch.float8_e4m3fn
_LARGEST = 448.0


def return_dtype(wire: torch.dtype | None, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which partial sums come back.

    Args:
        wire: what the runtime asks for, or None.
        dtype: of the layer's input.
    """
    if wire is None:
        return torch.promote_types(dtype, torch.float32)
    return torch.bfloat16 if wire == FP8 else wire


def check_wire(wire: torch.dtype | None) -> None:
    """Refuse a wire dtype that nothing here can send.

    Raises:
        ConfigError: names those that can be.
    """
    if wire not in (None, torch.float64, torch.float32, torch.bfloat16, torch.float16, FP8):
        raise ConfigError(f"wire_dtype={wire} cannot be sent; choose None, torch.bfloat16 or {FP8}")


def encode(rows_RD: torch.Tensor, wire: torch.dtype | None) -> torch.Tensor:
    """Return what travels for the rows: themselves, or bytes of fp8 elements and a scale."""
    if wire != FP8:
        return rows_RD
    exact = rows_RD.float()
    scale_R1 = exact.abs().amax(dim=1, keepdim=True).clamp_min(1e-30) / _LARGEST
    return pack_bytes((exact / scale_R1).to(FP8), scale_R1)


def decode_rows(sent: torch.Tensor, wire: torch.dtype | None, dtype: torch.dtype) -> torch.Tensor:
    """Return rows in `dtype` from what `encode` made of them."""
    if wire != FP8:
        return sent
    width = sent.shape[1] - 4
    flat, scale_R = unpack_bytes(sent, FP8, torch.float32, width)
    return (flat.view(-1, width).float() * scale_R[:, None]).to(dtype)
