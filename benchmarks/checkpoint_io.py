"""Loading and saving a hub folder: bytes, memory and time, beside a plain read and transformers.

    python benchmarks/checkpoint_io.py [--ranks 1,2,4] [--layers 10] [--repeats 3] [--write]

Writes a random bf16 Mixtral (about 2 GB with 10 layers) into a temporary folder and loads it on
local gloo ranks, with a warm and a cold page cache. In each round a plain read of as many bytes,
this library and transformers' `from_pretrained(tp_plan="auto")` take turns on the same ranks, so
that a busy moment of the machine falls on all of them; times are medians of the slowest rank's.
Memory is anonymous memory (RssAnon) above that before the load. It needs 5 GB of disk, which are
freed at the end.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import gc
import hashlib
import json
import multiprocessing
import os
import platform
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moe_tp import Mesh, ParallelLayout
from moe_tp.checkpoint import HubFolder, load_into, save_hub
from moe_tp.models import ModelConfig
from moe_tp.models.families import rules_for
from moe_tp.models.load import allocate
from moe_tp.parallel.shards import to_local

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
CHUNK = 16 << 20  # bytes a request of the plain read
Measured = dict[str, float]


class Watch:
    """Time, peak anonymous memory above the start and bytes from the disk, while open."""

    def __enter__(self) -> Watch:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what was freed before is not found again as room
        _barrier()  # collecting garbage takes ranks unequally long, and a load waits for the last
        self.base, self.peak, self.open = anonymous(), 0, True
        self.disk = from_disk()
        self.thread = threading.Thread(target=self._sample, daemon=True)
        self.thread.start()
        self.start = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self.start
        self.disk = from_disk() - self.disk
        self.open = False
        self.thread.join()
        self.peak = max(self.peak, anonymous() - self.base)

    def _sample(self) -> None:
        while self.open:
            self.peak = max(self.peak, anonymous() - self.base)
            time.sleep(0.005)


def anonymous() -> int:
    """Bytes of anonymous memory of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def from_disk() -> int:
    """Bytes that the disk has read for this process, not those from the page cache."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    return 0


def forget(path: Path) -> None:
    """Write back and drop the cached pages of a folder's files."""
    for file in path.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def warm(path: Path) -> None:
    """Bring a folder's files into the page cache."""
    buffer = bytearray(CHUNK)
    for file in path.iterdir():
        with open(file, "rb", buffering=0) as opened:
            while opened.readinto(buffer):
                pass


def plain(source: Path, rank: int, share: int) -> Measured:
    """Read `share` bytes in order into fresh memory, from this rank's part of the folder."""
    files = sorted(source.glob("*.safetensors"))
    total = sum(file.stat().st_size for file in files)
    skip, done = min(rank * share, total - share), 0
    with Watch() as watch:
        view = memoryview(torch.empty(share, dtype=torch.uint8).numpy())
        for file in files:
            size = file.stat().st_size
            if skip < size and done < share:
                with open(file, "rb", buffering=0) as opened:
                    opened.seek(skip)
                    while done < share:
                        got = opened.readinto(view[done : done + CHUNK])
                        if not got:
                            break
                        done += got
            skip = max(0, skip - size)
    assert done == share
    return {"seconds": watch.seconds, "disk": watch.disk}


def ours(source: Path, mesh: Mesh, target: Path | None = None) -> Measured:
    """Load the folder; save it again where a target is given."""
    with Watch() as watch:
        folder = HubFolder(source)
        config = ModelConfig.from_hub(folder.config)
        model = allocate(config, mesh, torch.bfloat16)
        rules = rules_for(config, folder.logical.keys())
        report = load_into(model, folder, rules)
    shard = sum(to_local(p).nbytes for p in model.parameters())
    found: Measured = {
        "seconds": watch.seconds,
        "over": watch.peak - shard,
        "disk": watch.disk,
        "asked": report.bytes_requested,
        "gaps": report.gap_bytes,
        "slices": sum(to_local(p).numel() * 2 for p in model.parameters()),  # 2 bytes on disk
    }
    if target is not None:
        _barrier()
        with Watch() as saving:
            save_hub(model, target, rules, folder.config, max_shard_size="200MB")
        found |= {"save": saving.seconds, "save over": saving.peak}
    return found


