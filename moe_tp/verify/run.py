"""The check itself: the reference in one process, the layout on all of them, and the verdict.

Letters: B batch · S sequence · K choices.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from moe_tp.checkpoint import gather_named
from moe_tp.errors import ConfigError, MoeTpError
from moe_tp.models import ModelConfig, from_pretrained
from moe_tp.models.decoder import Decoder
from moe_tp.parallel.gradients import clip_grad_norm, parameter_groups, settle_gradients
from moe_tp.parallel.layout import ParallelLayout, Runtime
from moe_tp.parallel.mesh import Mesh
from moe_tp.train.step import forward_backward
from moe_tp.verify.batches import make_step
from moe_tp.verify.compare import Findings, Report, judge, tolerances_for
from moe_tp.verify.data import Batch, Losses, Outcome
from moe_tp.verify.hub import read_config
from moe_tp.verify.reference import Reference
from moe_tp.verify.steps import StepResult, compare_step
from moe_tp.verify.watch import Choices, first_sample, tables, watch

__all__ = ["verify"]

T = TypeVar("T")

_CLIP = 0.5  # of the first gradient norm, so that clipping takes part
_STRIDE = 0.02  # of the weights' norm, what one optimiser step moves


def verify(
    path: str | os.PathLike[str],
    layout: ParallelLayout | None = None,
    *,
    tokens: int = 97,
    dtype: torch.dtype = torch.float32,
    steps: int = 3,
    runtime: Runtime | None = None,
    seed: int = 0,
    micro_batches: int = 2,
    optimizer: str = "adamw",
    device: torch.device | str | None = None,
) -> Report:
    """Return whether a layout computes what one process computes; collective, the same everywhere.

    Rank 0 runs the reference on the batches of all ranks. The layout loads the folder, takes the
    same batches with the reference's choice of experts replayed, and everything is compared: loss,
    logits, every gradient, the gradient norm, and the weights after `steps` optimiser steps with
    clipping. Dropout and router noise are off.

    Args:
        path: a hub-format folder.
        layout: the layout; None: data parallelism over all ranks.
        tokens: about how many a micro-batch holds over all ranks.
        dtype: of the computation; with bfloat16 the weights lie in fp32 and so does the reference.
        steps: optimiser steps; 0 compares one forward and backward only.
        runtime: how the layout is run.
        seed: of the batches.
        micro_batches: of each step.
        optimizer: "adamw" (eps 1e-4; 1e-8 in fp64) or "sgd" with momentum.
        device: as for `Mesh`.

    Raises:
        ConfigError: the layout does not fit, or the router looks across tokens (R1).
        CheckpointError: the folder is not complete.

    Collectives: those of the run; objects gathered to rank 0 and broadcast from it.
    """
    runtime = runtime or Runtime()
    if dtype == torch.bfloat16:
        runtime = replace(runtime, compute_dtype=dtype)
    limits = tolerances_for(dtype)
    config = ModelConfig.from_hub(read_config(path))
    _refuse(config, optimizer, steps)
    mesh = _mesh(layout or ParallelLayout(), runtime, device)
    wide = torch.float32 if dtype == torch.bfloat16 else dtype
    model = from_pretrained(path, mesh, dtype=wide)
    model.train(not _random(config))
    ranks, rank = mesh.size("dp"), mesh.coordinate("dp")
    batches = [
        make_step(
            vocab_size=config.vocab_size,
            tokens=tokens,
            ranks=ranks,
            micro_batches=micro_batches,
            seed=seed + 1000 * s,
        )
        for s in range(max(steps, 1))
    ]
    eps = 1e-8 if dtype == torch.float64 else 1e-4
    course = _Course(optimizer=optimizer, eps=eps)
    truth = _Truth(None, [])
    course, choices = _from_rank_0(
        mesh, lambda: truth.run(path, wide, batches, _losses(config), course, steps)
    )
    findings = Findings()
    first: StepResult | None = None
    optimise = course.build(parameter_groups(model, weight_decay=0.0))
    for s, step in enumerate(batches):
        own = [
            _arguments(parts[rank], first_sample(m, rank, ranks)) for m, parts in enumerate(step)
        ]
        result = _layout_step(model, own, choices[s], s, course.max_norm)
        first = first or result
        results = _to_rank_0(mesh, result if s == 0 else result.without_tensors())
        if results is not None:
            compare_step(findings, results, step, truth.outcomes[s], truth.reference, s == 0)
        if steps:
            optimise.step()
    if steps:
        weights = gather_named(model, "param")
        if mesh.rank == 0:
            findings.compare_named("weights", _host(weights), truth.final())
    assert first is not None

    def conclude() -> Report:
        failures = judge(findings, limits, steps=steps)
        errors: dict[str, float | None] = dict(findings.errors)
        if not steps:
            errors["weights"] = None
        return Report(
            passed=not failures,
            layout=str(mesh.layout),
            loss={"reference": float(truth.outcomes[0].loss), "layout": first.loss},
            max_relative_error=errors,
            worst_parameter=findings.worst[1],
            first_divergent_layer=findings.divergent_layer(limits),
            routing_flips=findings.flips,
            widest_flip=findings.widest_flip,
            tolerances=limits,
            failures=failures,
            steps=steps,
            dtype=str(dtype).removeprefix("torch."),
            tokens=sum(b.input_ids.numel() for parts in batches[0] for b in parts),
            targets=truth.outcomes[0].targets,
        )

    return _from_rank_0(mesh, conclude)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Course:
    """How the weights are moved, the same on both sides."""

    optimizer: str
    eps: float
    max_norm: float = float("inf")
    lr: float = 0.0

    def build(self, params: Any) -> torch.optim.Optimizer:
        """Return the optimiser of one side."""
        if self.optimizer == "sgd":
            return torch.optim.SGD(params, lr=self.lr, momentum=0.9)
        return torch.optim.AdamW(params, lr=self.lr, eps=self.eps, weight_decay=0.0)

    def paced(self, weights: Sequence[torch.Tensor], norm: float) -> _Course:
        """Return the course with its clip and learning rate set from the first gradients.

        A step moves the weights by a set part of their norm: enough that a wrong update shows in
        them, too little to leave the point where rounding stays small.
        """
        size = math.sqrt(sum(float(w.detach().double().square().sum()) for w in weights))
        max_norm = _CLIP * norm
        if self.optimizer == "sgd":
            lr = _STRIDE * size / max(max_norm, 1e-30)
        else:
            lr = _STRIDE * size / sum(w.numel() for w in weights) ** 0.5
        return replace(self, max_norm=max_norm, lr=lr)


@dataclass(slots=True)
class _Truth:
    """The reference's side; filled on rank 0 only."""

    _reference: Reference | None
    outcomes: list[Outcome]

    @property
    def reference(self) -> Reference:
        """The model, after its last step."""
        assert self._reference is not None
        return self._reference

    def run(
        self,
        path: str | os.PathLike[str],
        dtype: torch.dtype,
        batches: list[list[list[Batch]]],
        losses: Losses,
        course: _Course,
        steps: int,
    ) -> tuple[_Course, list[dict[int, Choices]]]:
        """Return the paced course and the choices of each step, after running the reference."""
        model = self._reference = Reference.load(path, dtype)
        layers = sorted(model.facts.moe_layers)
        optimise: torch.optim.Optimizer | None = None
        choices = []
        for step in batches:
            out = model.step(step, losses)
            self.outcomes.append(out)
            choices.append(tables(step, out.routing, layers))
            leaves = list(model.weights.values())
            if optimise is None:
                course = course.paced(leaves, out.grad_norm)
                optimise = course.build(leaves)
            scale = min(1.0, course.max_norm / (out.grad_norm + 1e-6))
            for name, leaf in model.weights.items():
                leaf.grad = out.gradients[name] * scale
            if steps:
                optimise.step()
        return course, choices

    def final(self) -> dict[str, torch.Tensor]:
        """Return the weights after the last step by hub name, buffers among them."""
        weights = {name: leaf.detach() for name, leaf in self.reference.weights.items()}
        return {**weights, **self.reference.buffers}


