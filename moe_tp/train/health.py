"""What a rank has to say of itself: its memory, and where its gradients are not finite."""

from __future__ import annotations

import resource
import sys

import torch

from moe_tp.checkpoint.agree import gather_json
from moe_tp.errors import MoeTpError
from moe_tp.models.decoder import Decoder
from moe_tp.parallel.parameter import named_specs
from moe_tp.parallel.shards import to_local


def peak_memory(device: torch.device) -> int:
    """Return the most bytes that this rank has held: on its GPU, or without one of host memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # Linux counts in KiB, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def non_finite_parameter(model: Decoder) -> str:
    """Return the first rank and parameter whose gradient is not finite.

    Collectives: all-gather of a text over the world.
    """
    mine: str | None = None
    for entry in named_specs(model):
        grad = entry.param.grad
        if grad is not None and not bool(torch.isfinite(to_local(grad)).all()):
            mine = entry.fqn
            break
    found = gather_json(mine, model.mesh.group("world"), model.mesh.device)
    for rank, name in enumerate(found):
        if name is not None:
            return f"rank {rank}: gradient of {name}"
    return "loss"


def hopeless(bad_in_a_row: int, step: int) -> MoeTpError:
    """Return the error of a run whose last steps had a loss or gradient that is not finite.

    Args:
        bad_in_a_row: such steps, `train.max_bad_steps` of them.
        step: steps done.
    """
    return MoeTpError(
        f"the last {bad_in_a_row} steps had a loss or gradient that is not finite, so the run "
        f"stops at step {step} (train.max_bad_steps={bad_in_a_row}); lower train.lr or look at the "
        f"data"
    )
