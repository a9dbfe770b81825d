"""Options that commands share: the layout, the runtime, the mesh made of them, and results."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moe_tp.checkpoint.dtypes import FLOATS, full_name
from moe_tp.cli.launcher import GRACE_S
from moe_tp.errors import ConfigError
from moe_tp.parallel.layout import ParallelLayout, Runtime
from moe_tp.parallel.mesh import Mesh

__all__ = [
    "add_json_argument",
    "add_layout_arguments",
    "check_ranks",
    "given_degrees",
    "is_first_rank",
    "layout_of",
    "make_mesh",
    "parse_dtype",
    "runtime_of",
    "say",
    "write_json",
]

_DEGREES = {
    "dp": "data-parallel replicas (default: fill the ranks)",
    "cp": "ranks that share a sequence",
    "tp": "ranks that split attention, vocabulary and dense layers",
    "pp": "pipeline stages",
    "ep": "ranks that share the experts of a layer",
    "etp": "ranks that split each expert",
    "zero": "ZeRO stage, 0 to 3",
}


def add_layout_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the layout's degrees, --runtime, --nproc and --device."""
    group = parser.add_argument_group("layout")
    for name, help_text in _DEGREES.items():
        group.add_argument(f"--{name}", type=int, metavar="N", help=help_text)
    group.add_argument(
        "--runtime",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="how the layout is run, as in recompute=full; may be repeated",
    )
    group.add_argument(
        "--nproc", type=_positive, default=1, metavar="N", help="start N ranks on this machine"
    )
    group.add_argument(
        "--grace",
        type=float,
        default=GRACE_S,
        metavar="SECONDS",
        help="time that the ranks of --nproc have to save and leave after a signal (60)",
    )
    group.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="auto: a GPU for each rank where there are enough, else the CPU",
    )


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    """Add --json."""
    parser.add_argument(
        "--json", metavar="FILE", help="write the result as JSON to FILE, or - for stdout"
    )


def given_degrees(options: argparse.Namespace) -> dict[str, int]:
    """Return the degrees of the layout that the command line gives."""
    degrees = {name: getattr(options, name) for name in _DEGREES}
    return {name: value for name, value in degrees.items() if value is not None}


def layout_of(options: argparse.Namespace) -> ParallelLayout:
    """Return the layout asked for."""
    return ParallelLayout(**given_degrees(options))


def runtime_of(options: argparse.Namespace) -> Runtime:
    """Return the runtime asked for."""
    from moe_tp.train.settings import from_mapping  # loads what a plan does without

    settings = {}
    for item in options.runtime:
        key, found, value = item.partition("=")
        if not found:
            raise ConfigError(f"--runtime {item} has no value; write --runtime {item}=VALUE")
        settings[key] = value
    return from_mapping(Runtime, settings, "--runtime")


def make_mesh(
    options: argparse.Namespace,
    *,
    layout: ParallelLayout | None = None,
    runtime: Runtime | None = None,
) -> Mesh:
    """Return the mesh over the ranks of this run, or of one process.

    Args:
        options: parsed arguments of a command whose `run` the main function called.
        layout: None takes that of the options.
        runtime: None takes that of the options.

    Collectives: those of `Mesh`, where the run has ranks.
    """
    layout = layout or layout_of(options)
    runtime = runtime or runtime_of(options)
    check_ranks(layout)
    if dist.is_initialized():
        return Mesh(layout, runtime, options.torch_device)
    return Mesh.single(runtime, options.torch_device)


def check_ranks(layout: ParallelLayout) -> None:
    """Raise ConfigError where a layout of several ranks meets one process, and name --nproc."""
    if dist.is_initialized():
        return
    try:
        whole = layout.resolve(1)
    except ConfigError as error:
        raise ConfigError(f"{error}; --nproc N starts N ranks on this machine") from None
    if whole.zero:
        raise ConfigError(
            f"zero={whole.zero} shards over data-parallel ranks and there is one process; "
            "leave --zero out, or start more ranks with --nproc"
        )


def parse_dtype(text: str) -> torch.dtype:
    """Return the dtype of a name, as bfloat16 or bf16."""
    found = FLOATS.get(full_name(text))
    if found is None:
        raise ConfigError(f"dtype {text!r} is unknown; choose among {', '.join(FLOATS)}")
    return found


def is_first_rank() -> bool:
    """Return whether this process prints and writes results."""
    return not dist.is_initialized() or dist.get_rank() == 0


def say(options: argparse.Namespace, text: str) -> None:
    """Print a line for people: on rank 0, and not where stdout carries JSON."""
    if is_first_rank() and getattr(options, "json", None) != "-":
        print(text, flush=True)


def write_json(options: argparse.Namespace, result: Mapping[str, Any]) -> None:
    """Write the result where --json says, on rank 0; missing folders of the file are made."""
    if options.json is None or not is_first_rank():
        return
    text = json.dumps(result, indent=2)
    if options.json == "-":
        print(text)
    else:
        Path(options.json).parent.mkdir(parents=True, exist_ok=True)
        Path(options.json).write_text(text + "\n", encoding="utf-8")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of ranks; choose 1 or more")
    return number
