"""Runs of experts that share one batched product, and pre-activations that lie turned for it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from model_cases import error
from test_experts_places import made

from moe_tp.experts import blocks, compiled
from moe_tp.experts.activation import GeluGLU, SwiGLU
from moe_tp.experts.grouped import LowRank, experts_forward
from moe_tp.experts.places import round_up
from moe_tp.experts.runs import even_out, find_runs
from moe_tp.parallel import product

Results = dict[str, torch.Tensor]
COUNTS = [37, 40, 33, 38, 0, 21, 24, 200, 190, 5]  # runs of 4, 2 and 2


def cuts(length: int) -> Iterator[tuple[int, ...]]:
    """Yield each way to cut so many experts into runs of 1, 2, 4 and 8."""
    if length == 0:
        yield ()
    for first in (1, 2, 4, 8):
        if first <= length:
            for rest in cuts(length - first):
                yield (first, *rest)


def cost(counts: Sequence[int], runs: Sequence[int], *, call: int, most: int) -> float:
    """Return places, and what calls are worth in places; infinite where a run is not allowed."""
    at, total = 0, 0
    for many in runs:
        own = counts[at : at + many]
        places = many * max(round_up(count) for count in own)
        if many > 1 and (0 in own or places > 1.2 * sum(own) or places > most):
            return float("inf")
        total += places + (call if places else 0)
        at += many
    return total


@pytest.mark.parametrize(("hidden", "call", "most"), [(256, 128, 8192), (8192, 16, 256)])
def test_runs_cost_the_least(hidden: int, call: int, most: int) -> None:
    """No other way to cut 9 experts costs less, of all that are allowed; 512 wide."""
    draw = random.Random(0)
    for _ in range(40):
        counts = [draw.choice((0, draw.randint(1, 60), draw.randint(90, 110))) for _ in range(9)]
        sizes = [round_up(count) for count in counts]
        runs = find_runs(counts, sizes, dim=512, hidden=hidden) or (1,) * 9
        best = min(cost(counts, other, call=call, most=most) for other in cuts(9))
        assert cost(counts, runs, call=call, most=most) == best
        even = even_out(sizes, runs)
        assert all(a <= b for a, b in zip(sizes, even, strict=True))
        assert sum(even) <= max(1.2 * sum(counts), sum(sizes))


def test_experts_that_differ_stay_alone() -> None:
    """Nothing is said where no two come together: products go as ever."""
    assert find_runs([10, 0, 100, 1000], [10, 0, 104, 1008], dim=512, hidden=256) == ()
    assert find_runs([], [], dim=512, hidden=256) == ()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let products be batched, and blocks be small; return how many matrices each call has."""
    found: list[int] = []

    def noted(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        found.append(a.shape[0] if a.dim() == 3 else 1)
        return product.product(a, b, out)

    monkeypatch.setattr(product, "_has_amx", lambda: True)
    monkeypatch.setattr(blocks, "PASS", 12000)
    monkeypatch.setattr(blocks, "product", noted)
    return found


def extras(kind: str, dtype: torch.dtype) -> Results:
    """Return biases, or terms of adapters, of 10 experts."""
    torch.manual_seed(3)
    experts = len(COUNTS)
    shapes = {
        "biases": {"gate_up_bias_e2F": (experts, 2, 64), "down_bias_eD": (experts, 256)},
        "adapters": {
            "gate_up_a": (experts, 2, 4, 256),
            "gate_up_b": (experts, 2, 64, 4),
            "down_a": (experts, 4, 64),
            "down_b": (experts, 256, 4),
        },
    }.get(kind, {})
    return {n: (torch.randn(s) / 8).to(dtype).requires_grad_() for n, s in shapes.items()}


def answers(kind: str, dtype: torch.dtype, backend: str) -> Results:
    """Return output and gradients of one layer of experts."""
    received, tensors = made(COUNTS, dtype)
    if kind == "early":
        received = replace(received, early=lambda rows: None)
    more = extras(kind, dtype)
    biases = more if kind == "biases" else {}
    y = experts_forward(
        received, tensors["gate_up"], tensors["down"],
        activation=GeluGLU() if kind == "gelu" else SwiGLU(),
        adapter=LowRank(**more) if kind == "adapters" else None,  # type: ignore[arg-type]
        backend=backend, recompute=kind == "recompute", **biases,  # type: ignore[arg-type]
    )  # fmt: skip
    torch.manual_seed(2)
    y.backward(torch.randn(y.shape).bfloat16().to(y.dtype))
    grads = {n: v.grad.double() for n, v in (tensors | more).items() if v.grad is not None}
    assert len(grads) == 4 + len(more)
    return {"y": y.detach().double(), **grads}


@pytest.mark.parametrize("compiles", [True, False])
@pytest.mark.parametrize("kind", ["plain", "early", "recompute", "gelu", "biases", "adapters"])
def test_runs_equal_the_loop(
    kind: str, compiles: bool, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """D1, D3, D5: as near to fp64 as the loop is in bf16, every gradient too."""
    if not compiles:
        monkeypatch.setattr(compiled, "_passes", lambda: None)
    exact = answers(kind, torch.float64, "loop")
    loop = answers(kind, torch.bfloat16, "loop")
    assert not calls
    found = answers(kind, torch.bfloat16, "sliced")
    assert {1, 2, 4} == set(calls)
    for name, value in found.items():
        assert error(value, exact[name]) <= 1.3 * error(loop[name], exact[name]) + 1e-3, name
    assert not found["down"][4].any()


def test_what_lies_turned(calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Pre-activations of SwiGLU alone, where it compiles; nothing else that reads them knows."""
    seen: list[bool] = []
    inner = blocks.make_blocks

    def noted(*args: object, turned: bool, **options: object) -> list[blocks.Block]:
        seen.append(turned)
        return inner(*args, turned=turned, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("moe_tp.experts.kernel.make_blocks", noted)
    for kind in ("plain", "early", "recompute", "gelu", "biases", "adapters"):
        answers(kind, torch.bfloat16, "sliced")
    compiles = compiled._passes() is not None
    assert seen == [compiles] * 3 + [False] * 3
    answers("plain", torch.float32, "sliced")
    assert seen[6:] == [False]


def turned(value_nN: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """Return the same memory filled with each expert's columns."""
    return torch.cat([own.t().reshape(-1) for own in value_nN.split(list(counts))]).view_as(
        value_nN
    )


@pytest.mark.parametrize(
    ("counts", "size"), [([0, 17, 1, 33, 5], 37), ([32, 64], 64), ([1], 1), ([47, 48, 31], 70)]
)
def test_turned_rows_have_the_same_bits(counts: list[int], size: int) -> None:
    """D1: sizes leave a rest of rows and of columns; 1 to 3 threads; NaN stays where it is."""
    if compiled._passes() is None:  # pragma: no cover
        pytest.skip("no C compiler")
    torch.manual_seed(0)
    rows, threads = sum(counts), torch.get_num_threads()
    bf16 = {"dtype": torch.bfloat16}
    gate_up, grad = torch.randn(rows, 2 * size).to(**bf16), torch.randn(rows, size).to(**bf16)
    gate_up[0, size - 1] = torch.nan
    weight = torch.rand(rows)

    def buffers() -> list[torch.Tensor]:
        wide = torch.full_like(gate_up, 7)
        return [torch.full_like(grad, 7), wide, wide.clone(), torch.full_like(weight, 7)]

    hidden, d_gate_up, _, d_weight = buffers()
    act = torch.empty_like(grad)
    compiled.swiglu(gate_up, act)
    compiled.swiglu_backward(grad, gate_up, weight, hidden, d_gate_up, d_weight)
    columns = turned(gate_up, counts)
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            got, got_act = buffers(), torch.empty_like(grad)
            compiled.turned_swiglu(columns, got_act, counts)
            compiled.turned_swiglu_backward(grad, columns, weight, *got, counts)
            expected = [turned(hidden, counts), d_gate_up, turned(d_gate_up, counts)]
            for one, other in zip([got_act, *got[:3]], [act, *expected], strict=True):
                assert torch.equal(one.view(torch.int16), other.view(torch.int16))
            torch.testing.assert_close(got[3], d_weight, equal_nan=True)
    finally:
        torch.set_num_threads(threads)


def test_few_lengths() -> None:
    """oneDNN compiles each number of experts anew: runs have 2, 4 or 8."""
    for draw in itertools.product((30, 31, 32), repeat=3):
        assert set(find_runs(draw * 5, draw * 5, dim=64, hidden=64)) <= {1, 2, 4, 8}
