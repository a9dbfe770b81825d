"""Loading a hub folder into a model: each rank reads the byte ranges of its own slices.

In order: every rank reads the headers and compares them with the name rules; all agree that nothing
is missing, extra or misshapen; only then are weights read. Every element of every local tensor is
written exactly once, which is counted. A rank's peak memory is its shard and one bounded buffer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from moe_tp.checkpoint.agree import together
from moe_tp.checkpoint.blocks import Aligned, Box, boxes_of, clip, numel, split
from moe_tp.checkpoint.header import CODES
from moe_tp.checkpoint.progress import Bar, Progress
from moe_tp.checkpoint.reader import HubFolder, listed
from moe_tp.checkpoint.rules import NameRules, Piece
from moe_tp.checkpoint.sized import layer_of, name_hint, shape_hint
from moe_tp.checkpoint.slices import span
from moe_tp.errors import CheckpointError
from moe_tp.log import get_logger
from moe_tp.parallel.parameter import mesh_of, named_specs
from moe_tp.parallel.shards import local_index, to_local

BUFFER = 32 << 20  # bytes read at once where they cannot go straight to their place
AHEAD = 64 << 20  # bytes that the disk is told of before they are read
_SHOWN = 8

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What a load did on this rank.

    Args:
        bytes_requested: bytes of slices and headers asked from storage.
        gap_bytes: bytes between slices that were read along.
        elements: elements of local tensors that were written.
        missing: hub tensors that were allowed to be missing; their parameters were left as found.
        passed_over: hub tensors that the model does not use (carried on by an export).
    """

    bytes_requested: int
    gap_bytes: int
    elements: int
    missing: tuple[str, ...] = ()
    passed_over: tuple[str, ...] = ()


@dataclass(slots=True)
class Target:
    """A local tensor to fill or to save.

    Args:
        fqn: name of the parameter or persistent buffer.
        local: this rank's part.
        shape: logical shape of the whole.
        index: logical index of each place along each dimension, -1 for padding.
        keep_fp32: it stays in fp32 whatever dtype the model has.
    """

    fqn: str
    local: torch.Tensor
    shape: tuple[int, ...]
    index: tuple[torch.Tensor, ...]
    keep_fp32: bool = False

    @property
    def boxes(self) -> list[Box]:
        """The dense boxes of logical elements that it holds."""
        return boxes_of(self.index)


def targets_of(model: nn.Module, rules: NameRules) -> list[Target]:
    """Return this rank's parameters, and the persistent buffers that the rules speak of.

    Raises:
        CheckpointError: a parameter without a rule.
    """
    found = []
    for fqn, _, _, param, spec in named_specs(model):
        rules.pieces_of(fqn)
        index = local_index(param, spec)
        found.append(Target(fqn, to_local(param), spec.shape, index, spec.keep_fp32))
    known = {target.fqn for target in found}
    for fqn, buffer in model.named_buffers():
        if fqn in rules.pieces and fqn not in known:
            index = tuple(torch.arange(n) for n in buffer.shape)
            fp32 = buffer.dtype == torch.float32
            found.append(Target(fqn, buffer.detach(), tuple(buffer.shape), index, fp32))
    return found


@dataclass(slots=True)
class _Job:
    """One dense read and the places it goes to."""

    name: str
    ranges: tuple[range, ...]
    places: list[tuple[tuple[range, ...], torch.Tensor]] = field(default_factory=list)


def load_into(
    model: nn.Module,
    folder: HubFolder,
    rules: NameRules,
    *,
    allow_missing: Sequence[str] = (),
    reject_nan: bool = False,
    progress: Progress | bool | None = None,
) -> LoadReport:
    """Return what was read to fill every parameter of a model from a hub folder.

    Args:
        model: its parameters are allocated, on any device; dtypes are converted while reading.
        folder: opened on every rank.
        rules: the model's name rules.
        allow_missing: patterns of hub tensors whose absence leaves their parameters untouched.
        reject_nan: raise for a value that is NaN or infinite.
        progress: called with (bytes done, bytes in all) of this rank; or whether the first rank
            shows a bar on stderr (None: in a terminal).

    Raises:
        CheckpointError: on every rank, naming file, tensor, what was expected and found.

    Collectives: agreements over the world before the first weight is read and after the last.
    """
    mesh = mesh_of(model)
    world, device = mesh.group("world"), mesh.device

    def prepare() -> tuple[list[Target], list[str]]:
        missing = compare(folder, rules, allow_missing=allow_missing)
        targets = targets_of(model, rules)
        for target in targets:
            if target.local.is_meta:
                raise CheckpointError(f"parameter {target.fqn!r} has no memory; materialise first")
        return targets, missing

    targets, missing = together(prepare, world, device)
    for doubt in folder.doubts if world.rank == 0 else ():
        _log.warning("%s: %s", folder.where, doubt)
    jobs = together(lambda: _jobs(folder, rules, targets, set(missing)), world, device)
    files = {part.file for job in jobs for part in folder.find(job.name).parts}
    folder.storage.prepare(sorted(files), world, device)
    with torch.no_grad(), Bar("loading", world.rank, progress) as bar:
        elements = together(lambda: _fill(folder, jobs, reject_nan, bar), world, device)
    folder.close()
    extra = tuple(n for n in folder.logical if rules.matches("passthrough", n))
    if extra:
        _log.info(
            "%s: %d tensors that the model does not use, such as %r, are left; a save keeps them",
            folder.where,
            len(extra),
            extra[0],
        )
    for name in missing:
        _log.warning("%s: tensor %r is missing; left as it was initialised", folder.where, name)
    return LoadReport(
        bytes_requested=folder.bytes_requested,
        gap_bytes=folder.gap_bytes,
        elements=elements,
        missing=tuple(missing),
        passed_over=extra,
    )


