"""Masks as callers bring them.

T tokens on this rank
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_tp.errors import ConfigError

__all__ = ["as_mask"]


def as_mask(mask_T: Tensor) -> Tensor:
    """Return the mask as bool, True where a token is real.

    Whole numbers are taken as they are in hub folders, 0 for padding. In a mask that is added to
    attention scores 0 means a real token, so numbers other than 0 and 1 are refused; only for
    floating point does that cost a host synchronisation.

    Args:
        mask_T: any shape and dtype.

    Raises:
        ConfigError: a floating-point mask that holds other numbers.
    """
    if mask_T.is_floating_point() and not mask_T.is_meta:
        strange = (mask_T != 0) & (mask_T != 1)
        if bool(strange.any()):
            raise ConfigError(
                f"the mask holds {float(mask_T[strange][0])}, as a mask that is added to attention "
                "scores does; pass True (or 1) where a token is real, False (or 0) elsewhere"
            )
    return mask_T.to(torch.bool)
