"""The parallel layers against plain torch on the joined tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from moe_tp.parallel.collectives import record_traffic
from moe_tp.parallel.gradients import clip_grad_norm, settle_gradients
from moe_tp.parallel.layout import ParallelLayout
from moe_tp.parallel.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from moe_tp.parallel.mesh import Mesh
from moe_tp.parallel.parameter import initialise, named_specs
from moe_tp.parallel.sequence import RMSNorm
from moe_tp.parallel.shards import full_logical
from moe_tp.parallel.vocab import VocabParallelEmbedding, vocab_cross_entropy, vocab_logits
from moe_tp.testing import run_ranks

V, D, FF, N, TOTAL = 11, 8, 12, 8, 13.0


class Tiny(nn.Module):
    """Embedding, norm, column/row pair, gate, tied head: one of each kind of layer."""

    def __init__(self, mesh: Mesh, dtype: torch.dtype) -> None:
        super().__init__()
        self.embed = VocabParallelEmbedding(V, D, mesh, dtype=dtype)
        self.norm = RMSNorm(D, 1e-5, mesh, dtype=dtype)
        self.up = ColumnParallelLinear(D, FF, mesh, dtype=dtype, bias=True)
        self.wide = RMSNorm(FF, 1e-5, mesh, dtype=dtype, split=True)
        self.down = RowParallelLinear(FF, D, mesh, dtype=dtype, bias=True)
        self.gate = ReplicatedLinear(D, 1, mesh, dtype=dtype)
        self.mesh = mesh

    def forward(self, ids_N: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
        x_TD = self.embed(ids_N)
        y_TD = self.down(self.wide(self.up(self.norm(x_TD))))
        x_TD = x_TD + y_TD * torch.sigmoid(self.gate(x_TD))
        head, group = self.embed.local("weight"), self.mesh.group("tp")
        return vocab_cross_entropy(
            x_TD, head, targets_N, group, vocab_size=V, chunk_tokens=3, logit_scale=0.5
        )


def plain(weights: dict[str, torch.Tensor], ids: torch.Tensor, targets: torch.Tensor) -> Any:
    """The same model in plain torch."""

    def norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * w

    x = weights["embed.weight"][ids]
    h = F.linear(norm(x, weights["norm.weight"]), weights["up.weight"], weights["up.bias"])
    y = F.linear(norm(h, weights["wide.weight"]), weights["down.weight"], weights["down.bias"])
    x = x + y * torch.sigmoid(x @ weights["gate.weight"].t())
    return F.cross_entropy(x @ weights["embed.weight"].t() * 0.5, targets, reduction="sum")


def batch(dp: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(3)
    ids = torch.randint(0, V, (dp, N), generator=g)
    targets = torch.randint(0, V, (dp, N), generator=g)
    targets[:, 1] = -100
    return ids, targets


def one_layout(layout: ParallelLayout, max_norm: float) -> dict[str, Any]:
    mesh = Mesh(layout)
    model = Tiny(mesh, torch.float64)
    initialise(model, 5)
    ids, targets = batch(layout.resolve(mesh.world_size).dp or 1)
    mine = mesh.coordinate("dp")
    loss = model(ids[mine], targets[mine]) / TOTAL
    loss.backward()
    settle_gradients(model)
    grads = {e.fqn: full_logical(e.param.grad, e.spec, mesh) for e in named_specs(model)}
    params = {e.fqn: full_logical(e.param, e.spec, mesh) for e in named_specs(model)}
    norm = clip_grad_norm(model, max_norm)
    clipped = {e.fqn: full_logical(e.param.grad, e.spec, mesh) for e in named_specs(model)}
    return {"grads": grads, "params": params, "norm": norm, "clipped": clipped, "loss": loss.item()}


@pytest.mark.parametrize("world", [2, 4])
def test_layers_match_plain_torch(world: int) -> None:
    """G1, G3, N1, D8, D9, L1: loss, gradients and norm equal one process; 11 words over tp."""
    for tp in [t for t in (1, 2, 4) if world % t == 0]:
        layout = ParallelLayout(tp=tp)
        results = run_ranks(one_layout, world, layout, 0.1)
        dp = world // tp
        ids, targets = batch(dp)
        weights = {k: v.clone().requires_grad_() for k, v in results[0]["params"].items()}
        loss = plain(weights, ids.flatten(), targets.flatten()) / TOTAL
        loss.backward()
        want = {k: v.grad for k, v in weights.items()}
        norm = torch.stack([g.norm() for g in want.values() if g is not None]).norm()
        assert sum(r["loss"] for r in results) == pytest.approx(loss.item(), rel=1e-12)
        for result in results:
            for name, grad in want.items():
                assert grad is not None
                torch.testing.assert_close(result["grads"][name], grad, rtol=1e-9, atol=1e-12)
                scale = min(1.0, 0.1 / (norm.item() + 1e-6))
                torch.testing.assert_close(
                    result["clipped"][name], grad * scale, rtol=1e-9, atol=1e-12
                )
                assert torch.equal(result["params"][name], results[0]["params"][name])
            assert result["norm"] == pytest.approx(norm.item(), rel=1e-9)


def single_params() -> dict[str, torch.Tensor]:
    mesh = Mesh.single()
    model = Tiny(mesh, torch.float64)
    initialise(model, 5)
    return {e.fqn: full_logical(e.param, e.spec, mesh) for e in named_specs(model)}


def test_initial_weights_are_layout_free() -> None:
    """N1, C36: bitwise the same weights on one process and on every layout."""
    want = single_params()
    for tp in (1, 2, 4):
        for result in run_ranks(one_layout, 4, ParallelLayout(tp=tp), 1.0):
            for name, value in want.items():
                assert torch.equal(result["params"][name], value), name
    assert not torch.equal(want["up.weight"][:D], want["down.weight"][:, :D].t()[:D])


def traffic(layout: ParallelLayout) -> dict[tuple[str, str, str], int]:
    mesh = Mesh(layout)
    model = Tiny(mesh, torch.float64)
    initialise(model, 5)
    ids, targets = batch(mesh.size("dp"))
    mine = mesh.coordinate("dp")
    with record_traffic() as log:
        loss = model(ids[mine], targets[mine])
        loss.backward()
    totals: dict[tuple[str, str, str], int] = {}
    for axis, op, phase, size in log.entries:
        totals[axis, op, phase] = totals.get((axis, op, phase), 0) + size
    return totals


def test_traffic_is_the_formula() -> None:
    """D11: bytes at each collective of a tensor-parallel layer equal the formula."""
    tp, size = 2, 8
    totals = run_ranks(traffic, 2, ParallelLayout(tp=tp))[0]
    rows = N * D * size * (tp - 1) // tp
    # Forward: gather into `up` and into the head; scatter out of the embedding, `down` and the
    # head's input gradient (computed in forward).
    assert totals["tp", "all_gather", "forward"] == 2 * rows
    assert totals["tp", "reduce_scatter", "forward"] == 3 * rows
    # Backward: gather for the embedding, for `down`, and again for the weights of `up`; scatter up.
    assert totals["tp", "all_gather", "backward"] == 3 * rows
    assert totals["tp", "reduce_scatter", "backward"] == rows
    chunks = -(-N // 3)
    assert chunks == 3
    small = N * size + 2 * N * size + N * size
    assert totals["tp", "all_reduce", "forward"] == 2 * small * (tp - 1) // tp
    assert totals["tp", "all_reduce", "backward"] == 2 * N * size * (tp - 1) // tp


def logits_of(layout: ParallelLayout) -> tuple[torch.Tensor, torch.Tensor]:
    mesh = Mesh(layout)
    head = VocabParallelEmbedding(V, D, mesh, dtype=torch.float64)
    initialise(head, 1)
    x = torch.arange(N * D, dtype=torch.float64).view(N, D) / 50
    owned = N // mesh.size("tp")
    mine = x[mesh.coordinate("tp") * owned :][:owned].requires_grad_()
    out = vocab_logits(mine, head.local("weight"), mesh.group("tp"), vocab_size=V)
    out.square().sum().backward()
    settle_gradients(head)
    entry = next(named_specs(head))
    return out.detach(), full_logical(entry.param.grad, entry.spec, mesh)


def test_logits_are_whole_and_their_loss_counts_once() -> None:
    """G1, D9: full logits on every rank; a loss computed alike on each rank counts once."""
    want, want_grad = run_ranks(logits_of, 1, ParallelLayout())[0]
    for result, grad in run_ranks(logits_of, 2, ParallelLayout(tp=2)):
        torch.testing.assert_close(result, want)
        torch.testing.assert_close(grad, want_grad)
        assert result.shape == (N, V)


def saved_bytes(layout: ParallelLayout) -> tuple[int, int]:
    mesh = Mesh(layout)
    norm = RMSNorm(64, 1e-5, mesh)
    up = ColumnParallelLinear(64, 128, mesh)
    initialise(norm, 1)
    initialise(up, 1)
    sizes: list[int] = []
    weights = {norm.local("weight").data_ptr(), up.local("weight").data_ptr()}

    def pack(t: torch.Tensor) -> torch.Tensor:
        if t.data_ptr() not in weights:
            sizes.append(t.nbytes)
        return t

    def count(work: Callable[[], torch.Tensor]) -> int:
        sizes.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            work()
        return sum(sizes)

    x = torch.randn(128 // mesh.size("tp"), 64, requires_grad=True)
    return count(lambda: norm(x)), count(lambda: up(x))


def test_saved_bytes_fall_with_tp() -> None:
    """D11: a norm and a column-parallel input keep 1/tp of the tokens; nothing gathered is kept."""
    whole = run_ranks(saved_bytes, 1, ParallelLayout())[0]
    for share in run_ranks(saved_bytes, 4, ParallelLayout(tp=4)):
        assert share == (whole[0] // 4, whole[1] // 4)
    assert whole[1] == 128 * 64 * 4
