"""Folding adapters into weights, element by element, with the same bits in every layout."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moe_tp.parallel.collectives import accumulate_dtype
from moe_tp.parallel.shards import local_index, to_local
from moe_tp.train.lora_dora import lengths

if TYPE_CHECKING:
    from moe_tp.train.lora import Factors


def fold_weight(factors: Factors, scale: float) -> None:
    """Add one adapter's product to this rank's part of the weight, whatever splits it."""
    a, b = factors.whole()
    param = factors.base.get_parameter(factors.name)
    index = local_index(param, factors.base.specs[factors.name])
    weight = to_local(param)
    dtype = accumulate_dtype(weight.dtype)
    outs, ins = (i.clamp(min=0).to(weight.device) for i in index[-2:])
    a = a.to(dtype).index_select(-1, ins)
    b = b.to(dtype).index_select(-2, outs)
    if weight.dim() == 4:  # ZeRO may split gate from up
        b = b.index_select(1, index[1].to(weight.device))
    leads = [()] if weight.dim() == 2 else [(place,) for place in range(weight.shape[0])]
    for lead in leads:
        # an empty slot of the expert table has nothing to fold
        expert = [int(index[0][place]) for place in lead]
        if -1 in expert:
            continue
        part, a_e, b_e = weight[lead], a[tuple(expert)], b[tuple(expert)]
        part.copy_(part.to(dtype) + product(a_e, b_e) * scale)


def fold_lengths(factors: Factors, scale: float) -> None:
    """Put this rank's part of `m V / ||V||` in the weight's place; rows are measured whole."""
    a, b = factors.whole()
    param = factors.base.get_parameter(factors.name)
    weight = to_local(param)
    dtype = accumulate_dtype(weight.dtype)
    whole = factors.whole_base().to(dtype)
    whole += product(a.to(dtype), b.to(dtype)) * scale
    whole *= (factors.whole_lengths().to(dtype) / lengths(whole))[:, None]
    for dim, places in enumerate(local_index(param, factors.base.specs[factors.name])):
        whole = whole.index_select(dim, places.to(whole.device))
    weight.copy_(whole)


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return `b @ a` summed over r in order, element by element.

    A matrix product picks its order of summing by shape, so that slices would differ in bits.
    """
    total = b[..., :, 0:1] * a[..., 0:1, :]
    for r in range(1, a.shape[-2]):
        total += b[..., :, r : r + 1] * a[..., r : r + 1, :]
    return total
