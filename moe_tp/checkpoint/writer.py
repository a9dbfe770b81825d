"""Writing a model as a hub folder: streaming, every rank its own files, whole or not at all.

The files and their bytes follow from names, dtypes and shapes alone. In rounds, each rank assembles
one window of a file from the slices that the ranks hold (one all-to-all a round) and appends it;
no rank ever holds more than its shard and the windows of one round.
"""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from moe_tp.checkpoint import atomic
from moe_tp.checkpoint.agree import gather_json, together
from moe_tp.checkpoint.files import (
    FilePlan,
    OutTensor,
    Quantise,
    index_of,
    out_tensors,
    parse_size,
    plan_files,
)
from moe_tp.checkpoint.holdings import Holding, gather_holdings
from moe_tp.checkpoint.load import targets_of
from moe_tp.checkpoint.progress import Bar, Progress
from moe_tp.checkpoint.reader import HubFolder
from moe_tp.checkpoint.rules import NameRules
from moe_tp.checkpoint.scan import CONFIG, INDEX, is_carried
from moe_tp.checkpoint.slices import bytes_of
from moe_tp.checkpoint.storage import Storage, local_path
from moe_tp.checkpoint.supply import FolderSupply, ModelSupply, Packed, Supply
from moe_tp.errors import CheckpointError
from moe_tp.parallel.collectives import Group
from moe_tp.parallel.parameter import mesh_of

WINDOW = 32 << 20  # bytes of all ranks' windows of a round together
_LEAST = 1 << 20
_PIECE = 8 << 20  # bytes copied at once


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport:
    """What a save wrote, over all ranks: weight files, tensors, elements and bytes."""

    files: tuple[str, ...]
    tensors: int
    elements: int
    nbytes: int


class Carried(Protocol):
    """Where the files that are no weights come along from: a `HubFolder`, for one."""

    @property
    def storage(self) -> Storage:
        """The files."""
        ...

    @property
    def where(self) -> str:
        """The folder, for messages."""
        ...


def save_hub(
    model: nn.Module,
    path: str | os.PathLike[str],
    rules: NameRules,
    config_json: Mapping[str, Any],
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    carry_from: str | os.PathLike[str] | HubFolder | None = None,
    quantise: Quantise | None = None,
    progress: Progress | bool | None = None,
) -> SaveReport:
    """Return what was written to make `path` a hub folder of the model.

    Args:
        model: in any layout.
        path: the folder; a model folder that lies there is replaced, in one step.
        rules: name rules; other ones than the model was read with give another format.
        config_json: becomes config.json, with the dtype that was written.
        dtype: of floating tensors, except `fp32_names`. None: as the source folder has them, and
            where there is none, as the parameters have them.
        max_shard_size: bytes a file, such as "5GB".
        carry_from: source folder; tensors that match `passthrough` and all files that are no
            weights and speak of none (tokenizer, chat template, generation config; not the state
            of a run) come along byte for byte.
        quantise: write some tensors in fp8 or MXFP4.
        progress: called with (bytes done, bytes in all) of this rank; or whether the first rank
            shows a bar on stderr (None: in a terminal).

    Raises:
        CheckpointError: on every rank, naming rank and cause; what lay at `path` is untouched.

    Collectives: over the world: agreements, a table of contents, one all-to-all a round.
    """
    mesh = mesh_of(model)
    world, device = mesh.group("world"), mesh.device
    target = local_path(path)
    limit = parse_size(max_shard_size)

    def prepare() -> HubFolder | None:
        if carry_from is None or isinstance(carry_from, HubFolder):
            return carry_from
        return HubFolder(carry_from)

    source = together(prepare, world, device)
    targets = together(lambda: targets_of(model, rules), world, device)
    holdings = gather_holdings(targets, world, device)

    def plan() -> tuple[list[FilePlan], Supply]:
        carried = None if source is None else FolderSupply(source)
        supply = ModelSupply(rules, targets, holdings, world, device, carried)
        tensors = _out_tensors(rules, holdings, source, dtype, quantise)
        return plan_files(tensors, limit), supply

    plans, supply = together(plan, world, device)
    config = written_config(config_json, plans, quantise)
    with torch.no_grad(), Bar("saving", world.rank, progress) as bar:
        return write_folder(
            target, plans, supply, config, world, device, carry_from=source, progress=bar
        )


