"""Few tokens that every rank of tp holds whole: one sum where shares need two collectives.

A step of generation has one token a sequence. Owned in shares (`moe_tp.parallel.sequence`) they are
gathered before a product and summed to their owners behind it, twice a layer, and such a step is
little else than waiting for those four collectives. Held whole on every rank, norm and router are
done by each rank for all of them, and a layer needs two sums.

Letters: P ranks · N tokens · D width.
"""

from __future__ import annotations

import torch

from moe_tp.parallel.collectives import Group, add_in_order, raw_all_gather
from moe_tp.parallel.mesh import Mesh


def sharers(mesh: Mesh, whole: bool) -> Group:
    """Return the ranks that hold shares of the tokens: those of tp, or this one alone.

    Args:
        mesh: the mesh.
        whole: every rank of tp holds all tokens.
    """
    return Group("tp", ranks=(mesh.rank,)) if whole else mesh.group("tp")


def sum_whole(x_ND: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the sum over the group on each of its ranks, in x's dtype; without gradient.

    Added in fp32 (fp64 for fp64) in rank order on every rank, so that all have the same bits: from
    here on each computes for itself what must come out alike.

    Args:
        x_ND: this rank's partial sums of the same tokens.
        group: the ranks.

    Collectives: all-gather over `group`.
    """
    if group.size == 1:
        return x_ND
    return add_in_order(raw_all_gather(x_ND[None], group))
