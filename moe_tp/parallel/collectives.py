"""Collectives as differentiable functions whose backward is the dual collective.

| forward                       | backward            |
|-------------------------------|---------------------|
| all_gather                    | reduce_scatter      |
| reduce_scatter                | all_gather          |
| all_reduce                    | identity            |
| replicate (identity)          | all_reduce          |
| all_to_all                    | all_to_all reversed |
| all_gather_rows (uneven)      | reduce_scatter_rows |
| reduce_scatter_rows (uneven)  | all_gather_rows     |

`all_reduce` is the sum of a loss or of partial activations that every rank then uses alike: each
rank's gradient is already the gradient of its own share. All are out of place, take strided input,
and are the identity on a group of one. Traffic goes through torch's functional collectives, which
recompute policies and compilers can see. Sums are taken in fp32 (fp64 for fp64) in rank order,
after an all-to-all: on gloo that sends half the bytes of its own reduce-scatter, and two runs give
the same bits. An all-reduce of fp32 or fp64 is the back end's; one of bf16 is a reduce-scatter and
an all-gather of the same bytes, because back ends round bf16 at every hop.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd import Function

from moe_tp.parallel.exchange import exchange_of
from moe_tp.parallel.functions import apply_function
from moe_tp.parallel.recompute import keep_tensor, kept_tensor

Phase = Literal["forward", "backward"]
ReduceOp = Literal["sum", "max", "min"]


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks along one mesh axis, as this rank sees them.

    Args:
        axis: name of the mesh axis, for messages and traffic logs.
        size: number of ranks.
        rank: this rank's place among them.
        ranks: their global ranks, in group order.
        process_group: None when size is 1.
    """

    axis: str
    size: int = 1
    rank: int = 0
    ranks: tuple[int, ...] = (0,)
    process_group: dist.ProcessGroup | None = None

    @property
    def name(self) -> str:
        """torch's name of the process group."""
        assert self.process_group is not None, f"group {self.axis} has one rank"
        return str(self.process_group.group_name)


@dataclass(slots=True)
class TrafficLog:
    """Bytes that this rank sent to other ranks, one entry a collective."""

    entries: list[tuple[str, str, Phase, int]] = field(default_factory=list)

    def total(
        self, *, axis: str | None = None, op: str | None = None, phase: Phase | None = None
    ) -> int:
        """Return the bytes of all entries that match."""
        return sum(
            size
            for a, o, p, size in self.entries
            if axis in (None, a) and op in (None, o) and phase in (None, p)
        )


_logs: list[TrafficLog] = []


@contextlib.contextmanager
def record_traffic() -> Iterator[TrafficLog]:
    """Record what this rank sends while the context is open."""
    log = TrafficLog()
    _logs.append(log)
    try:
        yield log
    finally:
        _logs.remove(log)


def _note(group: Group, op: str, phase: Phase, sent: int) -> None:
    for log in _logs:
        log.entries.append((group.axis, op, phase, sent))


