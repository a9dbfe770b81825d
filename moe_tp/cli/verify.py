"""`moe-tp verify PATH [layout]`: does the layout compute what one process computes?"""

from __future__ import annotations

import argparse
from typing import get_args

from moe_tp.cli.options import (
    add_json_argument,
    add_layout_arguments,
    check_ranks,
    layout_of,
    parse_dtype,
    runtime_of,
    say,
    write_json,
)
from moe_tp.train.overrides import BalanceLoss
from moe_tp.verify import verify


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("path", metavar="PATH", help="a hub-format folder")
    parser.add_argument(
        "--tokens", type=int, default=97, metavar="N", help="about as many a micro-batch"
    )
    parser.add_argument("--dtype", default="float32", help="float32 (default), float64, bfloat16")
    parser.add_argument(
        "--steps", type=int, default=3, metavar="N", help="optimiser steps; 0: gradients only"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the batches")
    parser.add_argument(
        "--optimizer", choices=("adamw", "sgd"), default="adamw", help="of the steps"
    )
    parser.add_argument(
        "--balance", choices=get_args(BalanceLoss), help="load-balance loss; the model's own"
    )
    add_json_argument(parser)
    add_layout_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Return 0 where the layout agrees with the reference, else 1.

    Collectives: those of `verify`.
    """
    layout = layout_of(options)
    check_ranks(layout)
    report = verify(
        options.path,
        layout,
        tokens=options.tokens,
        dtype=parse_dtype(options.dtype),
        steps=options.steps,
        runtime=runtime_of(options),
        seed=options.seed,
        optimizer=options.optimizer,
        balance=options.balance,
        device=options.torch_device,
    )
    say(options, str(report))
    write_json(options, report.to_json())
    return 0 if report.passed else 1
