"""`moe-tp init FAMILY OUT`: a random model as a hub-format folder."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from moe_tp.checkpoint.scan import CONFIG
from moe_tp.cli.options import (
    add_json_argument,
    add_layout_arguments,
    make_mesh,
    parse_dtype,
    say,
    write_json,
)
from moe_tp.errors import ConfigError
from moe_tp.models import ModelConfig, build, save_pretrained
from moe_tp.models.families import family, model_types, preset


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "family", metavar="FAMILY", help=f"hub model_type: {', '.join(model_types())}"
    )
    parser.add_argument("out", metavar="OUT", help="folder to write")
    parser.add_argument("--preset", default="tiny", help="a published size, or tiny (default)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a field of config.json by its hub name; may be repeated",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="bfloat16", help="of the weights (default: bfloat16)")
    parser.add_argument("--max-shard-size", default="5GB", help="of a weight file (default: 5GB)")
    add_json_argument(parser)
    add_layout_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Return 0, having written the folder.

    Raises:
        ConfigError: the folder holds a model already; random weights replace none.

    Collectives: those of `build` and `save_pretrained`.
    """
    dtype = parse_dtype(options.dtype)
    config = configuration(options.family, options.preset, options.set)
    if Path(options.out, CONFIG).is_file():
        raise ConfigError(
            f"{options.out} holds a model, which random weights would replace; choose another "
            f"folder or remove it yourself"
        )
    mesh = make_mesh(options)
    model = build(config, mesh, seed=options.seed, dtype=dtype)
    save_pretrained(model, options.out, dtype=dtype, max_shard_size=options.max_shard_size)
    result = {
        "path": options.out,
        "model_type": config.model_type,
        "layers": config.num_layers,
        "experts": config.moe.router.num_experts,
        "params_total": config.num_params(),
        "params_active": config.num_active_params(),
        "seed": options.seed,
    }
    say(
        options,
        f"wrote {options.out}: {config.model_type}, {config.num_layers} layers, "
        f"{config.moe.router.num_experts} experts, {config.num_params():,} parameters "
        f"({config.num_active_params():,} active)",
    )
    write_json(options, result)
    return 0


def configuration(model_type: str, preset_name: str, settings: list[str]) -> ModelConfig:
    """Return the preset with these fields of its config.json set.

    Args:
        model_type: the family.
        preset_name: one of its presets.
        settings: `key=value`, the value as JSON or, where it is none, as text.
    """
    base = preset(model_type, preset_name)
    known = {*family(model_type).to_hub(base), *family(model_type).presets[preset_name]}
    changes: dict[str, Any] = {}
    for item in settings:
        key, found, text = item.partition("=")
        if not found:
            raise ConfigError(f"--set {item} has no value; write --set {item}=VALUE")
        if key not in known:
            raise ConfigError(
                f"--set {key}: config.json of {model_type} has no such field; it has "
                f"{', '.join(sorted(known))}"
            )
        try:
            changes[key] = json.loads(text)
        except json.JSONDecodeError:
            changes[key] = text
    return preset(model_type, preset_name, **changes)
