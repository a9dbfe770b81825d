"""What a folder holds, from its headers alone: every problem is found before a weight is read.

Problems are sentences that name the file, the tensor, what was expected and what was found (K2).
Only safetensors and JSON are opened (K7).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from moe_tp.checkpoint.header import (
    LENGTH_BYTES,
    TensorInfo,
    header_length,
    load_json,
    parse_header,
)
from moe_tp.checkpoint.storage import Storage
from moe_tp.errors import CheckpointError
from moe_tp.log import get_logger

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
FINAL = "final"  # of a run's output folder: the model that it ends with
UNFINISHED = "moe_tp.unfinished.json"  # lies in a folder while it is being written
HIDDEN = ".unfinished-"  # in the name of that folder
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_WEIGHTS = (".safetensors", ".index.json", ".gguf", ".h5", ".msgpack", ".onnx")
# What speaks of the weights as they were: a run's state, adapters on them, their quantisation.
_STALE = re.compile(
    r"\..*|trainer_state\.json|training_args\.json|latest|zero_to_fp32\.py"
    r"|events\.out\.tfevents\..*|adapter_config\.json|(quantize|quant|hf_quant)_config\.json"
)
_MAX_JSON = 512 << 20

_log = get_logger(__name__)


@dataclass(slots=True)
class Scan:
    """What was found in a folder.

    Args:
        tensors: everything on disk by name.
        files: weight files and their sizes in bytes.
        config: config.json, empty where it cannot be read.
        problems: what is wrong, one sentence each.
        doubts: what is odd and keeps no weight from being read, one sentence each.
        header_bytes: bytes that were read to learn this.
        total_size: bytes of all tensors as the index claims, None where it does not.
    """

    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    header_bytes: int = 0
    total_size: Any = None

    def attempt(self, step: Callable[[], None]) -> None:
        """Run a step, keeping its error as a problem."""
        try:
            step()
        except CheckpointError as error:
            self.problems.append(str(error))


def is_carried(file: str) -> bool:
    """Return whether a file comes along from a source folder: no weights, and true of any."""
    left = file in (CONFIG, UNFINISHED) or _STALE.fullmatch(file) is not None
    return not left and not file.endswith((*_WEIGHTS, *PICKLES))


def model_of_run(folder: Path) -> Path | None:
    """Return the model folder in the output folder of a run; None: it is no such folder.

    Args:
        folder: where a model was looked for.
    """
    final = folder / FINAL
    return final if (final / CONFIG).is_file() and not (folder / CONFIG).exists() else None


def scan_folder(storage: Storage, *, need_config: bool = True) -> Scan:
    """Return what a folder holds, with all its problems; raises for none of them.

    Args:
        storage: the folder.
        need_config: a missing config.json is a problem.
    """
    scan = Scan()
    sizes = storage.sizes()
    if UNFINISHED in sizes or (not sizes and HIDDEN in storage.where):
        found = f"{UNFINISHED} lies in it" if sizes else "nothing lies in it yet"
        scan.problems.append(
            f"{storage.where} is an unfinished save ({found}), so weights may be "
            f"missing; use the previous checkpoint, and delete this folder"
        )
    if CONFIG in sizes:
        scan.attempt(lambda: scan.config.update(_json(storage, CONFIG, sizes, scan)))
    elif need_config:
        final = model_of_run(Path(storage.where))
        hint = "" if final is None else f" (a run has written its model to {final}: give that)"
        scan.problems.append(f"{CONFIG}: expected in the folder, found none{hint}")
    scan.doubts += [
        f"{file}: expected a file, found a link that leads nowhere, so no save could carry it on; "
        f"restore the file, or delete the link"
        for file, size in sizes.items()
        if size < 0 and is_carried(file)
    ]
    weight_map: dict[str, str] | None = None
    try:
        weight_map = _weight_map(storage, sizes, scan)
    except CheckpointError as error:
        scan.problems.append(str(error))
        return scan
    if weight_map is None:
        scan.attempt(lambda: _add_file(storage, SINGLE, sizes, scan))
    else:
        _add_indexed(storage, weight_map, sizes, scan)
        _check_total(scan)
    if not scan.tensors and not scan.problems:
        scan.problems.append("the weight files hold no tensor")
    _check_mixture(scan)
    return scan


def _json(storage: Storage, file: str, sizes: Mapping[str, int], scan: Scan) -> dict[str, Any]:
    if not 0 <= sizes[file] <= _MAX_JSON:
        raise CheckpointError(f"{file}: expected a JSON file, found {sizes[file]} bytes")
    text = storage.read(file, 0, sizes[file])
    scan.header_bytes += len(text)
    return load_json(text, file)


def _weight_map(storage: Storage, sizes: Mapping[str, int], scan: Scan) -> dict[str, str] | None:
    """Return tensor -> file as the index says, or None if `model.safetensors` holds everything."""
    if INDEX not in sizes:
        if SINGLE in sizes:
            return None
        raise CheckpointError(_no_weights(sizes))
    index = _json(storage, INDEX, sizes, scan)
    found, metadata = index.get("weight_map"), index.get("metadata")
    scan.total_size = metadata.get("total_size") if isinstance(metadata, dict) else None
    if not isinstance(found, dict) or not found:
        raise CheckpointError(f"{INDEX}: expected a weight_map of tensor to file, found none")
    for name, file in found.items():
        _check_file_name(name, file)
    if SINGLE not in sizes or SINGLE in found.values():
        return found
    # transformers reads model.safetensors where both are there, so this does too, if it is whole.
    alone = Scan()
    alone.attempt(lambda: _add_file(storage, SINGLE, sizes, alone))
    if set(alone.tensors) == set(found):
        _log.warning(
            "%s: %s and %s lie side by side with the same names; reading %s, as transformers does",
            storage.where,
            SINGLE,
            INDEX,
            SINGLE,
        )
        return None
    raise CheckpointError(
        f"{INDEX}: expected only the shards it lists, found {SINGLE} beside it with other tensors "
        f"({len(alone.tensors)} instead of {len(found)}); delete the one that is out of date"
    )


def _check_file_name(name: str, file: Any) -> None:
    plain = (
        isinstance(file, str) and file not in ("", ".", "..") and not re.search(r"[/\\\0]", file)
    )
    if not plain:
        raise CheckpointError(
            f"{INDEX}: tensor {name!r}: expected the name of a file in this folder, found {file!r}"
        )
    if not file.endswith(".safetensors"):
        raise CheckpointError(
            f"{INDEX}: tensor {name!r}: expected a .safetensors file, found {file!r}; only "
            f"safetensors and JSON are read, since a pickle could run code"
        )


def _no_weights(sizes: Mapping[str, int]) -> str:
    shards = [f for f in sizes if f.endswith(".safetensors")]
    pickles = [f for f in sizes if f.endswith(PICKLES)]
    if "adapter_model.safetensors" in sizes:
        return (
            f"{SINGLE}: expected model weights, found an adapter folder (adapter_model); give the "
            f"model with the adapter merged in, as a run's final/ is"
        )
    if shards:
        return (
            f"{INDEX}: expected it beside {shards[0]!r} ({len(shards)} safetensors files), found "
            f"none, so nobody knows whether all shards are there; restore the index"
        )
    if pickles:
        return (
            f"{pickles[0]}: expected safetensors, found a pickle, which could run code and is not "
            f"opened; convert the folder to safetensors first"
        )
    return f"{SINGLE}: expected it or {INDEX} in the folder, found neither"


def _add_file(storage: Storage, file: str, sizes: Mapping[str, int], scan: Scan) -> None:
    size = sizes[file]
    if size < 0:
        raise CheckpointError(f"{file}: expected a file, found a link that leads nowhere")
    start = storage.read(file, 0, min(size, storage.first_read))
    scan.header_bytes += len(start)
    length = header_length(start, file, size)
    text = start[LENGTH_BYTES : LENGTH_BYTES + length]
    if len(text) < length:
        rest = storage.read(file, LENGTH_BYTES + len(text), length - len(text))
        scan.header_bytes += len(rest)
        text += rest
    if len(text) < length:
        raise CheckpointError(
            f"{file}: expected a header of {length} bytes, found {len(text)}; the file is cut"
        )
    found = parse_header(text, file, size)
    scan.files[file] = size
    for name, info in found.items():
        other = scan.tensors.setdefault(name, info)
        if other is not info:
            raise CheckpointError(
                f"{file}: tensor {name!r}: expected once, found in {other.file} too"
            )


def _add_indexed(
    storage: Storage, weight_map: Mapping[str, str], sizes: Mapping[str, int], scan: Scan
) -> None:
    listed: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        listed.setdefault(file, []).append(name)
    broken: set[str] = set()
    for file, names in sorted(listed.items()):
        if file not in sizes:
            broken.add(file)
            scan.problems.append(
                f"{file}: expected by {INDEX} for {len(names)} tensors such as {names[0]!r}, found "
                f"no such file; copy or download it again"
            )
            continue
        before = len(scan.problems)
        scan.attempt(lambda file=file: _add_file(storage, file, sizes, scan))  # type: ignore[misc]
        if len(scan.problems) > before:
            broken.add(file)
            scan.problems[-1] += f" ({INDEX} expects {names[0]!r} in it)"
    for name, file in weight_map.items():
        info = scan.tensors.get(name)
        if info is not None and info.file != file:
            scan.problems.append(
                f"{INDEX}: tensor {name!r}: expected in {file}, found in {info.file}"
            )
        elif info is None and file not in broken:
            scan.problems.append(f"{file}: tensor {name!r}: expected by {INDEX}, found none")
    for name, info in scan.tensors.items():
        if name not in weight_map:
            scan.problems.append(
                f"{info.file}: tensor {name!r}: expected no tensor that {INDEX} does not list"
            )


def _check_total(scan: Scan) -> None:
    """Compare the claimed bytes; a wrong claim is common, since tools copy it after a change."""
    total = sum(info.nbytes for info in scan.tensors.values())
    if scan.total_size is not None and not scan.problems and scan.total_size != total:
        scan.doubts.append(
            f"{INDEX}: expected metadata.total_size={total}, the bytes of the tensors in the "
            f"files, found {scan.total_size!r}"
        )


def _check_mixture(scan: Scan) -> None:
    """Hardly anybody mixes the two half types: it may be a header that has been damaged."""
    halves: dict[torch.dtype, list[TensorInfo]] = {torch.float16: [], torch.bfloat16: []}
    for info in scan.tensors.values():
        if info.dtype in halves:
            halves[info.dtype].append(info)
    few, many = sorted(halves.values(), key=len)
    if few:
        scan.problems.append(
            f"{few[0].file}: tensor {few[0].name!r}: expected {many[0].dtype} as in {len(many)} "
            f"other tensors, found {few[0].dtype}; a header is damaged (get the file again), "
            f"or cast all to one of them"
        )
