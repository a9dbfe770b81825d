"""Embedding and head over a vocabulary that tp does not divide, and the chunked loss."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from moe_tp.errors import DataError
from moe_tp.parallel.collectives import Group
from moe_tp.parallel.gradients import clip_grad_norm, parameter_groups, settle_gradients
from moe_tp.parallel.layout import ParallelLayout
from moe_tp.parallel.mesh import Mesh
from moe_tp.parallel.parameter import initialise, materialise, named_specs
from moe_tp.parallel.shards import full_logical, to_local
from moe_tp.parallel.vocab import VocabParallelEmbedding, vocab_cross_entropy, vocab_logits
from moe_tp.testing import run_ranks

V, D, N = 11, 6, 8
ALONE = Group("tp")


def batch(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(2)
    x = torch.randn(N, D, generator=g, dtype=dtype)
    weight = torch.randn(V, D, generator=g, dtype=dtype)
    targets = torch.randint(0, V, (N,), generator=g)
    targets[[0, 5]] = torch.tensor([-100, V - 1])
    return x, weight, targets


@pytest.mark.parametrize("chunk", [1, 3, 8, 100])
@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_the_loss_is_torchs(chunk: int, scale: float) -> None:
    """L1, G1: sum of -log p over real targets and both gradients, for any chunk and scale."""
    x, weight, targets = batch()
    for needs in ((True, True), (True, False), (False, True)):
        leaves = [t.clone().requires_grad_(n) for t, n in zip((x, weight), needs, strict=True)]
        plain = [t.clone().requires_grad_(n) for t, n in zip((x, weight), needs, strict=True)]
        got = vocab_cross_entropy(
            *leaves, targets, ALONE, vocab_size=V, chunk_tokens=chunk, logit_scale=scale
        )
        want = F.cross_entropy(plain[0] @ plain[1].t() * scale, targets, reduction="sum")
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
        (got / 7).backward()
        (want / 7).backward()
        for a, b, need in zip(leaves, plain, needs, strict=True):
            assert (a.grad is not None) == need
            if need:
                torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-12)


def losses(tp: int, case: str) -> Any:
    mesh = Mesh(ParallelLayout(tp=tp))
    group = mesh.group("tp")
    x, weight, targets = batch()
    if case == "ignored":
        targets[:] = -100
    if case == "large":
        x = x * 1e4
    if case == "empty":
        x, targets = x[:0], targets[:0]
    rows = -(-V // tp)
    padded = F.pad(weight, (0, 0, 0, rows * tp - V), value=3.0)  # padding must not matter
    local = padded[group.rank * rows :][:rows].clone().requires_grad_()
    owned = x.chunk(tp)[group.rank].clone().requires_grad_() if len(x) else x.requires_grad_()
    loss = vocab_cross_entropy(owned, local, targets, group, vocab_size=V, chunk_tokens=3)
    (loss / 7).backward()
    return loss.detach(), owned.grad, local.grad


@pytest.mark.parametrize("case", ["plain", "ignored", "large", "empty"])
def test_the_loss_over_tp(case: str) -> None:
    """L1, D2, D4, D9, G1: 11 words over 2 and 4 ranks; padding, no target, no token, 1e4 logits."""
    for tp in (2, 4):
        results = run_ranks(losses, tp, tp, case)
        x, weight, targets = batch()
        x, weight = (x * 1e4 if case == "large" else x).requires_grad_(), weight.requires_grad_()
        total = sum(float(loss) for loss, _, _ in results)
        if case in ("ignored", "empty"):
            assert total == 0.0
            assert not any(g.any() for _, *grads in results for g in grads)
            continue
        want = F.cross_entropy(x @ weight.t(), targets, reduction="sum")
        (want / 7).backward()
        assert x.grad is not None
        assert weight.grad is not None
        assert total == pytest.approx(want.item(), rel=1e-12)
        grad_x = torch.cat([g for _, g, _ in results])
        grad_w = torch.cat([g for _, _, g in results])
        torch.testing.assert_close(grad_x, x.grad, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(grad_w[:V], weight.grad, rtol=1e-9, atol=1e-9)
        assert not grad_w[V:].any()


class _Largest(TorchDispatchMode):
    """Remember the most elements of any tensor made."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(value, torch.Tensor):
                self.elements = max(self.elements, value.numel())
        return out


