"""Which tensors go into which file, and in which windows a file is written.

All of it follows from names, dtypes and shapes alone, so that the bytes written are the same
whatever the layout of the ranks that write them.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch

from moe_tp.checkpoint.blocks import split
from moe_tp.checkpoint.formats import MX_SIZE, Kind, encode_fp8, encode_mxfp4, encoded_shapes
from moe_tp.checkpoint.header import encode_header
from moe_tp.checkpoint.rules import natural_key
from moe_tp.checkpoint.scan import SINGLE
from moe_tp.errors import CheckpointError, ConfigError

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


@dataclass(frozen=True, slots=True, kw_only=True)
class OutTensor:
    """A tensor to be written.

    Args:
        name: on disk.
        dtype: on disk.
        shape: on disk.
        logical: name of the logical tensor it is made from.
        logical_shape: shape of that.
        values: dtype in which the logical values come.
        encode: format on disk.
        part: 0 for the data, 1 for the scales.
        block: rows and columns under one scale, for fp8.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    logical: str
    logical_shape: tuple[int, ...]
    values: torch.dtype
    encode: Kind = "plain"
    part: int = 0
    block: tuple[int, int] = (1, 1)

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return math.prod(self.shape) * self.dtype.itemsize


def plain_tensor(name: str, dtype: torch.dtype, shape: Sequence[int]) -> OutTensor:
    """Return a tensor that is written as it is."""
    size = tuple(shape)
    return OutTensor(
        name=name, dtype=dtype, shape=size, logical=name, logical_shape=size, values=dtype
    )


