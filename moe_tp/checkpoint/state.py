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
would leave of DCP only its pickled metadata, which K7 forbids us to read. Saving is synchronous.

`config.json` has a model type of its own, so no reader of hub folders takes it for a model.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from moe_tp.checkpoint import atomic
from moe_tp.checkpoint.agree import gather_json, together
from moe_tp.checkpoint.blocks import split
from moe_tp.checkpoint.files import FilePlan, parse_size, plain_tensor, plan_files
from moe_tp.checkpoint.holdings import gather_holdings
from moe_tp.checkpoint.load import BUFFER, Progress, Target
from moe_tp.checkpoint.reader import HubFolder
from moe_tp.checkpoint.rules import NameRules, whole
from moe_tp.checkpoint.scan import CONFIG, UNFINISHED
from moe_tp.checkpoint.supply import ModelSupply
from moe_tp.checkpoint.writer import SaveReport, write_folder
from moe_tp.errors import CheckpointError
from moe_tp.log import get_logger
from moe_tp.parallel.parameter import ParallelModule, local_index, mesh_of, named_specs, to_local
from moe_tp.parallel.zero import reshard

KIND, VERSION = "moe_tp_training_state", 1
_NAME = re.compile(r"checkpoint-([0-9]+)")
_NO_TIES: Mapping[str, str] = {}

_log = get_logger(__name__)


def state_folder(output: Path, step: int) -> Path:
    """Return the path of the checkpoint of a step."""
    return output / f"checkpoint-{step}"


def save_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    path: Path,
    facts: Mapping[str, Any],
    *,
    tied: Mapping[str, str] = _NO_TIES,
    max_shard_size: int | str = "5GB",
    progress: Progress | None = None,
) -> SaveReport:
    """Return what was written to make `path` a checkpoint; collective.

    Args:
        model: in any layout, between two steps.
        optimizer: of its parameters.
        path: the folder; one of that name is replaced in one step.
        facts: what else is to be kept, as JSON; rank 0's are written.
        tied: parameter -> the parameter that it is a copy of (a tied head on its own stage).
        max_shard_size: bytes a file.
        progress: called with (bytes done, bytes in all) of this rank.

    Raises:
        CheckpointError: on every rank; what lay at `path`, and older checkpoints, are untouched.

    Collectives: over the world: agreements, a table of contents, one all-to-all a round.
    """
    mesh = mesh_of(model)
    world, device = mesh.group("world"), mesh.device
    reshard(model)  # a forward without backward leaves whole parameters

    def list_targets() -> list[Target]:
        return [*_model_targets(model, tied), *_moment_targets(model, optimizer, tied)]

    targets = together(list_targets, world, device)
    holdings = gather_holdings(targets, world, device)

    def plan() -> tuple[list[FilePlan], ModelSupply]:
        rules = NameRules(pieces={name: whole(name, h.shape) for name, h in holdings.items()})
        tensors = [
            plain_tensor(name, holdings[name].dtype, s) for name, s in rules.hub_shapes().items()
        ]
        supply = ModelSupply(rules, targets, holdings, world, device)
        return plan_files(tensors, parse_size(max_shard_size)), supply

    plans, supply = together(plan, world, device)
    config = {
        "model_type": KIND,
        "version": VERSION,
        "optimizer": type(optimizer).__name__,
        "facts": dict(facts),
    }
    with torch.no_grad():
        return write_folder(path, plans, supply, config, world, device, progress=progress)