def test_full_logits_never_exist() -> None:
    """D11: with chunks of 4 of 64 tokens and 500 words no tensor is larger than weight or x."""
    x = torch.randn(64, 8, requires_grad=True)
    weight = torch.randn(500, 8, requires_grad=True)
    targets = torch.arange(64)
    with _Largest() as seen:
        vocab_cross_entropy(x, weight, targets, ALONE, vocab_size=500, chunk_tokens=4).backward()
    assert seen.elements == 500 * 8
    assert 4 * 500 <= 500 * 8 < 64 * 500


def test_bf16_logits_are_summed_in_fp32() -> None:
    """R4: a bf16 head's loss is fp32, within bf16 rounding of the logits of the exact one."""
    x, weight, targets = batch(torch.bfloat16)
    x.requires_grad_()
    loss = vocab_cross_entropy(x, weight, targets, ALONE, vocab_size=V)
    assert loss.dtype is torch.float32
    logits = (x.detach() @ weight.t()).float()
    want = F.cross_entropy(logits, targets, reduction="sum")
    torch.testing.assert_close(loss, want, rtol=1e-6, atol=1e-6)
    loss.backward()
    assert x.grad is not None
    assert x.grad.dtype is torch.bfloat16


def embeddings(tp: int) -> Any:
    mesh = Mesh(ParallelLayout(tp=tp))
    group = mesh.group("tp")
    embed = VocabParallelEmbedding(V, D, mesh, dtype=torch.float64)
    initialise(embed, 0)
    entry = next(named_specs(embed))
    whole = full_logical(entry.param, entry.spec, mesh)
    ids = torch.tensor([0, 10, 3, 3, 7, 5, 1, 3])
    x = embed(ids)
    up = torch.arange(N * D, dtype=torch.float64).view(N, D)
    (x * up.chunk(tp)[group.rank]).sum().backward()
    settle_gradients(embed)
    assert entry.param.grad is not None
    grad = full_logical(entry.param.grad, entry.spec, mesh)
    padding = to_local(entry.param.grad)[max(0, V - group.rank * len(to_local(entry.param))) :]
    with torch.no_grad():
        to_local(entry.param)[0] = torch.inf  # row 0 of a rank stands in for other ranks' words
        spoilt = embed(torch.tensor([2, 4, 8, 10]))
    norm = clip_grad_norm(embed, 1e9)
    return x.detach(), whole, grad, bool(padding.any()), bool(spoilt.isnan().any()), norm


def test_the_embedding_over_tp() -> None:
    """D9, N1, G1, G3: rows, gradient and norm are those of one table; padding stays out."""
    want: Any = None
    for tp in (1, 2, 4):
        results = run_ranks(embeddings, tp, tp)
        x = torch.cat([r[0] for r in results])
        _, whole, grad, _, _, norm = results[0]
        want = want or (x, whole, grad, norm)
        for got, expected in zip((x, whole, grad, norm), want, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-12, atol=0)
        assert torch.equal(whole, want[1])
        assert not any(r[3] or r[4] for r in results)
    assert want[0].shape == (N, D)
    assert want[3] == pytest.approx(want[2].norm().item())


def strangers(case: str) -> str:
    mesh = Mesh(ParallelLayout(tp=2))
    embed = VocabParallelEmbedding(V, D, mesh)
    initialise(embed, 0)
    ids = torch.tensor([1, 2, {"high": V, "low": -1, "ignore": -100}[case.split()[0]], 4])
    try:
        if case.endswith("target"):
            x = torch.zeros(2, D)
            vocab_cross_entropy(x, embed.local("weight"), ids, mesh.group("tp"), vocab_size=V)
        else:
            embed(ids)
    except DataError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("case", ["high token", "low token", "ignore token", "high target"])
