"""Sizes of the axes over which the ranks of a layout talk, and how far their groups reach."""

from __future__ import annotations

from moe_tp.parallel.layout import ParallelLayout


def axis_sizes(layout: ParallelLayout, replicate: int = 1) -> dict[str, int]:
    """Return the ranks along each axis.

    Args:
        layout: resolved.
        replicate: replicas of what ZeRO shards.
    """
    assert layout.dp is not None
    return {
        "dp": layout.dp,
        "cp": layout.cp,
        "tp": layout.tp,
        "pp": layout.pp,
        "ep": layout.ep,
        "etp": layout.etp,
        "edp": layout.edp,
        "dp_cp": layout.dp * layout.cp,
        "cp_tp": layout.cp * layout.tp,
        "stage": layout.stage_size,
        "pp_ends": min(2, layout.pp),
        "world": layout.world_size,
        "shard": layout.dp * layout.cp // replicate,
        "expert_shard": max(1, layout.edp // replicate),
        "replicate": replicate,
        "expert_replicate": replicate,
    }


def spans(layout: ParallelLayout, replicate: int = 1) -> dict[str, int]:
    """Return how many neighbouring ranks a group of each axis reaches over.

    Args:
        layout: resolved.
        replicate: replicas of what ZeRO shards, each of neighbours.
    """
    stage = layout.stage_size
    return {
        "tp": layout.tp,
        "cp": layout.cp * layout.tp,
        "cp_tp": layout.cp * layout.tp,
        "dp": stage,
        "dp_cp": stage,
        "stage": stage,
        "etp": layout.etp,
        "ep": layout.ep * layout.etp,
        "edp": stage,
        "pp": 2 * stage,
        "pp_ends": layout.world_size,
        "world": layout.world_size,
        "shard": stage // replicate,
        "expert_shard": stage // replicate,
        "replicate": stage,
        "expert_replicate": stage,
    }
