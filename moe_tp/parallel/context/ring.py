"""Ring attention: keys and values travel round the cp ranks, softmax is built up block by block.

Ring Attention (arXiv:2310.01889, section 3) with the running maximum and sum of FlashAttention-2
(arXiv:2307.08691, algorithm 1) and its backward (algorithm 2). The gradients of keys and values
travel with them and are home after a full round. The next block is sent before the present one is
computed. Plain tensor operations, so that it runs on every device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Function

from moe_tp.parallel.collectives import (
    Group,
    Phase,
    accumulate_dtype,
    finish,
    start_all_to_all,
)
from moe_tp.parallel.functions import apply_function

Mask = Callable[[int], torch.Tensor]
_ROWS = 1024  # query rows whose scores exist at a time


def ring_attention(
    q_BHSd: torch.Tensor,
    k_BGSd: torch.Tensor,
    v_BGSd: torch.Tensor,
    mask: Mask,
    group: Group,
    *,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention over the whole sequence for this rank's queries, and its log-sum-exp.

    Args:
        q_BHSd: queries of this rank's positions.
        k_BGSd: keys of this rank's positions; G divides H (grouped-query attention).
        v_BGSd: values, possibly of another width.
        mask: for a rank of the group, boolean `[B or 1, 1, S_mine, S_theirs]`, True where this
            rank's query may see that rank's key.
        group: the cp group.
        scale: factor on the scores.

    Returns:
        out `[B, H, S, dv]` in q's dtype; a query that sees nothing gets 0.
        lse `[B, H, S]` in fp32 (or wider); -inf where a query sees nothing. Differentiable.

    Collectives: all-to-all with the next rank of `group`, size - 1 times forward and 2 size - 1
    times backward.
    """
    result: tuple[torch.Tensor, torch.Tensor] = apply_function(
        _RingAttention, q_BHSd, k_BGSd, v_BGSd, mask, group, scale
    )
    return result


def _pass_on(x: torch.Tensor, group: Group, phase: Phase) -> torch.Tensor:
    """Start sending `x` to the next rank; return what the previous one sends, on its way."""
    rows = x.shape[0]
    send, recv = [0] * group.size, [0] * group.size
    send[(group.rank + 1) % group.size] = rows
    recv[(group.rank - 1) % group.size] = rows
    return start_all_to_all(x, send, recv, group, phase=phase, op="ring")


def _scores(q: torch.Tensor, k: torch.Tensor, seen: torch.Tensor, scale: float) -> torch.Tensor:
    """Return masked scores [B, G, H/G, S, S'] in the accumulation dtype."""
    wide = accumulate_dtype(q.dtype)
    s = torch.einsum("bgrsd,bgtd->bgrst", q, k).to(wide).mul_(scale)
    return s.masked_fill_(~seen[:, :, None], -torch.inf)


def _forward_block(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one block's attention and log-sum-exp for some rows of queries."""
    s = _scores(q, k, seen, scale)
    lse = torch.logsumexp(s, -1)
    p = torch.exp(s - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
    return torch.einsum("bgrst,bgtd->bgrsd", p, v.to(p.dtype)), lse


def _merge(
    out: torch.Tensor, lse: torch.Tensor, more: torch.Tensor, more_lse: torch.Tensor
) -> None:
    """Add a block to the running result, in place."""
    total = torch.logaddexp(lse, more_lse)
    safe = total.masked_fill(total == -torch.inf, 0.0)
    out.mul_(torch.exp(lse - safe)[..., None])
    out.add_(more * torch.exp(more_lse - safe)[..., None])
    lse.copy_(total)


class _RingAttention(Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: Mask,
        group: Group,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        batch, heads, length, width = q.shape
        q5 = q.reshape(batch, k.shape[1], heads // k.shape[1], length, width)
        wide = accumulate_dtype(q.dtype)
        out = torch.zeros(*q5.shape[:-1], v.shape[-1], dtype=wide, device=q.device)
        lse = torch.full(q5.shape[:-1], -torch.inf, dtype=wide, device=q.device)
        kv = torch.cat([k, v], -1)
        for step in range(group.size):
            coming = _pass_on(kv, group, "forward") if step + 1 < group.size else None
            seen = mask((group.rank - step) % group.size)
            kk, vv = kv.split([k.shape[-1], v.shape[-1]], -1)
            for rows in _row_blocks(length):
                if seen[:, :, rows].any():
                    block = _forward_block(q5[..., rows, :], kk, vv, seen[:, :, rows], scale)
                    _merge(out[..., rows, :], lse[..., rows], *block)
            if coming is not None:
                kv = finish(coming)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mask, ctx.group, ctx.scale = mask, group, scale
        return out.to(q.dtype).reshape(batch, heads, length, -1), lse.reshape(q.shape[:-1]).clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        group, scale = ctx.group, ctx.scale
        wide = out.dtype
        q5 = q.reshape(*out.shape[:-1], q.shape[-1])
        do = grads[0].reshape(out.shape).to(wide)
        # d score = p * (dp - sum(do * out) + d lse), by the definition of log-sum-exp.
        shift = (do * out).sum(-1) - grads[1].reshape(lse.shape)
        state = (do, shift, lse.masked_fill(lse == -torch.inf, 0.0), scale)
        dq = torch.zeros_like(q5, dtype=wide)
        kv = torch.cat([k, v], -1)
        dkv = torch.zeros_like(kv, dtype=wide)
        for step in range(group.size):
            coming = _pass_on(kv, group, "backward") if step + 1 < group.size else None
            seen = ctx.mask((group.rank - step) % group.size)
            kk, vv = kv.split([k.shape[-1], v.shape[-1]], -1)
            dk, dv = dkv.split([k.shape[-1], v.shape[-1]], -1)
            for rows in _row_blocks(q.shape[2]):
                if seen[:, :, rows].any():
                    _backward_block(q5, kk, vv, seen, rows, state, (dq, dk, dv))
            # The gradient follows its block; after the last step it is one hop from home.
            dkv = finish(_pass_on(dkv, group, "backward")) if group.size > 1 else dkv
            if coming is not None:
                kv = finish(coming)
        dk, dv = dkv.split([k.shape[-1], v.shape[-1]], -1)
        return dq.to(q.dtype).reshape(q.shape), dk.to(k.dtype), dv.to(v.dtype), None, None, None


def _backward_block(
    q5: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: torch.Tensor,
    rows: slice,
    state: tuple[torch.Tensor, torch.Tensor, torch.Tensor, float],
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """Add one block's gradients for some rows of queries, in place."""
    do, shift, lse, scale = state
    dq, dk, dv = out
    part, grad = q5[..., rows, :], do[..., rows, :]
    p = torch.exp(_scores(part, k, seen[:, :, rows], scale) - lse[..., rows, None])
    dv += torch.einsum("bgrst,bgrsd->bgtd", p, grad)
    dp = torch.einsum("bgrsd,bgtd->bgrst", grad, v.to(p.dtype))
    ds = p.mul_(dp - shift[..., rows, None]).mul_(scale)
    dq[..., rows, :] += torch.einsum("bgrst,bgtd->bgrsd", ds, k.to(p.dtype))
    dk += torch.einsum("bgrst,bgrsd->bgtd", ds, part.to(p.dtype))


def _row_blocks(length: int) -> list[slice]:
    return [slice(start, min(start + _ROWS, length)) for start in range(0, length, _ROWS)]
