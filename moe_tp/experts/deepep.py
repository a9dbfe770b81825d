"""Dispatch by DeepEP's kernels, where that package is installed.

Letters: T tokens on this rank · K choices · D width · R rows after dispatch.

DeepEP (github.com/deepseek-ai/DeepEP, its `Buffer` for training) sends each token once per rank, as
this library does, and hands over for each row its local experts and weights, so its handle is our
route. The backward of its dispatch is its combine and the other way round. Partial sums travel in
bf16, the only dtype its combine knows. The package is imported when a dispatcher is made.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd import Function

from moe_tp.errors import ConfigError
from moe_tp.experts.dispatch import Received
from moe_tp.experts.local import sort_pairs
from moe_tp.parallel.functions import apply_function
from moe_tp.parallel.mesh import Mesh
from moe_tp.routing.assignment import Assignment
from moe_tp.routing.table import ExpertTable, slots_of_ids

_NVL_BYTES = 1 << 30
_RDMA_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class _Route:
    """DeepEP's handle, and how to go on from it."""

    buffer: Any
    handle: Any
    dtype: torch.dtype


class _Dispatch(Function):
    """Tokens and weights to rows and their weights."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: torch.Tensor,
        weights_TK: torch.Tensor,
        slots_TK: torch.Tensor,
        num_slots: int,
        buffer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Any]:
        per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(slots_TK, num_slots)
        rows_RD, slots_RK, weights_RK, _, handle, _ = buffer.dispatch(
            x_TD.contiguous(),
            topk_idx=slots_TK,
            topk_weights=weights_TK.float(),
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
        )
        ctx.buffer, ctx.handle = buffer, handle
        ctx.mark_non_differentiable(slots_RK)
        return rows_RD, weights_RK, slots_RK, handle

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        d_x, d_weights, _ = ctx.buffer.combine(
            grads[0].contiguous(), ctx.handle, topk_weights=grads[1].float().contiguous()
        )
        return d_x, d_weights, None, None, None


class _Combine(Function):
    """Partial sums of rows to sums of tokens."""

    @staticmethod
    def forward(
        ctx: Any, partial_RD: torch.Tensor, route: _Route, dtype: torch.dtype
    ) -> torch.Tensor:
        ctx.route = route
        y_TD, _, _ = route.buffer.combine(partial_RD.to(torch.bfloat16).contiguous(), route.handle)
        out_TD: torch.Tensor = y_TD.to(dtype)
        return out_TD.view_as(out_TD)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        route: _Route = ctx.route
        grad = grads[0].to(route.dtype).contiguous()
        rows: torch.Tensor = route.buffer.dispatch(grad, handle=route.handle)[0]
        return rows, None, None


class DeepEPDispatcher:
    """Rows over ep by DeepEP.

    Args:
        mesh: names ep; etp must be 1.
        table: which slot holds which expert.
        make_buffer: makes DeepEP's buffer from a process group; None imports the package.

    Raises:
        ConfigError: the package is missing, or the layout is not one that it serves.
    """

    def __init__(
        self,
        mesh: Mesh,
        table: ExpertTable,
        make_buffer: Callable[[Any], Any] | None = None,
    ) -> None:
        if mesh.size("etp") > 1:
            raise ConfigError(
                f"dispatcher='deepep' cannot split experts over etp={mesh.size('etp')}; choose "
                "etp=1 or dispatcher='all_to_all'"
            )
        group = mesh.group("ep").process_group
        if group is None:
            raise ConfigError("dispatcher='deepep' has nobody to send to with ep=1; choose 'local'")
        self._buffer = (make_buffer or _deepep_buffer)(group)
        self._ep_rank, self._num_slots = mesh.coordinate("ep"), table.slots_per_rank
        self._total_slots = len(table.slots)
        self._lookup = table.lookup(mesh.device, owner=mesh.coordinate("stage"))

    def dispatch(self, x_TD: torch.Tensor, assignment: Assignment) -> Received:
        """Return the rows for this rank's experts.

        Collectives: DeepEP's dispatch over ep; backward its combine.
        """
        slots_TK = slots_of_ids(assignment.ids_TK, *self._lookup)
        rows_RD, weights_RK, slots_RK, handle = apply_function(
            _Dispatch, x_TD, assignment.weights_TK, slots_TK, self._total_slots, self._buffer
        )
        identity_T = assignment.identity_T
        return Received(
            rows_RD=rows_RD,
            **sort_pairs(slots_RK, self._num_slots, weights_RK),
            route=_Route(buffer=self._buffer, handle=handle, dtype=x_TD.dtype),
            identity_R=None if identity_T is None else self._send_identity(identity_T, handle),
        )

    def _send_identity(self, identity_T: torch.Tensor, handle: Any) -> torch.Tensor:
        """Return the identity of each row's token, sent as bf16, the dtype that DeepEP moves.

        Collectives: DeepEP's dispatch over ep.
        """
        # it copies whole rows of multiples of 16 bytes
        sent_T8 = F.pad(identity_T[:, None].view(torch.bfloat16), (0, 4))
        got_R8: torch.Tensor = self._buffer.dispatch(sent_T8, handle=handle)[0]
        return got_R8[:, :4].contiguous().view(torch.int64)[:, 0]

    def combine(
        self, partial_RD: torch.Tensor, received: Received, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Return each token's sum, in `dtype` or that of x.

        Collectives: DeepEP's combine over ep, in bf16; backward its dispatch.
        """
        y_TD: torch.Tensor = apply_function(
            _Combine, partial_RD, received.route, dtype or received.route.dtype
        )
        return y_TD


def _deepep_buffer(group: Any) -> Any:
    try:
        package = importlib.import_module("deep_ep")
    except ImportError as error:
        raise ConfigError(
            "dispatcher='deepep' needs the package deep_ep, which cannot be imported here "
            f"({error}); install it, or choose dispatcher='all_to_all'"
        ) from error
    return package.Buffer(group, _NVL_BYTES, _RDMA_BYTES)
