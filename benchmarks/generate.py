"""Tokens a second while generating, beside transformers' `generate`, on one process and 2 ranks.

    python benchmarks/generate.py [--model mixtral qwen3_moe] [--rows 1 8] [--ranks 1 2] [--write]

The models of `activation_memory.py` from one random hub folder, prompts of 64 tokens, no stop
token, the likeliest token each time; both sides must give the same tokens in fp32. Decoding is
timed alone: a run of all new tokens less a run of one, in turns, medians. transformers uses
`sdpa`, `grouped_mm` experts and its default cache; over 2 ranks it has tp (with ep), this library
tp with ep, and data parallelism with ep, where each rank brings the rows.

On one process the table says what a step cannot be faster than: the products alone that it must
take (projections, router, the experts that as many random choices meet, head), one bare call each
by whichever way this library takes, and the bytes of those weights over the rate
at which this machine sums numbers in memory.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from activation_memory import COMMON, SIZES
from side_by_side import DTYPES, publish, table, today, versions

from moe_tp import Mesh, ParallelLayout
from moe_tp.experts.layer import GroupedExperts
from moe_tp.infer.generate import generate
from moe_tp.models import build, from_pretrained, save_pretrained
from moe_tp.models.decoder import Decoder
from moe_tp.models.families import preset
from moe_tp.parallel.held import holding
from moe_tp.parallel.parameter import named_specs
from moe_tp.parallel.product import linear
from moe_tp.parallel.shards import to_local
from moe_tp.testing import run_ranks

PROMPT = 64
OUR_FORMS: dict[str, dict[str, int]] = {"dp 2, ep 2": {"ep": 2}, "tp 2, ep 2": {"tp": 2, "ep": 2}}
THEIR_FORMS: dict[str, dict[str, int]] = {
    "tp 2": {"tp_size": 2},
    "tp 2, ep 2": {"tp_size": 2, "ep_size": 2},
}
Run = Callable[[int], list[list[int]]]


def our_run(folder: str, mesh: Mesh, dtype: torch.dtype, ids: torch.Tensor) -> Run:
    """Return a function that gives so many new tokens of each row."""
    model = from_pretrained(folder, mesh, dtype=dtype)
    return lambda new: generate(model, ids, max_new_tokens=new, stop_ids=()).tokens


def their_run(folder: str, dtype: torch.dtype, ids: torch.Tensor, **form: int) -> Run:
    """Return the same of transformers."""
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"experts_implementation": "grouped_mm"}
    if form:
        from transformers.distributed import DistributedConfig

        options["distributed_config"] = DistributedConfig(**form)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options).eval()
    mask = torch.ones_like(ids)
    settings = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}

    def run(new: int) -> list[list[int]]:
        out = model.generate(ids, attention_mask=mask, max_new_tokens=new, **settings)
        rows: list[list[int]] = out[:, ids.shape[1] :].tolist()
        return rows

    return run


def step_matrices(model: Decoder, rows: int) -> list[tuple[torch.Tensor, int]]:
    """Return the matrices of one step `[out, in]`, each with how many rows meet it."""
    generator = torch.Generator().manual_seed(0)
    config = model.config.moe.router
    found: list[tuple[torch.Tensor, int]] = []
    for _, module, name, param, spec in named_specs(model):
        value = to_local(param).detach()
        if isinstance(module, GroupedExperts):
            if name == "down":
                gate_up = to_local(module.get_parameter("gate_up")).detach().flatten(1, 2)
                order = torch.rand(rows, config.num_experts, generator=generator).argsort(1)
                counts = torch.bincount(order[:, : config.top_k].flatten())
                for expert, count in enumerate(counts.tolist()):
                    found += [(gate_up[expert], count), (value[expert], count)] if count else []
        elif value.dim() == 2 and spec.role != "embedding":
            found.append((value, rows))
    return found


def floors(model: Decoder, rows: int, rounds: int) -> dict[str, float]:
    """Return the seconds of a step's bare products, and of reading their weights once."""
    calls = [
        (torch.randn(count, weight.shape[1]).to(weight.dtype), weight)
        for weight, count in step_matrices(model, rows)
    ]
    size = sum(weight.nbytes for _, weight in calls)
    memory = torch.ones(1 << 26)  # 256 MiB: no cache holds it

    def fastest(work: Callable[[], object]) -> float:
        times = []
        for _ in range(3 * rounds):
            start = time.perf_counter()
            work()
            times.append(time.perf_counter() - start)
        return min(times)

    with torch.no_grad(), holding():
        return {
            "bare products": fastest(lambda: [linear(x, weight, None) for x, weight in calls]),
            "weights read": fastest(memory.sum) * size / memory.nbytes,
        }


