"""Which dispatcher a mesh runs."""

from __future__ import annotations

from moe_tp.errors import ConfigError
from moe_tp.experts.all_gather import AllGatherDispatcher
from moe_tp.experts.all_to_all import AllToAllDispatcher
from moe_tp.experts.deepep import DeepEPDispatcher
from moe_tp.experts.dispatch import Dispatcher
from moe_tp.experts.local import LocalDispatcher
from moe_tp.experts.padded import PaddedDispatcher
from moe_tp.experts.two_hop import TwoHopDispatcher
from moe_tp.parallel.mesh import Mesh
from moe_tp.routing.table import ExpertTable

NAMES = ("auto", "local", "all_to_all", "all_gather", "two_hop", "deepep")


def make_dispatcher(mesh: Mesh, table: ExpertTable, *, padded: bool = False) -> Dispatcher:
    """Return the dispatcher that `mesh.runtime` names; `auto` moves nothing where it need not.

    Args:
        mesh: the mesh.
        table: which slot holds which expert.
        padded: capacity fixes the sizes of what travels.

    Raises:
        ConfigError: the name is unknown, or the dispatcher cannot serve the mesh.
    """
    name, wire = mesh.runtime.dispatcher, mesh.runtime.wire_dtype
    if padded:
        if name not in ("auto", "local", "all_to_all"):
            raise ConfigError(
                f"pad_to_capacity=True does nothing for dispatcher={name!r}; choose "
                "dispatcher='all_to_all' or pad_to_capacity=False"
            )
        return PaddedDispatcher(mesh, table, wire)
    if name == "auto":
        name = "local" if mesh.size("ep") * mesh.size("etp") == 1 else "all_to_all"
    if name == "local":
        return LocalDispatcher(mesh, table)
    if name == "all_to_all":
        return AllToAllDispatcher(mesh, table, wire)
    if name == "all_gather":
        return AllGatherDispatcher(mesh, table, wire)
    if name == "two_hop":
        return TwoHopDispatcher(mesh, table, wire)
    if name == "deepep":
        return DeepEPDispatcher(mesh, table)
    raise ConfigError(
        f"dispatcher={mesh.runtime.dispatcher!r} is not known; choose one of {', '.join(NAMES)}"
    )
