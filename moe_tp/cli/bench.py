"""`moe-tp bench layer|dispatch|load|step`: how fast this machine runs the parts, and a profile.

Letters: T tokens of a rank.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from moe_tp.bench.floor import SHAPES, LayerShape, exchange_floor, matmul_floor
from moe_tp.bench.layer import make_layer, make_tokens, routing_of, training_step
from moe_tp.bench.model import step_flops
from moe_tp.bench.profile import measure_hardware, write_profile
from moe_tp.bench.timing import FLOOR, machine, side_by_side, wait
from moe_tp.cli.options import (
    add_json_argument,
    add_layout_arguments,
    is_first_rank,
    make_mesh,
    parse_dtype,
    say,
    write_json,
)
from moe_tp.errors import ConfigError
from moe_tp.experts.moe import MoE
from moe_tp.models import build, from_pretrained
from moe_tp.models.families import preset
from moe_tp.parallel.collectives import record_traffic
from moe_tp.parallel.gradients import parameter_groups, settle_gradients
from moe_tp.parallel.mesh import Mesh
from moe_tp.parallel.shards import to_local
from moe_tp.train.step import forward_backward

_KINDS = ("layer", "dispatch", "load", "step")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "what",
        choices=_KINDS,
        help="an MoE layer; its rows on the wire; loading a folder; a whole training step",
    )
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="load, step: a hub folder; step: or FAMILY:PRESET"
    )
    parser.add_argument(
        "--shape", choices=sorted(SHAPES), default="A", help="of the layer, see docs/speed.md"
    )
    for name in ("dim", "expert_dim", "experts", "top_k"):
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=int, metavar="N", help="in place of the shape's")
    parser.add_argument("--tokens", type=int, default=512, metavar="N", help="of each rank")
    parser.add_argument("--seq-len", type=int, default=512, metavar="N", help="step: tokens a row")
    parser.add_argument("--dtype", default="float32", help="float32 (default), bfloat16")
    parser.add_argument("--skew", action="store_true", help="half the tokens on one expert")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="medians are of these")
    parser.add_argument("--threads", type=int, metavar="N", help="of each process")
    parser.add_argument(
        "--profile", metavar="FILE", help="also measure rates, for `moe-tp plan --hardware FILE`"
    )
    add_json_argument(parser)
    add_layout_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Return 0, having measured.

    Collectives: those of what is measured, and barriers between.
    """
    for name in ("tokens", "rounds", "seq_len"):
        if getattr(options, name) < 1:
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} {getattr(options, name)} must be at least 1")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    mesh, dtype = make_mesh(options), parse_dtype(options.dtype)
    measure: Callable[..., dict[str, Any]] = {
        "layer": _layer,
        "dispatch": _dispatch,
        "load": _load,
        "step": _step,
    }[options.what]
    result = {
        "what": options.what,
        "layout": str(mesh.layout),
        "dtype": str(dtype).removeprefix("torch."),
        "machine": machine(mesh.device),
    }
    result |= measure(options, mesh, dtype)
    if options.profile is not None:
        hardware = measure_hardware(mesh, dtype)
        if is_first_rank():
            write_profile(hardware, options.profile)
        result["matmul_rate"], result["link_rate"] = hardware.flops, hardware.link
    for key, value in result.items():
        say(options, f"{key:24} {value:.4g}" if isinstance(value, float) else f"{key:24} {value}")
    write_json(options, result)
    return 0


