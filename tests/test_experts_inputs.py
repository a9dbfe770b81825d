"""What the layer and its losses make of unusual input: padding that holds NaN, masks, shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_tp import Mesh, MoE, Runtime
from moe_tp.errors import ConfigError
from moe_tp.parallel.shards import to_local
from moe_tp.routing import (
    RouterConfig,
    load_balance_loss,
    pooled_load_balance_loss,
    route,
    z_loss,
)

ROUTER = RouterConfig(num_experts=4, top_k=2, balance_coef=0.01, z_coef=0.001)


def layer(**options: Any) -> MoE:
    return MoE(8, 16, ROUTER, Mesh.single(), seed=0, **options)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("options", [{}, {"num_shared": 1, "shared_gate": True}], ids=str)
def test_padding_may_hold_anything(value: float, options: dict[str, Any]) -> None:
    """R6: a masked row of NaN changes no gradient, neither of weights nor of real rows."""
    x_TD = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    mask_T = torch.tensor([True, True, False, True, False, True])
    found = []
    for padding in (0.0, value):
        moe = layer(**options)
        rows_TD = torch.where(mask_T[:, None], x_TD, padding).requires_grad_()
        y_TD, aux = moe(rows_TD, mask_T)
        (y_TD.square().sum() + aux.loss).backward()
        grads = [to_local(param.grad) for param in moe.parameters() if param.grad is not None]
        found.append([y_TD.detach(), rows_TD.grad, *grads])
    for clean, dirty in zip(*found, strict=True):
        assert torch.equal(clean, dirty)


def test_masks_of_whole_numbers() -> None:
    """R6: hub folders' attention masks are integers."""
    mask_T = torch.tensor([1, 0, 1])
    x_TD, moe = torch.randn(3, 8), layer(num_shared=1)
    assert torch.equal(moe(x_TD, mask_T)[0], moe(x_TD, mask_T.bool())[0])
    logits_TE = torch.randn(3, 4)
    assert torch.equal(z_loss(logits_TE, mask_T=mask_T), z_loss(logits_TE, mask_T=mask_T.bool()))


def test_shapes_that_do_not_fit() -> None:
    """F3: rows of another width, and masks of another shape, are refused rather than refolded."""
    moe = layer()
    for shape in ((3, 16), (4, 4), (3, 4), ()):
        with pytest.raises(ConfigError, match="dim=8"):
            moe(torch.randn(shape))
    with pytest.raises(ConfigError, match="mask has shape"):
        moe(torch.randn(2, 3, 8), torch.ones(3, 2, dtype=torch.bool))
    with pytest.raises(ConfigError, match="expert_dim=0"):
        MoE(8, 0, ROUTER, Mesh.single())


def test_masks_that_are_added_are_refused() -> None:
    """R6: in a mask for attention scores 0 is a real token, so it would mask the wrong ones."""
    x_TD, moe = torch.randn(3, 8), layer()
    ones = torch.tensor([1.0, 0.0, 1.0])
    assert torch.equal(moe(x_TD, ones)[0], moe(x_TD, ones.bool())[0])
    added = torch.tensor([0.0, float("-inf"), 0.0])
    for act in (
        lambda: moe(x_TD, added),
        lambda: z_loss(x_TD, mask_T=added),
        lambda: route(x_TD[:, :4], ROUTER, mask_T=added),
        lambda: load_balance_loss(route(x_TD[:, :4], ROUTER), mask_T=added),
        lambda: pooled_load_balance_loss([x_TD], 2, mask_T=added),
    ):
        with pytest.raises(ConfigError, match="the mask holds -inf"):
            act()


def test_token_ids_are_no_activations() -> None:
    """F3: whole numbers were taken, and gave zeros."""
    with pytest.raises(ConfigError, match=r"x is torch\.int64"):
        layer()(torch.ones(3, 8, dtype=torch.int64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_is_obeyed(dtype: torch.dtype) -> None:
    """R4, G6: what `compute_dtype` of that dtype gives, bit for bit; routing stays in fp32.

    Also where the input is in the lower dtype already, and then where backward runs inside.
    """
    x_TD = torch.randn(6, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = []
    for compute, inside in (
        (torch.bfloat16, False), (None, False), (None, dtype == torch.bfloat16),
    ):  # fmt: skip
        mesh = Mesh.single(Runtime(compute_dtype=compute))
        moe = MoE(8, 16, ROUTER, mesh, seed=0, num_shared=1, shared_gate=True)
        rows_TD = x_TD.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=compute is None):
            y_TD, aux = moe(rows_TD)
            loss = y_TD.float().square().sum() + aux.loss
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        assert aux.loss.dtype == torch.float32
        grads = [to_local(param.grad) for param in moe.parameters() if param.grad is not None]
        found.append([y_TD.detach(), aux.loss.detach(), rows_TD.grad, *grads])
    assert found[0][0].dtype == dtype
    for values in zip(*found, strict=True):
        assert all(torch.equal(values[0], other) for other in values[1:])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_inputs_of_another_dtype(dtype: torch.dtype) -> None:
    """R4: output and input gradient are of the input's dtype, shared expert and gate included."""
    x_TD, moe = torch.randn(6, 8), layer(num_shared=1, shared_gate=True)
    rows_TD = x_TD.to(dtype).requires_grad_()
    y_TD, _ = moe(rows_TD)
    y_TD.sum().backward()
    assert y_TD.dtype == dtype
    assert rows_TD.grad is not None
    assert rows_TD.grad.dtype == dtype
    want_TD = moe(rows_TD.detach().float())[0]
    assert torch.allclose(y_TD.float(), want_TD, rtol=1e-2, atol=1e-5)


def test_counters_survive_to_empty() -> None:
    """L4: a layer made on the meta device counts from 0, not from what memory held."""
    config = RouterConfig(4, 2, score="sigmoid", correction_bias=True, bias_rate=0.1)
    with torch.device("meta"):
        moe = MoE(8, 16, config, Mesh.single(), seed=0)
    moe.router.step_counts_E += 5
    moe.to_empty(device="cpu")
    assert moe.router.step_counts_E.tolist() == [5] * 4
    assert int(moe.router.bias_steps) == 0
    moe.bfloat16()
    assert moe.router.step_counts_E.tolist() == [5] * 4


def test_functional_calls() -> None:
    """C58: `torch.func.functional_call` brings tensors that are no parameters."""
    moe, x_TD = layer(num_shared=1), torch.randn(3, 8)
    values = {name: param.detach() for name, param in moe.named_parameters()}
    assert torch.equal(torch.func.functional_call(moe, values, (x_TD,))[0], moe(x_TD)[0])