def theirs(source: Path, world: int) -> Measured:
    """Load the folder by transformers with its own tensor-parallel plan."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    disable_progress_bar()
    set_verbosity_error()
    options: dict[str, Any] = {} if world == 1 else {"tp_plan": "auto"}
    with Watch() as watch:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16, **options)
    shard = sum(getattr(p, "_local_tensor", p).nbytes for p in model.parameters())
    return {"seconds": watch.seconds, "over": watch.peak - shard, "disk": watch.disk}


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def rounds(rank: int, world: int, out: str, work: str, repeats: int, peer: bool) -> None:
    """Run all rounds of one rank; write what was measured to `out`, as JSON."""
    import warnings

    warnings.simplefilter("ignore", FutureWarning)  # tp_plan's new spelling
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    store = f"file://{out}.store".replace(f"-{rank}.store", ".store")
    if world > 1:
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    mesh = Mesh(ParallelLayout(**LAYOUTS[world]), device="cpu") if world > 1 else Mesh.single()
    source, target = Path(work, "model"), Path(work, f"out-{world}")
    _barrier()
    share = int(ours(source, mesh)["slices"])  # also warms up imports and code
    if peer:
        theirs(source, world)
    found: list[dict[str, Any]] = []
    for number in range(repeats):
        for cache in ("warm", "cold"):
            candidates: dict[str, Callable[[], Measured]] = {
                "plain": lambda: plain(source, rank, share),
                "ours": lambda n=number, c=cache: ours(
                    source, mesh, target if n == 0 and c == "warm" else None
                ),
            }
            if peer:
                candidates["theirs"] = lambda: theirs(source, world)
            for name, measure in candidates.items():
                _barrier()
                if rank == 0 and cache == "cold":
                    forget(source)
                elif rank == 0 and name == "plain":
                    warm(source)
                gc.collect()
                _barrier()
                found.append({"who": name, "cache": cache, **measure()})
                gc.collect()
    Path(out).write_text(json.dumps(found))
    if world > 1:
        dist.destroy_process_group()


def on_ranks(world: int, work: Path, repeats: int, peer: bool) -> list[list[dict[str, Any]]]:
    """Return what each of `world` fresh processes measured."""
    context = multiprocessing.get_context("spawn")
    outs = [str(work / f"measured-{world}-{rank}") for rank in range(world)]
    ranks = [
        context.Process(target=rounds, args=(r, world, outs[r], str(work), repeats, peer))
        for r in range(world)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    if any(process.exitcode for process in ranks):
        raise SystemExit(f"a rank of {world} failed")
    return [json.loads(Path(out).read_text()) for out in outs]


def make_folder(path: Path, layers: int) -> int:
    """Write a random Mixtral; return the bytes of its weight files."""
    config = ModelConfig.from_hub({**CONFIG, "num_hidden_layers": layers})
    model = allocate(config, Mesh.single(device="cpu"), torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            to_local(parameter).uniform_(-0.05, 0.05)
    save_hub(model, path, model.name_rules, model.hub_config, max_shard_size="200MB")
    return sum(file.stat().st_size for file in path.glob("*.safetensors"))


def digest(path: Path) -> str:
    """Return one hash of all files of a folder."""
    total = hashlib.blake2b()
    for file in sorted(path.iterdir()):
        total.update(file.name.encode())
        with open(file, "rb") as opened:
            total.update(hashlib.file_digest(opened, "blake2b").digest())
    return total.hexdigest()


def row(world: int, cache: str, size: int, results: Sequence[Sequence[dict[str, Any]]]) -> str:
    """Return a line of the table: each round's slowest rank, the median of the rounds."""

    def of(who: str, key: str, over_ranks: Callable[[Sequence[float]], float]) -> list[float]:
        picked = [
            [r[key] for r in rank if (r["who"], r["cache"]) == (who, cache)] for rank in results
        ]
        return [over_ranks(values) for values in zip(*picked, strict=True)]

    def middle(who: str, key: str, over_ranks: Callable[[Sequence[float]], float] = max) -> float:
        values = of(who, key, over_ranks)
        return statistics.median(values) if values else float("nan")

    load, read = middle("ours", "seconds"), middle("plain", "seconds")
    asked = max(r["asked"] / r["slices"] for rank in results for r in rank if r["who"] == "ours")
    cells = [
        str(world),
        cache,
        f"{load:.2f}",
        f"{read:.2f}",
        f"{read / load:.2f}",
        f"{middle('theirs', 'seconds'):.2f}",
        f"{100 * (asked - 1):.3f} %",
        f"{middle('ours', 'gaps') / 1e6:.0f} MB",
        f"{middle('ours', 'disk', sum) / size:.3f}",
        f"{max(of('ours', 'over', max)) / 2**20:.0f} MiB",
        f"{max(of('theirs', 'over', max), default=float('nan')) / 2**20:.0f} MiB",
    ]
    return "| " + " | ".join(cells) + " |"


