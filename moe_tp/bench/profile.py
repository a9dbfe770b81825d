"""A hardware profile for the planner, measured here: `moe-tp bench ... --profile FILE`.

Letters: G ranks.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

from moe_tp.bench.timing import wait
from moe_tp.parallel.collectives import raw_all_reduce
from moe_tp.parallel.mesh import Mesh
from moe_tp.plan.hardware import Hardware

_MATMUL = {"cpu": 1024, "cuda": 8192}  # rows and columns of the square matmul
_COPY = {"cpu": 1 << 26, "cuda": 1 << 30}  # bytes
_SEND = {"cpu": 1 << 23, "cuda": 1 << 27}  # bytes to each other rank


def best_time(step: Callable[[], object], device: torch.device, repeats: int = 5) -> float:
    """Return the least seconds of `step` over some repeats.

    Collectives: those of `step`.
    """
    seconds = []
    for _ in range(repeats + 1):
        wait(device)
        start = time.perf_counter()
        step()
        wait(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def measure_hardware(mesh: Mesh, dtype: torch.dtype) -> Hardware:
    """Return what this rank's device reaches; efficiencies are 1, since rates are measured.

    With one rank nothing is sent, and the links are taken as fast as the memory.

    Args:
        mesh: over whose ranks an all-to-all is timed.
        dtype: of the matmul.

    Collectives: all-to-alls and an all-reduce over the world.
    """
    device, kind = mesh.device, mesh.device.type
    side = _MATMUL[kind]
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    flops = 2.0 * side**3 / best_time(lambda: torch.mm(a, b, out=out), device)
    source = torch.zeros(_COPY[kind] // 4, dtype=torch.float32, device=device)
    target = torch.zeros_like(source)
    bandwidth = 2.0 * _COPY[kind] / best_time(lambda: target.copy_(source), device)
    link, latency = bandwidth, 1e-6
    ranks = mesh.world_size
    if ranks > 1:
        rows = torch.zeros(ranks, _SEND[kind] // 4, device=device)
        got, few = torch.empty_like(rows), torch.zeros(ranks, device=device)
        less = torch.empty_like(few)
        latency = best_time(lambda: dist.all_to_all_single(less, few), device)
        seconds = best_time(lambda: dist.all_to_all_single(got, rows), device)
        link = (ranks - 1) * _SEND[kind] / max(seconds - latency, 1e-9)
    # ranks disagree a little, and a plan wants one number: the slowest's
    rates = torch.tensor([flops, bandwidth, link, -latency], dtype=torch.float64, device=device)
    flops, bandwidth, link, latency = raw_all_reduce(rates, mesh.group("world"), "min").tolist()
    return Hardware(
        name=torch.cuda.get_device_name(device) if kind == "cuda" else platform.machine(),
        flops=flops,
        memory=float(_memory(device) if kind == "cuda" else _memory(device) // ranks),
        bandwidth=bandwidth,
        link=link,
        network=link,
        node_size=ranks,
        latency=-latency,
        matmul_efficiency=1.0,
        link_efficiency=1.0,
    )


def write_profile(hardware: Hardware, path: str | Path) -> None:
    """Write the profile as JSON, its keys the fields of `Hardware`; missing folders are made."""
    text = json.dumps(asdict(hardware), indent=2)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text + "\n", encoding="utf-8")


def _memory(device: torch.device) -> int:
    """Return the bytes of the device, or of the machine."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    return 1 << 33