def _wait(x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = torch.ops._c10d_functional.wait_tensor(x)
    return result


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of `dtype` are summed: fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype


def add_in_order(parts: torch.Tensor) -> torch.Tensor:
    """Return the sum over dimension 0 in its order, in fp32 or more, rounded once."""
    total = parts[0].to(accumulate_dtype(parts.dtype), copy=True)
    for part in parts[1:].unbind(0):
        total += part
    return total.to(parts.dtype)


# --- raw collectives: no autograd ---------------------------------------------------------------


def raw_all_reduce(
    x: torch.Tensor, group: Group, op: ReduceOp = "sum", *, phase: Phase = "forward"
) -> torch.Tensor:
    """Return the elementwise `op` over the group, on every rank; `max` and `min` may lose a NaN.

    Collectives: all-reduce over `group`; for a sum of a dtype narrower than fp32 a reduce-scatter
    and an all-gather.
    """
    if group.size == 1:
        return x
    if op == "sum" and accumulate_dtype(x.dtype) != x.dtype:
        share = -(-x.numel() // group.size)
        flat = F.pad(x.reshape(-1), (0, share * group.size - x.numel()))
        part = raw_reduce_scatter_rows(flat, [share] * group.size, group, phase=phase)
        return raw_all_gather(part, group, phase=phase)[: x.numel()].view(x.shape)
    _note(group, "all_reduce", phase, 2 * x.nbytes * (group.size - 1) // group.size)
    return _wait(torch.ops._c10d_functional.all_reduce(x.contiguous(), op, group.name))


def raw_all_gather(
    x: torch.Tensor, group: Group, dim: int = 0, *, phase: Phase = "forward"
) -> torch.Tensor:
    """Return the ranks' equally shaped tensors joined along `dim`.

    Collectives: all-gather over `group`.
    """
    if group.size == 1:
        return x
    out = kept_tensor()
    if out is None:
        _note(group, "all_gather", phase, x.nbytes * (group.size - 1))
        memory = exchange_of(group, x)
        if memory is not None:
            out = memory.all_gather(x)
        else:
            flat = x.contiguous().reshape(1, *x.shape)
            gather = torch.ops._c10d_functional.all_gather_into_tensor
            out = _wait(gather(flat, group.size, group.name)).view(group.size, *x.shape)
        keep_tensor(out)
    return out.flatten(0, 1) if dim == 0 and x.dim() else torch.cat(out.unbind(0), dim=dim)


def raw_all_to_all(
    x_RD: torch.Tensor,
    send_counts: Sequence[int],
    recv_counts: Sequence[int],
    group: Group,
    *,
    phase: Phase = "forward",
    op: str = "all_to_all",
) -> torch.Tensor:
    """Return the rows the other ranks sent here, in rank order.

    Args:
        x_RD: rows for rank 0, then rank 1, ...
        send_counts: rows for each rank.
        recv_counts: rows from each rank.

    Collectives: all-to-all over `group`.
    """
    return finish(start_all_to_all(x_RD, send_counts, recv_counts, group, phase=phase, op=op))


def start_all_to_all(
    x_RD: torch.Tensor,
    send_counts: Sequence[int],
    recv_counts: Sequence[int],
    group: Group,
    *,
    phase: Phase = "forward",
    op: str = "all_to_all",
) -> torch.Tensor:
    """Return the rows of `raw_all_to_all` while they are still on their way; see `finish`."""
    if group.size == 1:
        return x_RD
    kept = kept_tensor()
    if kept is not None:
        return kept
    row = math.prod(x_RD.shape[1:]) * x_RD.element_size()
    _note(group, op, phase, (sum(send_counts) - send_counts[group.rank]) * row)
    out: torch.Tensor = torch.ops._c10d_functional.all_to_all_single(
        x_RD.contiguous(), list(recv_counts), list(send_counts), group.name
    )
    keep_tensor(out)
    return out


def finish(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor that a `start_` function sent for, once it is there."""
    return _wait(x)


def exchange_counts(counts_PN: torch.Tensor, group: Group) -> torch.Tensor:
    """Return `[P, N]` whose row p holds what rank p had in its row for this rank.

    Collectives: all-to-all of `P * N` integers over `group`.
    """
    ones = [1] * group.size
    return raw_all_to_all(counts_PN, ones, ones, group)


def raw_reduce_scatter_rows(
    x_RD: torch.Tensor, counts: Sequence[int], group: Group, *, phase: Phase = "forward"
) -> torch.Tensor:
    """Return this rank's `counts[rank]` rows summed over the group, in fp32 and rank order.

    Args:
        x_RD: `sum(counts)` rows of partial sums.
        counts: rows that end on each rank.

    Collectives: all-to-all over `group`.
    """
    if group.size == 1:
        return x_RD
    mine = counts[group.rank]
    parts = raw_all_to_all(
        x_RD, counts, [mine] * group.size, group, phase=phase, op="reduce_scatter"
    )
    return add_in_order(parts.view(group.size, mine, *x_RD.shape[1:]))


def raw_all_gather_rows(
    x_RD: torch.Tensor, counts: Sequence[int], group: Group, *, phase: Phase = "forward"
) -> torch.Tensor:
    """Return the rows of all ranks, `counts[p]` of rank p, in rank order.

    Collectives: all-to-all over `group`, each rank sending its rows to every other.
    """
    if group.size == 1:
        return x_RD
    mine = counts[group.rank]
    copies = x_RD.contiguous().repeat(group.size, *[1] * (x_RD.dim() - 1))
    return raw_all_to_all(copies, [mine] * group.size, counts, group, phase=phase, op="all_gather")


# --- differentiable pairs -----------------------------------------------------------------------


class _AllGather(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
        ctx.group, ctx.dim = group, dim
        return raw_all_gather(x, group, dim)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _scatter_sum(grads[0], ctx.group, ctx.dim, "backward"), None, None


class _ReduceScatter(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
        ctx.group, ctx.dim = group, dim
        return _scatter_sum(x, group, dim, "forward")

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return raw_all_gather(grads[0], ctx.group, ctx.dim, phase="backward"), None, None


class _AllReduce(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        return raw_all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


class _Replicate(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return raw_all_reduce(grads[0], ctx.group, phase="backward"), None


class _AllToAll(Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, send: Sequence[int], recv: Sequence[int], group: Group
    ) -> torch.Tensor:
        ctx.send, ctx.recv, ctx.group = send, recv, group
        return raw_all_to_all(x, send, recv, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        back = raw_all_to_all(grads[0], ctx.recv, ctx.send, ctx.group, phase="backward")
        return back, None, None, None


class _AllGatherRows(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, counts: Sequence[int], group: Group) -> torch.Tensor:
        ctx.counts, ctx.group = counts, group
        return raw_all_gather_rows(x, counts, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        back = raw_reduce_scatter_rows(grads[0], ctx.counts, ctx.group, phase="backward")
        return back, None, None


class _ReduceScatterRows(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, counts: Sequence[int], group: Group) -> torch.Tensor:
        ctx.counts, ctx.group = counts, group
        return raw_reduce_scatter_rows(x, counts, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        back = raw_all_gather_rows(grads[0], ctx.counts, ctx.group, phase="backward")
        return back, None, None


def _scatter_sum(x: torch.Tensor, group: Group, dim: int, phase: Phase) -> torch.Tensor:
    if group.size == 1:
        return x
    rows = x.shape[dim]
    assert rows % group.size == 0, f"{rows} rows do not split over {group.axis}={group.size}"
    share = [rows // group.size] * group.size
    if dim == 0:
        return raw_reduce_scatter_rows(x, share, group, phase=phase)
    return raw_reduce_scatter_rows(x.movedim(dim, 0), share, group, phase=phase).movedim(0, dim)


def _run(function: Any, x: torch.Tensor, group: Group, *args: Any) -> torch.Tensor:
    if group.size == 1:
        return x
    result: torch.Tensor = apply_function(function, x, *args)
    return result


def all_gather(x: torch.Tensor, group: Group, dim: int = 0) -> torch.Tensor:
    """Return the ranks' equally shaped tensors joined along `dim`.

    Collectives: all-gather over `group`; backward reduce-scatter.
    """
    return _run(_AllGather, x, group, group, dim)


def reduce_scatter(x: torch.Tensor, group: Group, dim: int = 0) -> torch.Tensor:
    """Return this rank's slice along `dim` of the sum over the group.

    Collectives: reduce-scatter over `group`; backward all-gather.
    """
    return _run(_ReduceScatter, x, group, group, dim)


def all_reduce(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the sum over the group; each rank's gradient is that of its own share.

    Collectives: all-reduce over `group`; backward none.
    """
    return _run(_AllReduce, x, group, group)


def replicate(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Return `x`, equal on all ranks, for work that differs by rank: its gradients are summed.

    Collectives: none; backward all-reduce over `group`.
    """
    return _run(_Replicate, x, group, group)


def all_to_all(
    x_RD: torch.Tensor, send_counts: Sequence[int], recv_counts: Sequence[int], group: Group
) -> torch.Tensor:
    """Return the rows the other ranks sent here; see `raw_all_to_all`.

    Collectives: all-to-all over `group`; backward the reverse all-to-all.
    """
    return _run(_AllToAll, x_RD, group, send_counts, recv_counts, group)


def all_gather_rows(x_RD: torch.Tensor, counts: Sequence[int], group: Group) -> torch.Tensor:
    """Return the rows of all ranks, `counts[p]` of rank p.

    Collectives: uneven all-gather over `group`; backward the uneven reduce-scatter.
    """
    return _run(_AllGatherRows, x_RD, group, counts, group)


def reduce_scatter_rows(x_RD: torch.Tensor, counts: Sequence[int], group: Group) -> torch.Tensor:
    """Return this rank's `counts[rank]` rows of the sum over the group.

    Collectives: uneven reduce-scatter over `group`; backward the uneven all-gather.
    """
    return _run(_ReduceScatterRows, x_RD, group, counts, group)
