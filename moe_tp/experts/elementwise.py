"""The activation of a block, forward and backward, in pieces that stay in cache.

Every pass computes in fp32 and rounds what it writes to the dtype of the rows: casting whole
buffers to fp32 and back costs more on a CPU than all the rest. The sums that follow are in fp32.
SwiGLU of bf16 rows on a CPU is one pass where that compiles (`moe_tp.experts.compiled`).

Letters: n pairs of one block · N two times F · F expert hidden.
"""

from __future__ import annotations

import torch

from moe_tp.experts import compiled
from moe_tp.experts.activation import Activation, ActivationStep, SwiGLU
from moe_tp.experts.blocks import PASS, Block
from moe_tp.parallel.product import batches

CHUNK = {"cpu": PASS, "cuda": 1 << 24}  # elements of one elementwise pass; CPU: stay in cache


def _chunks(rows: int, columns: int, device: torch.device) -> list[slice]:
    size = max(CHUNK.get(device.type, CHUNK["cuda"]) // max(columns, 1), 1)
    return [slice(at, min(at + size, rows)) for at in range(0, rows, size)]


def turns(rows_RD: torch.Tensor, act: Activation) -> bool:
    """Return whether pre-activations of a layer without adapters or their biases lie turned.

    Args:
        rows_RD: the rows.
        act: the activation.
    """
    return isinstance(act, SwiGLU) and batches(rows_RD) and compiled.available((rows_RD[:0],))


def activate(
    block: Block, gate_up_nN: torch.Tensor, hidden_nF: torch.Tensor, act: Activation
) -> None:
    """Fill `hidden_nF` with the activation of the block's pairs."""
    if block.turned:
        compiled.turned_swiglu(gate_up_nN, hidden_nF, block.counts)
        return
    if isinstance(act, SwiGLU) and compiled.available((gate_up_nN, hidden_nF)):
        compiled.swiglu(gate_up_nN, hidden_nF)
        return
    rows, size = hidden_nF.shape
    for chunk in _chunks(rows, size, hidden_nF.device):
        gate_up = gate_up_nN[chunk]
        act.forward_into(hidden_nF[chunk], gate_up[:, :size], gate_up[:, size:])


def activate_backward(
    block: Block,
    grad_nF: torch.Tensor,
    gate_up_nN: torch.Tensor,
    weight_n: torch.Tensor,
    hidden_nF: torch.Tensor,
    d_gate_up_nN: torch.Tensor,
    d_turned_nN: torch.Tensor | None,
    d_weight_n: torch.Tensor,
    act: Activation,
) -> None:
    """Fill weighted hidden, pre-activation and weight gradients from `grad_nF` (overwritten).

    Where the block lies turned, so does hidden, and `d_turned_nN` is filled as well.
    """
    if d_turned_nN is not None:
        compiled.turned_swiglu_backward(
            grad_nF, gate_up_nN, weight_n, hidden_nF, d_gate_up_nN, d_turned_nN, d_weight_n,
            block.counts,
        )  # fmt: skip
        return
    rows_of_all = (grad_nF, gate_up_nN, hidden_nF, d_gate_up_nN)
    if isinstance(act, SwiGLU) and compiled.available(rows_of_all, (weight_n, d_weight_n)):
        compiled.swiglu_backward(grad_nF, gate_up_nN, weight_n, hidden_nF, d_gate_up_nN, d_weight_n)
        return
    rows, size = hidden_nF.shape
    weight_n1 = weight_n.to(grad_nF.dtype)[:, None]
    for chunk in _chunks(rows, size, hidden_nF.device):
        gate_up, d_gate_up = gate_up_nN[chunk], d_gate_up_nN[chunk]
        act.backward_into(
            ActivationStep(
                grad_NF=grad_nF[chunk],
                gate_NF=gate_up[:, :size],
                up_NF=gate_up[:, size:],
                weight_N1=weight_n1[chunk],
                hidden_NF=hidden_nF[chunk],
                d_gate_NF=d_gate_up[:, :size],
                d_up_NF=d_gate_up[:, size:],
                d_weight_N=d_weight_n[chunk],
            )
        )
