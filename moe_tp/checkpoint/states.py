"""The training checkpoints in a run's folder: which there are, which are whole, which stay."""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

from moe_tp.checkpoint import atomic
from moe_tp.checkpoint.reader import HubFolder
from moe_tp.checkpoint.scan import CONFIG, UNFINISHED
from moe_tp.errors import CheckpointError
from moe_tp.log import get_logger

KIND, VERSION = "moe_tp_training_state", 1
_NAME = re.compile(r"checkpoint-([0-9]+)")

_log = get_logger(__name__)


def state_folder(output: Path, step: int) -> Path:
    """Return the path of the checkpoint of a step."""
    return output / f"checkpoint-{step}"


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


def keep_states(output: Path, keep: int, also: Collection[Path] = ()) -> None:
    """Delete complete checkpoints but the newest `keep`; for one rank, after a save.

    A deletion that is cut short leaves a folder that every reader refuses.

    Args:
        output: the run's folder.
        keep: how many of the newest stay.
        also: others that stay.
    """
    whole_ones = [p for p in list_states(output) if not (p / UNFINISHED).exists() and is_state(p)]
    for path in whole_ones[keep:]:
        if path in also:
            continue
        atomic.write_bytes(
            path / UNFINISHED, b'{"what": "an old checkpoint that is being deleted"}'
        )
        atomic.sync_folder(path)
        atomic.abandon(path)
    for path in list_states(output):
        if (path / UNFINISHED).exists():  # what an earlier deletion left
            shutil.rmtree(path, ignore_errors=True)


def facts_of(path: Path) -> dict[str, Any]:
    """Return the facts of a complete checkpoint, without reading its tensors.

    Raises:
        CheckpointError: it is torn, or no checkpoint of this version.
    """
    with open_state(path) as folder:
        facts: dict[str, Any] = folder.config["facts"]
    return facts
