"""Expert compute: rows in, one partial sum a row out.

Letters: R rows · P (row, expert) pairs · D width · F expert hidden (this rank's share) · e experts
on this rank · r adapter rank.

For a pair (row x, expert i, weight w) the contribution to the row's sum is

    w * (act(G_i x + g_i, U_i x + u_i) D_i^T + d_i)

The weight goes in on this rank, in fp32, so that combining is a plain sum; in backward it goes in
before the down projection, so that the router's gradient needs no expert output: it is the sum
over F of gradient times activation. The sums of a row are taken in fp32 (fp64 for fp64) in the
order of the experts.

Back ends (`Runtime.experts`): `loop` is the plain reference; `sliced` walks the experts with
buffers that stay in cache; `grouped_mm` runs each projection of all experts as one torch call.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F

from moe_tp.errors import ConfigError
from moe_tp.experts.activation import Activation
from moe_tp.experts.blocks import Stack
from moe_tp.experts.dispatch import Received
from moe_tp.experts.kernel import ExpertKernel
from moe_tp.experts.quantized import QuantizedStack
from moe_tp.experts.row_dropout import RowDropout
from moe_tp.experts.steps import Options
from moe_tp.parallel.collectives import accumulate_dtype
from moe_tp.parallel.functions import apply_function

Backend = Literal["auto", "loop", "sliced", "grouped_mm"]
BACKENDS: tuple[Backend, ...] = ("auto", "loop", "sliced", "grouped_mm")


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRank:
    """Adapter terms that are added to the projections: `y += scale * (x A^T) B^T` per expert.

    Args:
        gate_up_a: `[e, G, r, D]`; G is 2, or 1 where gate and up share it.
        gate_up_b: `[e, 2, F, r]`.
        down_a: `[e, r, F]`.
        down_b: `[e, D, r]`.
        scale: alpha / r.
        dropout: of what A sees, or None.

    A pair left out (None) adds nothing. The down terms see the weighted hidden activation, as the
    down projection does.
    """

    gate_up_a: torch.Tensor | None = None
    gate_up_b: torch.Tensor | None = None
    down_a: torch.Tensor | None = None
    down_b: torch.Tensor | None = None
    scale: float = 1.0
    dropout: RowDropout | None = None


def experts_forward(
    received: Received,
    gate_up_e2FD: Stack,
    down_eDF: Stack,
    *,
    activation: Activation,
    gate_up_bias_e2F: torch.Tensor | None = None,
    down_bias_eD: torch.Tensor | None = None,
    adapter: LowRank | None = None,
    backend: Backend = "auto",
    recompute: bool = False,
) -> torch.Tensor:
    """Return `[R, D]`, the weighted sum of each row's expert outputs, in fp32 (fp64 for fp64).

    Where `received.sum_dtype` allows it a sum may come rounded to that, once, at its end.

    Args:
        received: rows and pairs, from a dispatcher.
        gate_up_e2FD, down_eDF: gate and up, and down projections; frozen where they are quantised.
        activation: see `moe_tp.experts.activation`.
        gate_up_bias_e2F, down_bias_eD: biases, or None.
        adapter: low-rank terms to add, or None.
        backend: which compute; `auto` takes what measured fastest for the device and dtype.
        recompute: save no pre-activation (2F a pair); backward computes it again.

    Raises:
        ConfigError: the adapter's terms depend on the tokens, which the dispatcher does not name;
            the back end is unknown or cannot compute this.

    Collectives: none.
    """
    terms = adapter or LowRank()
    if terms.dropout is not None:
        if received.identity_R is None:
            raise ConfigError(
                "dropout of the experts' adapters needs to know each row's token, but this "
                "dispatcher does not send it; fill Received.identity_R from "
                "Assignment.identity_T, or set lora dropout=0"
            )
        terms = replace(terms, dropout=replace(terms.dropout, identity_R=received.identity_R))
    chosen = _choose(backend, received.rows_RD, gate_up_e2FD)
    quantized = None
    if isinstance(gate_up_e2FD, QuantizedStack) and isinstance(down_eDF, QuantizedStack):
        quantized = (gate_up_e2FD, down_eDF)
    elif chosen == "loop":
        assert isinstance(gate_up_e2FD, torch.Tensor)
        assert isinstance(down_eDF, torch.Tensor)
        return _loop(
            received,
            gate_up_e2FD,
            down_eDF,
            activation=activation,
            gate_up_bias_e2F=gate_up_bias_e2F,
            down_bias_eD=down_bias_eD,
            terms=terms,
        )
    out: torch.Tensor = apply_function(
        ExpertKernel,
        received.rows_RD,
        received.pair_weight_P,
        None if quantized else gate_up_e2FD,
        None if quantized else down_eDF,
        gate_up_bias_e2F,
        down_bias_eD,
        terms.gate_up_a,
        terms.gate_up_b,
        terms.down_a,
        terms.down_b,
        received.pair_row_P,
        received.counts_e,
        Options(
            activation=activation,
            counts=received.counts,
            grouped=chosen == "grouped_mm",
            recompute=recompute,
            scale=terms.scale,
            early=received.early,
            dropout=terms.dropout,
            quantized=quantized,
            sum_dtype=received.sum_dtype,
        ),
    )
    return out


def _choose(backend: Backend, rows_RD: torch.Tensor, gate_up_e2FD: Stack) -> Backend:
    if backend not in BACKENDS:
        raise ConfigError(
            f"experts={backend!r} is no back end of the expert compute; choose one of "
            f"{', '.join(BACKENDS)}"
        )
    if isinstance(gate_up_e2FD, QuantizedStack):
        if backend in ("loop", "grouped_mm"):
            raise ConfigError(
                f"experts={backend!r} does not take quantised weights back one expert at a time; "
                "choose experts='auto' or 'sliced'"
            )
        return "sliced"
    # grouped_mm wants row strides that are multiples of 16 bytes, and knows no fp64
    hidden, width = gate_up_e2FD.shape[-2:]
    size = rows_RD.element_size()
    aligned = (hidden * size) % 16 == 0 and (width * size) % 16 == 0
    possible = aligned and rows_RD.dtype in (torch.float32, torch.bfloat16)
    if backend == "auto":
        fast = rows_RD.is_cuda and rows_RD.dtype == torch.bfloat16 and possible
        return "grouped_mm" if fast else "sliced"
    if backend == "grouped_mm" and not possible:
        raise ConfigError(
            f"experts='grouped_mm' cannot compute width {width} and expert hidden {hidden} in "
            f"{rows_RD.dtype}: rows must be multiples of 16 bytes, in fp32 or bf16; choose "
            "experts='sliced'"
        )
    return backend


def _loop(
    received: Received,
    gate_up_e2FD: torch.Tensor,
    down_eDF: torch.Tensor,
    *,
    activation: Activation,
    gate_up_bias_e2F: torch.Tensor | None,
    down_bias_eD: torch.Tensor | None,
    terms: LowRank,
) -> torch.Tensor:
    """Return what `experts_forward` does, one expert after the other under plain autograd."""
    rows_RD, drop = received.rows_RD, terms.dropout
    counts = received.counts or tuple(received.counts_e.tolist())
    out_RD = torch.zeros_like(rows_RD, dtype=accumulate_dtype(rows_RD.dtype))
    start = 0
    # unbind, not indexing: the backward of w[i] is as large as all experts, for each of them
    for place, (gate_up, down, count) in enumerate(
        zip(gate_up_e2FD.unbind(0), down_eDF.unbind(0), counts, strict=True)
    ):
        row_N = received.pair_row_P[start : start + count]
        weight_N1 = received.pair_weight_P[start : start + count, None]
        start += count
        x_ND = rows_RD.index_select(0, row_N)
        gate_NF, up_NF = F.linear(x_ND, gate_up[0]), F.linear(x_ND, gate_up[1])
        if terms.gate_up_a is not None and terms.gate_up_b is not None:
            a, b = terms.gate_up_a[place], terms.gate_up_b[place]
            low_x_ND = x_ND if drop is None else drop.input(x_ND, row_N, drop.expert_e[place, None])
            gate_NF = gate_NF + terms.scale * F.linear(F.linear(low_x_ND, a[0]), b[0])
            up_NF = up_NF + terms.scale * F.linear(F.linear(low_x_ND, a[-1]), b[1])
        if gate_up_bias_e2F is not None:
            gate_NF, up_NF = (
                gate_NF + gate_up_bias_e2F[place, 0],
                up_NF + gate_up_bias_e2F[place, 1],
            )
        hidden_NF = (weight_N1 * activation.apply(gate_NF, up_NF)).to(x_ND.dtype)
        y_ND = F.linear(hidden_NF, down)
        if terms.down_a is not None and terms.down_b is not None:
            low = (
                hidden_NF
                if drop is None
                else drop.hidden(hidden_NF, row_N, drop.expert_e[place, None])
            )
            low = F.linear(low, terms.down_a[place])
            y_ND = y_ND + terms.scale * F.linear(low, terms.down_b[place])
        y_ND = y_ND.to(out_RD.dtype)
        if down_bias_eD is not None:
            y_ND = y_ND + (weight_N1 * down_bias_eD[place]).to(out_RD.dtype)
        # a row meets an expert once, so the order of this sum is the order of the experts
        out_RD = out_RD.index_add(0, row_N, y_ND)
    return out_RD
