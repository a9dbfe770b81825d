"""Training state on disk: weights, optimiser moments, counters; written by one layout, read by any.

A checkpoint is a folder of safetensors with one tensor for each *logical* tensor, whole and without
padding: `model.NAME`, `optimizer.MOMENT.NAME`, `buffer.NAME`, under the parameter's name in the
whole model. It is written by the streaming writer of hub folders (each rank sends the blocks that
it holds, an element is written once however many ranks hold it) and appears whole or not at all:
a hidden folder, fsync of every file, `config.json` last, one rename. A reader takes the blocks of
its own `local_index`. So any (dp, tp, ep, etp, pp, cp, zero) reads what any other has written.

Why not `torch.distributed.checkpoint`: it saves a DTensor's chunks in its padded shape, and padding
follows the layout here (experts on uneven ep lie in `slots`, vocabularies are padded to tp), so the
same element has another place under another layout. A planner that writes logical blocks instead
would leave of DCP only its pickled metadata, which K7 forbids us to read.

Saving has two halves, so that the second may run beside the training: `stage_state` copies what
this rank will write into host memory, `write_state` writes it through a group of its own.

`config.json` has a model type of its own, so no reader of hub folders takes it for a model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from moe_tp.checkpoint.agree import gather_json, together
from moe_tp.checkpoint.blocks import split
from moe_tp.checkpoint.files import FilePlan, parse_size, plain_tensor, plan_files
from moe_tp.checkpoint.holdings import Holding, gather_holdings
from moe_tp.checkpoint.load import BUFFER, Target
from moe_tp.checkpoint.progress import Progress
from moe_tp.checkpoint.reader import HubFolder
from moe_tp.checkpoint.rules import NameRules, whole
from moe_tp.checkpoint.states import KIND, VERSION, open_state
from moe_tp.checkpoint.supply import ModelSupply
from moe_tp.checkpoint.writer import SaveReport, write_folder
from moe_tp.errors import CheckpointError
from moe_tp.parallel.collectives import Group
from moe_tp.parallel.parameter import ParallelModule, mesh_of, named_specs
from moe_tp.parallel.shards import local_index, to_local
from moe_tp.parallel.zero import reshard


def save_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    path: Path,
    facts: Mapping[str, Any],
    *,
    max_shard_size: int | str = "5GB",
    progress: Progress | None = None,
) -> SaveReport:
    """Return what was written to make `path` a checkpoint; collective.

    Args:
        model: in any layout, between two steps.
        optimizer: of its parameters.
        path: the folder; one of that name is replaced in one step.
        facts: what else is to be kept, as JSON; rank 0's are written.
        max_shard_size: bytes a file.
        progress: called with (bytes done, bytes in all) of this rank.

    Raises:
        CheckpointError: on every rank; what lay at `path`, and older checkpoints, are untouched.

    Collectives: over the world: agreements, a table of contents, one all-to-all a round.
    """
    world, device = mesh_of(model).group("world"), mesh_of(model).device
    staged = stage_state(model, optimizer)
    return write_state(
        staged, path, facts, world, device, max_shard_size=max_shard_size, progress=progress
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedState:
    """A model and its optimiser between two steps, as one rank will write them.

    Args:
        optimizer: name of its class.
        targets: this rank's tensors.
        holdings: how every tensor is held by the ranks.
    """

    optimizer: str
    targets: Sequence[Target]
    holdings: Mapping[str, Holding]


def stage_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    copies: dict[str, torch.Tensor] | None = None,
) -> StagedState:
    """Return what `write_state` writes; collective.

    Args:
        model: in any layout, between two steps.
        optimizer: of its parameters.
        copies: host memory of the last call, to be used again: training may go on while the state
            is written. Only what this rank has to write is copied. None: nothing is copied.

    Raises:
        CheckpointError: on every rank, for optimiser state that no layout could read.

    Collectives: over the world: an agreement, a table of contents.
    """
    mesh = mesh_of(model)
    world, device = mesh.group("world"), mesh.device
    reshard(model)  # a forward without backward leaves whole parameters

    def list_targets() -> list[Target]:
        return [*_model_targets(model), *_moment_targets(model, optimizer)]

    targets = together(list_targets, world, device)
    holdings = gather_holdings(targets, world, device)
    if copies is not None:
        mine = {
            fqn for fqn, h in holdings.items() if any(cell.rank == world.rank for cell in h.cells)
        }
        targets = [
            dataclasses.replace(target, local=_host_copy(target, copies))
            for target in targets
            if target.fqn in mine
        ]
    return StagedState(optimizer=type(optimizer).__name__, targets=targets, holdings=holdings)


def _host_copy(target: Target, copies: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the tensor in host memory, in the place of its last copy where there is one."""
    old, local = copies.get(target.fqn), target.local
    if old is None or (old.shape, old.dtype) != (local.shape, local.dtype):
        pinned = local.device.type == "cuda"
        old = copies[target.fqn] = torch.empty(local.shape, dtype=local.dtype, pin_memory=pinned)
    return old.copy_(local)


