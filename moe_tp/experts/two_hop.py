"""Dispatch in two hops: between nodes once per node, then inside the node once per rank.

Letters: as in `all_to_all.py`.

Between nodes a token goes to the rank of its own place in the other node, and from there to the
ranks that hold its experts; partial sums of a node are added up before they go back. The slow
links carry the distinct (token, node) pairs instead of the distinct (token, rank) pairs, each way
(node-limited routing bounds them: DeepSeek-V3, arXiv:2412.19437, section 3.2.2).
"""

from __future__ import annotations

import os
import weakref

import torch
import torch.distributed as dist

from moe_tp.errors import ConfigError
from moe_tp.experts.all_to_all import AllToAllDispatcher
from moe_tp.parallel.collectives import Group
from moe_tp.parallel.mesh import Mesh
from moe_tp.routing.table import ExpertTable

# process groups are made once a mesh and node size, not once a layer
_made: weakref.WeakKeyDictionary[Mesh, dict[int, tuple[Group, Group]]] = weakref.WeakKeyDictionary()


class TwoHopDispatcher(AllToAllDispatcher):
    """All-to-all between nodes, then inside the node.

    Args:
        mesh: names ep and etp; the ranks of ep lie node by node.
        table: which slot holds which expert.
        wire_dtype: as for `AllToAllDispatcher`.
        node_ranks: ranks of ep in a node; None takes what the launcher says (LOCAL_WORLD_SIZE).

    Raises:
        ConfigError: nodes do not divide ep.

    Collectives: creation of two groups the first time a mesh asks for them.
    """

    def __init__(
        self,
        mesh: Mesh,
        table: ExpertTable,
        wire_dtype: torch.dtype | None = None,
        *,
        node_ranks: int | None = None,
    ) -> None:
        super().__init__(mesh, table, wire_dtype)
        ep = mesh.group("ep")
        if node_ranks is None:
            local = int(os.environ.get("LOCAL_WORLD_SIZE", str(mesh.world_size)))
            node_ranks = min(max(local // mesh.size("etp"), 1), ep.size)
        if node_ranks < 1 or ep.size % node_ranks:
            raise ConfigError(
                f"nodes of {node_ranks} ranks do not divide ep={ep.size}; choose ep a multiple of "
                f"{node_ranks}, or dispatcher='all_to_all'"
            )
        between, inside = _groups(mesh, ep, node_ranks)
        slots = table.slots_per_rank
        self._groups = [(between, slots * node_ranks), (inside, slots)]


def _groups(mesh: Mesh, ep: Group, node_ranks: int) -> tuple[Group, Group]:
    """Return this rank's groups between nodes and inside its node."""
    made = _made.setdefault(mesh, {})
    if node_ranks not in made:
        node, place = divmod(ep.rank, node_ranks)
        between = ep.ranks[place::node_ranks]
        inside = ep.ranks[node * node_ranks : (node + 1) * node_ranks]
        made[node_ranks] = (
            _group("ep_between", between, node),
            _group("ep_inside", inside, place),
        )
    return made[node_ranks]


def _group(axis: str, ranks: tuple[int, ...], rank: int) -> Group:
    if len(ranks) == 1:
        return Group(axis, ranks=ranks)
    group = dist.new_group(list(ranks), use_local_synchronization=True)
    return Group(axis, len(ranks), rank, ranks, group)
