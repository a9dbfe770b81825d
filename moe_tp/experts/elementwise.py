"""The weighted activation of a block, forward and backward, in pieces that stay in cache.

Letters: n pairs of one block · N two times F · F expert hidden.
"""

from __future__ import annotations

import torch

from moe_tp.experts.activation import Activation, ActivationStep
from moe_tp.experts.blocks import Scratch

CHUNK = {"cpu": 1 << 16, "cuda": 1 << 24}  # elements of one elementwise pass; CPU: stay in L2


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
        gate, up, hidden = gate_up_nN[chunk, :size], gate_up_nN[chunk, size:], hidden_nF[chunk]
        count = gate.shape[0]
        if exact != gate_up_nN.dtype:
            gate = scratch.get("gate", count, size, exact).copy_(gate)
            up = scratch.get("up", count, size, exact).copy_(up)
            hidden = scratch.get("hidden", count, size, exact)
        act.forward_into(hidden, gate, up)
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
        tensors = {
            "grad": grad_nF[chunk],
            "gate": gate_up_nN[chunk, :size],
            "up": gate_up_nN[chunk, size:],
            "hidden": hidden_nF[chunk],
            "d_gate": d_gate_up_nN[chunk, :size],
            "d_up": d_gate_up_nN[chunk, size:],
        }
        work = dict(tensors)
        if cast:
            count = work["grad"].shape[0]
            work = {name: scratch.get(name, count, size, exact) for name in tensors}
            for name in ("grad", "gate", "up"):
                work[name].copy_(tensors[name])
        act.backward_into(
            ActivationStep(
                grad_NF=work["grad"],
                gate_NF=work["gate"],
                up_NF=work["up"],
                weight_N1=weight_n[chunk, None],
                hidden_NF=work["hidden"],
                d_gate_NF=work["d_gate"],
                d_up_NF=work["d_up"],
                d_weight_N=d_weight_n[chunk],
            )
        )
        if cast:
            for name in ("hidden", "d_gate", "d_up"):
                tensors[name].copy_(work[name])
