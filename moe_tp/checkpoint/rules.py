"""Which tensor on disk is which part of a parameter: name rules, as values.

A `Piece` ties a block of one parameter to a block of one hub tensor. Both blocks are outer products
of ranges, so any slice of a parameter that a rank holds maps to ranges on disk, whatever the
layout there: one matrix per expert, or all experts fused, joined, interleaved or transposed. A
family declares its pieces; nothing here guesses an orientation from a shape, because `2F == D` and
`F == D` do occur.

Letters: E experts, F expert hidden size, D model width.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from moe_tp.errors import CheckpointError

Index = int | slice
ExpertFormat = Literal["per_expert", "fused", "fused_transposed", "fused_interleaved", "flat"]
_ADAPTERS = {"low_rank", "adapter"}  # the modules that hold LoRA's factors


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One block of a hub tensor and the block of a parameter that it holds.

    Args:
        hub_name: name on disk.
        hub_shape: shape of the whole tensor on disk.
        param_index: leading indices of the block in the parameter; the rest is whole. An integer
            drops its dimension.
        hub_slices: the same for the hub tensor; slices may have a positive step.
        transpose: the last two dimensions of the block are swapped on disk.
    """

    hub_name: str
    hub_shape: tuple[int, ...]
    param_index: tuple[Index, ...] = ()
    hub_slices: tuple[Index, ...] = ()
    transpose: bool = False

    def hub_ranges(self) -> tuple[range, ...]:
        """Return the range of the block along each dimension of the hub tensor."""
        return to_ranges(self.hub_slices, self.hub_shape, self.hub_name)