def compare(folder: HubFolder, rules: NameRules, *, allow_missing: Sequence[str] = ()) -> list[str]:
    """Return the hub tensors that are missing and may be, having checked all others by header.

    Raises:
        CheckpointError: tensors are missing, extra, misshapen or of no floating dtype.
    """
    absent = [name for name in rules.hub_shapes() if name not in folder.logical]
    allowed = [n for n in absent if any(re.fullmatch(p, n) for p in allow_missing)]
    problems = differences(folder, rules, allowed)
    if problems:
        raise CheckpointError(listed(folder.where, problems))
    return allowed


def differences(folder: HubFolder, rules: NameRules, allowed: Sequence[str] = ()) -> list[str]:
    """Return how a folder's headers differ from the name rules, one sentence a problem.

    Args:
        folder: opened, strictly or not.
        rules: the model's name rules.
        allowed: hub tensors that may be missing.
    """
    shapes = rules.hub_shapes()
    may = set(allowed)
    missing = [n for n in shapes if n not in folder.logical and n not in may]
    extra = [
        name
        for name in folder.logical
        if name not in shapes
        and not rules.matches("passthrough", name)
        and not rules.matches("optional", name)
    ]
    problems = []
    if missing:
        problems.append(
            f"expected {len(missing)} tensors that are missing: {_names(missing, rules, folder)}"
            f"{_renamed(missing, extra)}"
        )
    if extra:
        files = sorted({folder.logical[name].data.file for name in extra})
        problems.append(
            f"found {len(extra)} tensors in {', '.join(files[:3])} that the model has no place "
            f"for: {_names(extra, rules, folder)}"
        )
    for name, shape in shapes.items():
        found = folder.logical.get(name)
        if found is None:
            continue
        if found.shape != shape:
            problems.append(
                f"{found.data.file}: tensor {name!r}: expected shape {list(shape)}, found "
                f"{list(found.shape)}{shape_hint(shape, found.shape)}"
            )
        elif not found.dtype.is_floating_point:
            problems.append(
                f"{found.data.file}: tensor {name!r}: expected a floating dtype, found "
                f"{CODES[found.dtype]}"
            )
    return problems


def _names(names: Sequence[str], rules: NameRules, folder: HubFolder) -> str:
    shown = ", ".join(repr(name) for name in names[:_SHOWN])
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    there = {layer_of(name) or "" for name in rules.hub_shapes() if name in folder.logical}
    return f"{shown}{more}{name_hint(names, rules.hints, there)}"


def _renamed(missing: Sequence[str], extra: Sequence[str]) -> str:
    """Say so where the missing tensors are there under another prefix."""
    for found in extra:
        for wanted in missing:
            tail = wanted.split(".", 1)[-1]
            if found.endswith("." + tail):
                return f" (found {found!r} instead of {wanted!r}: another prefix?)"
    return ""


def _jobs(
    folder: HubFolder, rules: NameRules, targets: Sequence[Target], missing: set[str]
) -> list[_Job]:
    """Return the reads that fill the targets, in the order of the disk; padding is set to 0."""
    jobs: dict[tuple[str, tuple[range, ...]], _Job] = {}
    for target in targets:
        boxes = target.boxes
        real = sum(numel([range(run.length) for run in box]) for box in boxes)
        skipped = False
        placed = 0
        for piece in rules.pieces_of(target.fqn):
            if piece.hub_name in missing:
                skipped = True
                continue
            placed += _plan(piece, target, boxes, jobs)
        if placed != real and not skipped:
            raise CheckpointError(
                f"parameter {target.fqn!r}: the name rules fill {placed} of its {real} elements on "
                f"this rank; each must be filled exactly once"
            )
        if real != target.local.numel():
            _clear_padding(target)
    return sorted(jobs.values(), key=lambda j: _place_on_disk(folder, j))


