"""The settings of a fine-tuning run, as its YAML file has them; every field is documented here."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch

from moe_tp.checkpoint.files import parse_size
from moe_tp.errors import ConfigError
from moe_tp.parallel.layout import ParallelLayout, Runtime
from moe_tp.train.lora import LoRAConfig
from moe_tp.train.overrides import BalanceLoss

Format = Literal["auto", "text", "messages", "prompt", "alpaca", "sharegpt", "tokens"]
LongDocuments = Literal["auto", "split", "truncate", "drop"]
LossOn = Literal["auto", "answers", "all"]
Schedule = Literal["constant", "linear", "cosine", "wsd"]
OptimizerName = Literal["adamw", "muon", "sgd"]
TrackerName = Literal["tensorboard", "wandb", "trackio"]
Moments = Literal["float32", "bfloat16", "8bit"]
Kernel = Literal["auto", "loop", "foreach", "fused"]

# What the formats of records read; data.columns says what the files call it.
COLUMNS = (
    "text", "messages", "conversations", "prompt", "completion", "instruction", "input", "output",
    "system", "history", "tools", "input_ids", "labels", "attention_mask",
)  # fmt: skip

_ROWS_A_STEP = 8  # where neither global_batch nor global_batch_tokens is given
_AT_LEAST_1 = (
    "micro_batch", "global_batch", "keep", "load_every", "max_bad_steps", "sample_tokens"
)  # fmt: skip
_AT_LEAST_0 = (
    "warmup_steps", "sample_every", "eval_every", "save_every", "keep_best", "probe_tokens",
    "rebalance_every", "decay_steps",
)  # fmt: skip

_NOT_NEGATIVE = (
    "lr", "router_lr", "weight_decay", "eps", "max_grad_norm", "balance_coef", "z_coef"
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """What is learned from.

    Args:
        train: files, folders of them, or globs (`data/part-*.jsonl`, `data/**/*.txt`): .txt,
            .jsonl, .json, .csv, each also as .gz, .bz2 or .xz, .parquet, and folders that
            `datasets` has saved. A .txt file is one text, whose lines end with newlines alone.
        eval: likewise, held out; none: no evaluation.
        format: of a record. `text`: {text}; `messages`: {messages: [{role, content}]}; `prompt`:
            {prompt, completion}; `alpaca`: {instruction, input, output}; `sharegpt`:
            {conversations: [{from, value}]}; `tokens`: {input_ids, labels, attention_mask}, of
            which what is masked is left out; `auto` goes by the keys of each file's first record.
        columns: name that this library reads -> name in the files, where they differ.
        seq_len: tokens a row.
        packing: put several documents in a row, with no attention and no target across.
        long: documents of more than seq_len tokens are split into rows, cut at the end, or left
            out; `auto` splits text and cuts conversations.
        loss: on `answers` (assistant turns, completions) or on `all` tokens; `auto`: answers where
            a record has them.
        chat_template: file of a jinja template; none: the model folder's.
        tokenizer: folder of the tokenizer; none: the model's.
        add_eos: end each text and completion with the end token if it does not; a conversation
            ends as its chat template says.
        shuffle: rows in a random order, another one each epoch.
        streaming: read the training data while the run goes on, instead of tokenising all of it
            first; shuffled and packed within windows. It needs train.steps.
        stream_window: documents of such a window.
    """

    train: tuple[str, ...]
    eval: tuple[str, ...] = ()
    format: Format = "auto"
    columns: Mapping[str, str] = field(default_factory=dict)
    seq_len: int = 2048
    packing: bool = True
    long: LongDocuments = "auto"
    loss: LossOn = "auto"
    chat_template: str | None = None
    tokenizer: str | None = None
    add_eos: bool = True
    shuffle: bool = True
    streaming: bool = False
    stream_window: int = 10_000

    def __post_init__(self) -> None:
        if not self.train:
            raise ConfigError("data.train is empty; name at least one file or folder")
        for ours, theirs in self.columns.items():
            if ours not in COLUMNS:
                turned = f" (did you mean {theirs}: {ours}?)" if theirs in COLUMNS else ""
                raise ConfigError(
                    f"data.columns={{{ours}: {theirs}}} names {ours!r}, which no format reads"
                    f"{turned}; write a name of {', '.join(COLUMNS)}, then the one in the files"
                )
        if len(set(self.columns.values())) < len(self.columns):
            raise ConfigError(
                f"data.columns={dict(self.columns)} gives one column two names; leave one out"
            )
        _at_least("data.seq_len", self.seq_len, 2)
        _at_least("data.stream_window", self.stream_window, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """How it is learned.

    Args:
        steps: optimiser steps; none: as many as `epochs` takes.
        epochs: passes over the data, where `steps` is none.
        micro_batch: rows a data-parallel rank computes at a time.
        global_batch: rows of an optimiser step over all ranks; a multiple of micro_batch x dp.
            None: what global_batch_tokens makes, or 8.
        global_batch_tokens: the same in tokens, a multiple of data.seq_len, instead of it.
        optimizer: `adamw`; `muon` for matrices of hidden layers (each expert's by itself), with
            AdamW for embeddings, head, norms and routers; `sgd` with momentum.
        moments: what AdamW's moments and Muon's momentum are kept in: `float32`; `bfloat16`, with
            stochastic rounding; `8bit`, which needs torchao. Weights in bf16
            (runtime.master_dtype) are rounded stochastically by adamw and muon.
        kernel: of AdamW with fp32 weights and moments: `loop`, `foreach`, `fused`; `auto`: torch's
            choice.
        lr: learning rate at its highest.
        router_lr: that of routers; none: lr.
        weight_decay: for weights; norms and biases get none.
        betas: decay of AdamW's moments.
        eps: of AdamW.
        momentum: of sgd, and of muon, for which 0.95 is usual.
        schedule: after the warmup: `constant`; `linear` or `cosine` down to min_lr_ratio x lr at
            the last step; `wsd`: constant, then linear over the last decay_steps.
        warmup_steps: steps of a linear rise from 0.
        decay_steps: of wsd; none: a tenth of all.
        min_lr_ratio: where the schedule ends, as a part of lr.
        max_grad_norm: gradients are scaled down to this norm; 0: never.
        balance_coef: of the routers' load-balance loss; none: the model's own. It is added
            whether or not anybody asks for router logits.
        balance_kind: over which tokens that loss looks: `micro_batch`, over all ranks, and so
            another with another micro_batch x dp; `sequence`, each row or packed document by
            itself; `global_batch`, the step so far; `global_batch_exact`, all of the step, for one
            more forward pass; none: the model's own.
        z_coef: of the routers' z-loss; none: the model's own.
        rebalance_every: steps after which experts are dealt anew over the ranks of ep, by the load
            since the last time, hot ones with replicas in runtime.spare_slots; with ep 1 none
            moves; 0: never.
        freeze: what is not trained: patterns over hub names (`model.layers.0.*`, `q_proj`), groups
            (router, experts, shared_experts, attention, norms, embeddings), or `experts.3`, that
            expert of every layer. A frozen router keeps its correction bias too.
        only: likewise, what alone is trained; empty: all that is not frozen.
        residual_dropout: probability, in training only; none: the model's own.
        sample_prompts: texts that the model goes on with during the run, greedily; they are shown,
            and kept in samples.jsonl.
        sample_every: steps between them; 0: only after the last step.
        sample_tokens: new tokens of each at most.
        eval_every: steps between evaluations; 0: only after the last step.
        save_every: steps between checkpoints; 0: none, except when told to stop.
        keep: newest checkpoints that are kept.
        keep_best: checkpoints kept beside them: those with the smallest held-out loss among the
            ones of steps that were evaluated.
        async_save: write checkpoints beside the next steps, from a copy in host memory (on each
            rank, of what that rank writes).
        load_every: steps between lines of expert load in load.jsonl.
        trackers: where each step's numbers go beside metrics.jsonl: `tensorboard`, `wandb`,
            `trackio`; the package of that name must be installed.
        project: of wandb and trackio.
        max_bad_steps: steps in a row with a loss or gradient that is not finite, each left out,
            before the run stops.
        probe_tokens: logits of this many tokens of data are written to probe.safetensors by the
            trained layout, so that final/ can be checked in another; 0: none.
        save_dtype: of the weights in final/; none: as in the model folder.
        max_shard_size: of a weight file in final/.
    """

    steps: int | None = None
    epochs: float | None = None
    micro_batch: int = 1
    global_batch: int | None = None
    global_batch_tokens: int | None = None
    optimizer: OptimizerName = "adamw"
    moments: Moments = "float32"
    kernel: Kernel = "auto"
    lr: float = 1e-5
    router_lr: float | None = None
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    momentum: float = 0.9
    schedule: Schedule = "cosine"
    warmup_steps: int = 0
    decay_steps: int | None = None
    min_lr_ratio: float = 0.1
    max_grad_norm: float = 1.0
    balance_coef: float | None = None
    balance_kind: BalanceLoss | None = None
    z_coef: float | None = None
    rebalance_every: int = 0
    freeze: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    residual_dropout: float | None = None
    sample_prompts: tuple[str, ...] = ()
    sample_every: int = 0
    sample_tokens: int = 64
    eval_every: int = 0
    save_every: int = 0
    keep: int = 2
    keep_best: int = 1
    async_save: bool = True
    load_every: int = 10
    trackers: tuple[TrackerName, ...] = ()
    project: str = "moe_tp"
    max_bad_steps: int = 5
    probe_tokens: int = 0
    save_dtype: torch.dtype | None = None
    max_shard_size: str = "5GB"

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.epochs is None):
            raise ConfigError(
                f"train.steps={self.steps} and train.epochs={self.epochs}: give exactly one of them"
            )
        for name in _AT_LEAST_1:
            value = getattr(self, name)
            _at_least(f"train.{name}", 1 if value is None else value, 1)
        for name in _AT_LEAST_0:
            _at_least(f"train.{name}", getattr(self, name) or 0, 0)
        if self.steps is not None:
            _at_least("train.steps", self.steps, 1)
        if self.epochs is not None and not 0 < self.epochs < math.inf:
            raise ConfigError(f"train.epochs={self.epochs} must be a finite number above 0")
        if self.eps == 0 and self.optimizer != "sgd":
            raise ConfigError(
                "train.eps=0.0 divides 0 by 0 where a gradient is 0, as of an expert without a "
                "token; choose a number above 0, such as 1e-8"
            )
        for name in _NOT_NEGATIVE:
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ConfigError(f"train.{name}={value} must be a finite number, 0 or above")
        for name, values in (("betas", self.betas), ("momentum", (self.momentum,))):
            if not all(0 <= value < 1 for value in values):
                raise ConfigError(f"train.{name}={getattr(self, name)} must lie in [0, 1)")
        if not 0 <= self.min_lr_ratio <= 1:
            raise ConfigError(f"train.min_lr_ratio={self.min_lr_ratio} must lie in [0, 1]")
        plain = self.optimizer == "adamw" and self.moments == "float32"
        if self.kernel != "auto" and not plain:
            raise ConfigError(
                f"train.kernel={self.kernel!r} is one of AdamW with float32 moments; leave it out "
                f"with optimizer={self.optimizer!r}, moments={self.moments!r}"
            )
        if self.optimizer == "sgd" and self.moments != "float32":
            raise ConfigError(
                f"train.moments={self.moments!r} is for adamw and muon; leave it out with sgd"
            )
        if self.rebalance_every and self.moments == "8bit":
            raise ConfigError(
                f"train.rebalance_every={self.rebalance_every} moves experts with their moments, "
                f"but train.moments='8bit' are kept in blocks of several; choose 'bfloat16'"
            )
        if self.residual_dropout is not None and not 0 <= self.residual_dropout < 1:
            raise ConfigError(f"train.residual_dropout={self.residual_dropout} must lie in [0, 1)")
        try:
            parse_size(self.max_shard_size)
        except ConfigError as error:
            raise ConfigError(f"train.{error}") from error

    def accumulation(self, dp: int) -> int:
        """Return the micro-batches of a step on each of `dp` ranks.

        Raises:
            ConfigError: they do not fill the global batch exactly.
        """
        at_once, rows = self.micro_batch * dp, self.rows_a_step
        if rows % at_once:
            raise ConfigError(
                f"train.global_batch={rows} is no multiple of micro_batch x dp = "
                f"{self.micro_batch} x {dp}; choose a multiple of {at_once}, or another micro_batch"
            )
        return rows // at_once

    @property
    def rows_a_step(self) -> int:
        """Rows of an optimiser step over all ranks."""
        return _ROWS_A_STEP if self.global_batch is None else self.global_batch


@dataclass(frozen=True, slots=True, kw_only=True)
class FinetuneConfig:
    """A whole run.

    Args:
        model: hub-format folder to start from.
        output: folder that gets metrics, report, checkpoints and final/.
        data: what is learned from.
        train: how it is learned.
        lora: adapters, trained instead of the weights; none: all weights are trained. They are
            written to adapter/ (a PEFT folder) and merged into final/. Frozen weights may lie in
            bf16 (runtime.master_dtype); adapters stay in fp32.
        parallel: the layout.
        runtime: how the layout is run.
        seed: of the data order and of dropout.
    """

    model: str
    output: str
    data: DataConfig
    train: TrainConfig
    lora: LoRAConfig | None = None
    parallel: ParallelLayout = field(default_factory=ParallelLayout)
    runtime: Runtime = field(default_factory=Runtime)
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.output:
            raise ConfigError("output is empty; name a folder")
        if os.path.realpath(self.output) == os.path.realpath(self.model):
            raise ConfigError(f"output={self.output} is the model's own folder; choose another")
        for path in (*self.data.train, *self.data.eval):
            if os.path.isdir(path) and _lies_in(self.output, path):
                raise ConfigError(
                    f"output={self.output} lies in the data folder {path}, so that a resume would "
                    f"read the run's own files as data; choose another"
                )
        if not 0 <= self.seed < 1 << 63:
            raise ConfigError(f"seed={self.seed} must lie in [0, 2**63)")
        if self.lora is not None and (self.train.freeze or self.train.only):
            raise ConfigError(
                "train.freeze and train.only choose among the model's weights, and lora freezes "
                "them all; say lora.targets and lora.experts instead"
            )
        if self.data.streaming and self.train.steps is None:
            raise ConfigError(
                "data.streaming=True does not know how many steps an epoch has; give train.steps "
                "instead of train.epochs"
            )
        if self.data.streaming and self.train.probe_tokens and not self.data.eval:
            raise ConfigError(
                f"train.probe_tokens={self.train.probe_tokens} takes its tokens from data.eval "
                f"where data.streaming is on; give data.eval"
            )
        self._refuse_fp16()
        object.__setattr__(self, "train", self._train_with_batch())

    def _refuse_fp16(self) -> None:
        """Refuse gradients in fp16: nothing scales the loss, and what is below 2^-25 becomes 0.

        The frozen weights of LoRA may lie in it where another dtype computes.
        """
        computed, kept = self.runtime.compute_dtype, self.runtime.master_dtype
        if kept == torch.float16 and (self.lora is None or computed is None):
            name = "master_dtype"
        elif computed == torch.float16:
            name = "compute_dtype"
        else:
            return
        raise ConfigError(
            f"runtime.{name}=float16 cannot be trained in: the loss is not scaled here, so that "
            f"small gradients become 0; choose bfloat16, or leave it out for float32"
        )

    def _train_with_batch(self) -> TrainConfig:
        """Return the training settings with the global batch in rows."""
        tokens, length = self.train.global_batch_tokens, self.data.seq_len
        if tokens is None:
            return replace(self.train, global_batch=self.train.rows_a_step)
        if tokens < length or tokens % length:
            raise ConfigError(
                f"train.global_batch_tokens={tokens} is no multiple of data.seq_len={length}; "
                f"choose {max(1, round(tokens / length)) * length}"
            )
        rows = tokens // length
        if self.train.global_batch not in (None, rows):
            raise ConfigError(
                f"train.global_batch={self.train.global_batch} and global_batch_tokens={tokens}, "
                f"which are {rows} rows of data.seq_len={length}: give one of them"
            )
        return replace(self.train, global_batch=rows)


def _lies_in(path: str, folder: str) -> bool:
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def _at_least(name: str, value: int, low: int) -> None:
    if value < low:
        raise ConfigError(f"{name}={value} must be at least {low}")
