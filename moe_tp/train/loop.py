"""The fine-tuning run: hub folder in; metrics, report and a hub folder out."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from moe_tp.checkpoint.agree import together
from moe_tp.checkpoint.scan import FINAL
from moe_tp.experts.router import forget_router_load, update_router_bias
from moe_tp.models.load import from_pretrained, save_pretrained
from moe_tp.parallel.gradients import clip_grad_norm, settle_gradients
from moe_tp.parallel.mesh import Mesh
from moe_tp.train import checks
from moe_tp.train.baseline import unigram_loss
from moe_tp.train.config import FinetuneConfig
from moe_tp.train.data import DataStream, data_together, load_rows, warn_of_length
from moe_tp.train.evaluate import evaluate
from moe_tp.train.files import list_files
from moe_tp.train.freeze import choose_trained
from moe_tp.train.health import hopeless, non_finite_parameter, peak_memory
from moe_tp.train.journal import Journal
from moe_tp.train.load import StepLoad, step_load
from moe_tp.train.lock import alone_in
from moe_tp.train.lora import apply_lora, merge_lora
from moe_tp.train.lora_io import save_adapter
from moe_tp.train.optim import make_optimizer, rate_factor, set_rate
from moe_tp.train.overrides import set_balance, set_residual_dropout
from moe_tp.train.placing import Placement
from moe_tp.train.probe import write_probe
from moe_tp.train.progress import ProgressLine
from moe_tp.train.report import write_report
from moe_tp.train.resume import any_rank, find_checkpoint, resume_run, save_checkpoint, stop_flag
from moe_tp.train.rows import Rows
from moe_tp.train.samples import Samples, check_samples
from moe_tp.train.saver import Saver
from moe_tp.train.settings import to_mapping, to_yaml
from moe_tp.train.step import StepOutput, forward_backward
from moe_tp.train.stream import WindowStream
from moe_tp.train.trackers import Tracker, open_trackers

ADAPTER, SETTINGS = "adapter", "config.yaml"


def finetune(
    config: FinetuneConfig, mesh: Mesh, *, quiet: bool = False, resume: bool = False
) -> dict[str, Any]:
    """Return what the run came to, having trained and written the output folder; collective.

    Args:
        config: the run; `parallel` and `runtime` are those that `mesh` was made of.
        mesh: the mesh.
        quiet: show no progress.
        resume: go on from the newest complete checkpoint in the output folder, if there is one.

    Raises:
        ConfigError: settings do not fit each other or the model.
        DataError: the data cannot be used.
        CheckpointError: the model folder cannot be read, or the output not written.

    Collectives: those of loading, of each step, of evaluations and of saving.
    """
    config.train.accumulation(mesh.size("dp"))  # refused before anything is allocated
    check_samples(config, mesh)
    data = config.data
    train, held_out = data_together(lambda: [*map(list_files, (data.train, data.eval))], mesh)
    checks.warn_of_files(train, held_out)
    mesh.agree("the settings of the run", repr(config))
    with alone_in(Path(config.output), mesh):
        checkpoint = find_checkpoint(config, mesh, resume=resume)
        run = Run(config, mesh, quiet=quiet)
        if checkpoint is not None:
            run.restore(checkpoint)
        together(run.write_settings, mesh.group("world"), mesh.device)
        return run.go()


class Run:
    """A fine-tuning run in progress.

    Args:
        config: the settings.
        mesh: the mesh.
        quiet: show no progress.

    Attributes:
        model, optimizer, stream: what is trained, by what, on what.
        steps: of the whole run.
        step: steps done.
        total_tokens: targets learned from since the start.
    """

    def __init__(self, config: FinetuneConfig, mesh: Mesh, *, quiet: bool = False) -> None:
        self.config, self.mesh = config, mesh
        self.output, self.first = Path(config.output), mesh.rank == 0
        self.quiet = quiet or not self.first
        together(self._open_output, mesh.group("world"), mesh.device)
        # Master weights are fp32 unless the runtime names another dtype: an update of lr x 1 is
        # lost in bf16 as soon as a weight is 256 times larger.
        self.model = from_pretrained(
            config.model, mesh, dtype=mesh.runtime.master_dtype or torch.float32
        )
        warn_of_length(config.data.seq_len, self.model.config.max_positions)
        self.model.seed = config.seed
        self._own_dropout = self.model.config.residual_dropout
        if config.train.residual_dropout is not None:
            set_residual_dropout(self.model, config.train.residual_dropout)
        set_balance(self.model, (t := config.train).balance_coef, t.z_coef, t.balance_kind)
        if config.lora is not None:
            apply_lora(self.model, config.lora)
        choose_trained(self.model, config.train.freeze, config.train.only)
        self.held_out = self._load(config.data.eval) if config.data.eval else None
        self.rows: Rows | None = None
        self.stream: DataStream | WindowStream
        if config.data.streaming:
            self.stream = self._window_stream()
        else:
            self.rows = self._load(config.data.train)
            checks.warn_of_few(self.rows, config.train)
            self.stream = DataStream(
                self.rows,
                seed=config.seed,
                shuffle=config.data.shuffle,
                global_batch=config.train.rows_a_step,
                micro_batch=config.train.micro_batch,
                dp=mesh.size("dp"),
                dp_rank=mesh.coordinate("dp"),
            )
        self.steps = checks.steps_of(config.train, self.rows)
        checks.warn_of_settings(config, self.steps)
        if self.first:
            shapes = self.model.name_rules.hub_shapes()
            checks.warn_of_final(self.output / FINAL, shapes, t.save_dtype)
        self.optimizer = make_optimizer(self.model, config.train, seed=config.seed)
        self.placement = Placement(self.model, config.train.rebalance_every)
        self.saver = Saver(mesh, background=config.train.async_save)
        self.step = self.total_tokens = self.bad_steps = self.bad_in_a_row = 0
        self.last_loss: float | None = None
        self.stopped = False

    def go(self) -> dict[str, Any]:
        """Return the result of the run, having done all its steps and written its folder."""
        began = time.monotonic()
        with stop_flag(alone=self.mesh.world_size == 1) as told_to_stop:
            line = self._train(told_to_stop)
            seconds = time.monotonic() - began
            final = None if self.stopped else self.save_final()
            result = {
                "final": None if final is None else str(final),
                "steps": self.step,
                "skipped_steps": self.bad_steps,
                "tokens": self.total_tokens,
                "loss": line.get("loss", self.last_loss),
                "eval_loss": line.get("eval_loss"),
                "unigram_loss": self._unigram_loss(),
                "seconds": round(seconds, 2),
            }
            together(self._write_report, self.mesh.group("world"), self.mesh.device)
        return result

    def _train(self, told_to_stop: Callable[[], bool]) -> dict[str, Any]:
        """Return the last step's line, having done all steps, or those until it is told to stop."""
        line: dict[str, Any] = {}
        with ExitStack() as stack:
            journal = stack.enter_context(self._open_journal())
            samples = self._open_samples()
            if samples is not None:
                stack.callback(samples.close)
            about = "streamed data" if self.rows is None else self.rows.counts
            journal.note(f"{self.config.model} on {self.mesh.layout}: {about}")
            if self.step:
                journal.note(f"resuming after step {self.step}")
            while self.step < self.steps and not self.stopped:
                line, load = self.train_step()
                line |= self._evaluation_if_due(journal)
                if samples is not None and self._due(self.config.train.sample_every):
                    samples.draw(self.model, self.step, journal)
                journal.step(line, load)
                if self.bad_in_a_row >= self.config.train.max_bad_steps:
                    self.saver.wait()
                    raise hopeless(self.bad_in_a_row, self.step)
                every = self.config.train.save_every
                self.stopped = any_rank(told_to_stop(), self.mesh)
                if self.stopped or (every and self.step % every == 0):
                    path = self.save_checkpoint(line.get("eval_loss"))
                    journal.note(f"{'told to stop, ' * self.stopped}saving {path.name}")
            self.saver.wait()
            if isinstance(self.stream, WindowStream):
                self.stream.close()
                journal.note(f"read {self.stream.counts}")
        return line

    def save_checkpoint(self, eval_loss: float | None = None) -> Path:
        """Return the checkpoint of the step that has just ended; it is there after `saver.wait()`.

        Args:
            eval_loss: held-out loss at this step, if it was evaluated.

        Collectives: those of `resume.save_checkpoint`.
        """
        counters = {
            "step": self.step,
            "total_tokens": self.total_tokens,
            "bad_steps": self.bad_steps,
            "bad_in_a_row": self.bad_in_a_row,
            "last_loss": self.last_loss,
            "stream": self.stream.state(),
            "placement": self.placement.state(),
        }
        return save_checkpoint(
            self.model,
            self.optimizer,
            self.config,
            counters,
            self.saver,
            residual_dropout=self._own_dropout,
            eval_loss=eval_loss,
        )

    def restore(self, checkpoint: Path) -> None:
        """Go on from a checkpoint of any layout; collective.

        Random numbers need nothing: all are functions of seed, step and place.

        Raises:
            CheckpointError: it is torn, or of another model or data; see `resume_run`.
        """
        counters = resume_run(checkpoint, self.model, self.optimizer, self.config, self.placement)
        self.stream.restore(counters.pop("stream"))
        for name, value in counters.items():
            assert hasattr(self, name), name
            setattr(self, name, value)

    def _open_samples(self) -> Samples | None:
        if not self.config.train.sample_prompts:
            return None
        output = self.output if self.first else None
        return together(
            lambda: Samples(self.config, output, done=self.step),
            self.mesh.group("world"),
            self.mesh.device,
        )

    def _open_journal(self) -> Journal:
        """Return what the run writes as it goes; an error of a tracker is raised on every rank."""
        train, world = self.config.train, self.mesh.group("world")

        def trackers() -> list[Tracker]:
            if not self.first or not train.trackers:
                return []
            settings = to_mapping(self.config)
            names, project = train.trackers, train.project
            return open_trackers(
                names, self.output, project=project, settings=settings, step=self.step
            )

        return Journal(
            self.output if self.first else None,
            together(trackers, world, self.mesh.device),
            ProgressLine(self.steps, start=self.step, shown=not self.quiet),
            done=self.step,
            load_every=train.load_every,
            last=self.steps,
        )

    def train_step(self) -> tuple[dict[str, Any], StepLoad]:
        """Return the step's line of metrics and its load, having done one optimiser step.

        A step whose loss or gradient is not finite changes nothing but is counted.
        """
        train, start = self.config.train, time.monotonic()
        rate = set_rate(self.optimizer, rate_factor(train, self.step, self.steps))
        self.model.train()
        self.optimizer.zero_grad()
        out = forward_backward(self.model, self.stream.next_step(), step=self.step)
        settle_gradients(self.model)
        norm = clip_grad_norm(self.model, train.max_grad_norm or math.inf)
        loss = float(out.loss)
        good = math.isfinite(loss) and math.isfinite(norm)
        self.last_loss = loss if math.isfinite(loss) else None
        where = None if good else non_finite_parameter(self.model)
        if good:
            self.optimizer.step()
            update_router_bias(self.model)
            self.bad_in_a_row = 0
        else:
            forget_router_load(self.model)
            self.bad_steps += 1
            self.bad_in_a_row += 1
        self.step += 1
        self.total_tokens += out.target_tokens
        self.placement.after_step(self.step, out.aux.counts_LE, self.optimizer)
        load = step_load(self.model, out.aux)
        line = self._line(out, load, norm, rate, time.monotonic() - start)
        if not good:
            line |= {"skipped": True, "where": where}
        return line, load

    def save_final(self) -> Path:
        """Return `final/`, a hub folder with tokenizer files, and write the probe beside it.

        Collectives: those of `save_pretrained` and of one forward pass.
        """
        final, train = self.output / FINAL, self.config.train
        set_residual_dropout(self.model, self._own_dropout)  # a setting of the run, not the model
        if self.config.lora is not None:
            save_adapter(self.model, self.output / ADAPTER)
            merge_lora(self.model)
        save_pretrained(
            self.model, final, dtype=train.save_dtype, max_shard_size=train.max_shard_size
        )
        if train.probe_tokens:
            self.model.eval()
            rows = self.held_out or self.rows
            assert rows is not None  # refused by the settings
            write_probe(self.model, rows, train.probe_tokens, self.output)
        return final

    def _window_stream(self) -> WindowStream:
        config = self.config
        return WindowStream(
            config.data,
            self.mesh,
            model_folder=config.model,
            vocab_size=self.model.config.vocab_size,
            cache=self.output / "rows" / "stream",
            seed=config.seed,
            global_batch=config.train.rows_a_step,
            micro_batch=config.train.micro_batch,
        )

    def _load(self, files: tuple[str, ...]) -> Rows:
        return load_rows(
            self.config.data,
            files,
            self.mesh,
            model_folder=self.config.model,
            vocab_size=self.model.config.vocab_size,
            cache=self.output / "rows",
        )

    def _unigram_loss(self) -> float | None:
        if self.held_out is None or self.rows is None or not self.first:
            return None
        return unigram_loss(self.rows, self.held_out, self.model.config.vocab_size)

    def _open_output(self) -> None:
        if self.first:
            checks.make_output(self.output)

    def write_settings(self) -> None:
        """Write the resolved settings, which a resume that is refused must leave as they were."""
        if self.first:
            (self.output / SETTINGS).write_text(to_yaml(self.config), encoding="utf-8")

    def _write_report(self) -> None:
        if self.first:
            title = f"{Path(self.config.model).name} on {self.mesh.layout}"
            write_report(self.output, title=title, settings=to_yaml(self.config))

    def _due(self, every: int) -> bool:
        """Return whether what is done every so many steps, and after the last, is due."""
        return self.step == self.steps or (every > 0 and self.step % every == 0)

    def _evaluation_if_due(self, journal: Journal) -> dict[str, float]:
        if self.held_out is None or not self._due(self.config.train.eval_every):
            return {}
        at_once = self.config.train.micro_batch
        found = evaluate(self.model, self.held_out, micro_batch=at_once, step=self.step)
        journal.note(
            f"step {self.step}: held-out loss {found['eval_loss']:.4f}, "
            f"perplexity {found['eval_perplexity']:.2f}"
        )
        return found

    def _line(
        self, out: StepOutput, load: StepLoad, norm: float, rate: float, seconds: float
    ) -> dict[str, Any]:
        """Return the step's line of metrics; `tokens` are targets, the rate is of all tokens."""
        line: dict[str, Any] = {
            "step": self.step,
            "loss": float(out.loss),
            "grad_norm": norm,
            "lr": rate,
            "tokens": out.target_tokens,
            "total_tokens": self.total_tokens,
            "seconds": round(seconds, 4),
            "tokens_per_second": out.tokens / max(seconds, 1e-9),
            "load_balance_loss": float(out.aux.loss),
            **load.summary(),
            "skipped_steps": self.bad_steps,
        }
        line["memory_gib"] = round(peak_memory(self.mesh.device) / 2**30, 4)
        return line
