"""Each collective, forward and backward, against one process that holds every rank's input."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from moe_tp.parallel import collectives as c
from moe_tp.parallel.collectives import Group, record_traffic
from moe_tp.parallel.layout import ParallelLayout
from moe_tp.parallel.mesh import Mesh
from moe_tp.testing import run_ranks

VIEWS = ("plain", "transposed", "strided", "expanded")
OPS = ("all_gather", "all_gather_1", "reduce_scatter", "reduce_scatter_1", "all_reduce")
OPS += ("replicate", "all_to_all", "all_gather_rows", "reduce_scatter_rows")
WIDTH = 3


def row_counts(size: int) -> list[int]:
    return [3, 0, 2, 1][:size]


def pair_counts(size: int) -> list[list[int]]:
    """Rows from rank s to rank d; the last rank sends nothing, rank 1 receives nothing."""
    return [
        [0 if s == size - 1 or d == 1 else (2 * s + d + 1) % 4 for d in range(size)]
        for s in range(size)
    ]


def shape_of(op: str, rank: int, size: int) -> tuple[int, ...]:
    if op == "all_to_all":
        return (sum(pair_counts(size)[rank]), WIDTH)
    if op == "all_gather_rows":
        return (row_counts(size)[rank], WIDTH)
    if op == "reduce_scatter_rows":
        return (sum(row_counts(size)), WIDTH)
    return (2 * size, size, 2)


def numbers(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=g, dtype=torch.float64)


def make(op: str, view: str, rank: int, size: int) -> torch.Tensor:
    """Return the input of one rank, laid out in memory as `view` says."""
    shape, seed = shape_of(op, rank, size), 10 * rank + 1
    if view == "transposed":
        return numbers(shape[::-1], seed).permute(*reversed(range(len(shape))))
    if view == "strided":
        return numbers((*shape[:-1], 2 * shape[-1]), seed)[..., ::2]
    if view == "expanded":
        return numbers((1, *shape[1:]), seed).expand(shape)
    return numbers(shape, seed)


def upstream(out: torch.Tensor, view: str, rank: int) -> torch.Tensor:
    """Return the gradient that reaches the output; that of a sum is expanded from one number."""
    if view == "expanded":
        return torch.ones((), dtype=out.dtype).expand(out.shape)
    return numbers(tuple(out.shape), 10 * rank + 7)


def apply(op: str, x: torch.Tensor, group: Group) -> torch.Tensor:
    size, rank = group.size, group.rank
    counts, pairs = row_counts(size), pair_counts(size)
    if op == "all_to_all":
        return c.all_to_all(x, pairs[rank], [pairs[s][rank] for s in range(size)], group)
    if op.endswith("rows"):
        return getattr(c, op)(x, counts, group)  # type: ignore[no-any-return]
    if op.endswith("_1"):
        return getattr(c, op[:-2])(x, group, 1)  # type: ignore[no-any-return]
    return getattr(c, op)(x, group)  # type: ignore[no-any-return]


def on_rank(layout: ParallelLayout, axis: str) -> dict[tuple[str, str], Any]:
    group = Mesh(layout).group(axis)
    results = {}
    for op, view in product(OPS, VIEWS):
        base = make(op, view, group.rank, group.size)
        before = base.clone()
        x = base.requires_grad_()
        out = apply(op, x, group)
        again = apply(op, x, group)
        assert torch.equal(out, again), f"{op} gave other bits the second time"
        side = numbers(tuple(x.shape), 5)
        if view == "expanded":
            loss = out.sum() + (side * x).sum()
        else:
            loss = (upstream(out, view, group.rank) * out).sum() + (side * x).sum()
        grad = torch.autograd.grad(loss, x)[0]
        assert torch.equal(x, before), f"{op} changed its input"
        results[op, view] = (out.detach(), grad - side)
    return results


def simulate(op: str, xs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return every rank's output."""
    size = len(xs)
    if op.startswith("all_gather"):
        return [torch.cat(xs, dim=1 if op.endswith("_1") else 0)] * size
    if op == "reduce_scatter_rows":
        return list(torch.stack(xs).sum(0).split(row_counts(size)))
    if op.startswith("reduce_scatter"):
        return list(torch.stack(xs).sum(0).chunk(size, dim=1 if op.endswith("_1") else 0))
    if op == "all_reduce":
        return [torch.stack(xs).sum(0)] * size
    if op == "replicate":
        return xs
    parts = [x.split(counts) for x, counts in zip(xs, pair_counts(size), strict=True)]
    return [torch.cat([parts[s][d] for s in range(size)]) for d in range(size)]


