"""Products through MKL and through oneDNN."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from moe_tp.parallel import product as room
from moe_tp.parallel.product import add_product, linear, product

HAS_ONEDNN = hasattr(torch.ops.mkldnn, "_linear_pointwise")


@pytest.fixture(params=[False, True])
def by_onednn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param and not HAS_ONEDNN:
        pytest.skip("torch was built without oneDNN")
    monkeypatch.setattr(room, "_prefers_onednn", lambda: request.param)
    return bool(request.param)


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool(torch.allclose(found.double(), expected, rtol=1e-5, atol=1e-4))


@pytest.mark.parametrize("rows", [1, 3, 1100])
def test_products(by_onednn: bool, rows: int) -> None:
    """All forms, sizes on both sides of the bounds: what fp64 says, `out` and `total` filled."""
    torch.manual_seed(0)
    x, w, g = torch.randn(rows, 256), torch.randn(1040, 256), torch.randn(rows, 1040)
    bias = torch.randn(1040)
    assert close(linear(x, w, bias), x.double() @ w.double().t() + bias.double())
    assert close(linear(x, w, None), x.double() @ w.double().t())
    for a, b in ((x, w.t()), (g, w), (g.t(), x)):
        expected = a.double() @ b.double()
        assert close(product(a, b), expected)
        out, start = torch.full(expected.shape, torch.nan), torch.randn(expected.shape)
        assert product(a, b, out) is out
        assert close(out, expected)
        total = start.clone()
        assert add_product(total, a, b) is total
        assert close(total, start.double() + expected)


@pytest.mark.skipif(not HAS_ONEDNN, reason="torch was built without oneDNN")
def test_onednn_where_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large fp32 products alone, so that the choice follows from sizes and machine, no clock."""
    monkeypatch.setattr(room, "_prefers_onednn", lambda: True)
    asked: list[tuple[int, ...]] = []

    def noted(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        asked.append(tuple(x.shape))
        return x @ weight.t()

    monkeypatch.setattr(room, "_onednn", noted)
    for dtype in (torch.float64, torch.bfloat16):
        linear(torch.zeros(512, 512, dtype=dtype), torch.zeros(512, 512, dtype=dtype), None)
    linear(torch.zeros(8, 64), torch.zeros(64, 64), None)
    assert not asked
    for rows in (1, 512):
        linear(torch.zeros(rows, 512), torch.zeros(512, 512), None)
    assert asked == [(1, 512), (512, 512)]


def test_one_bf16_row_goes_without_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fp64 says, oneDNN left out for that call alone, also where the call fails."""
    seen: list[bool] = []

    def noted(*args: torch.Tensor) -> torch.Tensor:
        seen.append(torch._C._get_mkldnn_enabled())
        return torch.nn.functional.linear(*args)

    monkeypatch.setattr(room, "F", SimpleNamespace(linear=noted))
    monkeypatch.setattr(room, "_prefers_onednn", lambda: True)
    before = torch._C._get_mkldnn_enabled()
    torch.manual_seed(0)
    x, w, bias = (torch.randn(n, 256).bfloat16() for n in (2, 96, 96))
    for rows, by_onednn in ((1, False), (2, before)):
        y = linear(x[:rows], w, bias[:, 0])
        expected = x[:rows].double() @ w.double().t() + bias[:, 0].double()
        assert torch.allclose(y.double(), expected, rtol=1e-2, atol=1e-1)
        assert seen.pop() == by_onednn
    with pytest.raises(RuntimeError):
        linear(x[:1], w[:, 1:], None)
    assert torch._C._get_mkldnn_enabled() == before
