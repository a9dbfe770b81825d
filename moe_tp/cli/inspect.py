"""`moe-tp inspect PATH`: what a folder holds, from its headers and config alone."""

from __future__ import annotations

import argparse
import math
from collections import Counter
from typing import Any

from moe_tp.checkpoint import HubFolder
from moe_tp.checkpoint.load import compare
from moe_tp.cli.options import add_json_argument, say, write_json
from moe_tp.errors import MoeTpError
from moe_tp.models import ModelConfig
from moe_tp.models.families import rules_for


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("path", metavar="PATH", help="a hub-format folder")
    add_json_argument(parser)


def run(options: argparse.Namespace) -> int:
    """Return 0, or 1 where the folder has problems."""
    with HubFolder(options.path, strict=False) as folder:
        result = describe(folder)
    say(options, _text(options.path, result))
    write_json(options, result)
    return 1 if result["problems"] else 0


def describe(folder: HubFolder) -> dict[str, Any]:
    """Return what the folder holds; values that its config does not tell are None.

    Args:
        folder: opened with strict=False.
    """
    problems = list(folder.problems)
    config: ModelConfig | None = None
    try:
        if folder.config:
            config = ModelConfig.from_hub(folder.config)
            if not problems:
                compare(folder, rules_for(config, folder.logical.keys()))
    except MoeTpError as error:
        problems += str(error).removeprefix(f"{folder.where}: ").splitlines()
    dtypes = Counter(_name(tensor.dtype) for tensor in folder.tensors.values())
    elements = sum(math.prod(tensor.shape) for tensor in folder.logical.values())
    return {
        "path": str(folder.where),
        "model_type": folder.config.get("model_type"),
        "layers": config.num_layers if config else folder.config.get("num_hidden_layers"),
        "experts": config.moe.router.num_experts if config else None,
        "top_k": config.moe.router.top_k if config else None,
        "params_total": config.num_params() if config else elements,
        "params_active": config.num_active_params() if config else None,
        "bytes": sum(tensor.nbytes for tensor in folder.tensors.values()),
        "dtypes": dict(dtypes.most_common()),
        "tensors": len(folder.tensors),
        "files": len(folder.files),
        "problems": problems,
    }


def _name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _text(path: str, result: dict[str, Any]) -> str:
    dtypes = ", ".join(f"{count} {name}" for name, count in result["dtypes"].items())
    active = result["params_active"]
    lines = [
        f"{path}: {result['model_type']}, {result['layers']} layers, {result['experts']} experts, "
        f"top {result['top_k']}",
        f"  parameters {result['params_total']:,}" + (f", {active:,} active" if active else ""),
        f"  {result['tensors']} tensors ({dtypes}) of {result['bytes']:,} bytes in "
        f"{result['files']} files",
    ]
    problems = [f"  {problem.strip()}" for problem in result["problems"]]
    return "\n".join([*lines, f"  problems: {len(problems) or 'none'}", *problems])
