"""A whole model's forward and backward beside transformers', on one process and on 4 ranks.

    python benchmarks/model_step.py [--ranks 1 4] [--model mixtral qwen3_moe] [--write]

Models of about 100 M parameters from one random hub folder, sequences of 512 tokens, one a data
rank. On one process the floor is the model's matmuls alone (`moe_tp.bench.model`): projections,
causal attention, balanced experts, head. Both sides take turns between two runs of it, and their
losses are compared. On several ranks (one thread each) tokens a second are those of all ranks, and
transformers runs in each of its parallel forms that trains here; what fails is said so. The
optimiser, which is the same on both sides, is left out.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from activation_memory import COMMON, SIZES
from side_by_side import DTYPES, publish, table, today, versions

from moe_tp import Mesh, ParallelLayout, forward_backward, settle_gradients
from moe_tp.bench.model import model_floor
from moe_tp.bench.timing import side_by_side
from moe_tp.models import build, from_pretrained, save_pretrained
from moe_tp.models.families import preset
from moe_tp.testing import run_ranks

LENGTH = 512
THEIR_FORMS: dict[str, dict[str, int]] = {
    "fsdp 4, ep 4": {"fsdp_size": 4, "ep_size": 4},
    "tp 4, ep 4": {"tp_size": 4, "ep_size": 4},
}
OUR_FORMS: dict[str, dict[str, int]] = {
    "dp 4, ep 4": {"ep": 4},
    "dp 4, ep 4, zero 3": {"ep": 4, "zero": 3},
}
Step = Callable[[], torch.Tensor]


def our_step(folder: str, mesh: Mesh, dtype: torch.dtype, ids: torch.Tensor) -> Step:
    """Return forward and backward of this library's model, to the loss."""
    model = from_pretrained(folder, mesh, dtype=dtype)

    def run() -> torch.Tensor:
        model.zero_grad()
        step = forward_backward(model, [{"input_ids": ids, "labels": ids}])
        settle_gradients(model)
        return step.loss

    return run


def their_step(folder: str, dtype: torch.dtype, ids: torch.Tensor, **form: int) -> Step:
    """Return forward and backward of transformers' model, to the loss."""
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"experts_implementation": "grouped_mm", "use_cache": False}
    if form:
        from transformers.distributed import DistributedConfig

        options["distributed_config"] = DistributedConfig(**form)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options)
    model.train()

    def run() -> torch.Tensor:
        model.zero_grad()
        loss: torch.Tensor = model(ids, labels=ids).loss
        loss.backward()
        return loss.detach()

    return run


def alone(folder: str, config: Any, label: str, rounds: int) -> list[list[str]]:
    """Return the rows of one process."""
    torch.manual_seed(0)
    dtype, ids = DTYPES[label], torch.randint(COMMON["vocab_size"], (1, LENGTH))
    mesh = Mesh.single()
    steps = {
        "moe_tp": our_step(folder, mesh, dtype, ids),
        "transformers": their_step(folder, dtype, ids),
    }
    losses = [float(step()) for step in steps.values()]
    if abs(losses[0] - losses[1]) > (1e-4 if dtype == torch.float32 else 3e-2) * losses[0]:
        raise SystemExit(f"the losses differ: {losses}")
    floor = model_floor(config, 1, LENGTH, mesh, dtype)
    times = side_by_side(steps, floor, rounds=rounds)
    threads = f"1 process, {torch.get_num_threads()} threads"
    rows = []
    for who in steps:
        seconds, ratio = times.median(who), f"{times.ratio(who):.2f}"
        speed = [f"{1e3 * seconds:.0f}", f"{LENGTH / seconds:.0f}"]
        rows.append([config.model_type, label, threads, who, *speed, ratio])
    return rows


def on_ranks(folder: str, label: str, rounds: int) -> dict[str, tuple[float, int] | str]:
    """Return seconds and tokens of each form, or why it does not run; on every rank.

    Collectives: those of the models, and barriers.
    """
    torch.set_num_threads(1)
    rank, world, dtype = dist.get_rank(), dist.get_world_size(), DTYPES[label]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(COMMON["vocab_size"], (world, LENGTH), generator=generator)
    found: dict[str, tuple[float, int] | str] = {}
    steps: dict[str, Step] = {}
    tokens: dict[str, int] = {}
    for name, form in OUR_FORMS.items():
        mesh = Mesh(ParallelLayout(**form))
        steps[f"moe_tp, {name}"] = our_step(folder, mesh, dtype, ids[rank : rank + 1])
        tokens[f"moe_tp, {name}"] = world * LENGTH
    for name, form in THEIR_FORMS.items():
        who, shared = f"transformers, {name}", "tp_size" in form
        own = ids[:1] if shared else ids[rank : rank + 1]
        try:
            step = their_step(folder, dtype, own, **form)
            step()
        except Exception as error:  # noqa: BLE001 - a peer's crash is a row of the table
            found[who] = f"fails: {type(error).__name__}"
            continue
        steps[who], tokens[who] = step, (1 if shared else world) * LENGTH
    times = side_by_side(steps, lambda: None, rounds=rounds, meet=dist.barrier)
    return found | {who: (times.median(who), tokens[who]) for who in steps}


def together(folder: str, config: Any, label: str, ranks: int, rounds: int) -> list[list[str]]:
    """Return the rows of several ranks."""
    found = run_ranks(on_ranks, ranks, folder, label, rounds, timeout=380)[0]
    rows = []
    for who, value in found.items():
        cells = [value, "", ""]
        if not isinstance(value, str):
            seconds, tokens = value
            cells = [f"{1e3 * seconds:.0f}", f"{tokens / seconds:.0f}", ""]
        rows.append([config.model_type, label, f"{ranks} ranks, 1 thread each", who, *cells])
    return rows


def main() -> None:
    """Print, and with --write keep, a table of times and tokens a second."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", nargs="+", choices=sorted(SIZES), default=sorted(SIZES))
    parser.add_argument("--ranks", type=int, nargs="+", choices=(1, 4), default=[1, 4])
    parser.add_argument("--dtype", nargs="+", choices=sorted(DTYPES), default=["fp32"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="keep benchmarks/NAME-DATE.md")
    options = parser.parse_args()
    rows: list[list[str]] = []
    captions = []
    for family in options.model:
        config = preset(family, **COMMON, **SIZES[family])
        captions.append(f"{family} {config.num_params() / 1e6:.0f} M")
        with tempfile.TemporaryDirectory() as folder:
            save_pretrained(build(config, Mesh.single(), seed=0), folder)
            for label in options.dtype:
                new: list[list[str]] = []
                if 1 in options.ranks:
                    new += alone(folder, config, label, options.rounds)
                if 4 in options.ranks:
                    new += together(folder, config, label, 4, options.rounds)
                rows += new
                for row in new:
                    print(*row, flush=True)
    head = ["model", "dtype", "where", "what", "ms", "tokens/s", "over the floor"]
    lines = [
        f"# Forward and backward of a whole model, {today()}",
        "",
        f"`python benchmarks/model_step.py`: {', '.join(captions)} parameters, width "
        f"{COMMON['hidden_size']}, {COMMON['num_hidden_layers']} layers, vocabulary "
        f"{COMMON['vocab_size']}, sequences of {LENGTH}; {versions()}, sdpa and grouped_mm. "
        f"Medians of {options.rounds}.",
        "",
        *table(head, rows),
    ]
    publish("model_step", lines, write=options.write)


if __name__ == "__main__":
    main()
