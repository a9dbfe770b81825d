"""`moe-tp plan PATH_OR_CONFIG`: which layouts of N GPUs fit a model, and how fast they may be."""

from __future__ import annotations

import argparse
import gc
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from moe_tp.checkpoint.scan import CONFIG
from moe_tp.cli.options import add_json_argument, say, write_json
from moe_tp.errors import ConfigError
from moe_tp.models import ModelConfig
from moe_tp.models.families import model_types, preset
from moe_tp.parallel.layout import ContextKind
from moe_tp.plan.advice import remedies, smallest_group, why_none
from moe_tp.plan.hardware import (
    TABLE,
    Hardware,
    hardware,
    parse_bytes,
    parse_rate,
    read_hardware,
)
from moe_tp.plan.job import Job, Kernel, Moments, Optimizer
from moe_tp.plan.memory import Planner
from moe_tp.plan.search import RECOMPUTE, Candidate, Plan, search

_MOST_LAYERS = 512  # the time to deal them grows with their square
_BAR = 32  # characters of the picture's longest bar


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "model",
        metavar="PATH_OR_CONFIG",
        help="a hub-format folder, its config.json, or FAMILY:PRESET as in mixtral:8x7b",
    )
    parser.add_argument("--gpus", type=int, required=True, metavar="N", help="number of GPUs")
    parser.add_argument("--gpu", choices=sorted(TABLE), help="kind of GPU; default H100")
    parser.add_argument(
        "--hardware", metavar="FILE", help="JSON of other rates, as moe-tp bench --profile writes"
    )
    parser.add_argument("--gpu-memory", metavar="80GB", help="memory of one GPU")
    parser.add_argument("--node-size", type=int, metavar="N", help="GPUs of a node")
    parser.add_argument("--link", metavar="RATE", help="inside a node: nvlink4, pcie5, 450GB")
    parser.add_argument("--network", metavar="RATE", help="between nodes: ib400, eth100, 50GB")
    parser.add_argument("--mode", choices=("full", "lora"), default="full", help="what is trained")
    parser.add_argument("--lora-rank", type=int, default=16, metavar="R", help="of every adapter")
    parser.add_argument(
        "--lora-base",
        choices=("loaded", "int8", "int4"),
        default="loaded",
        help="what the experts' frozen weights are kept in",
    )
    parser.add_argument("--seq-len", type=int, default=4096, metavar="TOKENS", help="of a row")
    parser.add_argument(
        "--global-batch", type=int, default=256, metavar="SEQUENCES", help="of an optimiser step"
    )
    parser.add_argument(
        "--micro-batch", type=int, default=1, metavar="SEQUENCES", help="of a call on one dp rank"
    )
    parser.add_argument(
        "--optimizer", choices=get_args(Optimizer), default="adamw", help="what steps the weights"
    )
    parser.add_argument(
        "--moments", choices=get_args(Moments), default="float32", help="how AdamW keeps its state"
    )
    parser.add_argument(
        "--kernel", choices=get_args(Kernel), default="foreach", help="of AdamW in fp32"
    )
    parser.add_argument(
        "--bf16-weights", action="store_true", help="train bf16 weights instead of fp32 ones"
    )
    parser.add_argument(
        "--cp-kind", choices=get_args(ContextKind), default="ulysses", help="how cp ranks attend"
    )
    parser.add_argument(
        "--dp-replicate", type=int, default=1, metavar="N", help="replicas of ZeRO's shards (HSDP)"
    )
    parser.add_argument(
        "--spare-slots",
        type=int,
        default=0,
        metavar="N",
        help="of each rank of ep, for replicas of hot experts",
    )
    parser.add_argument(
        "--offload", action="store_true", help="what ZeRO shards rests in host memory"
    )
    parser.add_argument(
        "--recompute", choices=RECOMPUTE, help="default: for each layout the least that fits"
    )
    parser.add_argument(
        "--skew", type=float, default=1.25, help="rows of the busiest rank over the mean"
    )
    parser.add_argument("--top", type=int, default=10, metavar="N", help="rows of the table")
    parser.add_argument("--refused", action="store_true", help="also list refused layouts and why")
    add_json_argument(parser)


def run(options: argparse.Namespace) -> int:
    """Return 0 where a layout fits, else 1."""
    gc.disable()  # looking for garbage among tens of thousands of layouts is a quarter of the time
    try:
        return _plan(options)
    finally:
        gc.enable()


