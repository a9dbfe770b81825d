"""`moe-tp upcycle DENSE OUT`: an MoE hub folder that starts out as a dense model."""

from __future__ import annotations

import argparse

from moe_tp.cli.options import (
    add_json_argument,
    add_layout_arguments,
    make_mesh,
    parse_dtype,
    say,
    write_json,
)
from moe_tp.models.upcycle import UpcycleConfig, upcycle


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "dense", metavar="DENSE", help="llama, mistral, qwen2 or qwen3 hub folder, or GGUF file"
    )
    parser.add_argument("out", metavar="OUT", help="folder to write")
    parser.add_argument("--experts", type=int, required=True, metavar="N", help="of each layer")
    parser.add_argument("--top-k", type=int, default=2, metavar="K", help="default: 2")
    parser.add_argument(
        "--kind",
        choices=("copy", "noise", "split"),
        default="copy",
        help="experts are copies of the MLP (default), noisy copies, or parts of copies",
    )
    parser.add_argument(
        "--noise", type=float, default=0.01, help="of --kind noise, as a part of the weights' rms"
    )
    parser.add_argument(
        "--parts", type=int, metavar="G", help="of --kind split: experts that a copy becomes"
    )
    parser.add_argument(
        "--balance-coef",
        type=float,
        default=0.01,
        help="of the load-balance loss that the model asks for (default: 0.01)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the router and of the noise")
    parser.add_argument("--tokenizer", metavar="FOLDER", help="whose tokenizer files come along")
    parser.add_argument("--dtype", help="of the weights (default: as they are; bf16 from GGUF)")
    parser.add_argument("--max-shard-size", default="5GB", help="of a weight file (default: 5GB)")
    add_json_argument(parser)
    add_layout_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Return 0, having written the folder.

    Collectives: those of `upcycle`.
    """
    config = UpcycleConfig(
        num_experts=options.experts,
        top_k=options.top_k,
        kind=options.kind,
        noise=options.noise,
        parts=options.parts or 1,
        balance_coef=options.balance_coef,
        seed=options.seed,
    )
    model, report = upcycle(
        options.dense,
        options.out,
        config,
        mesh=make_mesh(options),
        dtype=parse_dtype(options.dtype) if options.dtype else None,
        max_shard_size=options.max_shard_size,
        tokenizer=options.tokenizer,
    )
    say(
        options,
        f"wrote {options.out}: {model.model_type}, {model.num_layers} layers, "
        f"{config.num_experts} experts of {model.moe.expert_dim}, {model.num_params():,} "
        f"parameters ({model.num_active_params():,} active), {report.nbytes:,} bytes",
    )
    result = {
        "path": options.out,
        "model_type": model.model_type,
        "experts": config.num_experts,
        "top_k": config.top_k,
        "expert_dim": model.moe.expert_dim,
        "params_total": model.num_params(),
        "params_active": model.num_active_params(),
        "bytes": report.nbytes,
        "files": list(report.files),
    }
    write_json(options, result)
    return 0
