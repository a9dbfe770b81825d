"""`moe-tp finetune CONFIG.yaml [key.sub=value ...]`: train a hub folder on your text, export it."""

from __future__ import annotations

import argparse
import dataclasses

from moe_tp.cli.options import (
    add_json_argument,
    add_layout_arguments,
    layout_of,
    make_mesh,
    runtime_of,
    say,
    write_json,
)
from moe_tp.parallel.layout import ParallelLayout, Runtime
from moe_tp.train.loop import finetune, summary
from moe_tp.train.settings import load_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("config", metavar="CONFIG.yaml", help="the settings of the run")
    parser.add_argument(
        "settings", nargs="*", metavar="key.sub=value", help="settings that replace the file's"
    )
    add_json_argument(parser)
    add_layout_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Return 0, having trained and written the output folder.

    Collectives: those of `finetune`.
    """
    config = load_config(options.config, options.settings)
    layout = layout_of(options, _fields(config.parallel))
    runtime = runtime_of(options, _fields(config.runtime))
    config = dataclasses.replace(config, parallel=layout, runtime=runtime)
    mesh = make_mesh(options, layout=layout, runtime=runtime)
    result = finetune(config, mesh, quiet=options.json == "-")
    say(options, summary(result))
    write_json(options, result)
    return 0


def _fields(settings: ParallelLayout | Runtime) -> dict[str, object]:
    return {f.name: getattr(settings, f.name) for f in dataclasses.fields(settings)}