def test_ids_outside_the_vocabulary_are_refused(case: str) -> None:
    """D9, F3: 11 words padded to 12: id 11 is nobody's, and every rank says so."""
    number = {"high": V, "low": -1, "ignore": -100}[case.split()[0]]
    for text in run_ranks(strangers, 2, case):
        assert f"{case.split()[1]} {number} is outside the vocabulary of 11" in text
    assert run_ranks(strangers, 2, "ignore target") == ["no error"] * 2


class Tied(nn.Module):
    """C33's model without its layers: embedding and head are one parameter."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.embed = VocabParallelEmbedding(12, 8, mesh, dtype=torch.float64)
        self.head = VocabParallelEmbedding(12, 8, mesh, dtype=torch.float64)
        self.head.weight = self.embed.weight
        self.mesh = mesh

    def forward(self, ids_N: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
        group = self.mesh.group("tp")
        x = torch.tanh(self.embed(ids_N))
        weight = self.head.local("weight")
        return vocab_cross_entropy(x, weight, targets_N, group, vocab_size=12)


def tied(tp: int) -> Any:
    mesh = Mesh(ParallelLayout(tp=tp))
    with torch.device("meta"):
        model = Tied(mesh)
    materialise(model, torch.device("cpu"))
    initialise(model, 0)
    assert [e.fqn for e in named_specs(model)] == ["embed.weight"]
    groups = parameter_groups(model)
    assert sum(len(group["params"]) for group in groups) == 1
    optimiser = torch.optim.SGD(groups, lr=0.5)
    ids = torch.tensor([0, 11, 3, 4])
    norms = []
    for _ in range(3):
        optimiser.zero_grad()
        loss = model(ids, ids.roll(1)) / 4
        loss.backward()
        settle_gradients(model)
        norms.append(clip_grad_norm(model, 100.0))
        optimiser.step()
        assert model.head.weight is model.embed.weight
    entry = next(named_specs(model))
    weight = full_logical(entry.param, entry.spec, mesh)
    model.to(torch.bfloat16)
    assert model.head.weight is model.embed.weight
    assert model.head.weight.dtype is torch.bfloat16
    return weight, norms


def test_a_tied_head_is_one_parameter() -> None:
    """C33, G3: built on meta; gradient embedding + head, norm and optimiser count it once."""
    weight = run_ranks(tied, 1, 1)[0][0]
    mesh = Mesh.single()
    plain = VocabParallelEmbedding(12, 8, mesh, dtype=torch.float64)
    holder = nn.Module()
    holder.embed = plain
    initialise(holder, 0)
    w = to_local(plain.weight).clone().requires_grad_()
    ids = torch.tensor([0, 11, 3, 4])
    norms = []
    for _ in range(3):
        loss = F.cross_entropy(torch.tanh(w[ids]) @ w.t(), ids.roll(1))
        (grad,) = torch.autograd.grad(loss, w)
        norms.append(grad.norm().item())
        w = (w - 0.5 * grad).detach().requires_grad_()
    torch.testing.assert_close(weight, w.detach(), rtol=1e-10, atol=1e-12)
    for tp in (1, 2):
        for got, lengths in run_ranks(tied, tp, tp):
            torch.testing.assert_close(got, weight, rtol=1e-10, atol=1e-12)
            assert lengths == pytest.approx(norms, rel=1e-10)
            assert not math.isnan(lengths[0])


def logits(tp: int) -> torch.Tensor:
    group = Mesh(ParallelLayout(tp=tp)).group("tp")
    x, weight, _ = batch()
    rows = -(-V // tp)
    local = F.pad(weight, (0, 0, 0, rows * tp - V))[group.rank * rows :][:rows]
    mine = x.chunk(tp)[group.rank]
    return vocab_logits(mine, local, group, vocab_size=V, logit_scale=0.5)


def test_logits_have_no_padding() -> None:
    """D9: `[N, V]` on every rank, scaled, equal to one process."""
    x, weight, _ = batch()
    for got in run_ranks(logits, 4, 4):
        torch.testing.assert_close(got, x @ weight.t() * 0.5, rtol=1e-12, atol=1e-12)
