"""Mixture-of-Experts language models in plain PyTorch: every layout gives the one-process answer.

The public names are loaded on first use (PEP 562), so that `import moe_tp.routing` pulls in nothing
else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moe_tp.lazy import on_first_use

__version__ = "0.1.0"

if TYPE_CHECKING:
    from moe_tp.experts.host import library_parameters, prepare_for_ddp
    from moe_tp.experts.moe import MoE, update_router_bias
    from moe_tp.parallel.gradients import clip_grad_norm, parameter_groups, settle_gradients
    from moe_tp.parallel.layout import ParallelLayout, Runtime
    from moe_tp.parallel.mesh import Mesh
    from moe_tp.train.step import count_targets, forward_backward

_HOME = {
    "ParallelLayout": "moe_tp.parallel.layout",
    "Runtime": "moe_tp.parallel.layout",
    "Mesh": "moe_tp.parallel.mesh",
    "MoE": "moe_tp.experts.moe",
    "update_router_bias": "moe_tp.experts.moe",
    "library_parameters": "moe_tp.experts.host",
    "prepare_for_ddp": "moe_tp.experts.host",
    "forward_backward": "moe_tp.train.step",
    "count_targets": "moe_tp.train.step",
    "settle_gradients": "moe_tp.parallel.gradients",
    "clip_grad_norm": "moe_tp.parallel.gradients",
    "parameter_groups": "moe_tp.parallel.gradients",
}

__all__ = [
    "Mesh",
    "MoE",
    "ParallelLayout",
    "Runtime",
    "__version__",
    "clip_grad_norm",
    "count_targets",
    "forward_backward",
    "library_parameters",
    "parameter_groups",
    "prepare_for_ddp",
    "settle_gradients",
    "update_router_bias",
]

__getattr__, __dir__ = on_first_use(__name__, _HOME)