def decode_seconds(
    runs: dict[str, Run], new: int, rounds: int, meet: Callable[[], object]
) -> dict[str, float]:
    """Return the median seconds of `new - 1` steps that each get one token a row.

    Collectives: those of the runs and of `meet`.
    """

    def clock(run: Run, count: int) -> float:
        meet()
        start = time.perf_counter()
        run(count)
        meet()
        return time.perf_counter() - start

    seconds: dict[str, list[float]] = {who: [] for who in runs}
    for _ in range(rounds):
        for who, run in runs.items():
            seconds[who].append(clock(run, new) - clock(run, 1))
    return {who: statistics.median(values) for who, values in seconds.items()}


def prompts_of(rows: int, seed: int = 0) -> torch.Tensor:
    """Return `[rows, PROMPT]` random ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(COMMON["vocab_size"], (rows, PROMPT), generator=generator)


def alone(folder: str, label: str, rows: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return tokens a second of both sides on one process."""
    ids, dtype, new = prompts_of(rows), DTYPES[label], options.new_tokens
    runs = {
        "moe_tp": our_run(folder, Mesh.single(), dtype, ids),
        "transformers": their_run(folder, dtype, ids),
    }
    ours, theirs = (run(new) for run in runs.values())
    if label == "fp32" and ours != theirs:
        raise SystemExit("the two sides generate different tokens")
    seconds = decode_seconds(runs, new, options.rounds, lambda: None)
    found = {who: rows * (new - 1) / value for who, value in seconds.items()}
    least = floors(from_pretrained(folder, Mesh.single(), dtype=dtype), rows, options.rounds)
    return found | {f"floor: {what}": rows / value for what, value in least.items()}


def on_ranks(folder: str, label: str, rows: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return tokens a second of each form, over all ranks, or why it does not run.

    Collectives: those of the models, and barriers.
    """
    torch.set_num_threads(1)
    dtype, new, found = DTYPES[label], options.new_tokens, {}
    runs: dict[str, Run] = {}
    for name, form in OUR_FORMS.items():
        mesh = Mesh(ParallelLayout(**form))
        # as many rows in all: each rank of dp brings its share
        whole = prompts_of(rows)
        share = whole.chunk(mesh.size("dp"))
        mine = share[mesh.coordinate("dp")] if mesh.coordinate("dp") < len(share) else whole[:0]
        runs[f"moe_tp, {name}"] = our_run(folder, mesh, dtype, mine)
    for name, form in THEIR_FORMS.items():
        who = f"transformers, {name}"
        try:
            run = their_run(folder, dtype, prompts_of(rows), **form)
            run(2)
        except Exception as error:  # noqa: BLE001 - a peer's crash is a row of the table
            found[who] = f"fails: {type(error).__name__}"
            continue
        runs[who] = run
    for run in runs.values():
        run(2)
    seconds = decode_seconds(runs, new, options.rounds, dist.barrier)
    return found | {who: rows * (new - 1) / value for who, value in seconds.items()}


def main() -> None:
    """Print, and with --write keep, a table of tokens a second."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", nargs="+", choices=sorted(SIZES), default=sorted(SIZES))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--ranks", type=int, nargs="+", choices=(1, 2), default=[1, 2])
    parser.add_argument("--dtype", nargs="+", choices=sorted(DTYPES), default=["fp32", "bf16"])
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="keep benchmarks/NAME-DATE.md")
    options = parser.parse_args()
    cells: list[list[str]] = []
    for family in options.model:
        config = preset(family, **COMMON, **SIZES[family])
        with tempfile.TemporaryDirectory() as folder:
            save_pretrained(build(config, Mesh.single(), seed=0), folder)
            for label in options.dtype:
                for rows in options.rows:
                    for ranks in options.ranks:
                        if ranks == 1:
                            found = alone(folder, label, rows, options)
                        else:
                            found = run_ranks(
                                on_ranks, ranks, folder, label, rows, options, timeout=380
                            )[0]
                        peers = [
                            speed
                            for who, speed in found.items()
                            if who.startswith("transformers") and not isinstance(speed, str)
                        ]
                        for who, speed in found.items():
                            row = [family, label, str(rows), str(ranks), who]
                            if isinstance(speed, str):
                                row += [speed, ""]
                            else:
                                best = f"{speed / max(peers):.2f}" if peers else ""
                                row += [f"{speed:.1f}", best]
                            cells.append(row)
                            print(*row, flush=True)
    head = ["model", "dtype", "rows", "ranks", "what", "tokens/s", "over transformers' best"]
    lines = [
        f"# Decoding, tokens a second, {today()}",
        "",
        f"`python benchmarks/generate.py`: width {COMMON['hidden_size']}, "
        f"{COMMON['num_hidden_layers']} layers, vocabulary {COMMON['vocab_size']}, experts as in "
        f"shapes A (mixtral) and B (qwen3_moe), prompts of {PROMPT} tokens, {options.new_tokens} "
        f"new ones, the first not counted. One process: {torch.get_num_threads()} threads; ranks: "
        f"one each, gloo; {versions()}. Medians of {options.rounds}; floors: the fastest of "
        f"{3 * options.rounds}.",
        "",
        *table(head, cells),
    ]
    publish("generate", lines, write=options.write)


if __name__ == "__main__":
    main()
