"""Round numbers of places for oneDNN's products on a CPU, and sums that are rounded once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from model_cases import error

from moe_tp.experts.activation import SwiGLU
from moe_tp.experts.dispatch import Received
from moe_tp.experts.grouped import experts_forward
from moe_tp.experts.places import make_places, round_up
from moe_tp.experts.rows import plan_sums, stable_order, sum_rows
from moe_tp.parallel import product


@pytest.fixture(params=["one product an expert", "batched products"])
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let bf16 products go as on a processor without AMX, and as on one that has it."""
    name = str(request.param)
    monkeypatch.setattr(product, "_has_amx", lambda: name == "batched products")
    return name


def test_few_sizes_and_little_waste() -> None:
    """Each count has its places, at most an eighth more, and an octave has at most 32 sizes."""
    for count in range(3000):
        assert count <= round_up(count) <= count * 9 / 8 + 1
    for low in (16, 128, 1024, 8192):
        assert len({round_up(count) for count in range(low, 2 * low)}) <= 33
    assert {round_up(count) - count for count in range(16)} == {0}


def test_places_hold_each_pair_once_and_zeros_else() -> None:
    """Experts of 0, 17, 33 and 1 pairs; two choices without an expert follow."""
    counts = (0, 17, 33, 1)
    torch.manual_seed(0)
    row_P = torch.cat(
        [torch.randperm(60)[:n].sort().values for n in counts] + [torch.tensor([7, 9])]
    )
    places = make_places(row_P, counts, torch.randn(60, 4, dtype=torch.bfloat16))
    assert places.counts == (0, 18, 36, 1)
    assert places.place_N is not None
    assert torch.equal(places.row_Q[places.place_N], row_P[:51])
    free = sorted(set(range(55)) - set(places.place_N.tolist()))
    assert list(places.empty) == free == [17, 51, 52, 53]
    value_P = torch.rand(53)
    value_Q = places.spread(value_P)
    assert value_Q.sum() == pytest.approx(float(value_P[:51].sum()))
    assert torch.equal(places.collect(value_Q, 53), torch.cat([value_P[:51], torch.zeros(2)]))


