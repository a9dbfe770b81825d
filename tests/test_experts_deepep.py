"""The DeepEP adapter's contract, over a fake of the package's interface."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from experts_cases import draw, mesh_of_layout

from moe_tp import Mesh, MoE, settle_gradients
from moe_tp.errors import ConfigError
from moe_tp.experts.deepep import DeepEPDispatcher
from moe_tp.parallel.shards import to_local
from moe_tp.routing import ExpertTable, RouterConfig
from moe_tp.testing import run_ranks


class FakeBuffer:
    """The calls of DeepEP's `Buffer` that the adapter makes, over gloo."""

    num_local = 0

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.ranks = group, dist.get_world_size(group)

    def get_dispatch_layout(self, topk_idx: torch.Tensor, num_experts: int) -> tuple[Any, ...]:
        per = num_experts // self.ranks
        dest = torch.where(topk_idx >= 0, topk_idx // per, -1)
        in_rank = torch.stack([(dest == p).any(1) for p in range(self.ranks)], 1)
        flat = topk_idx.flatten()
        per_expert = torch.bincount(flat[flat >= 0], minlength=num_experts)
        return in_rank.sum(0), None, per_expert, in_rank, None

    def _move(self, rows: torch.Tensor, send: list[int], recv: list[int]) -> torch.Tensor:
        out = rows.new_empty(sum(recv), *rows.shape[1:])
        dist.all_to_all_single(out, rows.contiguous(), recv, send, group=self.group)
        return out

    def dispatch(self, x: torch.Tensor, handle: Any = None, topk_idx: Any = None,
                 topk_weights: Any = None, num_tokens_per_rank: Any = None,
                 is_token_in_rank: Any = None, **_: Any) -> tuple[Any, ...]:  # fmt: skip
        if handle is not None:
            token, send, recv, _, _ = handle
            return self._move(x[token], send, recv), None, None, None, None, None
        token = is_token_in_rank.t().nonzero()[:, 1]
        send = num_tokens_per_rank.tolist()
        counts = torch.empty(self.ranks, dtype=torch.int64)
        dist.all_to_all_single(counts, num_tokens_per_rank.contiguous(), group=self.group)
        recv = counts.tolist()
        rows, ids, weights = (self._move(t[token], send, recv) for t in (x, topk_idx, topk_weights))
        rank, per = dist.get_rank(self.group), self.num_local
        ids = torch.where(ids // per == rank, ids - rank * per, -1)
        weights = torch.where(ids >= 0, weights, 0.0)
        handle = (token, send, recv, x.shape[0], topk_idx.shape[1])
        return rows, ids, weights, None, handle, None

    def combine(self, x: torch.Tensor, handle: Any, topk_weights: Any = None) -> tuple[Any, ...]:
        assert x.dtype == torch.bfloat16
        token, send, recv, num, choices = handle
        back = self._move(x, recv, send).float()
        out = torch.zeros(num, x.shape[1]).index_add_(0, token, back).bfloat16()
        weights = None
        if topk_weights is not None:
            back = self._move(topk_weights, recv, send)
            weights = torch.zeros(num, choices).index_add_(0, token, back)
        return out, weights, None


def test_deepep_contract() -> None:
    """D1: the adapter over a fake of the package's interface equals the all-to-all in bf16."""
    want = run_ranks(_deepep, 2, False)
    for got, ref in zip(run_ranks(_deepep, 2, True), want, strict=True):
        for a, b in zip(got, ref, strict=True):
            assert ((a - b).float().norm() / b.float().norm()).item() < 1e-2


def _deepep(fake: bool) -> list[torch.Tensor]:
    mesh = mesh_of_layout({"ep": 2}, wire_dtype=torch.bfloat16)
    table = ExpertTable(5, 2)
    FakeBuffer.num_local = table.slots_per_rank
    dispatcher = DeepEPDispatcher(mesh, table, FakeBuffer) if fake else None
    layer = MoE(
        16, 8, RouterConfig(5, 2), mesh, dtype=torch.bfloat16, seed=0, dispatcher=dispatcher
    )
    x = draw(7 - mesh.rank, 16, dtype=torch.float32, seed=mesh.rank).bfloat16().requires_grad_()
    y, _ = layer(x)
    y.square().sum().backward()
    settle_gradients(layer)
    return [y.detach(), x.grad, *(to_local(p.grad) for p in layer.parameters())]


def test_deepep_is_asked_for_only_when_wanted() -> None:
    """F3: not installed, one rank, or etp: one sentence each."""
    with pytest.raises(ConfigError, match="choose 'local'"):
        DeepEPDispatcher(Mesh.single(), ExpertTable(4))
    for messages in run_ranks(_no_deepep, 2):
        assert "needs the package deep_ep" in messages[0]
        assert "cannot split experts over etp=2" in messages[1]


def _no_deepep() -> list[str]:
    messages = []
    for layout in ({"ep": 2}, {"etp": 2}):
        mesh = mesh_of_layout(layout, dispatcher="deepep")
        with pytest.raises(ConfigError) as info:
            MoE(8, 8, RouterConfig(4, 2), mesh)
        messages.append(str(info.value))
    return messages
