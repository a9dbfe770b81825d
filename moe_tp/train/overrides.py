"""What a run sets in a model for its own time: router losses and dropout; not exported."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any, Literal

from moe_tp.experts.moe import MoE
from moe_tp.log import get_logger
from moe_tp.models.decoder import Decoder

_log = get_logger(__name__)


BalanceLoss = Literal["micro_batch", "sequence", "global_batch", "global_batch_exact"]


def set_balance(
    model: Decoder,
    coef: float | None,
    z_coef: float | None,
    kind: BalanceLoss | None = None,
) -> None:
    """Set the weight of the routers' losses; what the model folder says is left to an export.

    Args:
        model: of any family.
        coef: of the load-balance loss; None: the model's own.
        z_coef: of the z-loss; None: the model's own.
        kind: over which tokens the load-balance loss looks; None: the model's own.

    Raises:
        ConfigError: the routers take no such loss.
    """
    given = {"balance_coef": coef, "z_coef": z_coef}
    changed: dict[str, Any] = {n: value for n, value in given.items() if value is not None}
    if kind is not None:
        exact = kind == "global_batch_exact"
        looks: dict[str, Any] = {"balance_exact": exact}
        looks["balance_kind"] = "global_batch" if exact else kind
        changed |= looks
        # a step asks the model's config, on pipeline ranks without a router too
        moe = model.config.moe
        model.config = replace(model.config, moe=replace(moe, router=replace(moe.router, **looks)))
    for module in model.modules():
        if isinstance(module, MoE):
            module.config = replace(module.config, **changed)
            module.router.config = replace(module.router.config, **changed)
    said = model.config.hub_config.get("router_aux_loss_coef")
    used = model.config.moe.router.balance_coef
    if said and coef is None and model.config.moe_layers and not used:
        _log.warning(
            "config.json has router_aux_loss_coef=%s, which models of type %s do not use; set "
            "train.balance_coef=%s for a load-balance loss",
            said,
            model.config.model_type,
            said,
        )


def set_residual_dropout(model: Decoder, p: float) -> None:
    """Set the probability of dropping an element before it joins the residual, in every block.

    Args:
        model: the model.
        p: in [0, 1).
    """
    changed = dataclasses.replace(model.config, residual_dropout=p)
    model.config = changed
    for block in model.blocks:
        block.config = changed
