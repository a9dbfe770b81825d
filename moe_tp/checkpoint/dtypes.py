"""The dtypes that weights may have, by value or by name."""

from __future__ import annotations

import torch

from moe_tp.errors import ConfigError

SHORT = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
FLOATS = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


def full_name(name: str) -> str:
    """Return a dtype's name as torch has it, of `bf16` or `torch.bfloat16` too; others as given."""
    name = name.lower().removeprefix("torch.")
    return SHORT.get(name, name)


def weight_dtype(value: torch.dtype | str) -> torch.dtype:
    """Return the dtype of weights that was asked for.

    Args:
        value: a dtype, or its name such as `bfloat16`, `torch.bfloat16` or `bf16`.

    Raises:
        ConfigError: it is none that weights are kept in; quantised formats are made by an export.
    """
    found = FLOATS.get(full_name(str(value)))
    if found is None or not isinstance(value, (str, torch.dtype)):
        raise ConfigError(
            f"dtype={value!r} is none that weights can have; choose among {', '.join(FLOATS)}"
        )
    return found
