"""Context-parallel attention against whole-sequence attention on one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_tp.errors import ConfigError
from moe_tp.parallel.context.ring import ring_attention
from moe_tp.parallel.context.sequence import order, padded_length, share
from moe_tp.parallel.context.ulysses import check_heads, kv_repeats, to_heads, to_sequence
from moe_tp.parallel.layout import ParallelLayout
from moe_tp.parallel.mesh import Mesh
from moe_tp.testing import run_ranks

B, H, G, D, DV, S = 2, 4, 2, 6, 5, 16


def inputs() -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(0)
    q, k = (torch.randn(B, n, S, D, generator=g, dtype=torch.float64) for n in (H, G))
    v = torch.randn(B, G, S, DV, generator=g, dtype=torch.float64)
    grad = torch.randn(B, H, S, DV, generator=g, dtype=torch.float64)
    documents = torch.tensor([[0] * 7 + [1] * 9, [0] * 16])
    sink = torch.randn(H, generator=g, dtype=torch.float64)
    return q, k, v, grad, documents, sink


def allowed(documents: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    causal = rows[:, None] >= columns[None, :]
    same = documents[:, rows][:, :, None] == documents[:, columns][:, None, :]
    return (causal & same)[:, None]


def plain(sink_on: bool) -> list[torch.Tensor]:
    q, k, v, grad, documents, sink = inputs()
    for t in (q, k, v, sink):
        t.requires_grad_()
    every = torch.arange(S)
    kk, vv = (t.repeat_interleave(H // G, 1) for t in (k, v))
    scores = (q @ kk.transpose(-1, -2)) * 0.3
    scores = scores.masked_fill(~allowed(documents, every, every), -torch.inf)
    if sink_on:
        column = sink.view(1, H, 1, 1).expand(B, H, S, 1)
        p = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    else:
        p = scores.softmax(-1)
    out = p @ vv
    (out * grad).sum().backward()
    extra = sink.grad if sink_on and sink.grad is not None else torch.zeros(H)
    return [out.detach(), q.grad, k.grad, v.grad, extra]  # type: ignore[list-item]


def ring(sink_on: bool) -> list[Any]:
    mesh = Mesh(ParallelLayout(cp=torch.distributed.get_world_size()))
    group = mesh.group("cp")
    q, k, v, grad, documents, sink = inputs()
    mine = share(S, group.size, group.rank)
    q, k, v = (t[:, :, mine].requires_grad_() for t in (q, k, v))
    sink.requires_grad_()

    def mask(rank: int) -> torch.Tensor:
        return allowed(documents, mine, share(S, group.size, rank))

    out, lse = ring_attention(q, k, v, mask, group, scale=0.3)
    if sink_on:
        out = out * torch.sigmoid(lse - sink.view(1, H, 1))[..., None]
    (out * grad[:, :, mine]).sum().backward()
    return [mine, out.detach(), q.grad, k.grad, v.grad, sink.grad if sink_on else torch.zeros(H)]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_ring_equals_whole_attention(world: int) -> None:
    """G1, C54: outputs and gradients of packed documents, with and without sinks, in fp64."""
    for sink_on in (False, True):
        want = plain(sink_on)
        results = run_ranks(ring, world, sink_on)
        for index in range(4):
            got = torch.zeros_like(want[index])
            for result in results:
                got[:, :, result[0]] = result[index + 1]
            torch.testing.assert_close(got, want[index], rtol=1e-9, atol=1e-12)
        total = sum(result[5] for result in results)
        torch.testing.assert_close(total.double(), want[4].double(), rtol=1e-9, atol=1e-12)


def exchange() -> list[torch.Tensor]:
    mesh = Mesh(ParallelLayout(cp=torch.distributed.get_world_size()))
    group = mesh.group("cp")
    whole = torch.arange(B * H * S * D, dtype=torch.float64).view(B, H, S, D)
    mine = share(S, group.size, group.rank)
    x = whole[:, :, mine].requires_grad_()
    heads = to_heads(x, group)
    back = to_sequence(heads, group)
    (heads * (group.rank + 1)).sum().backward()
    assert x.grad is not None
    return [heads.detach(), back.detach() - x.detach(), x.grad]


def test_ulysses_moves_heads_and_back() -> None:
    """D1: every rank sees its heads over the whole sequence, in order; gradients return home."""
    whole = torch.arange(B * H * S * D, dtype=torch.float64).view(B, H, S, D)
    for rank, (heads, difference, grad) in enumerate(run_ranks(exchange, 2)):
        assert torch.equal(heads, whole[:, rank * 2 : rank * 2 + 2])
        assert not difference.any()
        factor = torch.tensor([1.0, 1.0, 2.0, 2.0], dtype=torch.float64).view(1, H, 1, 1)
        assert torch.equal(grad, factor.expand_as(grad))


def test_shares_cover_each_position_once_with_equal_work() -> None:
    """D9: any length is padded to shares of equal size and equal causal work."""
    for cp in (1, 2, 3, 4, 8):
        for length in (1, 5, 16, 31):
            padded = padded_length(length, cp)
            assert length <= padded < length + 2 * cp
            shares = [share(padded, cp, rank) for rank in range(cp)]
            assert sorted(torch.cat(shares).tolist()) == list(range(padded))
            assert len({int((s + 1).sum()) for s in shares}) == 1
            assert torch.equal(torch.cat(shares)[order(padded, cp)], torch.arange(padded))


def test_ulysses_refuses_heads_it_cannot_deal() -> None:
    """F3: the sentence names cp and the way out."""
    check_heads(4, 4)
    with pytest.raises(ConfigError, match=r"cp=4.*ring"):
        check_heads(6, 4)
    for kv_heads in (1, 2, 3, 6):
        for cp in (1, 2, 3, 4, 6, 12):
            assert 12 % (kv_heads * kv_repeats(kv_heads, cp)) == 0
            assert kv_heads * kv_repeats(kv_heads, cp) % cp == 0
