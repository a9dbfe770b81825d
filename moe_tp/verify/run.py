"""The check itself: the reference in one process, the layout on all of them, and the verdict.

Letters: B batch · S sequence · K choices.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from moe_tp.checkpoint import gather_named
from moe_tp.errors import ConfigError, MoeTpError
from moe_tp.experts.router import forget_router_load
from moe_tp.models import ModelConfig, from_pretrained
from moe_tp.models.decoder import Decoder
from moe_tp.parallel.gradients import clip_grad_norm, parameter_groups, settle_gradients
from moe_tp.parallel.layout import ParallelLayout, Runtime
from moe_tp.parallel.mesh import Mesh
from moe_tp.train.overrides import BalanceLoss, set_balance
from moe_tp.train.step import forward_backward
from moe_tp.verify.batches import make_step
from moe_tp.verify.compare import Findings, Report, tolerances_for
from moe_tp.verify.course import Course, Truth
from moe_tp.verify.data import Batch, Losses
from moe_tp.verify.hub import read_config
from moe_tp.verify.steps import StepResult, compare_step
from moe_tp.verify.watch import Choices, first_sample, watch

__all__ = ["verify"]

T = TypeVar("T")
_COEF = 0.01  # of a balance loss that is asked for, where the model gives it no weight


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
    balance: BalanceLoss | None = None,
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
        balance: the load-balance loss, of the model's weight or 0.01; None: the model's own.
        device: as for `Mesh`.

    Raises:
        ConfigError: the layout does not fit, or the router looks across tokens (R1).
        CheckpointError: the folder is not complete.

    Collectives: those of the run; objects gathered to rank 0 and broadcast from it.
    """
    limits = tolerances_for(dtype)
    if tokens < 1:
        raise ConfigError(f"tokens={tokens} compares nothing; choose 1 or more")
    config = ModelConfig.from_hub(read_config(path))
    _refuse(config, optimizer, steps)
    layout = layout or ParallelLayout()
    _refuse_estimate(config, balance, layout)
    half = dtype == torch.bfloat16
    runtime = replace(runtime or Runtime(), compute_dtype=dtype) if half else runtime or Runtime()
    mesh = _mesh(layout, runtime, device)
    wide = torch.float32 if half else dtype
    model = from_pretrained(path, mesh, dtype=wide)
    if balance is not None:
        coef = config.moe.router.balance_coef or _COEF
        set_balance(model, coef, None, balance)
        router = replace(model.config.moe.router, balance_coef=coef)
        config = replace(config, moe=replace(config.moe, router=router))
        model.config = config
    model.train(not _random(config))
    batches = [
        make_step(
            vocab_size=config.vocab_size,
            tokens=tokens,
            ranks=mesh.size("dp"),
            micro_batches=micro_batches,
            seed=seed + 1000 * s,
        )
        for s in range(max(steps, 1))
    ]
    truth = Truth()
    course = Course(optimizer=optimizer, eps=1e-8 if dtype == torch.float64 else 1e-4)
    course, choices = _from_rank_0(
        mesh, lambda: truth.run(path, wide, batches, _losses(config), course, steps)
    )
    findings = Findings()
    loss = _run_layout(model, batches, course, choices, truth, findings, steps)
    about = {
        "layout": str(mesh.layout),
        "dtype": str(dtype).removeprefix("torch."),
        "tokens": sum(b.input_ids.numel() for parts in batches[0] for b in parts),
    }

    def conclude() -> Report:
        first = truth.outcomes[0]
        losses = {"reference": float(first.loss), "layout": loss}
        return findings.report(limits, losses, steps=steps, targets=first.targets, **about)

    return _from_rank_0(mesh, conclude)


def _run_layout(
    model: Decoder,
    batches: list[list[list[Batch]]],
    course: Course,
    choices: list[dict[int, Choices]],
    truth: Truth,
    findings: Findings,
    steps: int,
) -> float:
    """Return the layout's loss of the first step; on rank 0 `findings` is filled."""
    mesh = model.mesh
    ranks, rank = mesh.size("dp"), mesh.coordinate("dp")
    optimise = course.build(parameter_groups(model, weight_decay=0.0))
    losses = []
    for s, step in enumerate(batches):
        parts = enumerate(parts[rank] for parts in step)
        own = [_arguments(batch, first_sample(m, rank, ranks)) for m, batch in parts]
        result = _layout_step(model, own, choices[s], s, course.max_norm)
        losses.append(result.loss)
        results = _to_rank_0(mesh, result if s == 0 else result.without_tensors())
        if results is not None:
            compare_step(findings, results, step, truth.outcomes[s], truth.reference, s == 0)
        if steps:
            optimise.step()
        forget_router_load(model)  # the next step counts anew; the correction bias stays
    if steps:
        weights = _host(gather_named(model, "param"))
        if mesh.rank == 0:
            findings.compare_named("weights", weights, truth.final())
    return losses[0]


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
    if optimizer not in ("adamw", "sgd"):
        raise ConfigError(f"optimizer={optimizer!r} is not one of adamw, sgd")
    if steps < 0:
        raise ConfigError(f"steps={steps} must be at least 0")


def _refuse_estimate(
    config: ModelConfig, balance: BalanceLoss | None, layout: ParallelLayout
) -> None:
    """Refuse a loss that a pipeline's schedule decides."""
    router = config.moe.router
    own = router.balance_kind == "global_batch" and not router.balance_exact and router.balance_coef
    if layout.pp > 1 and (balance == "global_batch" if balance else own):
        raise ConfigError(
            f"balance_kind='global_batch' looks at the step so far, and with pp={layout.pp} a "
            f"stage runs several micro-batches forward before it has counted one, so no other "
            f"layout has the same estimate; choose balance='global_batch_exact', or pp=1"
        )


def _random(config: ModelConfig) -> bool:
    """Return whether training draws random numbers: then the layout is run as in evaluation."""
    router = config.moe.router
    drops = config.residual_dropout or config.attention.dropout
    return bool(drops or router.noisy or router.input_jitter)


def _losses(config: ModelConfig) -> Losses:
    router = config.moe.router
    exact = router.balance_kind == "global_batch" and router.balance_exact
    kind = "global_batch_exact" if exact else router.balance_kind
    return Losses(balance=router.balance_coef, kind=kind, z=router.z_coef)


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