@dataclass(frozen=True, slots=True, kw_only=True)
class NameRules:
    """How a model's parameters lie in a hub folder.

    Args:
        pieces: parameter (or persistent buffer) name -> pieces that cover it exactly once.
        passthrough: patterns of hub tensors that the model does not use and an export carries on
            (multi-token prediction layers).
        optional: patterns of hub tensors that may lie in a folder and are dropped in silence
            (the copy of a tied head).
        fp32_names: patterns of hub tensors written in fp32 whatever dtype is asked for.
        hints: pattern of hub names -> the config field that decides whether they are there, for
            messages; the first that matches counts. Sizes bring their own (`Sized`).
    """

    pieces: Mapping[str, tuple[Piece, ...]]
    passthrough: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    fp32_names: tuple[str, ...] = ()
    hints: Mapping[str, str] = field(default_factory=dict)

    def hub_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return every hub tensor that the model needs, with its shape, in natural order."""
        shapes: dict[str, tuple[int, ...]] = {}
        for pieces in self.pieces.values():
            for piece in pieces:
                known = shapes.setdefault(piece.hub_name, piece.hub_shape)
                assert known == piece.hub_shape, f"{piece.hub_name} has two shapes in the rules"
        return {name: shapes[name] for name in sorted(shapes, key=natural_key)}

    def pieces_of(self, fqn: str) -> tuple[Piece, ...]:
        """Return the pieces of a parameter.

        Raises:
            CheckpointError: no rule speaks of it.
        """
        found = self.pieces.get(fqn)
        if found is None and _ADAPTERS.intersection(fqn.split(".")):
            raise CheckpointError(
                f"parameter {fqn!r} belongs to an adapter, which a folder of the whole model has "
                f"no place for; fold it in with merge_lora(model) first, or write the adapters "
                f"alone with save_adapter(model, path)"
            )
        if found is None:
            raise CheckpointError(
                f"parameter {fqn!r} has no name rule, so it could be neither read nor written; "
                f"add its pieces to the family's name rules"
            )
        return found

    def matches(self, kind: Literal["passthrough", "optional", "fp32_names"], name: str) -> bool:
        """Return whether a pattern of that kind matches the whole hub name."""
        patterns: tuple[str, ...] = getattr(self, kind)
        return any(re.fullmatch(pattern, name) for pattern in patterns)


def natural_key(name: str) -> tuple[tuple[int, int, str], ...]:
    """Return a sort key in which numbers are ordered as numbers: expert 2 before expert 10."""
    return tuple(
        (0, int(part), part) if part.isdigit() and part.isascii() else (1, 0, part)
        for part in re.split(r"([0-9]+)", name)
        if part
    )


def to_ranges(index: Sequence[Index], shape: Sequence[int], name: str) -> tuple[range, ...]:
    """Return one range for each dimension of `shape`; dimensions beyond `index` are whole.

    Raises:
        CheckpointError: an index lies outside the shape.
    """
    if len(index) > len(shape):
        raise CheckpointError(f"{name}: {len(index)} indices for shape {list(shape)}")
    ranges = []
    for dim, size in enumerate(shape):
        at = index[dim] if dim < len(index) else slice(None)
        if isinstance(at, slice):
            start = at.start or 0
            stop = size if at.stop is None else at.stop
            found = range(start, stop, 1 if at.step is None else at.step)
        else:
            found = range(at, at + 1)
        if found.step < 1 or (len(found) and (found[0] < 0 or found[-1] >= size)):
            raise CheckpointError(f"{name}: index {at} lies outside dimension {dim} of size {size}")
        ranges.append(found)
    return tuple(ranges)


# --- builders -----------------------------------------------------------------------------------


def whole(hub_name: str, shape: Sequence[int]) -> tuple[Piece, ...]:
    """Return the piece of a parameter that lies on disk as it is."""
    return (Piece(hub_name=hub_name, hub_shape=tuple(shape)),)


def rows(hub_name: str, hub_shape: Sequence[int], start: int, stop: int) -> tuple[Piece, ...]:
    """Return the piece of a parameter that is rows `start:stop` of a joined hub tensor."""
    return (Piece(hub_name=hub_name, hub_shape=tuple(hub_shape), hub_slices=(slice(start, stop),)),)


def expert_gate_up(
    layout: ExpertFormat, names: Sequence[str], *, num_experts: int, hidden: int, dim: int
) -> tuple[Piece, ...]:
    """Return the pieces of a fused gate and up projection `[E, 2, F, D]`.

    Args:
        layout: `per_expert`: two names with `{e}`, each `[F, D]`; `fused`: one name `[E, 2F, D]`;
            `fused_transposed`: one name `[E, D, 2F]`; `fused_interleaved`: one name `[E, D, 2F]`
            with gate in the even and up in the odd columns; `flat`: two names, each `[E*F, D]`.
        names: hub names of gate and up (or the one that holds both).
        num_experts: E.
        hidden: F.
        dim: D.
    """
    pieces = []
    for e in range(num_experts):
        for half in range(2):
            name = names[half % len(names)].format(e=e)
            shape: tuple[int, ...]
            at: tuple[Index, ...]
            if layout == "per_expert":
                shape, at = (hidden, dim), ()
            elif layout == "flat":
                shape, at = (num_experts * hidden, dim), (slice(e * hidden, (e + 1) * hidden),)
            elif layout == "fused":
                shape = (num_experts, 2 * hidden, dim)
                at = (e, slice(half * hidden, (half + 1) * hidden))
            else:
                shape = (num_experts, dim, 2 * hidden)
                joined = slice(half * hidden, (half + 1) * hidden)
                columns = slice(half, None, 2) if layout == "fused_interleaved" else joined
                at = (e, slice(None), columns)
            swapped = layout in ("fused_transposed", "fused_interleaved")
            pieces.append(
                Piece(
                    hub_name=name,
                    hub_shape=shape,
                    param_index=(e, half),
                    hub_slices=at,
                    transpose=swapped,
                )
            )
    return tuple(pieces)


def expert_down(
    layout: ExpertFormat, name: str, *, num_experts: int, hidden: int, dim: int
) -> tuple[Piece, ...]:
    """Return the pieces of a fused down projection `[E, D, F]`.

    Args:
        layout: `per_expert`: a name with `{e}`, `[D, F]`; `fused`: `[E, D, F]`;
            `fused_transposed` and `fused_interleaved`: `[E, F, D]`; `flat`: `[E*F, D]`.
        name: hub name.
        num_experts: E.
        hidden: F.
        dim: D.
    """
    if layout == "fused":
        return whole(name, (num_experts, dim, hidden))
    pieces = []
    for e in range(num_experts):
        shape: tuple[int, ...]
        at: tuple[Index, ...]
        if layout == "per_expert":
            shape, at = (dim, hidden), ()
        elif layout == "flat":
            shape, at = (num_experts * hidden, dim), (slice(e * hidden, (e + 1) * hidden),)
        else:
            shape, at = (num_experts, hidden, dim), (e,)
        pieces.append(
            Piece(
                hub_name=name.format(e=e),
                hub_shape=shape,
                param_index=(e,),
                hub_slices=at,
                transpose=layout != "per_expert",
            )
        )
    return tuple(pieces)


def expert_gate_up_bias(
    layout: ExpertFormat, name: str, *, num_experts: int, hidden: int
) -> tuple[Piece, ...]:
    """Return the pieces of a fused gate and up bias `[E, 2, F]` that lies on disk as `[E, 2F]`."""
    pieces = []
    for e in range(num_experts):
        for half in range(2):
            joined = slice(half * hidden, (half + 1) * hidden)
            columns = slice(half, None, 2) if layout == "fused_interleaved" else joined
            pieces.append(
                Piece(
                    hub_name=name,
                    hub_shape=(num_experts, 2 * hidden),
                    param_index=(e, half),
                    hub_slices=(e, columns),
                )
            )
    return tuple(pieces)


# --- checks -------------------------------------------------------------------------------------


def check_cover(rules: NameRules, shapes: Mapping[str, Sequence[int]]) -> None:
    """Check that the pieces cover every parameter and every hub tensor exactly once.

    Args:
        rules: the rules.
        shapes: logical shape of every parameter of the whole model.

    Raises:
        CheckpointError: names the parameter or hub tensor.
    """
    hub: dict[str, list[tuple[range, ...]]] = {}
    for fqn, shape in shapes.items():
        pieces = rules.pieces_of(fqn)
        blocks = [to_ranges(piece.param_index, shape, fqn) for piece in pieces]
        _check_blocks(f"parameter {fqn!r}", shape, blocks)
        for piece, block in zip(pieces, blocks, strict=True):
            _check_lengths(fqn, piece, block)
            hub.setdefault(piece.hub_name, []).append(piece.hub_ranges())
    unknown = [fqn for fqn in rules.pieces if fqn not in shapes]
    if unknown:
        raise CheckpointError(f"the name rules speak of {unknown[0]!r}, which the model lacks")
    for name, hub_shape in rules.hub_shapes().items():
        _check_blocks(f"hub tensor {name!r}", hub_shape, hub[name])


def _check_lengths(fqn: str, piece: Piece, block: Sequence[range]) -> None:
    mine = [len(r) for r, at in _padded(block, piece.param_index) if not isinstance(at, int)]
    disk = [
        len(r) for r, at in _padded(piece.hub_ranges(), piece.hub_slices) if not isinstance(at, int)
    ]
    if piece.transpose and len(disk) > 1:
        disk[-1], disk[-2] = disk[-2], disk[-1]
    if mine != disk:
        raise CheckpointError(
            f"parameter {fqn!r}: its block has shape {mine}, but that of hub tensor "
            f"{piece.hub_name!r} has {disk}"
        )


def _padded(ranges: Sequence[range], index: Sequence[Index]) -> Iterable[tuple[range, Index]]:
    return zip(ranges, [*index, *[slice(None)] * (len(ranges) - len(index))], strict=True)


def _check_blocks(what: str, shape: Sequence[int], blocks: list[tuple[range, ...]]) -> None:
    numel = _numel([range(n) for n in shape])
    total = sum(_numel(block) for block in blocks)
    if total != numel:
        raise CheckpointError(
            f"{what}: its pieces hold {total} elements, but its shape {list(shape)} has {numel}"
        )
    clash = _first_clash([block for block in blocks if _numel(block)], 0)
    if clash is not None:
        raise CheckpointError(f"{what}: two pieces share element {list(clash)}")


def _first_clash(blocks: list[tuple[range, ...]], dim: int) -> tuple[int, ...] | None:
    """Return an element that two blocks share, or None; sorted sweep along one dimension a time."""
    if len(blocks) < 2:
        return None
    if dim == len(blocks[0]):
        return ()
    blocks = sorted(blocks, key=lambda b: (b[dim].start, b[dim].stop))
    cluster: list[tuple[range, ...]] = []
    end = -1
    for block in [*blocks, None]:
        if block is not None and block[dim].start < end:
            cluster.append(block)
            end = max(end, block[dim][-1] + 1)
            continue
        found = _cluster_clash(cluster, dim)
        if found is not None:
            return found
        if block is not None:
            cluster, end = [block], block[dim][-1] + 1
    return None


def _cluster_clash(cluster: list[tuple[range, ...]], dim: int) -> tuple[int, ...] | None:
    """Compare blocks whose extents along `dim` overlap."""
    if len(cluster) < 2:
        return None
    if len({block[dim] for block in cluster}) == 1:
        rest = _first_clash(cluster, dim + 1)
        return None if rest is None else (cluster[0][dim].start, *rest)
    for i, one in enumerate(cluster):
        for other in cluster[:i]:
            shared = [_common(a, b) for a, b in zip(one[dim:], other[dim:], strict=True)]
            if None not in shared:
                return tuple(x for x in shared if x is not None)
    return None


def _common(a: range, b: range) -> int | None:
    if len(a) > len(b):
        a, b = b, a
    return next((x for x in a if x in b), None)


def _numel(ranges: Sequence[range]) -> int:
    total = 1
    for r in ranges:
        total *= len(r)
    return total
