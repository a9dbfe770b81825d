"""`make gpu-check`: what someone with 2 to 8 GPUs runs, and one table to send back.

Verifies a sweep of layouts on NCCL against one process, runs the demo on four GPUs where there are
as many, times the MoE layer, and prints a table. Exit code 1 where anything failed. `--device cpu`
rehearses it without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
# Layouts by the number of ranks they fill; `dp` is the rest.
SWEEP: dict[int, tuple[str, ...]] = {
    1: ("",),
    2: (
        *("--ep 2", "--etp 2", "--tp 2", "--tp 2 --ep 2", "--tp 2 --etp 2"),
        *("--zero 3 --ep 2", "--pp 2", "--cp 2 --ep 2"),
    ),
    4: (
        *("--ep 4", "--ep 2 --etp 2", "--tp 2 --ep 2 --etp 2", "--tp 4 --ep 2", "--tp 2 --ep 4"),
        *("--zero 3 --tp 2 --ep 2 --etp 2", "--pp 2 --tp 2 --ep 2", "--cp 2 --tp 2 --ep 4"),
    ),
    8: (
        *("--ep 8", "--ep 4 --etp 2", "--tp 2 --ep 4 --etp 2", "--tp 4 --ep 2 --etp 4", "--tp 2"),
        *(
            "--zero 3 --tp 2 --ep 4 --etp 2",
            "--pp 2 --cp 2 --tp 2 --ep 4",
            "--zero 1 --pp 2 --ep 4",
        ),
    ),
}
EXPERTS = (8, 6)


def run(words: Sequence[object], log: Path) -> tuple[int, float]:
    """Return exit code and seconds of a command of Python; what it says is added to the log."""
    command = [sys.executable, *map(str, words)]
    start = time.monotonic()
    with log.open("a") as out:
        out.write(f"$ {' '.join(command)}\n")
        out.flush()
        code = subprocess.run(command, cwd=ROOT, stdout=out, stderr=out, check=False).returncode
    return code, time.monotonic() - start


def verify(folder: Path, layout: str, ranks: int, device: str, log: Path) -> dict[str, str]:
    """Return the table's row of one layout, in fp32."""
    report = folder / "verify.json"
    report.unlink(missing_ok=True)
    words = ["-m", "moe_tp", "verify", folder / "model", *layout.split(), "--json", report]
    code, seconds = run([*words, "--nproc", ranks, "--device", device, "--steps", 2], log)
    row = {"check": f"verify {folder.name}: {ranks} ranks {layout}", "result": "passed"}
    if report.exists():
        errors = json.loads(report.read_text())["max_relative_error"]
        row["detail"] = ", ".join(f"{k} {float(v):.0e}" for k, v in errors.items() if v is not None)
    if code:
        row["result"] = "FAILED" if code == 1 else f"FAILED (exit {code})"
    return {**row, "seconds": f"{seconds:.0f}"}


def machine(device: str) -> str:
    """Return one line about the machine."""
    parts = [platform.platform(), f"torch {torch.__version__}", f"{os.cpu_count()} cores"]
    if device == "cuda":
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        parts += [f"{len(names)} x {names[0]}", f"CUDA {torch.version.cuda}"]
        parts.append("NCCL " + ".".join(map(str, torch.cuda.nccl.version())))
    return ", ".join(parts)


def main() -> int:
    """Return 0 where everything passed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nproc", type=int, default=0, help="GPUs to use; 0: all")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="one layout a world, no demo")
    options = parser.parse_args()
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if options.device == "cuda" and not gpus:
        print("no GPU here that torch can use; `--device cpu` rehearses the check without one")
        return 2
    ranks = options.nproc or gpus or 2
    rows: list[dict[str, str]] = []

    def add(row: dict[str, str]) -> None:
        rows.append(row)
        print(*row.values(), sep=" | ", flush=True)

    with tempfile.TemporaryDirectory(prefix="moe_tp_gpu_") as name:
        log = Path(name, "log")
        for experts in EXPERTS[: 1 if options.quick else None]:
            folder = Path(name, f"{experts} experts")
            words = ["-m", "moe_tp", "init", "mixtral", folder / "model", "--dtype", "float32"]
            sizes = ["--set", f"num_local_experts={experts}", "--set", "vocab_size=1000"]
            if run([*words, *sizes, "--device", options.device], log)[0]:
                print(log.read_text())
                return 1
            for world in (w for w in SWEEP if w <= ranks):
                for layout in SWEEP[world][: 1 if options.quick else None]:
                    add(verify(folder, layout, world, options.device, log))
        device = options.device
        if ranks >= 4 and not options.quick:
            code, seconds = run(
                ["examples/demo.py", "--out", Path(name, "demo"), "--device", device], log
            )
            result = "FAILED" if code else "passed"
            add({"check": "demo on 4 ranks", "result": result, "seconds": f"{seconds:.0f}"})
        bench = Path(name, "bench")
        small = ["--tokens", 64, "--rounds", 1, "--shape", "A"] if options.quick else []
        code, _ = run(["benchmarks/moe_layer.py", "--device", device, *small], bench)
        if code:
            add({"check": "benchmark", "result": "FAILED"})
        failed = [row for row in rows if row["result"] != "passed"]
        print("\n--- please send everything below ---\n")
        print(f"moe_tp gpu-check on {machine(device)}\n")
        print("| check | result | detail | seconds |\n|---|---|---|---|")
        for row in rows:
            columns = ("check", "result", "detail", "seconds")
            print("| " + " | ".join(row.get(column, "") for column in columns) + " |")
        print("\n" + bench.read_text().partition("\n")[2])
        if failed:
            print(f"{len(failed)} failed; the end of what they said:\n{log.read_text()[-6000:]}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
