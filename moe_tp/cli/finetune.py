"""`moe-tp finetune CONFIG.yaml [key.sub=value ...]`: train a hub folder on your text, export it."""

from __future__ import annotations

import argparse

from moe_tp.cli.options import (
    add_json_argument,
    add_layout_arguments,
    given_degrees,
    is_first_rank,
    make_mesh,
    say,
    write_json,
)
from moe_tp.train.loop import finetune
from moe_tp.train.metrics import summary
from moe_tp.train.settings import load_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "config",
        metavar="CONFIG.yaml",
        help="the settings of the run; docs/finetuning.md lists them all",
    )
    parser.add_argument(
        "settings", nargs="*", metavar="key.sub=value", help="settings that replace the file's"
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on from the newest checkpoint of output"
    )
    add_json_argument(parser)
    add_layout_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Return 0, having trained and written the output folder.

    Collectives: those of `finetune`.
    """
    words = [
        *options.settings,
        *(f"parallel.{name}={degree}" for name, degree in given_degrees(options).items()),
        *(f"runtime.{item}" for item in options.runtime),
    ]
    config = load_config(options.config, words)
    mesh = make_mesh(options, layout=config.parallel, runtime=config.runtime)
    result = finetune(config, mesh, quiet=options.json == "-", resume=options.resume)
    if is_first_rank():
        say(options, summary(result))
    write_json(options, result)
    return 0
