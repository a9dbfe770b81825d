"""One optimiser step's forward and backward passes, for every layout."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from moe_tp.experts.moe import counted_step
from moe_tp.log import warn_once
from moe_tp.models.batches import batch_problem, count_agreed, fingerprints, share_numbers
from moe_tp.models.decoder import Decoder
from moe_tp.models.head import Aux
from moe_tp.models.stages import pipeline_step
from moe_tp.models.tokens import IGNORE, next_token_targets
from moe_tp.parallel.mesh import Mesh
from moe_tp.parallel.zero import reshard, set_last_micro_batch

MicroBatch = Mapping[str, Any]
_OPTIONAL = ("labels", "attention_mask", "position_ids")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """What the micro-batches of a step gave together; global values on every rank.

    Args:
        loss: cross entropy over all targets of the step; 0 without any.
        aux: router losses averaged over micro-batches, load summed over them.
        target_tokens: targets of the step on all ranks.
        tokens: real tokens of the step on all ranks, targets or not.
        num_micro_batches: the largest number on any rank.
        logits: for each of this rank's micro-batches, where asked for.
    """

    loss: torch.Tensor
    aux: Aux
    target_tokens: int
    tokens: int
    num_micro_batches: int
    logits: tuple[torch.Tensor, ...] = ()


def count_targets(batches: Iterable[MicroBatch], mesh: Mesh) -> int:
    """Return the number of targets in the batches of all data-parallel ranks.

    Args:
        batches: this rank's micro-batches, as the model takes them.
        mesh: the mesh.

    Raises:
        DataError: one of them is no dict of arguments; on every rank.
        RankMismatchError: ranks that share a batch were given unlike ones.

    Collectives: all-gather of eight integers over the world.
    """
    batches = list(batches)
    unlike = [u for u in map(_unlike_a_batch, batches) if u is not None]
    problem = f"a micro-batch cannot be used: {unlike[0]}" if unlike else None
    return int(count_agreed(batches, problem, mesh))


def forward_backward(
    model: Decoder,
    micro_batches: Iterable[MicroBatch],
    *,
    step: int = 0,
    backward: bool = True,
    return_logits: bool = False,
) -> StepOutput:
    """Return loss and router losses of one optimiser step, with its gradients left to settle.

    The loss is the sum over all targets of the step divided by their number, on whatever ranks and
    in whatever micro-batches they lie. Router losses are those of each micro-batch over the union
    of its ranks, averaged over the micro-batches; with `global_batch` their sum is the step's. With
    `balance_exact` the micro-batches first run forward once more, to count the load of the step.

    Args:
        model: the model.
        micro_batches: this dp rank's, each the arguments of a call by name. Ranks with fewer take
            part in the rest with empty ones, all in one where none has any. Without `sample_offset`
            rows are numbered dp rank by dp rank.
        step: seeds dropout.
        backward: False computes values only, under no_grad.
        return_logits: keep the logits of each micro-batch.

    Raises:
        DataError: a batch cannot be used; on every rank, before anything else is sent.
        RankMismatchError: ranks that share a batch were given unlike ones; likewise.

    Collectives: all-gather of eleven integers over the world; those of the calls.
    """
    if backward and model.mesh.runtime.compute_dtype == torch.float16:
        warn_once(
            "gradients in fp16",
            "compute_dtype=float16 computes gradients without loss scaling, so that small ones "
            "become 0; choose bfloat16 to train",
        )
    micro_batches = list(micro_batches)
    plan = _agree(model, micro_batches, step)
    router = model.config.moe.router
    if not (router.balance_kind == "global_batch" and router.balance_exact and router.balance_coef):
        return _run(model, micro_batches, plan, step, backward, return_logits)

    def count() -> None:
        _run(model, micro_batches, replace(plan, step_tokens=None), step, False, False)

    with counted_step(model, count):
        return _run(model, micro_batches, plan, step, backward, return_logits)


def _run(
    model: Decoder,
    micro_batches: Sequence[MicroBatch],
    plan: _Plan,
    step: int,
    backward: bool,
    return_logits: bool,
) -> StepOutput:
    """Return what `forward_backward` returns, from one pass over the micro-batches."""
    mesh = model.mesh
    if model.stages:
        return _through_pipeline(model, micro_batches, plan, step, backward, return_logits)
    loss = torch.zeros((), device=mesh.device)
    aux: Aux | None = None
    logits: list[torch.Tensor] = []
    offset = plan.first_sample
    whole_step = model.config.moe.router.balance_kind == "global_batch"
    with torch.set_grad_enabled(backward):
        for m in range(plan.num_micro_batches):
            own = m < len(micro_batches)
            batch = _arguments(micro_batches[m]) if own else _empty()
            batch.setdefault("sample_offset", offset)
            offset += batch["input_ids"].shape[0]
            set_last_micro_batch(model, mesh, m == plan.num_micro_batches - 1)
            out = model(
                **batch,
                target_tokens=plan.target_tokens,
                step=step,
                step_tokens=plan.step_tokens if whole_step else None,
                return_logits=return_logits,
            )
            share = out.aux.loss / (1 if whole_step else plan.num_micro_batches)
            if backward:
                (out.loss + share).backward()
            loss = loss + out.loss.detach()
            counts, sums = out.aux.counts_LE, out.aux.sums_LM
            if aux is not None:
                share, counts = share + aux.loss, counts + aux.counts_LE
                sums = sums + aux.sums_LM
            aux = Aux(loss=share.detach(), counts_LE=counts, sums_LM=sums)
            if return_logits and own:
                logits.append(out.logits.detach())
    if not backward:
        reshard(model)
    return StepOutput(
        loss=loss,
        aux=aux or model.gather_aux({}),
        target_tokens=plan.target_tokens,
        tokens=plan.tokens,
        num_micro_batches=plan.num_micro_batches,
        logits=tuple(logits),
    )


def _through_pipeline(
    model: Decoder,
    micro_batches: Sequence[MicroBatch],
    plan: _Plan,
    step: int,
    backward: bool,
    return_logits: bool,
) -> StepOutput:
    """Return what `forward_backward` returns, from the schedule that the runtime names."""
    batches, offset = [], plan.first_sample
    for m in range(plan.num_micro_batches):
        batch = _arguments(micro_batches[m]) if m < len(micro_batches) else _empty()
        batch.setdefault("sample_offset", offset)
        offset += batch["input_ids"].shape[0]
        batches.append(batch)
    whole_step = model.config.moe.router.balance_kind == "global_batch"
    loss, aux = pipeline_step(
        model,
        batches,
        target_tokens=plan.target_tokens,
        step_tokens=plan.step_tokens if whole_step else None,
        step=step,
        backward=backward,
    )
    logits = []
    if return_logits:
        for batch in batches:
            call = {name: value for name, value in batch.items() if name != "labels"}
            logits.append(model(**call, step=step).logits)
    return StepOutput(
        loss=loss,
        aux=aux,
        target_tokens=plan.target_tokens,
        tokens=plan.tokens,
        num_micro_batches=plan.num_micro_batches,
        logits=tuple(logits[: len(micro_batches)]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """What all dp ranks know of the step: its targets, its length, where this rank's rows begin."""

    target_tokens: int
    tokens: int
    step_tokens: int | None  # over which router losses add up, once the load has been counted
    num_micro_batches: int
    first_sample: int