def _out_tensors(
    rules: NameRules,
    holdings: Mapping[str, Holding],
    source: HubFolder | None,
    dtype: torch.dtype | None,
    quantise: Quantise | None,
) -> list[OutTensor]:
    common = _main_dtype(holdings)
    owner = {
        piece.hub_name: holdings[fqn] for fqn, pieces in rules.pieces.items() for piece in pieces
    }
    tensors: list[OutTensor] = []
    for name, shape in rules.hub_shapes().items():
        holding = owner[name]
        known = None if source is None else source.logical.get(name)
        if rules.matches("fp32_names", name):
            kind = torch.float32
        elif dtype is not None:
            kind = dtype
        elif known is not None:
            kind = known.dtype
        else:
            kind = common if holding.keep_fp32 else holding.dtype
        tensors += out_tensors(name, kind, shape, quantise)
    for name, found in {} if source is None else source.logical.items():
        if name not in owner and rules.matches("passthrough", name):
            cast = dtype is not None and found.dtype.is_floating_point
            kind = dtype if cast and dtype is not None else found.dtype
            tensors += out_tensors(name, kind, found.shape, quantise)
    return tensors


def _main_dtype(holdings: Mapping[str, Holding]) -> torch.dtype:
    """Return the dtype of most elements that may have any; the model's dtype."""
    sizes: dict[torch.dtype, int] = {}
    for holding in holdings.values():
        if not holding.keep_fp32:
            count = torch.Size(holding.shape).numel()
            sizes[holding.dtype] = sizes.get(holding.dtype, 0) + count
    return max(sizes, key=lambda d: sizes[d]) if sizes else torch.float32


def written_config(
    config_json: Mapping[str, Any], plans: Sequence[FilePlan], quantise: Quantise | None
) -> dict[str, Any]:
    """Return config.json for what is written: its dtype in both spellings, its quantisation."""
    config = dict(config_json)
    before = config.pop("quantization_config", None)
    config.pop("compression_config", None)  # another name of it, which engines know
    if quantise is not None:
        config["quantization_config"] = quantise.config(before)
    sizes: dict[torch.dtype, int] = {}
    for plan in plans:
        for tensor in plan.tensors:
            if tensor.part == 0 and tensor.values.is_floating_point:
                sizes[tensor.values] = sizes.get(tensor.values, 0) + tensor.nbytes
    if sizes:
        name = str(max(sizes, key=lambda d: sizes[d])).removeprefix("torch.")
        config["dtype"] = config["torch_dtype"] = name
    return config