def _plan(options: argparse.Namespace) -> int:
    config, gpu = _config(options.model), _hardware(options)
    if options.gpus < 1:
        raise ConfigError(f"--gpus {options.gpus} must be at least 1")
    if config.num_layers > _MOST_LAYERS:
        raise ConfigError(
            f"num_hidden_layers={config.num_layers} is more than {_MOST_LAYERS}, the most that a "
            f"plan deals to stages"
        )
    if options.top < 1:
        raise ConfigError(f"--top {options.top} must be at least 1")
    job = Job(
        mode=options.mode,
        seq_len=options.seq_len,
        global_batch=options.global_batch,
        micro_batch=options.micro_batch,
        optimizer=options.optimizer,
        moments=options.moments,
        kernel=options.kernel,
        master_bytes=2 if options.bf16_weights else 4,
        cp_kind=options.cp_kind,
        dp_replicate=options.dp_replicate,
        offload=options.offload,
        spare_slots=options.spare_slots,
        lora_rank=options.lora_rank,
        lora_base=options.lora_base,
        skew=options.skew,
    )
    mode, like = options.recompute, Planner(config, job)
    plan = search(
        config, job, options.gpus, gpu, recompute=mode, refusals=options.refused, like=like
    )
    group = smallest_group(config, job, gpu, recompute=mode, like=like)
    advice = []
    if plan.best is None:
        advice = remedies(config, job, options.gpus, gpu, recompute=mode, group=group)
    result: dict[str, Any] = {
        "model_type": config.model_type,
        "params_total": config.num_params(),
        "params_active": config.num_active_params(),
        "gpu": gpu.name,
        "gpus": options.gpus,
        "gpu_memory": gpu.memory,
        "legal": len(plan.candidates),
        "refused": plan.num_refused,
        "smallest_group": None
        if group is None
        else {"gpus": group[0], "layout": _degrees(group[1])},
        "best": _row(plan.best) if plan.best else None,
        "layouts": [_row(candidate) for candidate in plan.candidates[: options.top]],
        "remedies": advice,
    }
    if not plan.candidates:
        result["why_none"] = why_none(config, job, options.gpus)
    if options.refused:
        result["refusals"] = [
            {"layout": str(refusal.layout), "reason": refusal.reason} for refusal in plan.refusals
        ]
    say(options, _text(options, plan, result, gpu, job))
    write_json(options, result)
    return 0 if plan.best else 1


def _config(text: str) -> ModelConfig:
    """Return the model that a folder, a config file or FAMILY:PRESET names."""
    path = Path(text)
    if not path.exists():
        name, colon, size = text.partition(":")
        if name in model_types():
            return preset(name, size if colon else "tiny")
        raise ConfigError(
            f"{text} is no folder, no config.json and no FAMILY:PRESET; families are "
            f"{', '.join(model_types())}; of a model on the hub its config.json is enough"
        )
    file = path / CONFIG if path.is_dir() else path
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} holds no config.json") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{file} holds no JSON object")
    return ModelConfig.from_hub(found)


def _hardware(options: argparse.Namespace) -> Hardware:
    given = {"link": options.link, "network": options.network}
    changes = {name: parse_rate(text) for name, text in given.items() if text is not None}
    if options.gpu_memory is not None:
        changes["memory"] = parse_bytes(options.gpu_memory)
    if options.node_size is not None:
        changes["node_size"] = options.node_size
    if options.hardware is None:
        return hardware(options.gpu or "H100", **changes)
    if options.gpu is not None:
        raise ConfigError(
            f"--hardware {options.hardware} and --gpu {options.gpu} both name the GPU; give one "
            f'(the file may hold "gpu": "{options.gpu}" and what differs from it)'
        )
    return replace(read_hardware(options.hardware), **changes)  # type: ignore[arg-type]


def _degrees(candidate: Candidate) -> dict[str, int]:
    layout = candidate.layout
    names = ("dp", "cp", "tp", "pp", "ep", "etp", "zero")
    return {name: getattr(layout, name) for name in names}


def _row(candidate: Candidate) -> dict[str, Any]:
    time = candidate.time
    return {
        "layout": _degrees(candidate),
        "recompute": candidate.recompute,
        "fits": candidate.fits,
        "memory": candidate.memory.total,
        "memory_stage": candidate.memory.stage,
        "memory_moment": candidate.memory.moment,
        "memory_parts": candidate.memory.parts(),
        "tokens_per_second": time.tokens_per_second if time else None,
        "tflops_per_gpu": time.model_flops / 1e12 if time else None,
        "bound": time.bound if time else "memory",
    }


