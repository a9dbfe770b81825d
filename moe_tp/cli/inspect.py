"""`moe-tp inspect PATH`: what a folder holds, from its headers and config alone."""

from __future__ import annotations

import argparse
from typing import Any

from moe_tp.checkpoint import HubFolder, NameRules, inspect_folder
from moe_tp.cli.options import add_json_argument, say, write_json
from moe_tp.errors import ConfigError
from moe_tp.models import ModelConfig
from moe_tp.models.families import rules_for


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("path", metavar="PATH", help="a hub-format folder")
    parser.add_argument(
        "--values", action="store_true", help="also read all weights, and report NaN and infinity"
    )
    add_json_argument(parser)


def run(options: argparse.Namespace) -> int:
    """Return 0, or 1 where the folder has problems."""
    rules, problem = _rules(options.path)
    result: dict[str, Any] = dict(inspect_folder(options.path, rules=rules, values=options.values))
    if problem:
        result["problems"] = [*result["problems"], problem]
    say(options, _text(options.path, result))
    write_json(options, result)
    return 1 if result["problems"] else 0


def _rules(path: str) -> tuple[NameRules | None, str | None]:
    """Return the name rules of the folder's family, or why there are none."""
    with HubFolder(path, strict=False) as folder:
        if not folder.config:
            return None, None
        try:
            config = ModelConfig.from_hub(folder.config)
        except ConfigError as error:
            return None, str(error)
        return rules_for(config, folder.logical.keys()), None


def _text(path: str, result: dict[str, Any]) -> str:
    dtypes = ", ".join(f"{count:,} in {name}" for name, count in result["dtypes"].items())
    lines = [
        f"{path}: {result['model_type']}, {result['layers']} layers, {result['experts']} experts, "
        f"top {result['top_k']}",
        f"  {result['params_total']:,} parameters, {result['params_active']:,} active ({dtypes})",
        f"  {result['tensors']} tensors, {result['bytes']:,} bytes in {result['files']} files",
    ]
    problems = [f"  {problem.strip()}" for problem in result["problems"]]
    return "\n".join([*lines, f"  problems: {len(problems) or 'none'}", *problems])