def load_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    path: Path,
    *,
    tied: Mapping[str, str] = _NO_TIES,
) -> dict[str, Any]:
    """Return the facts of a checkpoint, having filled model and optimiser from it; collective.

    Args:
        model: allocated, in any layout.
        optimizer: of its parameters, fresh; None: weights and buffers only.
        path: the checkpoint.
        tied: as in `save_state`.

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
        targets = _model_targets(model, tied)
        if optimizer is not None:
            kind = folder.config["optimizer"]
            if kind != type(optimizer).__name__:
                raise CheckpointError(
                    f"{path}: holds the state of {kind}, and this run's optimiser is "
                    f"{type(optimizer).__name__}; resume with the optimiser it was started with"
                )
            _allocate_moments(model, optimizer, folder, tied)
            targets += _moment_targets(model, optimizer, tied)
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


def open_state(path: Path) -> HubFolder:
    """Return a checkpoint, its headers read and checked against the sizes of its files.

    Raises:
        CheckpointError: it is torn, or no checkpoint of this version.
    """
    folder = HubFolder(path)
    found = (folder.config.get("model_type"), folder.config.get("version"))
    if found != (KIND, VERSION):
        folder.close()
        raise CheckpointError(
            f"{path}: expected a training checkpoint (model_type {KIND!r}, version {VERSION}), "
            f"found model_type {found[0]!r}, version {found[1]}"
        )
    return folder


def is_state(path: Path) -> bool:
    """Return whether a folder says of itself that it is a training checkpoint, whole or torn."""
    file = path / CONFIG
    return file.is_file() and KIND in file.read_text(encoding="utf-8", errors="replace")


def list_states(output: Path) -> list[Path]:
    """Return the folders named as checkpoints, the newest first, whole or torn."""
    if not output.is_dir():
        return []
    found = {}
    for entry in output.iterdir():
        match = _NAME.fullmatch(entry.name)
        if match is not None and entry.is_dir():
            found[int(match[1])] = entry
    return [found[step] for step in sorted(found, reverse=True)]


def newest_state(output: Path) -> Path | None:
    """Return the newest complete checkpoint of a run, None where there is none of any kind.

    A torn one is named in a warning and left where it lies.

    Raises:
        CheckpointError: there are checkpoints, but each of them is torn.
    """
    reasons = []
    for path in list_states(output):
        try:
            open_state(path).close()
        except CheckpointError as error:
            _log.warning("%s is passed over: %s", path.name, error)
            reasons.append(f"{path.name}: {error}")
        else:
            return path
    if reasons:
        raise CheckpointError(
            f"{output}: none of its {len(reasons)} checkpoints is complete; {reasons[0]}"
        )
    return None


def keep_states(output: Path, keep: int) -> None:
    """Delete complete checkpoints but the newest `keep`; for one rank, after a save.

    A deletion that is cut short leaves a folder that every reader refuses.
    """
    whole_ones = [p for p in list_states(output) if not (p / UNFINISHED).exists() and is_state(p)]
    for path in whole_ones[keep:]:
        atomic.write_bytes(
            path / UNFINISHED, b'{"what": "an old checkpoint that is being deleted"}'
        )
        atomic.sync_folder(path)
        atomic.abandon(path)
    for path in list_states(output):
        if (path / UNFINISHED).exists():  # what an earlier deletion left
            shutil.rmtree(path, ignore_errors=True)


def _model_targets(model: nn.Module, tied: Mapping[str, str]) -> list[Target]:
    """Return this rank's parameters and persistent buffers."""
    targets: dict[str, Target] = {}
    for fqn, _, _, param, spec in named_specs(model):
        name = f"model.{tied.get(fqn, fqn)}"
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


def _moment_targets(
    model: nn.Module, optimizer: torch.optim.Optimizer, tied: Mapping[str, str]
) -> list[Target]:
    """Return this rank's optimiser state; what has a parameter's shape lies as it does.

    Raises:
        CheckpointError: state that is neither a moment nor a number.
    """
    targets: dict[str, Target] = {}
    for fqn, _, _, param, spec in named_specs(model):
        for key, value in optimizer.state.get(param, {}).items():
            if value is None:
                continue
            name = _moment_name(key, tied.get(fqn, fqn))
            if isinstance(value, torch.Tensor) and value.shape == param.shape:
                index = local_index(param, spec)
                targets.setdefault(name, Target(name, to_local(value), spec.shape, index))
            elif isinstance(value, torch.Tensor) and value.dim() == 0:
                targets.setdefault(name, _unsplit(name, value))
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
    tied: Mapping[str, str],
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
            found = folder.logical.get(_moment_name(key, tied.get(fqn, fqn)))
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