def _encoded(
    name: str, values: torch.dtype, shape: Sequence[int], kind: Kind, block: tuple[int, int]
) -> list[OutTensor]:
    """Return the data and the scales that a logical tensor becomes in a quantised format."""
    return [
        OutTensor(
            name=disk,
            dtype=dtype,
            shape=disk_shape,
            logical=name,
            logical_shape=tuple(shape),
            values=values,
            encode=kind,
            part=part,
            block=block,
        )
        for part, (disk, dtype, disk_shape) in enumerate(encoded_shapes(kind, name, shape, block))
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantise:
    """Write some tensors in a quantised format again.

    Args:
        kind: `fp8` (matrices, blocks with `weight_scale_inv`) or `mxfp4` (GPT-OSS experts).
        names: patterns of logical hub names.
        kept: modules that stay plain, as config.json lists them for readers that ask.
        block: rows and columns under one scale, for fp8.
    """

    kind: Literal["fp8", "mxfp4"]
    names: tuple[str, ...]
    kept: tuple[str, ...] = ()
    block: tuple[int, int] = (128, 128)

    def takes(self, name: str, shape: Sequence[int]) -> bool:
        """Return whether a tensor is to be quantised.

        Raises:
            CheckpointError: it is, but its shape does not allow it.
        """
        if not any(re.fullmatch(pattern, name) for pattern in self.names):
            return False
        mx = self.kind == "mxfp4"
        if len(shape) < 2 or (mx and shape[-2] % MX_SIZE):
            raise CheckpointError(
                f"tensor {name!r}: expected a matrix{', K a multiple of 32,' * mx} to write in "
                f"{self.kind}, found shape {list(shape)}"
            )
        return True

    def config(self, before: Any) -> dict[str, Any]:
        """Return the `quantization_config` of the written folder."""
        if isinstance(before, dict) and before.get("quant_method") == self.kind:
            return before
        kept = {"modules_to_not_convert": list(self.kept)} if self.kept else {}
        if self.kind == "fp8":
            return {
                "activation_scheme": "dynamic",
                "fmt": "e4m3",
                "quant_method": "fp8",
                "weight_block_size": list(self.block),
                **kept,
            }
        return {"quant_method": "mxfp4", **kept}


def out_tensors(
    name: str, values: torch.dtype, shape: Sequence[int], quantise: Quantise | None
) -> list[OutTensor]:
    """Return what a logical tensor becomes on disk: itself, or data and scales."""
    if quantise is not None and quantise.takes(name, shape):
        return _encoded(name, values, shape, quantise.kind, quantise.block)
    return [plain_tensor(name, values, shape)]


@dataclass(frozen=True, slots=True)
class Slab:
    """A stretch of a file: part of one tensor.

    Args:
        tensor: the tensor.
        logical: the block of the logical tensor that it is made from.
    """

    tensor: OutTensor
    logical: tuple[range, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its logical values."""
        return math.prod(len(r) for r in self.logical) * self.tensor.values.itemsize

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Return what lies on disk for the slab, given its logical values."""
        tensor = self.tensor
        if tensor.encode == "plain":
            return values.to(tensor.dtype).contiguous()
        if tensor.encode == "fp8":
            return encode_fp8(values, tensor.block)[tensor.part].contiguous()
        return encode_mxfp4(values.transpose(-1, -2))[tensor.part].contiguous()


def slabs(tensor: OutTensor, limit: int) -> Iterator[Slab]:
    """Yield the slabs of a tensor in the order of its bytes, of about `limit` bytes at most."""
    whole = tuple(range(n) for n in tensor.logical_shape)
    if tensor.encode == "plain":
        for part in split(whole, max(1, limit // tensor.values.itemsize)):
            yield Slab(tensor, part)
        return
    # Cut between rows that share no scale: rows of the disk's orientation.
    *lead, first, second = whole
    rows, unit = (first, tensor.block[0]) if tensor.encode == "fp8" else (second, 1)
    columns = second if tensor.encode == "fp8" else first
    step = max(1, limit // (unit * len(columns) * tensor.values.itemsize)) * unit
    for outer in itertools.product(*lead):
        fixed = tuple(range(i, i + 1) for i in outer)
        for start in range(0, len(rows), step):
            cut = rows[start : start + step]
            pair = (cut, columns) if tensor.encode == "fp8" else (columns, cut)
            yield Slab(tensor, (*fixed, *pair))


@dataclass
class FilePlan:
    """One file and its tensors, in the order of their bytes."""

    name: str
    tensors: list[OutTensor]

    @cached_property
    def header(self) -> bytes:
        """The first bytes of the file."""
        return encode_header((t.name, t.dtype, t.shape) for t in self.tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole file."""
        return len(self.header) + sum(t.nbytes for t in self.tensors)

    def windows(self, limit: int) -> list[list[Slab]]:
        """Return its slabs in groups of at most `limit` bytes of logical values."""
        found: list[list[Slab]] = []
        size = 0
        for tensor in self.tensors:
            for slab in slabs(tensor, limit):
                if not found or size + slab.nbytes > limit:
                    found.append([])
                    size = 0
                found[-1].append(slab)
                size += slab.nbytes
        return found


def plan_files(tensors: Sequence[OutTensor], max_shard_size: int) -> list[FilePlan]:
    """Return the files of a folder: shards of at most `max_shard_size` bytes, in natural order.

    A tensor larger than that has a shard of its own. Within a file, tensors of wide dtypes come
    first, so that each starts on a multiple of its element size.
    """
    shards: list[list[OutTensor]] = [[]]
    size = 0
    for tensor in sorted(tensors, key=lambda t: natural_key(t.name)):
        if shards[-1] and size + tensor.nbytes > max_shard_size:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    count = len(shards)
    plans = []
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{count:05d}.safetensors" if count > 1 else SINGLE
        plans.append(FilePlan(name, sorted(shard, key=lambda t: -t.dtype.itemsize)))
    return plans


def index_of(plans: Sequence[FilePlan]) -> dict[str, object] | None:
    """Return the index of a folder in several files, None for a single file."""
    if len(plans) == 1:
        return None
    tensors = [(t, plan.name) for plan in plans for t in plan.tensors]
    tensors.sort(key=lambda pair: natural_key(pair[0].name))
    return {
        "metadata": {
            "total_size": sum(t.nbytes for t, _ in tensors),
            "total_parameters": sum(math.prod(t.logical_shape) for t, _ in tensors if t.part == 0),
        },
        "weight_map": {t.name: file for t, file in tensors},
    }


def parse_size(size: int | str) -> int:
    """Return bytes for `5GB`, `500 MB`, `2GiB` or a number.

    Raises:
        ConfigError: it is none of these, or not positive.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", str(size), re.IGNORECASE)
    count = 0
    if match is not None and not (match[3] and not match[2]):
        factor = _UNITS[match[2].upper()]
        if match[3]:
            factor = 1 << (10 * list(_UNITS).index(match[2].upper()))
        count = int(float(match[1]) * factor)
    if count < 1:
        raise ConfigError(
            f"max_shard_size={size!r} is no size; give bytes, or a text such as '5GB' or '500MiB'"
        )
    return count


def size_text(count: float) -> str:
    """Return bytes as a text of three digits with the unit that suits them: `1.25 GB`, `48 B`."""
    for unit, factor in _UNITS.items():
        if count / factor < 999.5:
            return f"{count / factor:.3g} {unit}B"
    return f"{count / factor:.0f} {unit}B"


__all__ = [
    "FilePlan",
    "OutTensor",
    "Quantise",
    "Slab",
    "index_of",
    "out_tensors",
    "parse_size",
    "plain_tensor",
    "plan_files",
    "size_text",
    "slabs",
]
