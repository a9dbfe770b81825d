"""One layer on many ranks: its settings must be alike, and its first values are."""

from __future__ import annotations

from dataclasses import replace

import torch

from moe_tp.parallel.collectives import raw_all_reduce
from moe_tp.parallel.mesh import Mesh
from moe_tp.routing.config import RouterConfig

__all__ = ["agreed_seed"]


def agreed_seed(mesh: Mesh, router: RouterConfig, settings: str, seed: int | None) -> int:
    """Return the seed of a layer's first values, the same on all ranks that hold the layer.

    Args:
        mesh: the mesh.
        router: the layer's.
        settings: the rest of what the layer was made with, as text.
        seed: None draws one from torch's generator.

    Raises:
        RankMismatchError: a rank makes another layer than the first one.

    Collectives: exchange of the settings through the store; where no seed is given an all-reduce
        of one over the owners.
    """
    # a function prints with its address, which is another on each rank
    name = getattr(router.function, "__qualname__", type(router.function).__name__)
    said = f"seed={seed} {settings} function={name} {replace(router, function=None)!r}"
    mesh.agree("the settings of an MoE layer", said, axis="stage")
    if seed is not None:
        return seed
    draw = torch.randint(1 << 62, (1,)).to(mesh.device)
    return int(raw_all_reduce(draw, mesh.group("stage"), "max"))