def write_state(
    staged: StagedState,
    path: Path,
    facts: Mapping[str, Any],
    group: Group,
    device: torch.device,
    *,
    max_shard_size: int | str = "5GB",
    progress: Progress | None = None,
) -> SaveReport:
    """Return what was written to make `path` a checkpoint; collective, on any thread.

    Args:
        staged: of every rank, from the same step.
        path, facts, max_shard_size, progress: as in `save_state`.
        group: the ranks of the world; on another thread than the training's a group of its own.
        device: where collectives of the group take their tensors.

    Raises:
        CheckpointError: on every rank; what lay at `path`, and older checkpoints, are untouched.

    Collectives: over `group`: agreements, one all-to-all a round.
    """
    holdings = staged.holdings

    def plan() -> tuple[list[FilePlan], ModelSupply]:
        rules = NameRules(pieces={name: whole(name, h.shape) for name, h in holdings.items()})
        tensors = [
            plain_tensor(name, holdings[name].dtype, s) for name, s in rules.hub_shapes().items()
        ]
        supply = ModelSupply(rules, staged.targets, holdings, group, device)
        return plan_files(tensors, parse_size(max_shard_size)), supply

    plans, supply = together(plan, group, device)
    config = {
        "model_type": KIND,
        "version": VERSION,
        "optimizer": staged.optimizer,
        "facts": dict(facts),
    }
    with torch.no_grad():
        return write_folder(path, plans, supply, config, group, device, progress=progress)


def load_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    path: Path,
) -> dict[str, Any]:
    """Return the facts of a checkpoint, having filled model and optimiser from it; collective.

    Args:
        model: allocated, in any layout.
        optimizer: of its parameters, fresh; None: weights and buffers only.
        path: the checkpoint.

    Raises:
        CheckpointError: on every rank: the folder is torn, is no checkpoint, or holds other tensors
            than the run needs; the message names the first.

    Collectives: agreements over the world, a list of names, an agreement after reading.
    """
    mesh = mesh_of(model)
    world, device = mesh.group("world"), mesh.device
    reshard(model)

    def prepare() -> tuple[HubFolder, list[Target]]:
        folder = open_state(path)
        targets = _model_targets(model)
        if optimizer is not None:
            kind = folder.config["optimizer"]
            if kind != type(optimizer).__name__:
                raise CheckpointError(
                    f"{path}: holds the state of {kind}, and this run's optimiser is "
                    f"{type(optimizer).__name__}; resume with the optimiser, the dtype of its "
                    f"moments and of the weights that it was started with"
                )
            _allocate_moments(model, optimizer, folder)
            targets += _moment_targets(model, optimizer)
        for target in targets:
            _check(folder, target)
        return folder, targets

    folder, targets = together(prepare, world, device)
    with folder:
        lists = gather_json([t.fqn for t in targets], world, device)
        wanted = {name for names in lists for name in names}
        skipped = "optimizer." if optimizer is None else "\0"
        extra = [n for n in folder.logical if n not in wanted and not n.startswith(skipped)]
        if extra:
            raise CheckpointError(
                f"{path}: tensor {extra[0]!r} (and {len(extra) - 1} more): this run has no such "
                f"parameter or does not train it; resume with the settings it was started with"
            )
        with torch.no_grad():
            together(lambda: _fill(folder, targets), world, device)
        facts: dict[str, Any] = folder.config["facts"]
        return facts


