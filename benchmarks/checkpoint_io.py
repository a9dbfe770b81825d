"""Loading and saving a hub folder: bytes, memory and time, beside a plain read and transformers.

    python benchmarks/checkpoint_io.py WORK_FOLDER [--ranks 1,2,4] [--layers 10] [--peer]

Writes a random bf16 Mixtral folder of about 2 GB into WORK_FOLDER (kept for the next run), then
loads and saves it on local gloo ranks, with a warm page cache and, where the system allows to drop
it, a cold one. Peak memory is anonymous memory (RssAnon) above that before the load.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

CONFIG: dict[str, Any] = {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
    "dtype": "bfloat16",
}
LAYOUTS: dict[int, dict[str, int]] = {
    1: {},
    2: {"tp": 2, "ep": 2},
    4: {"tp": 4, "ep": 2, "etp": 2},
    8: {"tp": 8, "ep": 4, "etp": 2},
}


class Watch:
    """Time, and peak anonymous memory above the start, while the context is open."""

    def __enter__(self) -> Watch:
        self.base, self.peak, self.open = anonymous(), 0, True
        self.thread = threading.Thread(target=self._sample, daemon=True)
        self.thread.start()
        self.start = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self.start
        self.open = False
        self.thread.join()

    def _sample(self) -> None:
        while self.open:
            self.peak = max(self.peak, anonymous() - self.base)
            time.sleep(0.002)


def anonymous() -> int:
    """Bytes of anonymous memory of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def drop_cache(path: Path) -> bool:
    """Write back and forget the cached pages of a folder's files; False where that fails."""
    subprocess.run(["sync"], check=True)
    try:
        for file in path.iterdir():
            descriptor = os.open(file, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
    except OSError:
        return False
    return True


def join(rank: int, world: int, store: str) -> Any:
    import torch.distributed as dist

    from moe_tp import Mesh, ParallelLayout

    torch.set_num_threads(1)
    if world == 1:
        return Mesh.single(device="cpu")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    return Mesh(ParallelLayout(**LAYOUTS[world]), device="cpu")


def load_and_save(rank: int, world: int, store: str, source: str, target: str) -> dict[str, Any]:
    from moe_tp.checkpoint import HubFolder, load_into, save_hub
    from moe_tp.models.config import ModelConfig
    from moe_tp.models.families import rules_for
    from moe_tp.models.load import allocate
    from moe_tp.parallel.parameter import to_local

    mesh = join(rank, world, store)
    with Watch() as loading:
        folder = HubFolder(source)
        config = ModelConfig.from_hub(folder.config)
        model = allocate(config, mesh, torch.bfloat16)
        rules = rules_for(config, folder.logical.keys())
        report = load_into(model, folder, rules)
    shard = sum(to_local(p).nbytes for p in model.parameters())
    wanted = sum(to_local(p).numel() * 2 for p in model.parameters())
    with Watch() as saving:
        save_hub(model, target, rules, folder.config, max_shard_size="400MB", carry_from=folder)
    return {
        "load_s": loading.seconds,
        "load_peak": loading.peak - shard,
        "requested": report.bytes_requested,
        "gaps": report.gap_bytes,
        "wanted": wanted,
        "save_s": saving.seconds,
        "save_peak": saving.peak,
        "shard": shard,
    }


def plain_read(rank: int, world: int, store: str, source: str, share: int) -> dict[str, Any]:
    """Read as many bytes as a rank's slices, in order, into fresh memory."""
    join(rank, world, store)
    out = torch.empty(share, dtype=torch.uint8)
    view = memoryview(out.numpy())
    files = sorted(Path(source).glob("*.safetensors"))
    skip, done = rank * share, 0
    start = time.perf_counter()
    for file in files:
        size = file.stat().st_size
        if skip >= size:
            skip -= size
            continue
        with open(file, "rb", buffering=0) as opened:
            opened.seek(skip)
            skip = 0
            while done < share:
                got = opened.readinto(view[done : done + (1 << 24)])
                if not got:
                    break
                done += got
    return {"load_s": time.perf_counter() - start, "bytes": done}


def peer(rank: int, world: int, store: str, source: str) -> dict[str, Any]:
    """transformers' from_pretrained with its own tensor-parallel plan on the same ranks."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    join(rank, world, store)
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {} if world == 1 else {"tp_plan": "auto"}
    with Watch() as loading:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16, **options)
    local = [getattr(p, "_local_tensor", p) for p in model.parameters()]
    return {"load_s": loading.seconds, "load_peak": loading.peak - sum(p.nbytes for p in local)}


def _child(work: Callable[..., Any], rank: int, args: tuple[Any, ...], out: str) -> None:
    Path(out).write_text(json.dumps(work(rank, *args)))


def on_ranks(work: Callable[..., Any], world: int, *args: Any) -> list[dict[str, Any]] | str:
    """Run `work(rank, world, store, *args)` in fresh processes; return the results or a failure."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        outs = [f"{folder}/{rank}" for rank in range(world)]
        full = (world, f"{folder}/store", *args)
        ranks = [
            context.Process(target=_child, args=(work, r, full, outs[r])) for r in range(world)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            return "failed"
        return [json.loads(Path(out).read_text()) for out in outs]


def make_folder(path: Path, layers: int) -> None:
    from moe_tp import Mesh
    from moe_tp.models import ModelConfig, build, save_pretrained

    if (path / "config.json").exists():
        return
    config = ModelConfig.from_hub({**CONFIG, "num_hidden_layers": layers})
    model = build(config, Mesh.single(device="cpu"), dtype=torch.bfloat16)
    save_pretrained(model, path, dtype=torch.bfloat16, max_shard_size="400MB")


def table(work: Path, worlds: list[int], with_peer: bool) -> list[str]:
    source, target = work / "model", work / "out"
    size = sum(file.stat().st_size for file in source.glob("*.safetensors"))
    lines = [
        f"Folder of {size / 1e9:.2f} GB bf16. Times are the slowest rank's, memory the largest.",
        "",
        "| ranks | cache | load s | plain read s | plain / load | asked / slices | gaps | "
        "load peak over shard | save s | save peak |"
        + (" transformers load s | its peak over shard |" if with_peer else ""),
        "|" + "---|" * (10 + 2 * with_peer),
    ]
    for world in worlds:
        for cache in ("warm", "cold"):
            found: dict[str, list[dict[str, Any]] | str] = {}
            runs: list[tuple[str, Callable[..., Any], tuple[Any, ...]]] = [
                ("ours", load_and_save, (str(source), str(target)))
            ]
            runs.append(("plain", plain_read, (str(source), size // world)))
            if with_peer:
                runs.append(("peer", peer, (str(source),)))
            for name, function, args in runs:
                if cache == "cold" and not drop_cache(source):
                    continue
                if cache == "warm":
                    for file in source.glob("*.safetensors"):
                        file.read_bytes()
                found[name] = on_ranks(function, world, *args)
                shutil.rmtree(target, ignore_errors=True)
            lines.append(row(world, cache, found))
    return lines


def row(world: int, cache: str, found: dict[str, list[dict[str, Any]] | str]) -> str:
    def most(name: str, key: str) -> float:
        results = found.get(name, "failed")
        return float("nan") if isinstance(results, str) else max(r[key] for r in results)

    ours = found["ours"]
    asked = gaps = float("nan")
    if not isinstance(ours, str):
        asked = max(r["requested"] / r["wanted"] for r in ours)
        gaps = max(r["gaps"] for r in ours)
    load, plain = most("ours", "load_s"), most("plain", "load_s")
    cells = [
        str(world),
        cache,
        f"{load:.2f}",
        f"{plain:.2f}",
        f"{plain / load:.2f}",
        f"{asked:.4f}",
        f"{gaps / 1e6:.1f} MB",
        f"{most('ours', 'load_peak') / 2**20:.0f} MiB",
        f"{most('ours', 'save_s'):.2f}",
        f"{most('ours', 'save_peak') / 2**20:.0f} MiB",
    ]
    if "peer" in found:
        cells += [f"{most('peer', 'load_s'):.2f}", f"{most('peer', 'load_peak') / 2**20:.0f} MiB"]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("work", type=Path)
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--peer", action="store_true", help="also time transformers")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    make_folder(options.work / "model", options.layers)
    worlds = [int(n) for n in options.ranks.split(",")]
    lines = [
        f"# Loading and saving, {time.strftime('%Y-%m-%d')}",
        "",
        f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores, "
        f"`{' '.join(['python', *sys.argv])}`.",
        *table(options.work, worlds, options.peer),
    ]
    print("\n".join(lines))


if __name__ == "__main__":
    main()
