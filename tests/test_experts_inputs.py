"""What the layer and its losses make of unusual input: padding that holds NaN, masks, shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_tp import Mesh, MoE
from moe_tp.errors import ConfigError
from moe_tp.parallel.parameter import to_local
from moe_tp.routing import RouterConfig, z_loss

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