def _layout_step(
    model: Decoder,
    micro_batches: list[dict[str, Any]],
    choices: dict[int, Choices],
    step: int,
    max_norm: float,
) -> StepResult:
    """Return what one step of the layout gave on this rank; gradients are left clipped."""
    model.zero_grad()
    with watch(model, choices) as seen:
        out = forward_backward(model, micro_batches, step=step, return_logits=step == 0)
    settle_gradients(model)
    gradients = _host(gather_named(model, "grad")) if step == 0 else {}
    norm = clip_grad_norm(model, max_norm)
    mesh = model.mesh
    return StepResult(
        loss=float(out.loss),
        aux_loss=float(out.aux.loss),
        targets=out.target_tokens,
        grad_norm=norm,
        rank=mesh.coordinate("dp"),
        logits=[logits.cpu() for logits in out.logits],
        gradients=gradients if mesh.rank == 0 else {},
        seen=seen.joined(),
    )


def _refuse(config: ModelConfig, optimizer: str, steps: int) -> None:
    """Refuse what cannot be compared."""
    router = config.moe.router
    if router.layout_dependent:
        raise ConfigError(
            f"verify compares layouts, but this router's choice depends on the layout "
            f"({router.layout_dependence}); choose kind='top_k' without capacity"
        )
    if router.balance_coef and router.balance_kind != "micro_batch":
        raise ConfigError(
            f"verify computes balance_kind='micro_batch', not {router.balance_kind!r}; set "
            f"balance_coef=0 to compare the rest"
        )
    if optimizer not in ("adamw", "sgd"):
        raise ConfigError(f"optimizer={optimizer!r} is not one of adamw, sgd")
    if steps < 0:
        raise ConfigError(f"steps={steps} must be at least 0")


