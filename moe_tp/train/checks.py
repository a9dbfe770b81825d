"""What a run looks at before its first step: its folder, its length, settings that do nothing."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from moe_tp.checkpoint.files import size_text
from moe_tp.errors import ConfigError
from moe_tp.log import get_logger
from moe_tp.train.config import FinetuneConfig, TrainConfig
from moe_tp.train.rows import Rows

_log = get_logger(__name__)


def make_output(output: Path) -> None:
    """Make the folder of a run.

    Args:
        output: the folder, which may be there.

    Raises:
        ConfigError: it cannot be made or written to, or it is a file.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"output={output} cannot be made a folder: {error.strerror}; choose another"
        ) from error
    if not os.access(output, os.W_OK | os.X_OK):
        raise ConfigError(f"output={output} is a folder that cannot be written to; choose another")


def warn_of_final(
    final: Path, shapes: Mapping[str, Sequence[int]], dtype: torch.dtype | None
) -> None:
    """Warn where what a run ends with has no room, or takes the place of another run's.

    Args:
        final: the folder that it will be written to, in the output folder.
        shapes: of the tensors to write, by name.
        dtype: they are written in; None: not known here, counted as bf16.
    """
    size = (dtype or torch.bfloat16).itemsize
    needed = size * sum(math.prod(shape) for shape in shapes.values())
    output = final.parent
    if final.exists() and not any(output.glob("checkpoint-*")):
        _log.warning("%s is of an earlier run, and this one replaces it", final)
    free = shutil.disk_usage(output).free
    if free < needed:
        _log.warning(
            "output=%s has %s free, and the weights in final/ take %s; free some before the run "
            "ends",
            output,
            size_text(free),
            size_text(needed),
        )


def steps_of(train: TrainConfig, rows: Rows | None) -> int:
    """Return the steps of a whole run.

    Args:
        train: names them, or the passes over the data.
        rows: the data; None where it is streamed, for which steps are named.
    """
    if train.steps is not None:
        return train.steps
    assert train.epochs is not None
    assert rows is not None
    return max(1, math.ceil(train.epochs * len(rows) / train.rows_a_step))


def warn_of_few(rows: Rows, train: TrainConfig) -> None:
    """Warn where a step takes more rows than there are.

    Args:
        rows: the data.
        train: names the rows of a step.
    """
    if len(rows) < train.rows_a_step:
        _log.warning(
            "the data makes %d rows of data.seq_len, and train.global_batch=%d takes them more "
            "than once a step; lower it, or data.seq_len",
            len(rows),
            train.rows_a_step,
        )


def warn_of_files(train: Sequence[Path], held_out: Sequence[Path]) -> None:
    """Warn of files that are learned from more than once, or evaluated on too.

    Args:
        train: the data files of data.train.
        held_out: those of data.eval.
    """
    named = [path.resolve() for path in train]
    learned = set(named)
    if len(learned) < len(named):
        _log.warning(
            "data.train names %s more than once, so that its records are learned as many times "
            "an epoch",
            next(path for path in named if named.count(path) > 1),
        )
    both = [path for path in held_out if path.resolve() in learned]
    if both:
        _log.warning(
            "data.eval: %s is in data.train too, so that the held-out loss is not that of data "
            "the run has not seen",
            both[0],
        )


def warn_of_settings(config: FinetuneConfig, steps: int) -> None:
    """Warn of settings that do not do what they seem to.

    Args:
        config: the settings.
        steps: of the whole run.
    """
    train = config.train
    if train.warmup_steps >= steps:
        _log.warning(
            "train.warmup_steps=%d is not below the %d steps of the run, so that the learning "
            "rate never reaches train.lr",
            train.warmup_steps,
            steps,
        )
    if train.eval_every and not config.data.eval:
        _log.warning("train.eval_every=%d evaluates nothing without data.eval", train.eval_every)
    if train.decay_steps is not None and train.schedule != "wsd":
        _log.warning(
            "train.decay_steps=%d is of schedule wsd and does nothing with %s",
            train.decay_steps,
            train.schedule,
        )
