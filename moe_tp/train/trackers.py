"""Where a run's numbers go beside its own files: TensorBoard, W&B, trackio; on rank 0 only.

The packages are imported when a run asks for them, and not before.
"""

from __future__ import annotations

import importlib
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from moe_tp.errors import ConfigError

TENSORBOARD = "tensorboard"  # folder in the output, and name of the tracker
WANDB_ID = "wandb-id"  # file in the output


class Tracker(Protocol):
    """Takes a run's numbers as they come."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take the numbers of a step."""

    def text(self, step: int, name: str, text: str) -> None:
        """Take a text, such as a sampled generation."""

    def close(self) -> None:
        """Write what is left."""


class TensorBoard:
    """Event files in `OUTPUT/tensorboard`.

    Args:
        output: the run's folder.
        step: steps already done; events of later ones are hidden.
    """

    def __init__(self, output: Path, step: int) -> None:
        writer = _module("torch.utils.tensorboard", "tensorboard").SummaryWriter
        self._writer = writer(str(output / TENSORBOARD), purge_step=step + 1 if step else None)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add a scalar for each number."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def text(self, step: int, name: str, text: str) -> None:
        """Add a text, shown as it is."""
        indented = "\n".join(f"    {line}" for line in text.splitlines())
        self._writer.add_text(name, indented, step)

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


class Service:
    """W&B, or trackio, which has the same three calls.

    Args:
        package: `wandb` or `trackio`.
        output: the run's folder, whose name is the run's.
        project: of the service.
        settings: of the run.
        step: steps already done; a run that goes on is the same run there.
    """

    def __init__(
        self, package: str, output: Path, project: str, settings: Mapping[str, Any], step: int
    ) -> None:
        self._package = _module(package, package)
        # trackio knows a run by its name, W&B by its id alone.
        known = {"id": _identity(output, step)} if package == "wandb" else {}
        self._package.init(
            project=project,
            name=output.resolve().name,
            config=dict(settings),
            resume="allow" if step else "never",
            **known,
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send the numbers of a step."""
        self._package.log(dict(values), step=step)

    def text(self, step: int, name: str, text: str) -> None:
        """Send nothing: texts are in the run's own files."""

    def close(self) -> None:
        """Wait until all is sent."""
        self._package.finish()


def open_trackers(
    names: Sequence[str], output: Path, *, project: str, settings: Mapping[str, Any], step: int = 0
) -> list[Tracker]:
    """Return the trackers that a run asks for.

    Args:
        names: `tensorboard`, `wandb`, `trackio`.
        output: the run's folder.
        project: for services.
        settings: of the run, as mappings.
        step: steps already done.

    Raises:
        ConfigError: a package is not installed.
    """
    found: list[Tracker] = []
    for name in dict.fromkeys(names):
        if name == TENSORBOARD:
            found.append(TensorBoard(output, step))
        else:
            found.append(Service(name, output, project, settings, step))
    return found


def _identity(output: Path, step: int) -> str:
    """Return the id of a run at W&B: the one in its folder, a new one at its start."""
    path = output / WANDB_ID
    if step and path.is_file():
        return path.read_text().strip()
    output.mkdir(parents=True, exist_ok=True)
    path.write_text(secrets.token_hex(8))
    return path.read_text()


def _module(name: str, package: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"train.trackers asks for {package}, which is not installed; pip install "
            f"'moe-tp[{package}]', or leave it out"
        ) from error
