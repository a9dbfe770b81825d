"""Routing of a whole model, recorded in one run and used again in another, in any layout.

    with record_routing(model) as record:
        model(input_ids)
    save_routing(record, "routing.safetensors", mesh)
    ...
    with replay_routing(other, load_routing("routing.safetensors")):
        forward_backward(other, micro_batches)

Choices are kept by the identity of the token (sample of the global batch, column), so that ranks,
micro-batches and pipeline stages may be others when they are replayed. Weights always come from the
logits of the run at hand, and so do gradients.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from moe_tp.errors import ConfigError, RoutingError
from moe_tp.experts.moe import MoE
from moe_tp.parallel.mesh import Mesh
from moe_tp.routing.assignment import Assignment
from moe_tp.routing.replay import RoutingRecord

__all__ = ["load_routing", "record_routing", "replay_routing", "save_routing"]


@contextmanager
def record_routing(model: nn.Module) -> Iterator[RoutingRecord]:
    """Yield a record that fills with the choices of every MoE layer while the context is open.

    Args:
        model: holds MoE layers whose calls name their tokens (`identity`); a decoder's do.
    """
    record = RoutingRecord()
    with _attached(model, _Tape(record=record, replays=False)):
        yield record


@contextmanager
def replay_routing(model: nn.Module, record: RoutingRecord) -> Iterator[None]:
    """Let every MoE layer use the recorded choices while the context is open.

    Args:
        model: as for `record_routing`.
        record: holds every token that the model will see.
    """
    with _attached(model, _Tape(record=record, replays=True)):
        yield


def save_routing(
    record: RoutingRecord, path: str | os.PathLike[str], mesh: Mesh | None = None
) -> None:
    """Write the choices of all ranks as one safetensors file, from rank 0.

    Args:
        record: this rank's.
        path: of the file.
        mesh: whose ranks' records belong together; None writes this one alone.

    Collectives: gather of the records to rank 0 and a barrier, over the world.
    """
    parts: list[RoutingRecord | None] = [record]
    if mesh is not None and mesh.world_size > 1:
        parts = [None] * mesh.world_size
        dist.gather_object(record, parts if mesh.rank == 0 else None)
    if mesh is None or mesh.rank == 0:
        whole = RoutingRecord()
        for part in parts:
            assert part is not None
            whole.update(part)
        save_file(whole.to_tensors(), Path(path))
    if mesh is not None and mesh.world_size > 1:
        dist.barrier()


def load_routing(path: str | os.PathLike[str]) -> RoutingRecord:
    """Return the record of a file that `save_routing` wrote.

    Args:
        path: of the file.

    Raises:
        RoutingError: the file cannot be read, or holds something else.
    """
    try:
        tensors = load_file(Path(path))
    except (OSError, SafetensorError) as error:
        raise RoutingError(f"{path} cannot be read as recorded routing: {error}") from error
    return RoutingRecord.from_tensors(tensors)


@dataclass(frozen=True, slots=True)
class _Tape:
    """A record, and which way it is used; see `moe_tp.experts.moe.RoutingTape`."""

    record: RoutingRecord
    replays: bool

    def before(
        self, layer: int, identity_T: torch.Tensor | None, mask_T: torch.Tensor | None
    ) -> torch.Tensor | None:
        if not self.replays:
            return None
        identity_T = _named(layer, identity_T)
        return self.record.ids(layer=layer, identity_T=identity_T, mask_T=mask_T)

    def after(self, layer: int, identity_T: torch.Tensor | None, assignment: Assignment) -> None:
        if not self.replays:
            self.record.add(assignment, layer=layer, identity_T=_named(layer, identity_T))


def _named(layer: int, identity_T: torch.Tensor | None) -> torch.Tensor:
    if identity_T is None:
        raise ConfigError(
            f"layer {layer} was called without identity, so its tokens cannot be told apart in a "
            "record; pass identity= to the layer, a number for each token"
        )
    return identity_T


@contextmanager
def _attached(model: nn.Module, tape: _Tape) -> Iterator[None]:
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    busy = [layer.layer for layer in layers if layer.tape is not None]
    if busy:
        raise ConfigError(
            f"the routing of layer {busy[0]} is recorded or replayed already; close that context"
        )
    for layer in layers:
        layer.tape = tape
    try:
        yield
    finally:
        for layer in layers:
            layer.tape = None