def dual(op: str, gs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return every rank's input gradient from every rank's output gradient."""
    size = len(gs)
    total = torch.stack(gs).sum(0) if op.startswith(("all_gather", "replicate")) else None
    if op == "all_gather_rows":
        assert total is not None
        return list(total.split(row_counts(size)))
    if total is not None:
        dim = 1 if op.endswith("_1") else 0
        return [total] * size if op == "replicate" else list(total.chunk(size, dim=dim))
    if op.startswith("reduce_scatter"):
        return [torch.cat(gs, dim=1 if op.endswith("_1") else 0)] * size
    if op == "all_reduce":
        return gs
    back = [list(counts) for counts in zip(*pair_counts(size), strict=True)]
    parts = [g.split(counts) for g, counts in zip(gs, back, strict=True)]
    return [torch.cat([parts[d][s] for d in range(size)]) for s in range(size)]


@pytest.mark.parametrize(
    ("world", "layout", "axis"),
    [
        (2, ParallelLayout(tp=2), "tp"),
        (4, ParallelLayout(tp=4), "tp"),
        (4, ParallelLayout(tp=2), "dp"),
        (4, ParallelLayout(cp=2, ep=2), "edp"),
    ],
)
def test_every_collective_and_its_dual(world: int, layout: ParallelLayout, axis: str) -> None:
    """D2, C23: values and gradients, also strided, expanded, uneven and empty; inputs untouched.

    The loss holds a residual term in x itself, which an in-place collective would spoil.
    """
    results = run_ranks(on_rank, world, layout, axis)
    size = 4 if layout.tp == 4 else 2
    stride = world // size  # a group of 2 in a world of 4 is {0, 2}; {1, 3} does the same
    for op, view in product(OPS, VIEWS):
        xs = [make(op, view, rank, size) for rank in range(size)]
        outs = simulate(op, xs)
        grads = dual(op, [upstream(o, view, rank) for rank, o in enumerate(outs)])
        for place, (rank, _) in enumerate(product(range(size), range(stride))):
            out, grad = results[place][op, view]
            torch.testing.assert_close(out, outs[rank], rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(grad, grads[rank], rtol=1e-12, atol=1e-12)


def c23() -> list[tuple[torch.Tensor, torch.Tensor]]:
    group = Mesh(ParallelLayout(tp=2)).group("tp")
    found = []
    for dense in (False, True):
        leaf = torch.arange(24.0).requires_grad_()
        for x in (leaf.view(4, 6).t(), leaf.view(4, 6)[:, ::2], leaf.view(1, 24).expand(2, 24)):
            y = x.contiguous() if dense else x
            rows = y.shape[0] // 2
            for f in (
                lambda t: c.all_gather(t, group),
                lambda t: c.reduce_scatter(t, group),
                lambda t: c.all_reduce(t, group),
                lambda t: c.replicate(t, group),
                lambda t, n=rows: c.all_to_all(t, [n, n], [n, n], group),
                lambda t, n=y.shape[0]: c.all_gather_rows(t, [n, n], group),
                lambda t, n=rows: c.reduce_scatter_rows(t, [n, n], group),
            ):
                out = f(y)
                grad = torch.autograd.grad(out.sum(), leaf, retain_graph=True)[0]
                found.append((out.detach(), grad))
    return found


def test_strided_input_is_its_contiguous_copy() -> None:
    """C23: results and gradients of x.t(), x[:, ::2] and an expanded x equal the copy's."""
    for found in run_ranks(c23, 2):
        half = len(found) // 2
        assert half == 21
        for (out, grad), (want, want_grad) in zip(found[:half], found[half:], strict=True):
            assert torch.equal(out, want)
            assert torch.equal(grad, want_grad)


def sums_of(dtype: torch.dtype, values: list[float]) -> dict[str, list[float]]:
    group = Mesh(ParallelLayout(tp=4)).group("tp")
    x = torch.full((4, 3), values[group.rank], dtype=dtype, requires_grad=True)
    odd = torch.full((3,), values[group.rank], dtype=dtype)
    up = torch.full((), values[group.rank], dtype=dtype)

    def grad(y: torch.Tensor) -> list[float]:
        return torch.autograd.grad(y, x, up.expand(y.shape))[0].flatten().unique().tolist()  # type: ignore[no-any-return]

    return {
        "reduce_scatter": c.reduce_scatter(x, group).flatten().unique().tolist(),
        "rows": c.reduce_scatter_rows(x, [1, 0, 3, 0], group).flatten().unique().tolist(),
        "all_reduce": c.all_reduce(x, group).flatten().unique().tolist(),
        "odd": c.raw_all_reduce(odd, group).unique().tolist(),
        "gather backward": grad(c.all_gather(x, group)),
        "rows backward": grad(c.all_gather_rows(x, [4] * 4, group)),
        "replicate backward": grad(c.replicate(x, group)),
    }


def test_bf16_sums_do_not_round_on_the_way() -> None:
    """D6: 256 + 1 + 1 + 1 is 259, 260 in bf16; bf16 accumulation would stay at 256."""
    for values in ([256.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 256.0]):
        for rank, sums in enumerate(run_ranks(sums_of, 4, torch.bfloat16, values)):
            for name, got in sums.items():
                empty = name == "rows" and rank in (1, 3)
                assert got == ([] if empty else [260.0]), (name, got)
    for sums in run_ranks(sums_of, 4, torch.float16, [2048.0, 1.0, 1.0, 1.0]):
        assert sums["all_reduce"] == [2052.0]


def ordered() -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    group = Mesh(ParallelLayout(tp=4)).group("tp")
    x = numbers((8, 5), group.rank).float() * 10.0 ** (3 * group.rank)
    outs = [c.reduce_scatter(x, group), c.reduce_scatter_rows(x, [2] * 4, group)]
    return x, outs[0], [*outs, c.all_reduce(x, group), c.all_reduce(x, group)]


def test_sums_are_taken_in_rank_order() -> None:
    """D6: a reduce-scatter in fp32 has the bits of ((x0 + x1) + x2) + x3; a rerun has the same."""
    results = run_ranks(ordered, 4)
    xs = [x for x, _, _ in results]
    want = ((xs[0] + xs[1]) + xs[2]) + xs[3]
    assert not torch.equal(want, ((xs[3] + xs[2]) + xs[1]) + xs[0])
    assert torch.equal(torch.cat([out for _, out, _ in results]), want)
    for _, out, outs in results:
        assert torch.equal(out, outs[1])
        assert torch.equal(outs[2], outs[3])
        assert torch.equal(outs[2], results[0][2][2])


def bytes_sent(dtype: torch.dtype) -> list[Any]:
    group = Mesh(ParallelLayout(tp=4)).group("tp")
    found = []
    for op in OPS:
        x = make(op, "plain", group.rank, group.size).to(dtype).requires_grad_()
        with record_traffic() as outer, record_traffic() as log:
            apply(op, x, group).sum().backward()
        assert outer.entries == log.entries
        found.append((op, x.nbytes, log.entries))
    with record_traffic() as log:
        c.exchange_counts(torch.arange(8).view(4, 2) + 10 * group.rank, group)
    found.append(("exchange_counts", 64, log.entries))
    with record_traffic() as log:
        alone = Mesh.single().group("tp")
        for op in ("all_gather", "reduce_scatter", "all_reduce", "replicate"):
            y = torch.ones(2, 2)
            assert getattr(c, op)(y, alone) is y
    assert log.entries == []
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_bytes_sent_are_the_formula(dtype: torch.dtype) -> None:
    """D11: what a rank sends in each collective, forward and backward, equals the formula."""
    counts, pairs, row = row_counts(4), pair_counts(4), WIDTH * dtype.itemsize
    for rank, found in enumerate(run_ranks(bytes_sent, 4, dtype)):
        for op, n, entries in found:
            ring = n * 3 // 4  # what a reduce-scatter or an all-gather of n bytes sends
            to_others = sum(pairs[rank]) - pairs[rank][rank]
            from_others = sum(p[rank] for p in pairs) - pairs[rank][rank]
            others = sum(counts) - counts[rank]
            narrow = dtype is torch.bfloat16
            reduce = [("reduce_scatter", ring), ("all_gather", ring)]
            reduce = reduce if narrow else [("all_reduce", 2 * ring)]
            forward, backward = {
                "all_gather": ([("all_gather", 3 * n)], [("reduce_scatter", 3 * n)]),
                "reduce_scatter": ([("reduce_scatter", ring)], [("all_gather", ring)]),
                "all_reduce": (reduce, []),
                "replicate": ([], reduce),
                "all_to_all": (
                    [("all_to_all", to_others * row)],
                    [("all_to_all", from_others * row)],
                ),
                "all_gather_rows": (
                    [("all_gather", 3 * counts[rank] * row)],
                    [("reduce_scatter", others * row)],
                ),
                "reduce_scatter_rows": (
                    [("reduce_scatter", others * row)],
                    [("all_gather", 3 * counts[rank] * row)],
                ),
                "exchange_counts": ([("all_to_all", 3 * 16)], []),
            }[op.removesuffix("_1")]
            want = [("tp", o, "forward", b) for o, b in forward]
            want += [("tp", o, "backward", b) for o, b in backward]
            assert [tuple(e) for e in entries] == want, op


def small_things() -> dict[str, Any]:
    group = Mesh(ParallelLayout(tp=4)).group("tp")
    r = group.rank
    empty = torch.zeros(0, 2, requires_grad=True)
    joined = [
        c.all_gather(empty, group),
        c.reduce_scatter(empty, group),
        c.all_to_all(empty, [0] * 4, [0] * 4, group),
        c.all_gather_rows(empty, [0] * 4, group),
        c.reduce_scatter_rows(empty, [0] * 4, group),
        c.all_reduce(empty, group),
    ]
    torch.cat(joined).sum().backward()
    assert empty.grad is not None
    counts = torch.tensor([[10 * r + p, p] for p in range(4)])
    late = c.start_all_to_all(torch.full((4, 1), float(r)), [1] * 4, [1] * 4, group)
    with record_traffic() as log:
        c.raw_all_reduce(torch.ones(4, dtype=torch.float64), group)
        c.raw_all_gather(torch.ones(1), group)
    return {
        "shapes": [tuple(t.shape) for t in joined],
        "max": c.raw_all_reduce(torch.tensor([r, -r]), group, "max").tolist(),
        "min": c.raw_all_reduce(torch.tensor([r, -r]), group, "min").tolist(),
        "sum": c.raw_all_reduce(torch.tensor([r, 1 << 40]), group).tolist(),
        "counts": c.exchange_counts(counts, group).tolist(),
        "late": c.finish(late).flatten().tolist(),
        "totals": (log.total(), log.total(op="all_gather"), log.total(axis="dp"),
                   log.total(axis="tp", phase="backward")),
    }  # fmt: skip


def test_empty_rows_counts_and_integers() -> None:
    """D2: no rows anywhere still joins and back-propagates; integer sums and counts are exact."""
    for rank, got in enumerate(run_ranks(small_things, 4)):
        assert got["shapes"] == [(0, 2)] * 6
        assert got["max"] == [3, 0]
        assert got["min"] == [0, -3]
        assert got["sum"] == [6, 4 << 40]
        assert got["counts"] == [[10 * p + rank, rank] for p in range(4)]
        assert got["late"] == [0.0, 1.0, 2.0, 3.0]
        assert got["totals"] == (2 * 32 * 3 // 4 + 4 * 3, 12, 0, 0)