def measure(work: Path, worlds: Sequence[int], repeats: int, layers: int, peer: bool) -> list[str]:
    """Return the lines of both tables."""
    size = make_folder(work / "model", layers)
    loads = [
        "| ranks | cache | load s | plain read s | plain / load | transformers s "
        "| asked over slices | gaps a rank | read from disk / folder | peak over shard "
        "| transformers' |",
        "|" + "---|" * 11,
    ]
    saves = ["| ranks | save s | peak over shard |", "|" + "---|" * 3]
    digests = set()
    for world in worlds:
        results = on_ranks(world, work, repeats, peer)
        loads += [row(world, cache, size, results) for cache in ("warm", "cold")]
        wrote = [r for rank in results for r in rank if "save" in r]
        seconds, over = (max(r[key] for r in wrote) for key in ("save", "save over"))
        saves.append(f"| {world} | {seconds:.2f} | {over / 2**20:.0f} MiB |")
        digests.add(digest(work / f"out-{world}"))
        shutil.rmtree(work / f"out-{world}")
    same = "the same bytes from every layout" if len(digests) == 1 else "DIFFERENT bytes"
    start = time.perf_counter()
    with open(work / "plain", "wb", buffering=0) as out:
        block = memoryview(os.urandom(CHUNK))
        for _ in range(size // CHUNK):
            out.write(block)
        os.fsync(out.fileno())
    wrote_plainly = time.perf_counter() - start
    head = f"A Mixtral of {layers} layers, width 1024, 8 experts of 3584: {size / 1e9:.2f} GB bf16."
    tail = f"Saved: {same}. Writing as many bytes plainly, by one process: {wrote_plainly:.2f} s."
    return [head, "", *loads, "", *saves, "", tail]


def main(argv: Sequence[str] | None = None) -> None:
    """Print, and with --write keep, the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", default="1,2,4", help="numbers of ranks, such as 1,2,4")
    parser.add_argument("--layers", type=int, default=10, help="about 0.19 GB each")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where the temporary folder is made")
    parser.add_argument("--no-peer", action="store_true", help="leave transformers out")
    parser.add_argument("--write", action="store_true", help="keep the tables in benchmarks/")
    options = parser.parse_args(argv)
    worlds = [int(n) for n in options.ranks.split(",")]
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="checkpoint_io_") as work:
        body = measure(Path(work), worlds, options.repeats, options.layers, not options.no_peer)
    versions = f"torch {torch.__version__}"
    if not options.no_peer:
        import transformers

        versions += f", transformers {transformers.__version__}"
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    layouts = "; ".join(f"{n}: {ParallelLayout(**LAYOUTS[n])}" for n in worlds)
    lines = [
        f"# Loading and saving a hub folder, {today}",
        "",
        f"{versions}, Python {platform.python_version()}, {os.cpu_count()} {platform.machine()} "
        f"cores, one thread a rank, gloo; layouts by ranks: {layouts}. Median of "
        f"{options.repeats} rounds of the slowest rank; `benchmarks/checkpoint_io.py` says how.",
        "",
        *body,
    ]
    print("\n".join(lines))
    if options.write:
        Path(__file__).with_name(f"checkpoint_io-{today}.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
