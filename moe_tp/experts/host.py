"""Living inside a user's own model: wrappers must leave the library's parameters alone (G6).

The library reduces its own gradients (`settle_gradients`), over axes that a wrapper knows nothing
of. DDP would average expert gradients over ranks that hold other experts; FSDP2 would shard what is
already sharded.
"""

from __future__ import annotations

from typing import TypeVar

from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from moe_tp.errors import ConfigError
from moe_tp.parallel.gradients import library_parameters
from moe_tp.parallel.parameter import ParallelModule, named_specs

__all__ = ["check_host", "library_parameters", "prepare_for_ddp"]

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


def check_host(layer: nn.Module) -> None:
    """Refuse to run where a wrapper has taken hold of the layer's parameters.

    Raises:
        ConfigError: names the wrapper and what to call.
    """
    wrapper = getattr(DistributedDataParallel, "_active_ddp_module", None)
    if wrapper is not None:
        ours = {id(param) for param in layer.parameters()}
        named = wrapper.module.named_parameters()
        ignored = wrapper.parameters_to_ignore
        taken = [name for name, param in named if id(param) in ours and name not in ignored]
        if taken:
            raise ConfigError(
                f"DistributedDataParallel reduces {taken[0]}, which this library reduces itself; "
                "wrap with DistributedDataParallel(prepare_for_ddp(model))"
            )
    for module in layer.modules():
        if not isinstance(module, ParallelModule) or module.mesh.layout.zero:
            continue
        for name, spec in module.specs.items():
            param = getattr(module, name)
            home = module.mesh.at_rest(spec.domain, zero_sharded=spec.zero_sharded)
            if not isinstance(param, DTensor) or param.device_mesh != home:
                raise ConfigError(
                    f"fully_shard has sharded {name} of {type(module).__name__}, which this "
                    "library places itself; pass "
                    "ignored_params=set(library_parameters(model)) to fully_shard"
                )