def _shape(options: argparse.Namespace) -> LayerShape:
    names = ("dim", "expert_dim", "experts", "top_k")
    given = {name: getattr(options, name) for name in names}
    shape = replace(SHAPES[options.shape], **{n: v for n, v in given.items() if v is not None})
    for name in names:
        if getattr(shape, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1")
    return shape


def _tokens(
    options: argparse.Namespace, layer: MoE, mesh: Mesh, dtype: torch.dtype
) -> torch.Tensor:
    router_ED = to_local(layer.router.get_parameter("weight")).detach()
    return make_tokens(router_ED, options.tokens, dtype, skew=options.skew, seed=mesh.rank)


def _meet(mesh: Mesh) -> Callable[[], object] | None:
    return dist.barrier if mesh.world_size > 1 else None


def _layer(options: argparse.Namespace, mesh: Mesh, dtype: torch.dtype) -> dict[str, Any]:
    """Return the time of an MoE layer, forward and backward, over its matmuls and bare exchange."""
    shape = _shape(options)
    layer = make_layer(shape, mesh, dtype)
    x_TD = _tokens(options, layer, mesh, dtype)
    step = training_step(lambda x: layer(x)[0], x_TD, list(layer.parameters()))
    matmuls = matmul_floor(shape, options.tokens, mesh, dtype)
    send = exchange_floor(routing_of(layer, x_TD), shape.dim, mesh, dtype)

    def floor() -> None:
        matmuls()
        send()

    times = side_by_side(
        {"layer": step}, floor, rounds=options.rounds, meet=_meet(mesh), device=mesh.device
    )
    seconds = times.median("layer")
    return {
        "shape": str(shape),
        "tokens_per_rank": options.tokens,
        "seconds": seconds,
        "floor_seconds": times.median(FLOOR),
        "over_floor": times.ratio("layer"),
        "tokens_per_second": options.tokens * mesh.world_size / seconds,
        "flops_per_second_per_rank": shape.flops(options.tokens) / seconds,
    }


def _dispatch(options: argparse.Namespace, mesh: Mesh, dtype: torch.dtype) -> dict[str, Any]:
    """Return the time of dispatch and combine, forward and backward, over a bare exchange."""
    if mesh.size("ep") * mesh.size("etp") == 1:
        raise ConfigError("nothing is sent with ep=1 and etp=1; try --nproc 2 --ep 2")
    shape = _shape(options)
    layer = make_layer(shape, mesh, dtype)
    x_TD = _tokens(options, layer, mesh, dtype)
    assignment, dispatcher = routing_of(layer, x_TD), layer.dispatcher
    exact = torch.promote_types(dtype, torch.float32)

    def there_and_back(x: torch.Tensor) -> torch.Tensor:
        received = dispatcher.dispatch(x, assignment)
        return dispatcher.combine(received.rows_RD.to(exact), received)

    step = training_step(there_and_back, x_TD, [])
    send = exchange_floor(assignment, shape.dim, mesh, dtype)
    times = side_by_side(
        {"dispatch": step}, send, rounds=options.rounds, meet=_meet(mesh), device=mesh.device
    )
    with record_traffic() as log:
        step()
    return {
        "shape": str(shape),
        "tokens_per_rank": options.tokens,
        "dispatcher": type(dispatcher).__name__,
        "seconds": times.median("dispatch"),
        "exchange_seconds": times.median(FLOOR),
        "bytes_sent_forward": log.total(phase="forward"),
        "bytes_sent_backward": log.total(phase="backward"),
    }


def _load(options: argparse.Namespace, mesh: Mesh, dtype: torch.dtype) -> dict[str, Any]:
    """Return the time to load a folder, as on disk, with its files in the page cache or not."""
    if options.model is None:
        raise ConfigError("bench load needs a hub folder; write moe-tp bench load PATH")
    meet, seconds, size = _meet(mesh), [], 0
    for _ in range(options.rounds):
        if meet is not None:
            meet()
        start = time.perf_counter()
        model = from_pretrained(options.model, mesh)
        wait(mesh.device)
        if meet is not None:
            meet()
        seconds.append(time.perf_counter() - start)
        size = sum(to_local(param).nbytes for param in model.parameters())
        del model
    best = min(seconds)
    return {
        "model": options.model,
        "first_seconds": seconds[0],
        "best_seconds": best,
        "bytes_per_rank": size,
        "bytes_per_second_per_rank": size / best,
    }


def _step(options: argparse.Namespace, mesh: Mesh, dtype: torch.dtype) -> dict[str, Any]:
    """Return the time of forward, backward and AdamW, with --tokens tokens or a row a dp rank."""
    name = options.model or "mixtral:tiny"
    family, colon, size = name.partition(":")
    if colon:
        model = build(preset(family, size), mesh, dtype=dtype)
    else:
        model = from_pretrained(name, mesh, dtype=dtype)
    rows = max(options.tokens // options.seq_len, 1)
    generator = torch.Generator().manual_seed(mesh.coordinate("dp"))
    ids = torch.randint(model.config.vocab_size, (rows, options.seq_len), generator=generator)
    ids = ids.to(mesh.device)
    optimizer = torch.optim.AdamW(parameter_groups(model), lr=1e-4)
    meet, seconds = _meet(mesh), []
    for turn in range(options.rounds + 1):
        if meet is not None:
            meet()
        start = time.perf_counter()
        forward_backward(model, [{"input_ids": ids, "labels": ids}], step=turn)
        settle_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        wait(mesh.device)
        if meet is not None:
            meet()
        seconds.append(time.perf_counter() - start)
    median = statistics.median(seconds[1:])
    tokens = rows * options.seq_len * mesh.size("dp")
    flops = tokens * step_flops(model.config, options.seq_len)
    return {
        "model": name,
        "tokens_per_step": tokens,
        "seconds": median,
        "tokens_per_second": tokens / median,
        "flops_per_second_per_rank": flops / median / mesh.world_size,
    }
