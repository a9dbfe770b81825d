"""Published totals, legality, search and the command, without ranks."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from moe_tp.cli.main import main
from moe_tp.errors import ConfigError
from moe_tp.models import ModelConfig
from moe_tp.models.families import family, model_types, preset
from moe_tp.parallel.layout import ParallelLayout
from moe_tp.plan.advice import remedies, smallest_group
from moe_tp.plan.hardware import TABLE, hardware, parse_bytes, parse_rate, read_hardware
from moe_tp.plan.job import Job, check, divisors
from moe_tp.plan.memory import Planner
from moe_tp.plan.moments import Memory
from moe_tp.plan.search import layouts, legal_layouts, search
from moe_tp.plan.time import Clock

H100 = TABLE["H100"]


@pytest.fixture(scope="module")
def mixtral() -> ModelConfig:
    return preset("mixtral", "8x7b")


def test_published_totals_of_mixtral(mixtral: ModelConfig) -> None:
    # PEERS.md: 18 bytes a parameter on 8 GPUs, and bf16 weights under LoRA at EP8
    layout = ParallelLayout(tp=8, ep=8).resolve(8)
    planner = Planner(mixtral, Job())
    moments = planner.moments(layout, planner.stages(layout)[0])
    full = next(memory for memory in moments if memory.moment == "backward")
    assert (full.resident + full.copies) / 1e9 == pytest.approx(105.0, abs=0.6)
    lora = Planner(mixtral, Job(mode="lora")).peak(ParallelLayout(ep=8).resolve(8))
    assert lora.weights / 1e9 == pytest.approx(14.5, abs=0.05)
    assert search(mixtral, Job(), 8, H100).best is None


@pytest.mark.parametrize("name", model_types())
def test_elements_add_up_to_the_parameters(name: str) -> None:
    for size in family(name).presets:
        config = preset(name, size)
        planner = Planner(config, Job())
        layout = ParallelLayout().resolve(1)
        correction = len(config.moe_layers) * config.moe.router.num_experts
        bias = correction if config.moe.router.correction_bias else 0
        assert planner.elements(layout, planner.stages(layout)[0]) == config.num_params() + bias


@pytest.mark.parametrize(
    ("gpus", "changes"),
    [
        (1, {"offload": True}),
        (6, {}),
        (8, {}),
        (8, {"dp_replicate": 2}),
        (8, {"offload": True}),
        (8, {"mode": "lora", "lora_base": "int4"}),
    ],
)
def test_both_searches_accept_what_resolve_and_check_accept(
    gpus: int, changes: dict[str, Any]
) -> None:
    config = preset("deepseek_v3", "tiny")
    job = Job(global_batch=4, **changes)
    accepted = []
    for layout in layouts(gpus):
        assert replace(layout, dp=None).resolve(gpus) == layout
        try:
            check(config, layout, job)
        except ConfigError:
            continue
        accepted.append(layout)
    assert set(legal_layouts(config, job, gpus)[0]) == set(accepted)
    refusals: list = []
    listed, number = legal_layouts(config, job, gpus, refusals)
    assert set(listed) == set(accepted)
    assert number == len(refusals) == legal_layouts(config, job, gpus)[1]
    assert all(refusal.reason for refusal in refusals)


def test_layouts_are_all_that_resolve() -> None:
    every = set(layouts(8))
    count = 0
    for code in range(4**6):
        degrees = [2 ** (code // 4**i % 4) for i in range(6)]
        dp, cp, tp, pp, ep, etp = degrees
        try:
            found = ParallelLayout(dp=dp, cp=cp, tp=tp, pp=pp, ep=ep, etp=etp).resolve(8)
        except ConfigError:
            continue
        assert found in every
        count += 1
    assert 4 * count == len(every)


@pytest.mark.parametrize(
    ("layout", "word"),
    [
        (ParallelLayout(tp=64), "num_attention_heads"),
        (ParallelLayout(ep=16), "num_experts=8"),
        (ParallelLayout(pp=64), "layers"),
        (ParallelLayout(dp=64), "global_batch"),
        (ParallelLayout(tp=32, cp=2), "attention heads"),
        (ParallelLayout(pp=2, zero=3), "zero=3"),
    ],
)
def test_refusals_name_the_setting(mixtral: ModelConfig, layout: ParallelLayout, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        check(mixtral, layout.resolve(64), Job(global_batch=32))


def test_4096_gpus_in_ten_seconds() -> None:
    start = time.process_time()
    plan = search(preset("qwen3_moe", "30b-a3b"), Job(), 4096, H100)
    assert time.process_time() - start < 10.0
    assert plan.best is not None
    assert plan.num_refused > 1000


@pytest.mark.parametrize("changes", [{}, {"mode": "lora"}, {"global_batch": 16, "offload": True}])
def test_what_is_passed_over_changes_no_answer(changes: dict[str, Any]) -> None:
    """A search that shares what layouts have in common says of each what a new planner says."""
    config, job = preset("deepseek_v3", "v3"), Job(**changes)
    gpu = replace(H100, memory=60e9)
    plan = search(config, job, 16, gpu)
    modes = ("none", "selective", "full")
    for candidate in plan.candidates[::7]:
        layout = candidate.layout
        planners = [Planner(config, replace(job, recompute=mode)) for mode in modes]
        peaks = [planner.peak(layout) for planner in planners]
        fits = [i for i, peak in enumerate(peaks) if peak.total <= gpu.memory]
        first = fits[0] if fits else 2
        assert (candidate.recompute, candidate.memory) == (modes[first], peaks[first])
        assert candidate.fits == bool(fits)
        assert all(p.least(layout) <= peak.total for p, peak in zip(planners, peaks, strict=True))
        if fits:
            assert candidate.time == Clock(planners[first], gpu).step(layout)


def test_more_of_anything_is_more_memory(mixtral: ModelConfig) -> None:
    layout = ParallelLayout(ep=8).resolve(8)

    def total(layout: ParallelLayout = layout, **changes: object) -> float:
        # the passes are fullest where the optimiser holds nothing besides its states
        return Planner(mixtral, replace(Job(kernel="fused"), **changes)).peak(layout).total

    assert total(recompute="full") < total(recompute="selective") < total()
    assert total(skew=2.0) > total(skew=1.0)
    assert total(seq_len=8192) > total()
    assert total(optimizer="sgd") < total()
    assert total(replace(layout, zero=3)) < total(replace(layout, zero=1)) < total()


def test_smallest_group_and_remedies(mixtral: ModelConfig) -> None:
    found = smallest_group(mixtral, Job(), H100)
    assert found is not None
    gpus, candidate = found
    assert gpus > 8  # 105 GB a GPU on 8
    assert candidate.memory.total <= H100.memory
    advice = remedies(mixtral, Job(), 8, H100)
    assert [line.split()[0] for line in advice] == [
        "train.moments:",
        "train.moments:",
        "bf16",
        "LoRA",
        "weights",
        "more",
    ]
    small = replace(H100, memory=1e3)
    assert remedies(preset("mixtral"), Job(mode="lora", offload=True), 1, small) == []


def test_hardware_is_overridable() -> None:
    assert hardware("H100", memory=1e9).memory == 1e9
    assert parse_bytes("80GB") == 80e9
    assert parse_bytes("80GiB") == 80 * 2**30
    assert parse_rate("ib400") == parse_rate("50GB/s") == 50e9
    for text in ("eighty", "-1GB", "0", "80", "1e999GB", "ib400"):
        with pytest.raises(ConfigError, match="bytes"):
            parse_bytes(text)
    with pytest.raises(ConfigError, match="nvlink4"):
        parse_rate("nvlink9")
    with pytest.raises(ConfigError, match="table"):
        hardware("TPU")


def test_hardware_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "ours.json"
    file.write_text(json.dumps(asdict(replace(H100, name="measured", link=1e9))))
    assert read_hardware(file) == replace(H100, name="measured", link=1e9)
    file.write_text('{"gpu": "A100", "network": 1e9}')
    assert read_hardware(file) == replace(TABLE["A100"], network=1e9)
    for text, word in (
        ("[]", "object"),
        ("{", "JSON"),
        ('{"flops": 1e12}', "memory"),
        ('{"gpu": "H100", "speed": 1}', "speed"),
        ('{"gpu": "H100", "link": "fast"}', "no number"),
        ('{"gpu": "H100", "link": 0}', "at least 1"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=word):
            read_hardware(file)
    words = ["mixtral:8x7b", "--gpus", "8", "--mode", "lora"]
    file.write_text('{"gpu": "H200", "name": "ours"}')
    assert main(["plan", *words, "--hardware", str(file)]) == 0
    assert main(["plan", *words, "--hardware", str(file), "--gpu", "H100"]) == 2


@pytest.mark.parametrize("name", model_types())
def test_every_family_from_its_config_alone(name: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    largest = max(family(name).presets, key=lambda size: preset(name, size).num_params())
    file.write_text(json.dumps(preset(name, largest).to_hub()))
    out = tmp_path / "plan.json"
    words = ["--gpus", "16", "--mode", "lora", "--seq-len", "512", "--json", str(out)]
    assert main(["plan", str(file), *words]) in (0, 1)
    result = json.loads(out.read_text())
    assert result["params_total"] == preset(name, largest).num_params()
    assert result["legal"] > 0


def test_what_new_settings_change(mixtral: ModelConfig) -> None:
    """HSDP, host memory, optimisers: states by kind, and the sections to paste."""
    layout = ParallelLayout(zero=3, ep=2).resolve(8)
    planner = Planner(mixtral, Job())

    def peak(**changes: object) -> Memory:
        return Planner(mixtral, replace(Job(), **changes)).peak(layout)

    plain = planner.peak(layout)
    assert peak(moments="bfloat16").states == pytest.approx(plain.states / 2, rel=1e-3)
    assert peak(moments="8bit").states == pytest.approx(plain.states * (1 + 1 / 64) / 4, rel=1e-3)
    assert peak(optimizer="sgd").states == pytest.approx(plain.states / 2)
    assert plain.states / 2 < peak(optimizer="muon").states < 0.6 * plain.states
    assert peak(offload=True).resident < 0.02 * plain.resident
    halves = peak(dp_replicate=2)
    assert halves.weights == pytest.approx(2 * plain.weights, rel=0.01)
    with pytest.raises(ConfigError, match="dp_replicate"):
        check(mixtral, replace(layout, zero=0), Job(dp_replicate=2))
    with pytest.raises(ConfigError, match="offload"):
        check(mixtral, replace(layout, zero=0), Job(offload=True))


def test_settings_stand_in_the_block(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--gpus", "16", "--gpu", "H200", "--top", "1", "--offload", "--dp-replicate", "2"]
    words += ["--spare-slots", "1"]
    assert main(["plan", "mixtral:8x7b", *words, "--recompute", "full"]) == 0
    block = capsys.readouterr().out.split("parallel:\n")[1]
    for line in ("  zero: ", "runtime:\n", "  dp_replicate: 2", "  offload: true", "  recompute"):
        assert line in block
    assert ("  ep: " in block) == ("  spare_slots: 1" in block)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(preset("mixtral", "8x7b").to_hub()))
    words = ["--gpus", "8", "--gpu-memory", "80GB", "--top", "2"]
    assert main(["plan", str(file), *words, "--mode", "lora", "--json", "-"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["best"]["fits"]
    assert len(result["layouts"]) == 2
    assert main(["plan", str(tmp_path), *words, "--mode", "lora"]) == 0
    out = capsys.readouterr().out
    assert "parallel:\n" in out
    assert "smallest group that fits" in out
    assert main(["plan", "mixtral:8x7b", *words, "--refused"]) == 1
    out = capsys.readouterr().out
    assert "nothing fits" in out
    assert "refused " in out
    assert main(["plan", "nowhere", *words]) == 2


def test_bubble_and_links_cost_time(mixtral: ModelConfig) -> None:
    """More micro-batches shrink the bubble to (pp - 1) / micro of the work; slow links cost."""
    layout = ParallelLayout(pp=4, ep=8).resolve(32)
    few, many = (
        Clock(Planner(mixtral, Job(global_batch=n)), H100).step(layout) for n in (32, 1024)
    )
    assert few.bubble / (few.total - few.bubble) == pytest.approx(3 / 4, rel=0.05)
    assert many.bubble / (many.total - many.bubble) == pytest.approx(3 / 128, rel=0.05)
    slow = Clock(Planner(mixtral, Job()), hardware("H100", network=5e9))
    fast = Clock(Planner(mixtral, Job()), hardware("H100", network=50e9))
    wide = ParallelLayout(ep=8, etp=2).resolve(64)
    assert slow.step(wide).exposed > 2.0 * fast.step(wide).exposed


def test_what_fits_comes_first_and_fast_before_slow(mixtral: ModelConfig) -> None:
    plan = search(mixtral, Job(), 16, H100)
    fits = [candidate.fits for candidate in plan.candidates]
    assert fits == sorted(fits, reverse=True)
    assert not all(fits)
    speeds = [c.time.tokens_per_second for c in plan.candidates if c.time]
    assert speeds == sorted(speeds, reverse=True)


def test_divisors() -> None:
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