def _fill(folder: HubFolder, jobs: Sequence[_Job], reject_nan: bool, progress: Progress) -> int:
    """Do all reads; return the number of elements written."""
    parts = [(job, part) for job in jobs for part in _parts(folder, job)]
    sizes = [numel(part) * folder.find(job.name).dtype.itemsize for job, part in parts]
    expected = sum(view.numel() for job in jobs for _, view in job.places)
    total, done, written, told, ahead = sum(sizes), 0, 0, 0, 0
    for number, (job, part) in enumerate(parts):
        # The disk fetches the next parts while this one is copied.
        while told < len(parts) and (told <= number or ahead < AHEAD):
            _expect(folder, *parts[told])
            ahead += sizes[told]
            told += 1
        written += _read(folder, job, part, reject_nan)
        ahead -= sizes[number]
        done += sizes[number]
        progress(done, total)
    if written != expected:
        raise CheckpointError(f"wrote {written} elements where {expected} were expected")
    return written


def _plan(
    piece: Piece,
    target: Target,
    boxes: Sequence[Box],
    jobs: dict[tuple[str, tuple[range, ...]], _Job],
) -> int:
    """Add what a piece asks to be read to `jobs`; return how many local elements it fills."""
    aligned = Aligned(piece, target.shape)
    count = 0
    for box in boxes:
        overlap = aligned.overlap(box)
        if overlap is None:
            continue
        view = aligned.hub_view(target.local, overlap)
        dense = _dense_hull(overlap.hub, piece.hub_shape)
        key = (piece.hub_name, dense)
        job = jobs.setdefault(key, _Job(piece.hub_name, dense))
        job.places.append((overlap.hub, view))
        count += view.numel()
    return count


def _dense_hull(ranges: Sequence[range], shape: Sequence[int]) -> tuple[range, ...]:
    """Return dense ranges around strided ones, alike for all offsets below the step.

    Interleaved pieces (gate in the even and up in the odd columns) so share one read.
    """
    return tuple(
        r
        if r.step == 1
        else range(r.start // r.step * r.step, min(size, (r[-1] // r.step + 1) * r.step))
        for r, size in zip(ranges, shape, strict=True)
    )


def _clear_padding(target: Target) -> None:
    for dim, index in enumerate(target.index):
        empty = (index < 0).nonzero().flatten()
        if len(empty):
            target.local.index_fill_(dim, empty.to(target.local.device), 0)


def _place_on_disk(folder: HubFolder, job: _Job) -> tuple[str, int, tuple[int, ...]]:
    data = folder.find(job.name).data
    return data.file, data.offset, tuple(r.start for r in job.ranges)


def _expect(folder: HubFolder, job: _Job, part: tuple[range, ...]) -> None:
    """Say that a part will be read soon, where the bytes on disk lie as the logical ones do."""
    tensor = folder.find(job.name)
    if tensor.data.shape == tensor.shape:
        folder.storage.expect(tensor.data.file, *span(tensor.data, part))


def _straight(folder: HubFolder, job: _Job, reject_nan: bool) -> bool:
    """Return whether the bytes on disk can be read right into the local tensor."""
    tensor = folder.find(job.name)
    place, view = job.places[0]
    return (
        tensor.kind == "plain"
        and len(job.places) == 1
        and place == job.ranges
        and view.dtype == tensor.dtype
        and view.device.type == "cpu"
        and view.is_contiguous()
        and not reject_nan
    )


def _parts(folder: HubFolder, job: _Job) -> Iterator[tuple[range, ...]]:
    """Yield the parts in which a job is read, of at most `BUFFER` bytes in memory."""
    tensor = folder.find(job.name)
    # Decoding holds a part in fp32 beside its bf16 form.
    plain = tensor.kind == "plain"
    return split(job.ranges, BUFFER // (tensor.dtype.itemsize if plain else 16))


def _read(folder: HubFolder, job: _Job, part: tuple[range, ...], reject_nan: bool) -> int:
    """Read one part of a job; return the number of elements written."""
    tensor = folder.find(job.name)
    if _straight(folder, job, reject_nan):
        flat = job.places[0][1].view([len(r) for r in job.ranges])
        at = tuple(
            slice(p.start - r.start, p.stop - r.start)
            for p, r in zip(part, job.ranges, strict=True)
        )
        folder.read(job.name, part, out=flat[at])
        return numel(part)
    block = folder.read(job.name, part)
    if reject_nan and not bool(torch.isfinite(block.float()).all()):
        raise CheckpointError(
            f"{tensor.data.file}: tensor {job.name!r}: expected finite values, found NaN or "
            f"infinity"
        )
    count = 0
    for hub, view in job.places:
        shared = clip(hub, part)
        if shared is not None:
            inside, placed = shared
            view[inside].copy_(block[placed])
            count += view[inside].numel()
    return count
