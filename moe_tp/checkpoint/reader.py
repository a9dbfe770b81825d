"""A hub folder, opened for reading slices of its tensors."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from moe_tp.checkpoint.blocks import numel
from moe_tp.checkpoint.formats import (
    MX_SIZE,
    Logical,
    block_ranges,
    decode_fp8,
    decode_mxfp4,
    logical_tensors,
)
from moe_tp.checkpoint.header import TensorInfo
from moe_tp.checkpoint.remote import open_storage
from moe_tp.checkpoint.rules import Index, natural_key, to_ranges
from moe_tp.checkpoint.scan import scan_folder
from moe_tp.checkpoint.slices import Counter, read_dense
from moe_tp.checkpoint.storage import LocalStorage, Storage
from moe_tp.errors import CheckpointError

_SHOWN = 8


class HubFolder:
    """A folder of safetensors and JSON whose headers have been read and checked.

    Args:
        path: a folder, a URL (`s3://...`), a hub id (`owner/name`, `owner/name@revision`), or a
            `Storage`.
        strict: raise if there is any problem; otherwise `problems` tells.
        need_config: a missing config.json is a problem.

    Attributes:
        path: the folder on this machine, None for a remote one (`where` opens that again).
        config: config.json.
        tensors: what lies on disk, by name.
        logical: what a model sees (quantised tensors decoded to bf16), by name in natural order.
        files: weight files and their bytes.
        problems: what is wrong, one sentence each.
        doubts: what is odd and keeps no weight from being read, one sentence each.

    Raises:
        CheckpointError: strict and something is wrong, or there is no such folder.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | Storage,
        *,
        strict: bool = True,
        need_config: bool = True,
    ) -> None:
        if path is None or isinstance(path, (bytes, int, float)):
            raise CheckpointError(
                f"expected a folder, a URL or a hub id to read a model from, found {path!r}"
            )
        self.storage: Storage = open_storage(path) if isinstance(path, (str, os.PathLike)) else path
        self.path: Path | None = (
            self.storage.path if isinstance(self.storage, LocalStorage) else None
        )
        try:
            scan = scan_folder(self.storage, need_config=need_config)
        except BaseException:
            self.storage.close()
            raise
        self.config: dict[str, Any] = scan.config
        self.tensors: dict[str, TensorInfo] = scan.tensors
        self.files: dict[str, int] = scan.files
        logical, problems = logical_tensors(self.tensors, self.config)
        self.logical: dict[str, Logical] = {n: logical[n] for n in sorted(logical, key=natural_key)}
        self.problems: list[str] = scan.problems + problems
        self.doubts: list[str] = scan.doubts
        self.counter = Counter(headers=scan.header_bytes)
        if strict and self.problems:
            self.storage.close()
            raise CheckpointError(listed(self.where, self.problems))

    @property
    def where(self) -> str:
        """The folder, URL or hub id with its revision: for messages, and to open it again."""
        return self.storage.where

    @property
    def bytes_requested(self) -> int:
        """Bytes of slices and headers that were asked from storage, without joined gaps."""
        return self.counter.slices + self.counter.headers

    @property
    def gap_bytes(self) -> int:
        """Bytes between wanted stretches that were read along in one request."""
        return self.counter.gaps

    @property
    def default_dtype(self) -> torch.dtype:
        """The floating dtype of most elements after decoding (bf16 for quantised formats)."""
        sizes: dict[torch.dtype, int] = {}
        for tensor in self.logical.values():
            if tensor.dtype.is_floating_point:
                count = numel([range(n) for n in tensor.shape])
                sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + count
        return max(sizes, key=lambda d: sizes[d]) if sizes else torch.float32

    @property
    def quantised(self) -> bool:
        """Whether any tensor is kept in a quantised format."""
        return any(tensor.kind != "plain" for tensor in self.logical.values())

    def find(self, name: str) -> Logical:
        """Return a logical tensor.

        Raises:
            CheckpointError: there is none of that name.
        """
        try:
            return self.logical[name]
        except KeyError:
            raise CheckpointError(
                f"{self.where}: tensor {name!r}: expected in the folder, found none"
            ) from None

    def read_slice(self, name: str, slices: Sequence[Index] = ()) -> torch.Tensor:
        """Return a slice of a logical tensor, decoded; an integer drops its dimension.

        Args:
            name: hub name.
            slices: leading indices; the rest is whole.
        """
        ranges = to_ranges(slices, self.find(name).shape, name)
        block = self.read(name, [range(r.start, r[-1] + 1) if r else r for r in ranges])
        for dim, r in enumerate(ranges):
            if r.step > 1:
                block = block[(slice(None),) * dim + (slice(None, None, r.step),)]
        for dim in reversed([d for d, i in enumerate(slices) if isinstance(i, int)]):
            block = block.squeeze(dim)
        return block

    def read(
        self, name: str, ranges: Sequence[range], out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return a dense block of a logical tensor, decoded, on the CPU.

        Args:
            name: hub name.
            ranges: what to read along each dimension; every step is 1.
            out: contiguous CPU tensor of the stored dtype to fill, for plain tensors.
        """
        tensor = self.find(name)
        if tensor.kind == "plain":
            return read_dense(self.storage, tensor.data, ranges, self.counter, out)
        assert tensor.scale is not None
        assert out is None
        if tensor.kind == "fp8":
            q = read_dense(self.storage, tensor.data, ranges, self.counter)
            scaled = [*ranges[:-2], *map(block_ranges, ranges[-2:], tensor.block)]
            scale = read_dense(self.storage, tensor.scale, scaled, self.counter)
            return decode_fp8(q, scale, ranges, tensor.block)
        *lead, columns, rows = ranges
        groups = block_ranges(columns, MX_SIZE)
        wanted = [*lead, rows, groups]
        scale = read_dense(self.storage, tensor.scale, wanted, self.counter)
        packed = [*wanted, range(MX_SIZE // 2)]
        values = decode_mxfp4(read_dense(self.storage, tensor.data, packed, self.counter), scale)
        start = columns.start - groups.start * MX_SIZE
        return values[..., start : start + len(columns)].transpose(-1, -2).contiguous()

    def close(self) -> None:
        """Close open files; the folder opens them again when it is read."""
        self.storage.close()

    def __enter__(self) -> HubFolder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def listed(where: str, problems: Sequence[str]) -> str:
    """Return one message for one or several problems of a folder."""
    if len(problems) == 1:
        return f"{where}: {problems[0]}"
    more = [f"and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
    return f"{where}: {len(problems)} problems: {'; '.join([*problems[:_SHOWN], *more])}"
