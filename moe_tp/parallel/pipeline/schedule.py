"""Running a rank's stages over micro-batches, by the schedules of torch.distributed.pipelining.

Activations go from a rank to the one with its coordinates on the next pipeline rank. Shapes are
told to torch beforehand, so that it needs no hidden first run, which would route and count twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from moe_tp.parallel.mesh import Mesh
from moe_tp.parallel.parameter import sharing_casts
from moe_tp.parallel.pipeline.stages import holder_of, num_stages

_SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "zbv": ScheduleZBVZeroBubble,
}
Signature = tuple[torch.Tensor, ...]


def train_pipeline(
    stages: Mapping[int, nn.Module],
    mesh: Mesh,
    *,
    first_input: torch.Tensor,
    arguments: Mapping[str, torch.Tensor],
    carried: Signature,
    result: Signature,
    micro_batches: int,
    loss_fn: Callable[[torch.Tensor], torch.Tensor],
) -> list[torch.Tensor]:
    """Return the last stage's results of all micro-batches (empty elsewhere), after backward.

    Args:
        stages: this rank's stage modules by number. The first takes a piece of `first_input`, the
            others what `carried` describes; each also takes a piece of every argument by name.
        mesh: its `pp` axis is the pipeline.
        first_input, arguments: all micro-batches along dimension 0, equal parts of it.
        carried: tensors on the meta device as stages hand them on, with `requires_grad` set.
        result: the same for the last stage's result.
        micro_batches: their number, one that `fitting_micro_batches` returns.
        loss_fn: of a result: what backward starts from.

    Collectives: point-to-point exchange of `carried` and its gradient with the neighbours on pp.
    """
    group, runtime = mesh.group("pp"), mesh.runtime
    total = num_stages(mesh.layout, runtime)
    pieces = []
    for number, module in sorted(stages.items()):
        pieces.append(
            PipelineStage(
                module,
                number,
                total,
                mesh.device,
                input_args=first_signature(first_input, micro_batches) if number == 0 else carried,
                output_args=result if number == total - 1 else carried,
                group=group.process_group,
            )
        )
    results: list[torch.Tensor] = []

    def collect(output: torch.Tensor, _: Any) -> torch.Tensor:
        results.append(output.detach())
        return loss_fn(output)

    name = runtime.pp_schedule
    if name == "1f1b" and micro_batches < total:
        # With fewer micro-batches than stages 1F1B stores as many and waits as long as GPipe.
        name = "gpipe"
    schedule = _SCHEDULES[name](
        pieces if name in ("interleaved_1f1b", "zbv") else pieces[0],
        n_microbatches=micro_batches,
        loss_fn=collect,
        scale_grads=False,
    )
    inputs = (first_input,) if 0 in stages else ()
    target = torch.zeros(micro_batches, device=mesh.device) if total - 1 in stages else None
    with sharing_casts():
        schedule.step(*inputs, target=target, return_outputs=False, **arguments)
    return results


def first_signature(first_input: torch.Tensor, micro_batches: int) -> Signature:
    """Return what one micro-batch of the first stage's input looks like, on the meta device."""
    rows = first_input.shape[0] // micro_batches
    return (torch.empty(rows, *first_input.shape[1:], dtype=first_input.dtype, device="meta"),)


def run_forward(
    stages: Mapping[int, nn.Module],
    mesh: Mesh,
    *,
    first_input: torch.Tensor,
    arguments: Mapping[str, Any],
    carried: Signature,
) -> Any:
    """Return the last stage's result where it is held, None elsewhere, of one forward pass.

    Passes may follow each other without waiting: each rank goes on once it has handed on.

    Args:
        stages: as in `train_pipeline`.
        mesh: its `pp` axis is the pipeline.
        first_input, arguments: of this one micro-batch.
        carried: what stages hand on, on the meta device.

    Collectives: point-to-point sends of `carried` along pp.
    """
    group, layout, runtime = mesh.group("pp"), mesh.layout, mesh.runtime
    total = num_stages(layout, runtime)
    value: tuple[torch.Tensor, ...] = (first_input,)
    result: Any = None
    for number in range(total):
        if number not in stages:
            continue
        if number and holder_of(layout, runtime, number - 1) != group.rank:
            source = group.ranks[holder_of(layout, runtime, number - 1)]
            value = tuple(torch.empty_like(t, device=mesh.device) for t in carried)
            for tensor in value:
                dist.recv(tensor, src=source, group=group.process_group)
        output = stages[number](*value, **arguments)
        if number == total - 1:
            result = output
            continue
        value = output
        if holder_of(layout, runtime, number + 1) != group.rank:
            target = group.ranks[holder_of(layout, runtime, number + 1)]
            for tensor in value:
                dist.send(tensor.contiguous(), dst=target, group=group.process_group)
    return result
