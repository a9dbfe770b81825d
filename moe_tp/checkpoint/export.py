"""From one hub folder to another without building a model: dtype, shards, expert format, decoding.

A tensor to write is traced through the parameter it belongs to: its name rules say which block of
which parameter it holds, the source's rules say where that block lies. Each rank reads what its own
files need, a window at a time.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from moe_tp.checkpoint.agree import together
from moe_tp.checkpoint.blocks import Aligned, Run
from moe_tp.checkpoint.files import (
    FilePlan,
    OutTensor,
    Quantise,
    out_tensors,
    parse_size,
    plan_files,
)
from moe_tp.checkpoint.load import compare
from moe_tp.checkpoint.progress import Bar, Progress
from moe_tp.checkpoint.reader import HubFolder
from moe_tp.checkpoint.rules import NameRules, Piece
from moe_tp.checkpoint.storage import local_path
from moe_tp.checkpoint.supply import FolderSupply, Route
from moe_tp.checkpoint.writer import SaveReport, write_folder, written_config
from moe_tp.errors import CheckpointError
from moe_tp.parallel.mesh import Mesh

# Correction biases of routers: small differences on a large offset, which bf16 would wipe out.
KEPT_FP32 = (r".*e_score_correction_bias", r".*expert_bias")


def export_folder(
    source: str | os.PathLike[str] | HubFolder,
    target: str | os.PathLike[str],
    *,
    mesh: Mesh | None = None,
    rules: NameRules | None = None,
    rules_out: NameRules | None = None,
    config_json: Mapping[str, Any] | None = None,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    quantise: Quantise | None = None,
    progress: Progress | bool | None = None,
) -> SaveReport:
    """Return what was written to make `target` a hub folder with the weights of `source`.

    Args:
        source: read from; quantised tensors are decoded to bf16.
        target: written; see `save_hub`.
        mesh: the ranks that share the work; one process by default.
        rules: name rules of the source; needed to change the expert format.
        rules_out: name rules of the target; those of the source by default.
        config_json: config.json of the target; that of the source by default.
        dtype: of floating tensors, except those in fp32 by rule; None keeps them.
        max_shard_size: bytes a file.
        quantise: write some tensors in fp8 or MXFP4.
        progress: called with (bytes done, bytes in all) of this rank; or whether the first rank
            shows a bar on stderr (None: in a terminal).

    Raises:
        CheckpointError: on every rank; see `load_into` and `save_hub`.

    Collectives: agreements over the world of `mesh`.
    """
    mesh = Mesh.single() if mesh is None else mesh
    world, device = mesh.group("world"), mesh.device
    limit = parse_size(max_shard_size)

    def plan() -> tuple[HubFolder, list[FilePlan], FolderSupply]:
        folder = source if isinstance(source, HubFolder) else HubFolder(source)
        routes: dict[str, list[Route]] = {}
        if rules is not None:
            compare(folder, rules)
            if rules_out is not None:
                routes = _routes(rules, rules_out)
        tensors = _tensors(folder, rules, rules_out, dtype, quantise)
        return folder, plan_files(tensors, limit), FolderSupply(folder, routes)

    folder, plans, supply = together(plan, world, device)
    config = written_config(folder.config if config_json is None else config_json, plans, quantise)
    try:
        with Bar("exporting", world.rank, progress) as bar:
            return write_folder(
                local_path(target),
                plans,
                supply,
                config,
                world,
                device,
                carry_from=folder,
                progress=bar,
            )
    finally:
        folder.close()


def _tensors(
    folder: HubFolder,
    rules: NameRules | None,
    rules_out: NameRules | None,
    dtype: torch.dtype | None,
    quantise: Quantise | None,
) -> list[OutTensor]:
    out = rules_out or rules
    shapes = {name: t.shape for name, t in folder.logical.items()}
    kinds = {name: t.dtype for name, t in folder.logical.items()}
    if rules is not None and out is not None:
        carried = {n: s for n, s in shapes.items() if rules.matches("passthrough", n)}
        shapes = {**out.hub_shapes(), **carried}
        kinds.update(_kinds(folder, rules, out))
    tensors: list[OutTensor] = []
    for name, shape in shapes.items():
        kind = kinds[name]
        fp32 = any(re.fullmatch(p, name) for p in KEPT_FP32)
        if out is not None:
            fp32 = out.matches("fp32_names", name)
        if fp32:
            kind = torch.float32
        elif dtype is not None and kind.is_floating_point:
            kind = dtype
        tensors += out_tensors(name, kind, shape, quantise)
    return tensors


def _kinds(folder: HubFolder, rules: NameRules, out: NameRules) -> dict[str, torch.dtype]:
    """Return the dtype of every tensor to write: that of the tensors it is made from."""
    kinds: dict[str, torch.dtype] = {}
    for fqn, pieces in out.pieces.items():
        found = {folder.find(p.hub_name).dtype for p in rules.pieces_of(fqn)}
        kind = max(found, key=lambda d: d.itemsize)
        for piece in pieces:
            kinds[piece.hub_name] = kind
    return kinds


def _routes(rules: NameRules, out: NameRules) -> dict[str, list[Route]]:
    routes: dict[str, list[Route]] = {}
    for fqn, pieces in out.pieces.items():
        shape = param_shape(rules.pieces_of(fqn))
        by_first: dict[int | None, list[Aligned]] = {}
        for piece in rules.pieces_of(fqn):
            by_first.setdefault(_leading(piece), []).append(Aligned(piece, shape))
        for piece in pieces:
            wanted = Aligned(piece, shape)
            first = _leading(piece)
            every = [a for group in by_first.values() for a in group]
            given = every if first is None else by_first.get(first, []) + by_first.get(None, [])
            for aligned in given:
                route = _route(wanted, aligned)
                if route is not None:
                    routes.setdefault(piece.hub_name, []).append(route)
    return routes


def _route(wanted: Aligned, given: Aligned) -> Route | None:
    """Return how a piece to write is read from a piece on disk, None if they share nothing."""
    if any(r.step != 1 for r in (*wanted.param, *given.param)):
        raise CheckpointError(f"{wanted.piece.hub_name}: a strided parameter cannot be exported")
    box = tuple(Run(r.start, r.start, len(r)) for r in given.param)
    to = wanted.overlap(box)
    if to is None:
        return None
    shared = tuple(Run(s.start, s.start, s.stop - s.start) for s in to.local)
    source = given.overlap(shared)
    assert source is not None
    param_of = {hub: param for param, hub in given.free.items()}
    dims = tuple(
        wanted.free.get(param_of[d]) if d in param_of else None for d in range(len(source.hub))
    )
    return Route(to.hub, given.piece.hub_name, source.hub, dims)


def _leading(piece: Piece) -> int | None:
    first = piece.param_index[0] if piece.param_index else None
    return first if isinstance(first, int) else None


def param_shape(pieces: Sequence[Piece]) -> tuple[int, ...]:
    """Return the logical shape of the parameter that the pieces cover."""
    shape: list[int] = []
    for piece in pieces:
        free = [
            len(r)
            for d, r in enumerate(piece.hub_ranges())
            if d >= len(piece.hub_slices) or isinstance(piece.hub_slices[d], slice)
        ]
        if piece.transpose and len(free) > 1:
            free[-1], free[-2] = free[-2], free[-1]
        sizes: list[int] = []
        for index in piece.param_index:
            if isinstance(index, slice):
                size = free.pop(0)
                sizes.append(size if index.stop is None else index.stop)
            else:
                sizes.append(index + 1)
        sizes += free
        shape = sizes if not shape else [max(a, b) for a, b in zip(shape, sizes, strict=True)]
    return tuple(shape)
