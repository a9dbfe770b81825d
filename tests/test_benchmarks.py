"""The measuring commands, rehearsed at sizes that take no time."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moe_tp import Mesh, ParallelLayout
from moe_tp.bench.floor import LayerShape, exchange_floor, matmul_floor
from moe_tp.bench.layer import make_layer, make_tokens, routing_of
from moe_tp.bench.timing import Times, side_by_side
from moe_tp.cli.main import main
from moe_tp.parallel.shards import to_local
from moe_tp.testing import run_ranks

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import metrics_cost

ROOT = Path(__file__).resolve().parents[1]
SMALL = LayerShape(dim=16, expert_dim=24, experts=4, top_k=2)
WORDS = ["--dim", "16", "--expert-dim", "24", "--experts", "4", "--top-k", "2", "--tokens", "12"]


def test_ratios_are_paired_with_the_floor_beside() -> None:
    """A round that was slow for both counts as 1.5, whatever the medians of the times are."""
    times = Times({"floor": [1.0, 2.0], "layer": [1.5, 30.0, 1.5]}, {"layer": [1.0, 20.0, 1.0]})
    assert times.ratio("layer") == 1.5
    order: list[str] = []
    side_by_side(
        {"a": lambda: order.append("a"), "b": lambda: order.append("b")},
        lambda: order.append("floor"),
        rounds=1,
        warmup=0,
    )
    assert order == ["floor", "a", "floor", "b", "floor"]


def test_the_floor_runs_the_layers_operations() -> None:
    """Issue 7: per expert and projection one balanced matmul forward and two backward."""
    count = 0

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal count
            if func is torch.ops.aten.mm.out:
                count += 2 * args[0].shape[0] * args[0].shape[1] * args[1].shape[1]
            return func(*args, **(kwargs or {}))

    run = matmul_floor(SMALL, 12, Mesh.single(), torch.float32)
    with Count():
        run()
    assert count == SMALL.flops(12)


def test_half_of_skewed_tokens_choose_expert_0() -> None:
    layer = make_layer(SMALL, Mesh.single(), torch.float32)
    router_ED = to_local(layer.router.get_parameter("weight")).detach()
    for skew, least in ((False, 0), (True, 32)):
        x_TD = make_tokens(router_ED, 64, torch.float32, skew=skew)
        found = routing_of(layer, x_TD).counts_E[0].item()
        assert found >= least
        assert skew or found < 64


def sent_by_the_floor() -> int:
    mesh = Mesh(ParallelLayout(ep=2))
    layer = make_layer(SMALL, mesh, torch.float32)
    router_ED = to_local(layer.router.get_parameter("weight")).detach()
    x_TD = make_tokens(router_ED, 12, torch.float32, skew=False, seed=mesh.rank)
    assignment = routing_of(layer, x_TD)
    exchange_floor(assignment, SMALL.dim, mesh, torch.float32)()
    remote = assignment.ids_TK // 2 != mesh.rank
    return int(remote.any(dim=1).sum())


def test_the_bare_exchange_runs_on_two_ranks() -> None:
    assert all(0 < rows <= 12 for rows in run_ranks(sent_by_the_floor, 2))


def test_bench_step_and_load(tmp_path: Path) -> None:
    folder, out = tmp_path / "model", tmp_path / "out.json"
    assert main(["init", "mixtral", str(folder)]) == 0
    words = ["--rounds", "1", "--json", str(out)]
    assert main(["bench", "load", str(folder), *words]) == 0
    assert json.loads(out.read_text())["bytes_per_rank"] > 0
    assert main(["bench", "step", str(folder), "--tokens", "16", "--seq-len", "8", *words]) == 0
    assert json.loads(out.read_text())["tokens_per_step"] == 16


def test_the_cost_of_metrics_is_taken_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many steps with metrics as without, and time within each part of those with them."""
    monkeypatch.setattr(metrics_cost, "LENGTH", 8)
    options = argparse.Namespace(layers=1, tokens=8, steps=4)
    clock = metrics_cost.measure(SMALL, options)
    assert [len(clock.steps[on]) for on in (True, False)] == [2, 2]
    assert all(len(seconds) == 2 and min(seconds) > 0.0 for seconds in clock.parts.values())
    row = metrics_cost.row_of("small", clock)
    assert len(row) == 6 + len(metrics_cost.PARTS)
    assert 0.0 < float(row[5].removesuffix(" %")) < 100.0


def test_bench_refuses_in_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    for words, fix in (
        (["bench", "dispatch", *WORDS], "--nproc 2 --ep 2"),
        (["bench", "load"], "moe-tp bench load PATH"),
        (["bench", "layer", "--tokens", "0"], "--tokens 0"),
        (["bench", "layer", "--top-k", "0"], "--top-k"),
    ):
        assert main(words) == 2
        assert fix in capsys.readouterr().err


@pytest.mark.slow
def test_bench_dispatch_counts_bytes(tmp_path: Path) -> None:
    """Rows leave once for each remote rank, in fp32: at most one a token on two ranks."""
    out = tmp_path / "out.json"
    words = ["bench", "dispatch", *WORDS, "--rounds", "1", "--json", str(out)]
    assert main([*words, "--nproc", "2", "--ep", "2"]) == 0
    result = json.loads(out.read_text())
    assert 0 < result["bytes_sent_forward"] < 2 * 12 * 16 * 4 + 12 * 2 * 8 + 64


@pytest.mark.slow
def test_the_gpu_check_prints_its_table() -> None:
    words = ["benchmarks/gpu_check.py", "--device", "cpu", "--nproc", "2", "--quick"]
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| verify 8 experts: 2 ranks --ep 2 | passed |" in done.stdout
    assert "| A | fp32 | natural | moe_tp, auto |" in done.stdout
