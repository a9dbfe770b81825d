"""`moe-tp export CHECKPOINT OUT`: a hub folder from a folder, in another dtype or expert form."""

from __future__ import annotations

import argparse
import re
from functools import partial
from pathlib import Path

import torch

from moe_tp.checkpoint import HubFolder, NameRules, SaveReport, export_folder
from moe_tp.checkpoint.states import is_state
from moe_tp.cli.options import (
    add_json_argument,
    add_layout_arguments,
    make_mesh,
    parse_dtype,
    say,
    write_json,
)
from moe_tp.errors import ConfigError
from moe_tp.models import ModelConfig
from moe_tp.models.families import model_types, rules_for
from moe_tp.models.quantised import FORMATS, quantised
from moe_tp.parallel.mesh import Mesh
from moe_tp.train.resume import export_checkpoint

_PER_EXPERT = re.compile(r"\.experts\.\d+\.")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", help="hub folder or training checkpoint"
    )
    parser.add_argument("out", metavar="OUT", help="folder to write")
    parser.add_argument("--dtype", help="of the weights (default: as they are)")
    parser.add_argument("--max-shard-size", default="5GB", help="of a weight file (default: 5GB)")
    parser.add_argument(
        "--experts",
        choices=("per-expert", "fused"),
        help="one matrix an expert, or all experts of a layer in one tensor (default: as they are)",
    )
    parser.add_argument(
        "--quantize",
        choices=tuple(FORMATS),
        help="write the family's published quantised format (default: quantised weights are "
        "written back as bf16)",
    )
    add_json_argument(parser)
    add_layout_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Return 0, having written the folder.

    Collectives: those of `export_folder`.
    """
    dtype = parse_dtype(options.dtype) if options.dtype else None
    mesh = make_mesh(options)
    if is_state(Path(options.checkpoint)):
        return _done(options, export_state(options, mesh, dtype))
    with HubFolder(options.checkpoint) as folder:
        rules = rules_out = quantise = None
        asked = options.experts is not None or options.quantize is not None
        if folder.config.get("model_type") in model_types() or asked:
            config = ModelConfig.from_hub(folder.config)
            rules = rules_for(config, folder.logical.keys())
            if options.experts is not None:
                rules_out = rules_in_form(config, options.experts)
            if options.quantize is not None:
                quantise = quantised(options.quantize, config, rules_out or rules)
    report = export_folder(
        options.checkpoint,
        options.out,
        mesh=mesh,
        rules=rules,
        rules_out=rules_out,
        dtype=dtype,
        max_shard_size=options.max_shard_size,
        quantise=quantise,
    )
    return _done(options, report)


def export_state(options: argparse.Namespace, mesh: Mesh, dtype: torch.dtype | None) -> SaveReport:
    """Return what was written from a training checkpoint.

    Collectives: those of `export_checkpoint`.
    """
    form, kind = options.experts, options.quantize
    return export_checkpoint(
        Path(options.checkpoint),
        Path(options.out),
        mesh,
        dtype=dtype,
        max_shard_size=options.max_shard_size,
        rules=None if form is None else partial(rules_in_form, form=form),
        quantise=None if kind is None else partial(quantised, kind),
    )


def _done(options: argparse.Namespace, report: SaveReport) -> int:
    say(
        options,
        f"wrote {options.out}: {report.tensors} tensors, {report.nbytes:,} bytes in "
        f"{len(report.files)} files",
    )
    result = {
        "path": options.out,
        "tensors": report.tensors,
        "bytes": report.nbytes,
        "files": list(report.files),
    }
    write_json(options, result)
    return 0


def rules_in_form(config: ModelConfig, form: str) -> NameRules:
    """Return the family's name rules with its experts in this form.

    Args:
        config: the model.
        form: "per-expert" or "fused".

    Raises:
        ConfigError: the family knows no such form.
    """
    hints = [f"model.layers.{layer}.mlp.experts.down_proj" for layer in config.moe_layers]
    if form == "per-expert":
        hints = [f"model.layers.{n}.mlp.experts.0.down_proj.weight" for n in config.moe_layers]
    for candidate in (rules_for(config, hints), rules_for(config)):
        names = [piece.hub_name for pieces in candidate.pieces.values() for piece in pieces]
        single = any(_PER_EXPERT.search(name) for name in names)
        if single == (form == "per-expert"):
            return candidate
    raise ConfigError(
        f"--experts {form}: {config.model_type} knows no such form of its experts on disk; leave "
        "--experts out to keep the form they have"
    )
