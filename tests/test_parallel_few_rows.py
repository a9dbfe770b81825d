"""Products and norms of few rows in C, against fp64 and against torch's operators."""

from __future__ import annotations

import pytest
import torch

from moe_tp.parallel import few_rows, product
from moe_tp.parallel.held import holding
from moe_tp.parallel.sequence import rms_norm

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture
def compiler() -> None:
    """Skip where nothing compiles."""
    if few_rows._library() is None:  # pragma: no cover
        pytest.skip("no C compiler")


def inputs(rows: int, m: int, k: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows and five matrices, whose memory ends where theirs does."""
    torch.manual_seed(0)
    return torch.randn(rows, k).to(dtype), torch.randn(5, m, k).to(dtype)


def in_fp64(
    x: torch.Tensor, weights: torch.Tensor, slots: list[int], counts: list[int]
) -> torch.Tensor:
    """Return the products in fp64."""
    runs = zip(x.double().split(counts), slots, strict=True)
    return torch.cat([part @ weights[slot].double().t() for part, slot in runs])


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_are_those_of_fp64(dtype: torch.dtype) -> None:
    """D1: at odd sizes, also smaller than a vector, runs of many, of one and of no row."""
    slots, counts = [4, 0, 3, 1], [7, 1, 0, 2]
    for m, k in ((1, 3), (3, 15), (4, 16), (6, 31), (9, 33), (13, 100)):
        x, weights = inputs(10, m, k, dtype)
        with holding():
            assert few_rows.takes(x, weights, 4)
            got = product.linears(x, weights, slots, counts)
        expected = in_fp64(x, weights, slots, counts)
        assert got.dtype == dtype
        bound = 1e-6 if dtype == torch.float32 else 2.0**-8  # of a result that is rounded once
        scale = x.double().abs() @ weights.double().abs().amax(0).t()
        error = (got.double() - expected).abs()
        assert bool((error <= bound * expected.abs() + 1e-6 * scale).all()), (m, k)


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_worked_out_alike_among_any_others(dtype: torch.dtype) -> None:
    """R1: bit for bit, for any number of rows and of threads."""
    x, weights = inputs(12, 7, 77, dtype)
    whole = few_rows.few_rows(x, weights[2], [0], [12])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        for rows in range(1, 12):
            assert torch.equal(few_rows.few_rows(x[:rows], weights, [2], [rows]), whole[:rows])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.usefixtures("compiler")
def test_not_a_number_and_infinity_come_through() -> None:
    """R7: rounding to bf16 keeps them."""
    x, weights = inputs(2, 4, 40, torch.bfloat16)
    x[0, 39], weights[0, 1, 0] = float("nan"), float("inf")
    got = few_rows.few_rows(x, weights[0], [0], [2])
    assert got[0].isnan().all()
    assert got[1, 1].isinf()
    assert got[1, [0, 2, 3]].isfinite().all()
    # all bits set, where rounding up would carry into the sign
    weight = torch.full((40,), 0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    assert few_rows.few_norms(x[1:], weight, 1e-6).isnan().all()


@pytest.mark.usefixtures("compiler")
def test_what_is_not_few_rows_goes_by_torch() -> None:
    """Outside `holding`, strided, mixed, fp64, many rows or none."""
    x, weights = inputs(few_rows.MOST_ROWS, 8, 16, torch.float32)
    assert not few_rows.takes(x, weights[0])
    with holding():
        assert few_rows.takes(x, weights[0])
        assert not few_rows.takes(x[:0], weights[0])
        assert not few_rows.takes(torch.cat([x, x]), weights[0])
        assert few_rows.takes(torch.cat([x, x]), weights, 2)
        assert not few_rows.takes(x.double(), weights[0].double())
        assert not few_rows.takes(x, weights[0].bfloat16())
        assert not few_rows.takes(x[:, ::2], weights[0, :, :8].contiguous())
        assert not few_rows.takes(x[:, :8].contiguous(), weights[0, :, ::2])


def test_without_a_compiler_torch_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    """D1: the same products, with and without a bias."""
    monkeypatch.setattr(few_rows, "_library", lambda: None)
    x, weights = inputs(10, 9, 33, torch.float32)
    slots, counts = [4, 0, 3, 1], [7, 1, 0, 2]
    with holding():
        got = product.linears(x, weights, slots, counts)
    torch.testing.assert_close(got.double(), in_fp64(x, weights, slots, counts), rtol=0, atol=1e-5)


@pytest.mark.usefixtures("compiler")
def test_a_bias_is_added() -> None:
    """D8: once, to each row."""
    x, weights = inputs(3, 9, 33, torch.float32)
    bias = torch.randn(9)
    with holding():
        got = product.linear(x, weights[0], bias)
    torch.testing.assert_close(got, torch.nn.functional.linear(x, weights[0], bias))


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_are_those_of_fp64(dtype: torch.dtype) -> None:
    """D1: of rows and of heads, at odd sizes and magnitudes; without a compiler as with one."""
    torch.manual_seed(0)
    for shape in ((1, 3), (3, 16), (2, 1, 3, 37), (5, 100)):
        x = (torch.randn(shape) * 10.0 ** torch.randint(-4, 4, (*shape[:-1], 1))).to(dtype)
        weight, wide = torch.randn(shape[-1]), x.double()
        expected = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * weight
        bound = 1e-6 if dtype == torch.float32 else 2.0**-8
        with torch.no_grad(), holding():
            assert few_rows.takes_norm(x, weight)
            got = rms_norm(x, weight, 1e-6)
        assert got.dtype == dtype
        assert bool(((got.double() - expected).abs() <= bound * expected.abs()).all()), shape


@pytest.mark.usefixtures("compiler")
def test_what_is_not_few_norms_goes_by_torch() -> None:
    """Outside `holding`, strided, fp64, many elements or none."""
    x, weight = torch.randn(4, 16), torch.randn(16)
    assert not few_rows.takes_norm(x, weight)
    with holding():
        assert few_rows.takes_norm(x, weight)
        assert not few_rows.takes_norm(x[:0], weight)
        assert not few_rows.takes_norm(x.t(), weight[:4])
        assert not few_rows.takes_norm(x.double(), weight)
        assert not few_rows.takes_norm(x, weight.double())
        assert not few_rows.takes_norm(x.repeat(few_rows.MOST_NORMED // 64 + 1, 1), weight)
