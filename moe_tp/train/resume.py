"""Checkpoints of a run: when they are saved, what may go on from them, export of one."""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from moe_tp.checkpoint.agree import gather_json, together
from moe_tp.checkpoint.files import Quantise
from moe_tp.checkpoint.reader import HubFolder
from moe_tp.checkpoint.rules import NameRules
from moe_tp.checkpoint.state import load_state, stage_state, write_state
from moe_tp.checkpoint.states import (
    facts_of,
    keep_states,
    list_states,
    newest_state,
    state_folder,
)
from moe_tp.checkpoint.writer import SaveReport, save_hub
from moe_tp.errors import CheckpointError, ConfigError
from moe_tp.log import get_logger
from moe_tp.models import ModelConfig
from moe_tp.models.decoder import Decoder
from moe_tp.models.families import rules_for
from moe_tp.models.load import allocate, from_pretrained
from moe_tp.parallel.collectives import Group, raw_all_reduce
from moe_tp.parallel.mesh import Mesh
from moe_tp.train.adamw import SmallAdamW
from moe_tp.train.config import FinetuneConfig
from moe_tp.train.lora import LoRAConfig, attach, merge_lora
from moe_tp.train.placing import Placement
from moe_tp.train.saver import Saver
from moe_tp.train.settings import from_mapping, to_mapping

# What a run must not change when it goes on: data order, schedule and moments mean something else
# then. Everything else (layout, runtime, rates, files' places) may change and is said in a warning.
_FIXED = (
    "seed",
    "data.train",
    "data.format",
    "data.columns",
    "data.seq_len",
    "data.packing",
    "data.long",
    "data.loss",
    "data.chat_template",
    "data.tokenizer",
    "data.add_eos",
    "data.shuffle",
    "data.streaming",
    "data.stream_window",
    "train.optimizer",
    "train.moments",
    "train.global_batch",
    "train.freeze",
    "train.only",
    "lora",
    "lora.rank",
    "lora.alpha",
    "lora.targets",
    "lora.rslora",
    "lora.dora",
    "lora.experts",
    "lora.base",
)
# Lists whose order means nothing.
_SETS = ("lora.targets", "lora.experts", "train.freeze", "train.only")
_FREE = ("parallel.", "runtime.", "output", "data.eval")

_log = get_logger(__name__)


def save_checkpoint(
    model: Decoder,
    optimizer: torch.optim.Optimizer,
    config: FinetuneConfig,
    counters: Mapping[str, Any],
    saver: Saver,
    *,
    residual_dropout: float,
    eval_loss: float | None = None,
) -> Path:
    """Return the checkpoint of the step that has just ended; `saver.wait()` says when it is there.

    Args:
        model, optimizer: after the step.
        config: of the run; names the output folder.
        counters: JSON that `resume_run` returns; `step` names the folder.
        saver: writes it.
        residual_dropout: the model's own, which is no setting of the run.
        eval_loss: held-out loss at this step, by which the best checkpoints are chosen.

    Raises:
        CheckpointError: the checkpoint before this one could not be written; older checkpoints are
            untouched.

    Collectives: those of `stage_state`; on the saver's thread those of `write_state` and an
    agreement over the world.
    """
    saver.wait()
    output, train = Path(config.output), config.train
    path = state_folder(output, counters["step"])
    hub = dataclasses.replace(model.config, residual_dropout=residual_dropout).to_hub()
    facts = {
        "counters": dict(counters),
        "eval_loss": eval_loss,
        "settings": to_mapping(config),
        "model": {
            "config": hub,
            "source": None if model.source is None else os.path.abspath(model.source),
            "hub_names": sorted(model.name_rules.hub_shapes()),
            "dtype": str(model.mesh.runtime.master_dtype or torch.float32).removeprefix("torch."),
        },
    }
    staged = stage_state(model, optimizer, copies=saver.copies)

    def write(group: Group, device: torch.device) -> None:
        def prune() -> None:
            if group.rank == 0:
                keep_states(output, train.keep, best_states(output, train.keep_best))

        write_state(staged, path, facts, group, device, max_shard_size=train.max_shard_size)
        together(prune, group, device)

    saver.run(write)
    return path


def best_states(output: Path, count: int) -> list[Path]:
    """Return the complete checkpoints with the smallest held-out losses, at most `count`.

    Those of steps that were not evaluated, or whose loss is not finite, are none of them.
    """
    found: list[tuple[float, int, Path]] = []
    for path in list_states(output) if count else ():
        try:
            loss = facts_of(path).get("eval_loss")
        except CheckpointError:  # torn; `newest_state` says so where it matters
            continue
        if loss is not None and math.isfinite(loss):
            found.append((loss, len(found), path))
    return [path for _, _, path in sorted(found)[:count]]


def find_checkpoint(config: FinetuneConfig, mesh: Mesh, *, resume: bool) -> Path | None:
    """Return the checkpoint to go on from, None to begin at step 0; equal on all ranks.

    Args:
        config: its output folder is looked at.
        mesh: the mesh.
        resume: go on from the newest complete one.

    Raises:
        CheckpointError: not `resume`, and an earlier run's checkpoints lie there, which a later
            resume could take for this run's; or all of them are torn.

    Collectives: an agreement and an exchange over the world.
    """
    output, world = Path(config.output), mesh.group("world")

    def look() -> str | None:
        if mesh.rank:
            return None
        old = list_states(output)
        if not resume and old:
            raise ConfigError(
                f"output={config.output} holds {old[0].name} of an earlier run; add --resume to "
                f"go on from it, or choose another output"
            )
        found = newest_state(output) if resume else None
        if resume and found is None:
            _log.warning("--resume: no checkpoint in %s; starting at step 0", output)
        return None if found is None else str(found)

    found = gather_json(together(look, world, mesh.device), world, mesh.device)[0]
    return None if found is None else Path(found)


