"""RMSNorm on owned tokens and over a width that tp splits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from moe_tp.parallel.collectives import record_traffic
from moe_tp.parallel.gradients import settle_gradients
from moe_tp.parallel.layout import ParallelLayout
from moe_tp.parallel.mesh import Mesh
from moe_tp.parallel.parameter import initialise
from moe_tp.parallel.sequence import RMSNorm, rms_norm
from moe_tp.parallel.shards import full_logical, local_index, to_local
from moe_tp.testing import run_ranks

EPS = 1e-5


@pytest.mark.parametrize("shape", [(5, 6), (2, 3, 6), (6,), (0, 6)])
def test_the_norm_is_torchs(shape: tuple[int, ...]) -> None:
    """G1, D2: value and both gradients equal torch's, also for no rows and an expanded gradient."""
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    w = torch.randn(6, dtype=torch.float64, requires_grad=True)
    got, want = rms_norm(x, w, EPS), F.rms_norm(x, (6,), w, EPS)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    for up in (torch.randn(shape, dtype=torch.float64), torch.ones((), dtype=torch.float64)):
        up = up.expand(shape)
        kept = up.clone()
        for a, b in zip(
            torch.autograd.grad(got, (x, w), up, retain_graph=True),
            torch.autograd.grad(want, (x, w), up, retain_graph=True),
            strict=True,
        ):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
        assert torch.equal(up, kept)
    if x.numel() and x.dim() == 2:
        assert torch.autograd.gradcheck(lambda a, b: rms_norm(a, b, EPS), (x, w))


def test_bf16_input_is_normed_in_fp32() -> None:
    """R4: the norm of bf16 rows is the fp32 norm, rounded once; its gradients too."""
    norm = RMSNorm(64, EPS, Mesh.single(), dtype=torch.bfloat16)
    initialise(norm, 0)
    assert norm.weight.dtype is torch.float32
    with torch.no_grad():
        to_local(norm.weight).uniform_(0.5, 1.5)
    x = (100 + torch.randn(16, 64)).bfloat16().requires_grad_()
    wide = x.detach().float().requires_grad_()
    got, want = norm(x), rms_norm(wide, to_local(norm.weight), EPS)
    assert got.dtype is torch.bfloat16
    assert torch.equal(got, want.bfloat16())
    up = torch.randn(16, 64).bfloat16()
    got.backward(up)
    want.backward(up.float())
    assert x.grad is not None
    assert wide.grad is not None
    assert torch.equal(x.grad, wide.grad.bfloat16())


def over_ranks(layout: ParallelLayout) -> Any:
    mesh = Mesh(layout)
    group = mesh.group("tp")
    g = torch.Generator().manual_seed(1)
    rows = torch.randn(8, 12, generator=g, dtype=torch.float64)
    up = torch.randn(8, 12, generator=g, dtype=torch.float64)
    weight = torch.randn(12, generator=g, dtype=torch.float64)
    found = []
    for split in (False, True):
        norm = RMSNorm(12, EPS, mesh, dtype=torch.float64, split=split)
        with torch.no_grad():
            to_local(norm.weight).copy_(weight[local_index(norm.weight, norm.specs["weight"])[0]])
        # Each dp rank has half of the rows; over tp either tokens or features are shared out.
        half = slice(4 * mesh.coordinate("dp"), 4 * mesh.coordinate("dp") + 4)
        x = rows[half].chunk(group.size, dim=1 if split else 0)[group.rank].contiguous()
        mine = up[half].chunk(group.size, dim=1 if split else 0)[group.rank]
        x.requires_grad_()
        with record_traffic() as log:
            y = norm(x)
            (y * mine).sum().backward()
        assert x.grad is not None
        settle_gradients(norm)
        grad = full_logical(norm.weight.grad, norm.specs["weight"], mesh)
        sent = (log.total(phase="forward"), log.total(phase="backward"))
        found.append((y.detach(), x.grad, grad, sent))
    return found, (rows, up, weight)


def test_owned_rows_and_split_width_equal_one_process() -> None:
    """G1, G2, D11: sequence shards and a width split over tp; one number a row travels."""
    results = run_ranks(over_ranks, 4, ParallelLayout(tp=2))
    rows, up, weight = results[0][1]
    rows.requires_grad_()
    weight.requires_grad_()
    want = F.rms_norm(rows, (12,), weight, EPS)
    (want * up).sum().backward()
    for rank, (found, _) in enumerate(results):
        dp, tp = divmod(rank, 2)
        for split, (y, grad_x, grad_w, sent) in enumerate(found):

            def part(t: torch.Tensor, dim: int = split, dp: int = dp, tp: int = tp) -> Any:
                return t[4 * dp : 4 * dp + 4].chunk(2, dim=dim)[tp]

            torch.testing.assert_close(y, part(want.detach()), rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(grad_x, part(rows.grad), rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(grad_w, weight.grad, rtol=1e-10, atol=1e-12)
            assert sent == ((4 * 8, 4 * 8) if split else (0, 0))
