"""Living inside a user's own model: wrappers must leave the library's parameters alone (G6).

The library reduces its own gradients (`settle_gradients`), over axes that a wrapper knows nothing
of. DDP would average expert gradients over ranks that hold other experts, FSDP2 would shard what
is sharded already; both refuse, when they wrap, parameters that lie on two grids. So say:

    DistributedDataParallel(prepare_for_ddp(model))
    fully_shard(model, ignored_params=set(library_parameters(model)))
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import nn
from torch.autograd import Function
from torch.nn.parallel import DistributedDataParallel

from moe_tp.parallel.gradients import library_parameters
from moe_tp.parallel.parameter import ParallelModule, named_specs

__all__ = ["library_parameters", "prepare_for_ddp"]

Module = TypeVar("Module", bound=nn.Module)


def prepare_for_ddp(model: Module) -> Module:
    """Return `model`, told so that `DistributedDataParallel(model)` leaves our parameters alone.

    Buffers of the library's modules (counters of the load) are left alone too: DDP would overwrite
    them with those of rank 0.

    Args:
        model: what will be handed to DDP.
    """
    names = [entry.fqn for entry in named_specs(model)]
    for prefix, module in model.named_modules():
        if isinstance(module, ParallelModule):
            dot = f"{prefix}." if prefix else ""
            names += [f"{dot}{name}" for name, _ in module.named_buffers(recurse=False)]
    known = list(getattr(model, "_ddp_params_and_buffers_to_ignore", []))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, known + names)
    return model


def connected(x: torch.Tensor) -> torch.Tensor:
    """Return `x`, requiring a gradient even where the host's does not: it goes nowhere then.

    Ranks of one layer may bring tokens of both kinds (zeros of an idle rank beside activations),
    but the backward of a collective takes all of them.
    """
    if x.requires_grad:
        return x
    result: torch.Tensor = _Connected.apply(x, x.new_empty(0).requires_grad_())  # type: ignore[no-untyped-call]
    return result


class _Connected(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, None]:
        return None, None
