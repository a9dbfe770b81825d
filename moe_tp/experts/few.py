"""Experts for the few tokens of a generation step, on a CPU.

Letters: T tokens on this rank · R rows · K choices · D width · F expert hidden · N two times F · P
(row, expert) pairs · e experts on this rank.

A step has a handful of pairs, and its time is reading the weights of the chosen experts and the
calls from Python. So the choices are read to the host once, the experts that have rows cost one
call a projection, and nothing is listed, counted or padded for backward or the wire.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from moe_tp.experts.layer import GroupedExperts
from moe_tp.experts.router import Router
from moe_tp.parallel.collectives import accumulate_dtype
from moe_tp.parallel.held import held
from moe_tp.parallel.product import linear, linears
from moe_tp.routing.route import choose

MOST_PAIRS = 512  # above, sorting them on the host costs more than it saves


def serves(x_TD: torch.Tensor, router: Router, experts: GroupedExperts) -> bool:
    """Return whether this file knows what the layer does: plain routing and plain weights.

    Router and experts are not called as modules, so nothing may hang on that: no hook, no ZeRO.
    """
    config, runtime = router.config, experts.mesh.runtime
    hooks = (m._forward_hooks or m._forward_pre_hooks for m in (router, experts))
    return (
        x_TD.device.type == "cpu"
        and experts.mesh.layout.zero == 0
        and not any(hooks)
        and not torch.is_grad_enabled()
        and x_TD.shape[0] * config.top_k <= MOST_PAIRS
        and config.kind == "top_k"
        and config.function is None
        and router.low_rank is None
        and experts.adapter is None
        and experts.quantized is None
        and runtime.experts in ("auto", "sliced")
        and not torch.is_autocast_enabled("cpu")
    )


def choose_few(
    x_TD: torch.Tensor, mask_T: torch.Tensor | None, router: Router
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return `ids_TK`, -1 in masked rows, and `weights_TK`, as `Router` would have them.

    None where a row of logits cannot be ranked: the router itself says which, and refuses (R7).

    Args:
        x_TD: tokens.
        mask_T: True where a token is real.
        router: that `serves` accepts.
    """
    has, config = router.specs, router.config
    weight_ED = router.local("weight")
    logits_TE = linear(
        x_TD.to(weight_ED.dtype), weight_ED, router.local("bias") if "bias" in has else None
    )
    tops = logits_TE.amax(-1).tolist()
    real = [True] * len(tops) if mask_T is None else mask_T.tolist()
    if not all(math.isfinite(top) for top, is_real in zip(tops, real, strict=True) if is_real):
        return None
    bias_E = router.local("correction_bias") if "correction_bias" in has else None
    ids_TK, weights_TK = choose(logits_TE, config, bias_E=bias_E)
    if not all(real):
        assert mask_T is not None
        ids_TK = ids_TK.masked_fill(~mask_T[:, None], -1)
    return ids_TK, weights_TK


def compute_few(
    rows_RD: torch.Tensor,
    slots_RK: Sequence[Sequence[int]],
    weights_RK: torch.Tensor,
    experts: GroupedExperts,
) -> torch.Tensor:
    """Return `[R, D]`, each row's weighted sum in fp32 (fp64 for fp64), experts in rising order.

    Args:
        rows_RD: in the compute dtype.
        slots_RK: local slot of each choice; others than this rank's are left out.
        weights_RK: routing weights.
        experts: that `serves` accepts.

    Collectives: none.
    """
    gate_up, down = _matrices(experts)
    exact, choices, mine = accumulate_dtype(rows_RD.dtype), weights_RK.shape[1], down.shape[0]
    pairs = sorted(
        (slot, row * choices + choice)
        for row, slots in enumerate(slots_RK)
        for choice, slot in enumerate(slots)
        if 0 <= slot < mine
    )
    if not pairs:
        return rows_RD.new_zeros(rows_RD.shape, dtype=exact)
    busy: dict[int, int] = {}
    for slot, _ in pairs:
        busy[slot] = busy.get(slot, 0) + 1
    runs = list(busy), list(busy.values())
    place_P = torch.tensor([place for _, place in pairs])
    weight_P1 = weights_RK.reshape(-1).index_select(0, place_P)[:, None].to(exact)
    row_P = torch.div(place_P, choices, rounding_mode="floor")
    gate_up_PN = linears(rows_RD.index_select(0, row_P), gate_up, *runs)
    slot_P = None
    if "down_bias" in experts.specs:
        slot_P = torch.tensor([slot for slot, _ in pairs])
        gate_up_PN = gate_up_PN + experts.local("gate_up_bias").flatten(1).index_select(0, slot_P)
    gate_PF, up_PF = gate_up_PN.chunk(2, dim=1)
    hidden_PF = torch.empty_like(gate_PF)
    experts.activation.forward_into(hidden_PF, gate_PF, up_PF)
    y_PD = linears(hidden_PF, down, *runs).to(exact)
    if slot_P is not None and experts.mesh.coordinate("etp") == 0:  # added once
        y_PD = y_PD + experts.local("down_bias").index_select(0, slot_P)
    y_PD = y_PD * weight_P1
    return y_PD.new_zeros(rows_RD.shape).index_add_(0, row_P, y_PD)


def _matrices(experts: GroupedExperts) -> tuple[torch.Tensor, torch.Tensor]:
    """Return gate and up as one matrix an expert `[e, 2F, D]`, and down `[e, D, F]`: views."""

    def make() -> tuple[torch.Tensor, torch.Tensor]:
        return experts.local("gate_up").flatten(1, 2), experts.local("down")

    return held(experts, "matrices", make)