def _random(config: ModelConfig) -> bool:
    """Return whether training draws random numbers: then the layout is run as in evaluation."""
    router = config.moe.router
    drops = config.residual_dropout or config.attention.dropout
    return bool(drops or router.noisy or router.input_jitter)


def _losses(config: ModelConfig) -> Losses:
    router = config.moe.router
    return Losses(balance=router.balance_coef, z=router.z_coef)


def _mesh(layout: ParallelLayout, runtime: Runtime, device: torch.device | str | None) -> Mesh:
    if dist.is_initialized():
        return Mesh(layout, runtime, device)
    layout.resolve(1)
    return Mesh.single(runtime, device)


def _arguments(batch: Batch, first: int) -> dict[str, Any]:
    """Return a part as the arguments of a model's call."""
    fields = {
        "input_ids": batch.input_ids,
        "labels": batch.labels,
        "attention_mask": batch.attention_mask,
        "position_ids": batch.position_ids,
    }
    return {name: t for name, t in fields.items() if t is not None} | {"sample_offset": first}


def _host(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu() for name, tensor in tensors.items()}


def _from_rank_0(mesh: Mesh, compute: Callable[[], T]) -> T:
    """Return what `compute` gives on rank 0, on every rank; its error is every rank's.

    Collectives: broadcast of an object over the world.
    """
    box: list[Any] = [None]
    if mesh.rank == 0:
        try:
            box = [(compute(), None)]
        except MoeTpError as error:
            box = [(None, error)]
    if mesh.world_size > 1:
        dist.broadcast_object_list(box, src=0)
    value, failure = box[0]
    if failure is not None:
        raise failure
    result: T = value
    return result


def _to_rank_0(mesh: Mesh, value: T) -> list[T] | None:
    """Return every rank's value on rank 0, None elsewhere.

    Collectives: gather of an object over the world.
    """
    if mesh.world_size == 1:
        return [value]
    values: list[Any] | None = [None] * mesh.world_size if mesh.rank == 0 else None
    dist.gather_object(value, values, dst=0)
    return values
