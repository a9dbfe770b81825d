"""What goes in and comes out of `moe-tp plan`: a measured profile, and sections of a run's YAML."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_tp.cli.main import main
from moe_tp.cli.plan import _yaml
from moe_tp.models.families import preset
from moe_tp.plan.hardware import TABLE, read_hardware
from moe_tp.plan.job import Job
from moe_tp.plan.search import search
from moe_tp.train.settings import load_config

WORDS = ["--dim", "16", "--expert-dim", "24", "--experts", "4", "--top-k", "2", "--tokens", "12"]


def plan(out: Path, *words: str) -> Any:
    """Return what a plan of Mixtral on 8 GPUs writes as JSON."""
    assert main(["plan", "mixtral:8x7b", "--gpus", "8", *words, "--json", str(out)]) in (0, 1)
    return json.loads(out.read_text())


def test_a_measured_profile_is_planned_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """bench --profile, then plan --hardware: operations and bytes a second, bytes, its own name."""
    out, profile = tmp_path / "out.json", tmp_path / "ours.json"
    words = ["bench", "layer", *WORDS, "--rounds", "1", "--json", str(out)]
    assert main([*words, "--profile", str(profile)]) == 0
    result, measured = json.loads(out.read_text()), read_hardware(profile)
    assert result["over_floor"] > 1.0
    assert result["tokens_per_second"] > 0
    assert measured.flops == result["matmul_rate"] > 1e8
    pages = next(
        int(line.split()[1])
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemTotal")
    )
    assert measured.memory == 1024.0 * pages
    assert 1e8 < measured.bandwidth < 1e14  # bytes a second, whatever the machine
    assert measured.link == measured.network == measured.bandwidth  # one rank: nothing is sent
    big = ["--gpu-memory", "900GB", "--hardware"]
    found = plan(out, *big, str(profile))
    assert (found["gpu"], found["gpu_memory"]) == (measured.name, 900e9)
    best = found["best"]
    assert 0.0 < best["tflops_per_gpu"] < measured.flops / 1e12
    # all rates thrice as high, and no latency in either: a third of the time
    slow, fast = tmp_path / "slow.json", tmp_path / "fast.json"
    rates = {name: getattr(measured, name) for name in ("flops", "bandwidth", "link", "network")}
    slow.write_text(json.dumps(asdict(replace(measured, latency=0.0))))
    thrice = {name: 3.0 * rate for name, rate in rates.items()}
    fast.write_text(json.dumps(asdict(replace(measured, latency=0.0, **thrice))))
    speeds = [plan(out, *big, str(p))["best"]["tokens_per_second"] for p in (slow, fast)]
    assert speeds[1] == pytest.approx(3.0 * speeds[0])
    # what else lies about is no profile
    capsys.readouterr()
    config = tmp_path / "config.json"
    config.write_text(json.dumps(preset("mixtral").to_hub()))
    for wrong in (out, config, tmp_path, tmp_path / "none.json"):
        assert main(["plan", "mixtral:8x7b", "--gpus", "8", "--hardware", str(wrong)]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert str(wrong) in error


JOBS: list[dict[str, Any]] = [
    {},
    {"cp_kind": "ring", "mode": "lora"},
    {"dp_replicate": 2, "offload": True},
    {"spare_slots": 1, "master_bytes": 2},
]


@pytest.mark.parametrize("changes", JOBS, ids=str)
def test_a_run_takes_the_printed_sections_and_means_the_layout(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    """Every axis and ZeRO stage: pasted under a run's own settings, they resolve to the row."""
    job, file = Job(seq_len=512, **changes), tmp_path / "run.yaml"
    rows = search(preset("deepseek_v3", "v3"), job, 16, TABLE["H100"]).candidates
    seen: set[tuple[str, int]] = set()
    for row in rows[::23]:
        own = "model: m\noutput: o\ndata: {train: [t.txt], seq_len: 512}\ntrain: {steps: 1}\n"
        file.write_text(own + _yaml(row, job) + "\n")
        config = load_config(file)
        assert config.parallel.resolve(16) == row.layout
        runtime = config.runtime
        assert runtime.recompute == row.recompute
        assert runtime.dp_replicate == job.dp_replicate
        assert runtime.offload == job.offload
        if row.layout.cp > 1:
            assert runtime.cp_kind == job.cp_kind
        if row.layout.ep > 1:
            assert runtime.spare_slots == job.spare_slots
        assert (runtime.master_dtype == torch.bfloat16) == (job.master_bytes == 2)
        layout = row.layout
        axes = {name: getattr(layout, name) for name in ("cp", "tp", "pp", "ep", "etp", "zero")}
        seen |= {(name, min(size, 2)) for name, size in axes.items() if size > 1 or name == "zero"}
    assert {name for name, _ in seen} == {"cp", "tp", "pp", "ep", "etp", "zero"}