def _model_targets(model: nn.Module) -> list[Target]:
    """Return this rank's parameters and persistent buffers."""
    targets: dict[str, Target] = {}
    for fqn, _, _, param, spec in named_specs(model):
        name = f"model.{fqn}"
        index = local_index(param, spec)
        targets.setdefault(name, Target(name, to_local(param), spec.shape, index, spec.keep_fp32))
    for prefix, module in model.named_modules():
        if not isinstance(module, ParallelModule):
            continue
        for own, buffer in module._buffers.items():
            if buffer is not None and own not in module._non_persistent_buffers_set:
                name = f"buffer.{prefix}.{own}"
                targets[name] = _unsplit(name, buffer)
    return list(targets.values())


def _moment_targets(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Target]:
    """Return this rank's optimiser state; what has a parameter's shape lies as it does.

    Raises:
        CheckpointError: state that is neither a moment nor a number.
    """
    targets: dict[str, Target] = {}
    for fqn, _, _, param, spec in named_specs(model):
        for key, value in optimizer.state.get(param, {}).items():
            if value is None:
                continue
            name = _moment_name(key, fqn)
            local = _plain(value)
            if local is not None and local.shape == to_local(param).shape:
                index = local_index(param, spec)
                targets.setdefault(name, Target(name, local, spec.shape, index))
            elif local is not None and local.dim() == 0:
                targets.setdefault(name, _unsplit(name, local))
            else:
                raise CheckpointError(
                    f"parameter {fqn!r}: optimiser state {key!r} is neither of the parameter's "
                    f"shape nor one number, so it cannot be saved for another layout"
                )
    return list(targets.values())


def _allocate_moments(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    folder: HubFolder,
) -> None:
    """Give each trained parameter the state that the folder holds of it, to be filled."""
    group_of = {p: group for group in optimizer.param_groups for p in group["params"]}
    keys = {name.split(".")[1] for name in folder.logical if name.startswith("optimizer.")}
    for fqn, _, _, param, _ in named_specs(model):
        group = group_of.get(param)
        if group is None:
            continue
        state: dict[str, torch.Tensor] = {}
        for key in sorted(keys):
            found = folder.logical.get(_moment_name(key, fqn))
            if found is None:
                continue
            if key == "step":
                on_device = group.get("fused") or group.get("capturable")
                device = to_local(param).device if on_device else torch.device("cpu")
                state[key] = torch.zeros((), dtype=found.dtype, device=device)
            else:
                state[key] = torch.zeros_like(param, dtype=found.dtype, requires_grad=False)
        if state:
            optimizer.state[param] = state


def _plain(value: object) -> torch.Tensor | None:
    """Return the local values of optimiser state; what is kept in 8 bits is saved in fp32."""
    if not isinstance(value, torch.Tensor):
        return None
    local = to_local(value)
    quantised = hasattr(local, "dequantize") and hasattr(local, "codes")
    return local.dequantize() if quantised else local


def _moment_name(key: str, fqn: str) -> str:
    return f"optimizer.{key}.{fqn}"


def _unsplit(name: str, value: torch.Tensor) -> Target:
    """Return a tensor that every rank holds whole; a number is kept as one element."""
    local = to_local(value)
    local = local.view(1) if local.dim() == 0 else local
    index = tuple(torch.arange(n) for n in local.shape)
    return Target(name, local, tuple(local.shape), index, local.dtype == torch.float32)


def _check(folder: HubFolder, target: Target) -> None:
    found = folder.find(target.fqn)
    if found.shape != target.shape:
        raise CheckpointError(
            f"{folder.where}: tensor {target.fqn!r}: expected shape {list(target.shape)}, found "
            f"{list(found.shape)}; the checkpoint is of another model"
        )
    if found.dtype != target.local.dtype:
        raise CheckpointError(
            f"{folder.where}: tensor {target.fqn!r}: expected {target.local.dtype}, found "
            f"{found.dtype}; resume with the runtime.master_dtype it was started with"
        )


def _fill(folder: HubFolder, targets: Sequence[Target]) -> None:
    """Read this rank's blocks; padding becomes zero."""
    for target in targets:
        if any(bool((index < 0).any()) for index in target.index):
            target.local.zero_()
        limit = BUFFER // target.local.dtype.itemsize
        for box in target.boxes:
            ranges = tuple(range(run.logical, run.logical + run.length) for run in box)
            for part in split(ranges, limit):
                at = tuple(
                    slice(run.local + p.start - run.logical, run.local + p.stop - run.logical)
                    for p, run in zip(part, box, strict=True)
                )
                target.local[at].copy_(folder.read(target.fqn, part))