def _agree(model: Decoder, micro_batches: Sequence[MicroBatch], step: int) -> _Plan:
    """Return the plan of a step.

    Collectives: all-gather of eleven integers over the world.
    """
    problem: str | None = None
    targets = samples = tokens = 0
    for m, batch in enumerate(micro_batches):
        found = _unlike_a_batch(batch)
        if found is not None:
            problem = f"micro-batch {m}: {found}"
            break
        ids: torch.Tensor = batch["input_ids"]
        labels, mask, positions = (batch.get(name) for name in _OPTIONAL)
        found = batch_problem(model.config.vocab_size, ids, labels, mask, positions)
        if found is not None:
            problem = f"micro-batch {m}: {found}"
            break
        samples += ids.shape[0]
        tokens += ids.numel() if mask is None else int(mask.bool().sum())
        if labels is not None:
            targets += int((next_token_targets(labels, mask, positions) != IGNORE).sum())
    group = model.mesh.group("dp")
    mine = (len(micro_batches), targets, samples, tokens)
    prints = fingerprints(micro_batches, model.mesh, step, problem=problem)
    numbers = share_numbers(model.mesh, mine, prints, problem, "a batch")
    return _Plan(
        target_tokens=sum(row[1] for row in numbers),
        tokens=sum(row[3] for row in numbers),
        step_tokens=sum(row[3] for row in numbers),
        # a step of nothing still runs once, so that gradients are zero instead of missing
        num_micro_batches=max(1, *(row[0] for row in numbers)),
        first_sample=sum(row[2] for row in numbers[: group.rank]),
    )


def _unlike_a_batch(batch: object) -> str | None:
    """Return why something is no dict of a call's arguments, or None."""
    if not isinstance(batch, Mapping):
        return f"it is of type {type(batch).__name__}, not a dict of arguments"
    if batch.get("input_ids") is None:
        return "it has no input_ids"
    unknown = sorted(set(batch) - {"input_ids", "sample_offset", *_OPTIONAL})
    if unknown:
        return f"it has {unknown[0]!r}, which is no argument of a micro-batch"
    return None


def _arguments(batch: MicroBatch) -> dict[str, Any]:
    """Return a micro-batch with labels: none means no target, but the loss is still taken."""
    result = dict(batch)
    if result.get("labels") is None:
        result["labels"] = torch.full_like(result["input_ids"], IGNORE)
    return result


def _empty() -> dict[str, Any]:
    ids = torch.zeros(0, 1, dtype=torch.int64)
    return {"input_ids": ids, "labels": ids}
