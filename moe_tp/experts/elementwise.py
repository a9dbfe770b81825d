"""The weighted activation of a block, forward and backward, in pieces that stay in cache.

Letters: n pairs of one block · N two times F · F expert hidden.
"""

from __future__ import annotations

import torch

from moe_tp.experts.activation import Activation, ActivationStep
from moe_tp.experts.blocks import PASS, Scratch

CHUNK = {"cpu": PASS, "cuda": 1 << 24}  # elements of one elementwise pass; CPU: stay in cache


def _chunks(rows: int, columns: int, device: torch.device) -> list[slice]:
    size = max(CHUNK.get(device.type, CHUNK["cuda"]) // max(columns, 1), 1)
    return [slice(at, min(at + size, rows)) for at in range(0, rows, size)]


def activate(
    gate_up_nN: torch.Tensor,
    weight_n: torch.Tensor,
    hidden_nF: torch.Tensor,
    scratch: Scratch,
    act: Activation,
) -> None:
    """Fill `hidden_nF` with weight times activation, worked out in fp32."""
    rows, size = hidden_nF.shape
    exact = torch.promote_types(gate_up_nN.dtype, torch.float32)
    for chunk in _chunks(rows, size, hidden_nF.device):
        gate_up, hidden = gate_up_nN[chunk], hidden_nF[chunk]
        if exact != gate_up_nN.dtype:
            count = gate_up.shape[0]
            gate_up = scratch.get("wide_gate_up", count, 2 * size, exact).copy_(gate_up)
            hidden = scratch.get("wide_hidden", count, size, exact)
        act.forward_into(hidden, gate_up[:, :size], gate_up[:, size:])
        hidden.mul_(weight_n[chunk, None])
        if exact != gate_up_nN.dtype:
            hidden_nF[chunk].copy_(hidden)


def activate_backward(
    grad_nF: torch.Tensor,
    gate_up_nN: torch.Tensor,
    weight_n: torch.Tensor,
    hidden_nF: torch.Tensor,
    d_gate_up_nN: torch.Tensor,
    d_weight_n: torch.Tensor,
    scratch: Scratch,
    act: Activation,
) -> None:
    """Fill hidden, pre-activation gradients and weight gradients from `grad_nF` (overwritten)."""
    rows, size = hidden_nF.shape
    exact = torch.promote_types(gate_up_nN.dtype, torch.float32)
    cast = exact != gate_up_nN.dtype
    for chunk in _chunks(rows, size, hidden_nF.device):
        given = (grad_nF[chunk], gate_up_nN[chunk], hidden_nF[chunk], d_gate_up_nN[chunk])
        grad, gate_up, hidden, d_gate_up = given
        if cast:
            count = grad.shape[0]
            grad = scratch.get("wide_grad", count, size, exact).copy_(grad)
            gate_up = scratch.get("wide_gate_up", count, 2 * size, exact).copy_(gate_up)
            hidden = scratch.get("wide_hidden", count, size, exact)
            d_gate_up = scratch.get("wide_d_gate_up", count, 2 * size, exact)
        act.backward_into(
            ActivationStep(
                grad_NF=grad,
                gate_NF=gate_up[:, :size],
                up_NF=gate_up[:, size:],
                weight_N1=weight_n[chunk, None],
                hidden_NF=hidden,
                d_gate_NF=d_gate_up[:, :size],
                d_up_NF=d_gate_up[:, size:],
                d_weight_N=d_weight_n[chunk],
            )
        )
        if cast:
            given[2].copy_(hidden)
            given[3].copy_(d_gate_up)
