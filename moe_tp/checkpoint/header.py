"""The header of a safetensors file: read with suspicion, written in one fixed form.

A file is eight bytes of header length, a JSON header, and the tensors' bytes without holes. Nothing
in it is trusted before it is checked against the size of the file, so that a cut, empty or forged
file is an error with a name instead of a crash or a wrong weight. Format:
https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from moe_tp.errors import CheckpointError

MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors library
LENGTH_BYTES = 8

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
CODES = {dtype: code for code, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """Where a tensor lies on disk.

    Args:
        name: its hub name.
        dtype: as stored.
        shape: as stored.
        file: name of the file inside the folder.
        offset: bytes from the start of the file.
        nbytes: size on disk.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: str
    offset: int
    nbytes: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def header_length(start: bytes, file: str, file_size: int) -> int:
    """Return the length in bytes of the JSON header.

    Args:
        start: the first bytes of the file, at least eight if it has them.
        file: name for messages.
        file_size: bytes of the whole file.

    Raises:
        CheckpointError: the file is no safetensors file, or is shorter than its header.
    """
    if file_size < LENGTH_BYTES or len(start) < LENGTH_BYTES:
        raise CheckpointError(
            f"{file}: expected a safetensors file, found {file_size} bytes, which is less than its "
            f"{LENGTH_BYTES}-byte header length; copy or download the file again"
        )
    (length,) = struct.unpack("<Q", start[:LENGTH_BYTES])
    room = min(file_size - LENGTH_BYTES, MAX_HEADER)
    # Only where the length is no length: that of one safetensors header in 32 begins with 0x80 too.
    if not 2 <= length <= room and (start[:2] == b"PK" or start[:1] == b"\x80"):
        raise CheckpointError(
            f"{file}: expected a safetensors file, found a pickle or zip archive, which could run "
            f"code; convert it to safetensors with the tool that made it"
        )
    if not 2 <= length <= room:
        raise CheckpointError(
            f"{file}: expected a header of 2 to {room} bytes in a file of {file_size} bytes, found "
            f"a header length of {length}; the file is cut or damaged, copy or download it again"
        )
    return int(length)


def parse_header(text: bytes, file: str, file_size: int) -> dict[str, TensorInfo]:
    """Return every tensor of a file, checked to fill it without holes or overlaps.

    Args:
        text: the JSON header.
        file: name for messages.
        file_size: bytes of the whole file.

    Raises:
        CheckpointError: names the file and, where there is one, the tensor.
    """
    header = load_json(text, f"{file}: header")
    base = LENGTH_BYTES + len(text)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(f"{file}: expected __metadata__ to map text to text, found otherwise")
    infos = {name: _entry(name, value, file, base) for name, value in header.items()}
    end = base
    for info in sorted(infos.values(), key=lambda i: (i.offset, i.nbytes)):
        if info.offset != end:
            what = "an overlap" if info.offset < end else "a hole"
            raise CheckpointError(
                f"{file}: tensor {info.name!r}: expected its data to start at byte {end}, found "
                f"{what} at byte {info.offset}; the header is damaged, get the file again"
            )
        end += info.nbytes
    if end != file_size:
        last = max(infos.values(), key=lambda i: (i.offset, i.nbytes), default=None)
        name = f" (its last tensor is {last.name!r})" if last else ""
        raise CheckpointError(
            f"{file}: expected {end} bytes as its header says{name}, found a file of {file_size} "
            f"bytes; the file is {'cut' if file_size < end else 'too long'}, get it again"
        )
    return infos


def _entry(name: str, value: Any, file: str, base: int) -> TensorInfo:
    where = f"{file}: tensor {name!r}"
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(
            f"{where}: expected an entry with dtype, shape and data_offsets, found {_short(value)}"
        )
    code, shape, span = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(code, str) or code not in DTYPES:
        raise CheckpointError(
            f"{where}: expected a dtype among {', '.join(DTYPES)}, found {_short(code)}"
        )
    if not isinstance(shape, list) or not all(_is_size(n) for n in shape):
        raise CheckpointError(f"{where}: expected a shape of sizes, found {_short(shape)}")
    if not isinstance(span, list) or len(span) != 2 or not all(_is_size(n) for n in span):
        raise CheckpointError(f"{where}: expected two data offsets, found {_short(span)}")
    nbytes = math.prod(shape) * DTYPES[code].itemsize
    if span[1] - span[0] != nbytes:
        raise CheckpointError(
            f"{where}: expected {nbytes} bytes for {code} {shape}, found data offsets {span} of "
            f"{span[1] - span[0]} bytes"
        )
    return TensorInfo(
        name=name,
        dtype=DTYPES[code],
        shape=tuple(shape),
        file=file,
        offset=base + span[0],
        nbytes=nbytes,
    )


def encode_header(
    tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]],
    metadata: Mapping[str, str] | None = None,
) -> bytes:
    """Return the first bytes of a safetensors file: the length and the JSON header.

    Args:
        tensors: (name, dtype, shape) in the order of their data.
        metadata: text for text; `{"format": "pt"}` by default, which transformers asks for.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata or {"format": "pt"})}
    offset = 0
    for name, dtype, shape in tensors:
        end = offset + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # tensors start on a multiple of 8 bytes
    return struct.pack("<Q", len(text)) + text


def load_json(text: bytes, where: str) -> dict[str, Any]:
    """Return the JSON object in `text`, in which no name may stand twice.

    Raises:
        CheckpointError: it is cut, no JSON, or no object.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise CheckpointError(f"{where}: expected each name once, found {twice!r} twice")
        return result

    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{where}: expected JSON, found {len(text)} bytes that are none ({error}); "
            f"the file is cut or damaged, get it again"
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: expected a JSON object, found {_short(value)}")
    return value


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**62


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