def write_folder(
    target: Path,
    plans: Sequence[FilePlan],
    supply: Supply,
    config: Mapping[str, Any],
    group: Group,
    device: torch.device,
    *,
    carry_from: Carried | None = None,
    progress: Progress | None = None,
) -> SaveReport:
    """Return what was written; see `save_hub`. All ranks call it with equal plans.

    Collectives: an agreement and an exchange a round over `group`, and a few at both ends.
    """
    first = group.rank == 0
    total = sum(plan.nbytes for plan in plans)

    def start() -> str | None:
        if not first:
            return None
        atomic.check_target(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        _check_room(target.parent, total)
        return str(atomic.begin(target))

    work = Path(gather_json(together(start, group, device), group, device)[0])
    try:
        _write_files(work, plans, supply, group, device, progress)

        def complete() -> None:
            if not first:
                return
            _carry(carry_from, work)
            index = index_of(plans)
            if index is not None:
                atomic.write_bytes(work / INDEX, _json(index))
            atomic.write_bytes(work / CONFIG, _json(config))
            atomic.finish(work, target)

        together(complete, group, device)
    except Exception:
        if first:
            atomic.abandon(work)
        raise
    tensors = [t for plan in plans for t in plan.tensors]
    return SaveReport(
        files=tuple(plan.name for plan in plans),
        tensors=len(tensors),
        elements=sum(torch.Size(t.logical_shape).numel() for t in tensors if t.part == 0),
        nbytes=total,
    )


def _write_files(
    work: Path,
    plans: Sequence[FilePlan],
    supply: Supply,
    group: Group,
    device: torch.device,
    progress: Progress | None,
) -> None:
    size = max(_LEAST, WINDOW // group.size)
    shares = _assign(plans, group.size)
    streams = [
        [(plan, window) for plan in share for window in plan.windows(size)] for share in shares
    ]
    output = _Output(work, shares[group.rank], progress)
    mine = streams[group.rank]
    rounds = max(map(len, streams))

    def step(number: int, received: torch.Tensor) -> Packed | None:
        """Write the window that came in the last round, gather what is owed to the next."""
        if 0 < number <= len(mine):
            plan, window = mine[number - 1]
            for slab, values in zip(window, supply.unpack(window, received), strict=True):
                output.append(plan, slab.encode(values))
        if number < rounds:
            return supply.pack([s[number][1] if number < len(s) else [] for s in streams])
        output.complete()
        return None

    received = torch.empty(0, dtype=torch.uint8)
    try:
        for number in range(rounds + 1):
            packed = together(partial(step, number, received), group, device)
            if packed is not None:
                received = supply.exchange(packed)
    finally:
        output.close()


def _assign(plans: Sequence[FilePlan], ranks: int) -> list[list[FilePlan]]:
    """Return the files of each rank: each file goes to the rank with the fewest bytes so far."""
    shares: list[list[FilePlan]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for plan in plans:
        rank = load.index(min(load))
        shares[rank].append(plan)
        load[rank] += plan.nbytes
    return shares


class _Output:
    """The files of one rank, written from front to back; a thread waits for the disk meanwhile."""

    def __init__(self, folder: Path, plans: Sequence[FilePlan], progress: Progress | None) -> None:
        self.folder, self.waiting, self.progress = folder, list(plans), progress
        self.total = sum(plan.nbytes for plan in plans)
        self.done = 0
        self.file: io.FileIO | None = None
        self.plan: FilePlan | None = None
        self.thread = ThreadPoolExecutor(1)
        self.on_disk: list[Future[None]] = []

    def append(self, plan: FilePlan, data: torch.Tensor) -> None:
        """Write the next bytes of a file."""
        while self.plan is not plan:
            self._next()
        self._write(bytes_of(data))

    def complete(self) -> None:
        """Write what is left (files of empty tensors) and wait until all is on the disk."""
        while self.waiting:
            self._next()
        self._finish()
        for file in self.on_disk:
            file.result()
        if self.done != self.total:
            raise CheckpointError(f"wrote {self.done} bytes where {self.total} were planned")

    def close(self) -> None:
        """Close the open file, finished or not, and those on their way to the disk."""
        if self.file is not None:
            self.file.close()
            self.file = None
        self.thread.shutdown()

    def _next(self) -> None:
        self._finish()
        self.plan = self.waiting.pop(0)
        self.file = io.FileIO(self.folder / self.plan.name, "xb")
        self._write(memoryview(self.plan.header))

    def _finish(self) -> None:
        if self.file is not None:
            self.on_disk.append(self.thread.submit(_sync, self.file))
            self.file = None

    def _write(self, data: memoryview) -> None:
        assert self.file is not None
        at = 0
        while at < len(data):
            at += self.file.write(data[at:])
        self.done += at
        if self.progress is not None:
            self.progress(self.done, self.total)


def _sync(file: io.FileIO) -> None:
    """Wait until a file is on the disk, and close it."""
    with file:
        os.fsync(file.fileno())


def _check_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise CheckpointError(
            f"{folder}: expected room for {needed} bytes, found {free} free; free some, or save "
            f"elsewhere"
        )


def _carry(source: Carried | None, work: Path) -> None:
    """Copy every file of the source that is no weight and speaks of none, byte for byte."""
    if source is None:
        return
    for file, size in source.storage.sizes().items():
        if not is_carried(file):
            continue
        if size < 0:
            raise CheckpointError(f"{source.where}/{file}: expected a file, found a dead link")
        (work / file).parent.mkdir(exist_ok=True)
        with open(work / file, "wb") as out:
            for start in range(0, size, _PIECE):
                out.write(source.storage.read(file, start, min(_PIECE, size - start)))
            out.flush()
            os.fsync(out.fileno())


def _json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
