"""Each file of examples/ does what it says."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch.distributed as dist

from moe_tp import ParallelLayout
from moe_tp.cli.main import main
from moe_tp.testing import run_ranks

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the ranks of the pool import the examples by name."""
    monkeypatch.syspath_prepend(str(EXAMPLES))


def _load(name: str) -> ModuleType:
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


def test_a_rule_of_your_own(capsys: pytest.CaptureFixture[str]) -> None:
    _load("own_routing").main()
    assert "token 5" in capsys.readouterr().out


def test_a_way_of_your_own(capsys: pytest.CaptureFixture[str]) -> None:
    """Issue 5: a user's dispatcher over ranks, through the public contract."""
    _load("own_dispatcher").main()
    assert "rank 3: largest difference" in capsys.readouterr().out


def test_the_layer_in_a_wrapped_model_learns() -> None:
    """G6: under DDP and FSDP2 alike."""
    train = _load("moe_in_ddp").train
    results = {wrapper: run_ranks(train, 4, wrapper, 40) for wrapper in ("ddp", "fsdp2")}
    assert all(losses[-1] < 0.5 * losses[0] for losses in results["ddp"])
    for ddp, fsdp in zip(results["ddp"], results["fsdp2"], strict=True):
        assert fsdp == pytest.approx(ddp, rel=1e-3)


def test_your_own_loop_gives_the_same_losses_on_a_layout(tmp_path: Path) -> None:
    """L1, G5: one process and four ranks."""
    loop, source = _load("own_loop"), str(tmp_path / "model")
    words = ["--set", "vocab_size=96", "--set", "num_local_experts=6", "--dtype", "float32"]
    assert main(["init", "mixtral", source, *words]) == 0
    alone = loop.train(source, str(tmp_path / "one"), ParallelLayout(), 3)
    layout = ParallelLayout(tp=2, ep=2, etp=2)
    results = run_ranks(loop.train, 4, source, str(tmp_path / "four"), layout, 3)
    for losses in results:
        assert losses == pytest.approx(alone, rel=1e-5)
    assert losses[-1] < losses[0]
    config = json.loads((tmp_path / "four" / "config.json").read_text())
    assert config["torch_dtype"] == "bfloat16"
    assert not dist.is_initialized()


def test_every_example_is_listed() -> None:
    text = (EXAMPLES / "README.md").read_text()
    assert [f.name for f in EXAMPLES.glob("*.py") if f"`{f.name}`" not in text] == []