@pytest.mark.parametrize("by_onednn", [True, False])
def test_fp32_takes_round_places_where_onednn_multiplies(
    by_onednn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not for little work, nor in fp64, nor in MKL's products."""
    monkeypatch.setattr("moe_tp.parallel.product._prefers_onednn", lambda: by_onednn)
    row_P, counts = torch.arange(50), (17, 33)
    wide, narrow = torch.empty(60, 2048), torch.empty(60, 4)
    assert make_places(row_P, counts, wide).counts == ((18, 36) if by_onednn else counts)
    for rows in (narrow, wide.double()):
        assert make_places(row_P, counts, rows).counts == counts


@pytest.mark.parametrize("early", [False, True])
def test_round_places_in_fp32_change_no_answer(
    early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D1, D3: every gradient too, as near to fp64 as the loop."""
    monkeypatch.setattr("moe_tp.experts.places.compiles_each_size", lambda rows: True)
    counts, results = [137, 0, 17, 200, 5, 256], []
    for dtype, backend in ((torch.float64, "loop"), (torch.float32, "sliced")):
        received, tensors = made(counts, dtype)
        if early:
            received = replace(received, early=lambda rows: None)
        y = experts_forward(
            received, tensors["gate_up"], tensors["down"], activation=SwiGLU(), backend=backend,  # type: ignore[arg-type]
        )  # fmt: skip
        torch.manual_seed(2)
        y.backward(torch.randn(y.shape).to(y.dtype))
        results.append(
            [
                y.detach().double(),
                *(v.grad.double() for v in tensors.values() if v.grad is not None),
            ]
        )
    assert len(results[0]) == len(results[1]) == 5
    for exact, got in zip(*results, strict=True):
        assert error(got, exact) < 1e-6


def made(counts: list[int], dtype: torch.dtype) -> tuple[Received, dict[str, torch.Tensor]]:
    """Return pairs of 256 rows, so many an expert, and the tensors that get gradients."""
    torch.manual_seed(1)
    width, hidden, experts = 256, 64, len(counts)
    rows = [torch.randperm(256)[:count].sort().values for count in counts]
    tensors = {
        "x": torch.randn(256, width),
        "w": torch.rand(sum(counts)),
        "gate_up": torch.randn(experts, 2, hidden, width) / 16,
        "down": torch.randn(experts, width, hidden) / 8,
    }
    tensors = {n: v.to(torch.float32 if n == "w" else dtype) for n, v in tensors.items()}
    tensors = {n: v.requires_grad_() for n, v in tensors.items()}
    received = Received(
        rows_RD=tensors["x"], pair_row_P=torch.cat(rows), pair_weight_P=tensors["w"],
        counts_e=torch.tensor(counts), sum_dtype=dtype,
    )  # fmt: skip
    return received, tensors


@pytest.mark.parametrize("early", [False, True])
def test_padded_experts_equal_the_loop(early: bool, machine: str) -> None:
    """D1, D3, D5: bf16 in round places is as near to fp64 as the loop, every gradient too."""
    counts = [137, 0, 17, 200, 5, 256]
    results = {}
    for dtype, backend in (("float64", "loop"), ("bfloat16", "loop"), ("bfloat16", "sliced")):
        received, tensors = made(counts, getattr(torch, dtype))
        if early:
            received = Received(
                **{name: getattr(received, name) for name in received.__slots__}
                | {"early": lambda rows: None}
            )
        y = experts_forward(
            received, tensors["gate_up"], tensors["down"], activation=SwiGLU(), backend=backend,  # type: ignore[arg-type]
        )  # fmt: skip
        torch.manual_seed(2)
        y.backward(torch.randn(y.shape).bfloat16().to(y.dtype))
        grads = {n: v.grad.double() for n, v in tensors.items() if v.grad is not None}
        results[dtype, backend] = {"y": y.detach().double(), **grads}
    exact = results["float64", "loop"]
    for name, value in results["bfloat16", "sliced"].items():
        size = exact[name].norm()
        loop = (results["bfloat16", "loop"][name] - exact[name]).norm() / size
        assert (value - exact[name]).norm() / size <= 1.3 * loop + 1e-3, name
    assert not results["bfloat16", "sliced"]["down"][1].any()


def test_an_expert_that_overflows_leaves_other_rows_alone(machine: str) -> None:
    """D5: empty places of an expert whose weights are not finite reach no row."""
    for sum_dtype in (torch.bfloat16, None):
        received, tensors = made([0, 17, 129, 256], torch.bfloat16)
        with torch.no_grad():
            tensors["down"][1] = torch.inf
        received = Received(
            **{name: getattr(received, name) for name in received.__slots__}
            | {"sum_dtype": sum_dtype}
        )
        y = experts_forward(received, tensors["gate_up"], tensors["down"], activation=SwiGLU())
        assert y.dtype == (sum_dtype or torch.float32)
        hit = torch.zeros(256, dtype=torch.bool)
        hit[received.pair_row_P[:17]] = True
        assert not hit[0]  # the row that empty places name
        assert torch.isfinite(y[~hit]).all()
        assert not torch.isfinite(y[hit]).any()


def test_a_row_that_is_not_finite_reaches_its_own_experts_alone(machine: str) -> None:
    """D5: empty places name row 0, but nothing of it comes into another expert's gradients."""
    received, tensors = made([0, 17, 129, 256], torch.bfloat16)
    assert 0 not in received.pair_row_P[:146]
    with torch.no_grad():
        tensors["x"][0] = torch.nan
    y = experts_forward(received, tensors["gate_up"], tensors["down"], activation=SwiGLU())
    y.sum().backward()
    for name in ("gate_up", "down"):
        grad = tensors[name].grad
        assert grad is not None
        assert torch.isfinite(grad[:3]).all()
        assert not torch.isfinite(grad[3]).all()


def test_a_sum_in_16_bits_is_added_in_32() -> None:
    """D6: 256 and 64 times 1 are 320 in bf16 too, and weights count to 17 bits."""
    y_SD = torch.ones(65, 8, dtype=torch.bfloat16)
    y_SD[0] = 256
    plan = plan_sums(torch.zeros(65, dtype=torch.int64), 1)
    assert torch.equal(
        sum_rows(y_SD, plan, dtype=torch.bfloat16), torch.full((1, 8), 320.0).bfloat16()
    )
    weight_S = torch.full((65,), 1 / 65) + torch.linspace(-1e-4, 1e-4, 65)
    y_SD = torch.randn(65, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    y_SD[:, 0], y_SD[0, 0] = 1, -64  # what is left of the sum tells how exact the weights are
    exact = (y_SD.double() * weight_S.double()[:, None]).sum(0)
    got = sum_rows(y_SD, plan, weight_S=weight_S, dtype=torch.bfloat16)[0].double()
    assert (got - exact).abs().max() <= 2.0**-8 * exact.abs().max() + 2e-5
    assert abs(float(got[0] - exact[0])) < 1e-4 * 64 / 65


@pytest.mark.parametrize("most", [7, 1 << 14, 1 << 15, 1 << 20])
def test_order_keeps_equal_keys_as_they_came(most: int) -> None:
    """D6: the order of a sum is that of the rows, by whichever way it is found."""
    key = torch.randint(0, most + 1, (3000,), generator=torch.Generator().manual_seed(3))
    assert torch.equal(stable_order(key, most), torch.argsort(key, stable=True))