def _text(
    options: argparse.Namespace, plan: Plan, result: dict[str, Any], gpu: Hardware, job: Job
) -> str:
    lines = [
        f"{options.model}: {_billions(result['params_total'])} B parameters, "
        f"{_billions(result['params_active'])} B active; {options.mode} training on "
        f"{options.gpus} x {gpu.name} with {gpu.memory / 1e9:.3g} GB",
        f"{len(plan.candidates)} layouts, {plan.num_refused} refused; estimates, see "
        f"docs/planner.md for how far off they may be",
        "",
        f"{'layout':30} {'recompute':10} {'fits':5} {'GB':>6} {'tokens/s':>10} "
        f"{'TFLOP/s':>8}  bound",
    ]
    for candidate in plan.candidates[: options.top]:
        time = candidate.time
        speed, rate = ("-", "-")
        if time is not None:
            speed, rate = f"{time.tokens_per_second:.0f}", f"{time.model_flops / 1e12:.0f}"
        lines.append(
            f"{candidate.layout!s:30} {candidate.recompute:10} "
            f"{'yes' if candidate.fits else 'no':5} {candidate.memory.total / 1e9:6.1f} "
            f"{speed:>10} {rate:>8}  {time.bound if time else 'memory'}"
        )
    if not plan.candidates:
        lines += [f"no layout of {options.gpus} GPUs is legal; the commonest reasons:"]
        lines += [f"  - {reason}" for reason in result["why_none"]]
    for refusal in plan.refusals:
        lines.append(f"refused {refusal.layout}: {refusal.reason}")
    shown = plan.best or (plan.candidates[0] if plan.candidates else None)
    if shown is not None:
        lines += [
            "",
            f"memory of {shown.layout} (GB; stage {shown.memory.stage}, {shown.memory.moment}):",
        ]
        most = max(shown.memory.parts().values())
        for name, size in shown.memory.parts().items():
            if not size:
                continue
            bar = "#" * round(_BAR * size / most) if most else ""
            lines.append(f"  {name:12} {size / 1e9:7.1f}  {bar}")
    group = result["smallest_group"]
    what = f"{group['gpus']} GPUs" if group else "none up to 4096 GPUs"
    lines += ["", f"smallest group that fits: {what}"]
    if plan.best is not None:
        lines += ["", _yaml(plan.best, job)]
    else:
        lines += ["nothing fits; what would, the cheapest first:"]
        lines += [f"  - {remedy}" for remedy in result["remedies"] or [_none_known(job, gpu)]]
    return "\n".join(lines)


def _billions(params: int) -> str:
    """Return them in billions, with three digits of a small model."""
    return f"{params / 1e9:.1f}" if params > 1e9 else f"{params / 1e9:.3g}"


def _none_known(job: Job, gpu: Hardware) -> str:
    """Return why nothing makes a model fit, where that is plain."""
    if gpu.memory > job.reserve:
        return "nothing that is known"
    return (
        f"nothing: {job.reserve / 1e9:.3g} GB of each GPU are reserved for its context and "
        f"communication buffers, and it has {gpu.memory / 1e9:.3g} GB"
    )


def _yaml(candidate: Candidate, job: Job) -> str:
    """Return the sections of a run's YAML that the row was computed for."""
    degrees = _degrees(candidate).items()
    plain = {"dp": None, "zero": 0}  # dp always stands there
    shown = [f"  {name}: {value}" for name, value in degrees if value != plain.get(name, 1)]
    runtime: dict[str, object] = {}
    if candidate.recompute != "none":
        runtime["recompute"] = candidate.recompute
    if job.cp_kind != "ulysses" and candidate.layout.cp > 1:
        runtime["cp_kind"] = job.cp_kind
    if job.dp_replicate > 1:
        runtime["dp_replicate"] = job.dp_replicate
    if job.spare_slots and candidate.layout.ep > 1:
        runtime["spare_slots"] = job.spare_slots
    if job.offload:
        runtime["offload"] = "true"
    if job.mode == "full" and job.master_bytes == 2:
        runtime["master_dtype"] = "bfloat16"
    block = [f"# planned for {_settings(job)}", "parallel:", *shown]
    if runtime:
        block += ["runtime:", *(f"  {name}: {value}" for name, value in runtime.items())]
    return "\n".join(block)


def _settings(job: Job) -> str:
    """Return the settings of the data, train and lora sections that the row was computed for."""
    found = [f"seq_len {job.seq_len}", f"micro_batch {job.micro_batch}"]
    found += [f"global_batch {job.global_batch}", f"optimizer {job.optimizer}"]
    if job.optimizer != "sgd":
        found.append(f"moments {job.moments}")
    if job.optimizer == "adamw" and job.moments == "float32":
        found.append(f"kernel {job.kernel}")
    if job.mode == "lora":
        found += [f"lora.rank {job.lora_rank}", f"lora.base {job.lora_base}"]
    return ", ".join(found)