def resume_run(
    path: Path,
    model: Decoder,
    optimizer: torch.optim.Optimizer,
    config: FinetuneConfig,
    placement: Placement,
) -> dict[str, Any]:
    """Return the counters of a checkpoint, having filled model and optimiser; collective.

    Experts lie where they lay, if the layout has the same slots.

    Raises:
        CheckpointError: it is torn or of another model; the settings differ where they must not.

    Collectives: those of `load_state`, and an agreement before.
    """
    mesh = model.mesh

    def compare() -> dict[str, Any] | None:
        facts = facts_of(path)
        _check_settings(path, facts["settings"], to_mapping(config))
        mine, saved = model.config, ModelConfig.from_hub(facts["model"]["config"])
        router = dataclasses.replace(  # settings of the run, not of the model
            saved.moe.router,
            balance_kind=mine.moe.router.balance_kind,
            balance_exact=mine.moe.router.balance_exact,
        )
        same = dataclasses.replace(
            saved,
            residual_dropout=mine.residual_dropout,
            moe=dataclasses.replace(saved.moe, router=router),
        )
        if same != mine:
            raise ConfigError(
                f"{path}: is of another model than model={config.model}; resume with the model "
                f"folder it was started with ({facts['model']['source']})"
            )

        found: dict[str, Any] | None = facts["counters"].get("placement")
        return found

    placement.restore(together(compare, mesh.group("world"), mesh.device))
    facts = load_state(model, optimizer, path)
    if isinstance(optimizer, SmallAdamW):
        optimizer.adopt_state()
    counters: dict[str, Any] = facts["counters"]
    counters.pop("placement", None)
    return counters


def _check_settings(path: Path, saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse what must not change, and say what else has."""
    before, after = dict(_flat(saved)), dict(_flat(now))
    changed = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    for name in (name for name in changed if name in _FIXED):
        raise ConfigError(
            f"{path}: was saved with {name}={before.get(name)!r}, and this run has "
            f"{after.get(name)!r}; resume with the old value, or start a new run from an export of "
            f"the checkpoint"
        )
    for name in (name for name in changed if not name.startswith(_FREE)):
        _log.warning("resuming with %s=%r, which was %r", name, after.get(name), before.get(name))


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and name != "data.columns":
            yield from _flat(value, f"{name}.")
        elif name in _SETS and value is not None:
            yield name, sorted(set(value))
        else:
            yield name, value


@contextmanager
def stop_flag(*, alone: bool) -> Iterator[Callable[[], bool]]:
    """Yield a function that tells whether SIGTERM or SIGINT has come; the process goes on.

    A second SIGTERM changes nothing, so that it breaks no save.
    Outside the main thread, where no handler can be set, the answer is always no.

    Args:
        alone: a second SIGINT is a KeyboardInterrupt, since no launcher is there to end the
            process at once.
    """
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return

    def note(number: int, _: FrameType | None) -> None:
        if alone and number == signal.SIGINT and number in came:
            raise KeyboardInterrupt
        came.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield lambda: bool(came)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def any_rank(flag: bool, mesh: Mesh) -> bool:
    """Return whether the flag is set on any rank.

    Collectives: all-reduce of one integer over the world.
    """
    mine = torch.tensor([int(flag)], dtype=torch.int32, device=mesh.device)
    return bool(int(raw_all_reduce(mine, mesh.group("world"), "max")))


def export_checkpoint(
    path: Path,
    target: Path,
    mesh: Mesh,
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    rules: Callable[[ModelConfig], NameRules] | None = None,
    quantise: Callable[[ModelConfig, NameRules], Quantise] | None = None,
) -> SaveReport:
    """Return what was written to make `target` a hub folder of a checkpoint's weights; collective.

    Adapters are merged.

    Tokenizer files and tensors that the model does not use come from the folder that the run was
    started from.

    Args:
        path: the checkpoint.
        target: the folder to write.
        mesh: the ranks that share the work, in any layout.
        dtype: of the weights; None: as in the folder that the run was started from.
        max_shard_size: bytes a weight file.
        rules: name rules of another form of the experts; None: the form it was read in.
        quantise: what to write in a quantised format; None: nothing.

    Raises:
        CheckpointError: the checkpoint is torn, or its source folder is gone.

    Collectives: those of `load_state` and `save_hub`.
    """

    def read() -> dict[str, Any]:
        facts = facts_of(path)
        about: dict[str, Any] = {"lora": facts["settings"].get("lora"), **facts["model"]}
        if about["source"] is not None:
            try:
                HubFolder(about["source"]).close()
            except CheckpointError as error:
                raise CheckpointError(
                    f"{path}: tokenizer files and unused tensors come from the folder that the "
                    f"run was started from, which cannot be read: {error}"
                ) from error
        return about

    about = together(read, mesh.group("world"), mesh.device)
    config, master = ModelConfig.from_hub(about["config"]), getattr(torch, about["dtype"])
    if about["lora"] is not None and about["lora"].get("base") is not None:
        model = from_pretrained(about["source"], mesh, dtype=master)  # it is not in the checkpoint
    else:
        model = allocate(config, mesh, master)
    model.name_rules = rules_for(config, about["hub_names"])
    if about["lora"] is not None:
        attach(model, from_mapping(LoRAConfig, about["lora"], str(path), "lora."))
    load_state(model, None, path)
    if about["lora"] is not None:
        merge_lora(model)
    written = model.name_rules if rules is None else rules(config)
    return save_hub(
        model,
        target,
        written,
        model.hub_config,
        dtype=dtype,
        max_shard_size=max_shard_size,
        carry_from=about["source"],
        quantise=None if quantise is None else quantise(config, written),
    )
