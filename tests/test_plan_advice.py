"""What the planner says where nothing fits or an input is odd."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from moe_tp.cli.main import main
from moe_tp.errors import ConfigError
from moe_tp.models.families import preset
from moe_tp.parallel.layout import ParallelLayout, Recompute
from moe_tp.plan.advice import remedies, smallest_group, why_none
from moe_tp.plan.hardware import TABLE, read_hardware
from moe_tp.plan.job import Job
from moe_tp.plan.memory import Planner
from moe_tp.plan.search import legal_layouts
from moe_tp.plan.time import Clock

H100 = TABLE["H100"]
MIXTRAL = preset("mixtral", "8x7b")


def test_nothing_fits_below_an_equal_share() -> None:
    """Sizes that are passed over by their share of the states have no layout that fits."""
    for changes in ({}, {"mode": "lora"}, {"moments": "8bit"}, {"offload": True}):
        job = replace(Job(recompute="full"), **changes)
        found = smallest_group(MIXTRAL, job, H100)
        assert found is not None
        planner = Planner(MIXTRAL, job)
        for gpus in (n for n in (1, 2, 3, 4, 6, 8, 12) if n < found[0]):
            peaks = [planner.peak(x).total for x in legal_layouts(MIXTRAL, job, gpus)[0]]
            assert min(peaks, default=1e99) > H100.memory


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_nothing_fits_below_the_tokens_of_a_layer(family: str, recompute: Recompute) -> None:
    """What is passed over by its tokens alone has no layout that fits, and much is."""
    config = preset(family, "tiny")
    job = Job(recompute=recompute, seq_len=1 << 20)
    planner = Planner(config, job)
    legal = legal_layouts(config, job, 8)[0]
    parts = [planner.least_passing(x) / planner.peak(x).total for x in legal]
    assert 0.5 < max(parts) <= 1.0


def test_a_sequence_without_end_is_refused_soon() -> None:
    """No layout of 1 to 4096 GPUs is looked at closely: each holds too many tokens."""
    planner = Planner(MIXTRAL, Job(seq_len=10**12))
    assert smallest_group(MIXTRAL, planner.job, H100, like=planner) is None
    assert not planner.shared.fixed


def test_a_group_is_found_whatever_the_replicas() -> None:
    """No power of two, nor one and a half, holds 7 replicas: 7 times one of them does."""
    found = smallest_group(MIXTRAL, Job(mode="lora", dp_replicate=7), H100)
    assert found is not None
    assert found[0] % 7 == 0


def test_a_gpu_smaller_than_what_is_reserved(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "mixtral:tiny", "--gpus", "2", "--gpu-memory", "1GB"]) == 1
    assert "nothing: 1.5 GB of each GPU are reserved" in capsys.readouterr().out


def test_broken_configs_are_refused_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, good = tmp_path / "config.json", MIXTRAL.to_hub()
    for text, word in (
        ("", "no JSON"),
        ("[" * 100_000, "no JSON"),
        ("null", "no JSON object"),
        (json.dumps({**good, "num_attention_heads": 0}), "num_attention_heads=0"),
        (json.dumps({**good, "head_dim": -2}), "head_dim=-2"),
        (json.dumps({**good, "num_hidden_layers": 600}), "num_hidden_layers=600"),
        (json.dumps({**good, "hidden_size": 4096.5}), "hidden_size=4096.5"),
        (json.dumps({**good, "num_local_experts": 0}), "num_experts=0"),
    ):
        file.write_text(text)
        assert main(["plan", str(file), "--gpus", "8"]) == 2
        error = capsys.readouterr().err
        assert word in error
        assert error.count("\n") == 1


def test_two_remedies_where_one_is_not_enough() -> None:
    """Mixtral on one GPU: neither LoRA nor narrow states fit, LoRA over 4-bit experts does."""
    advice = remedies(MIXTRAL, Job(), 1, H100)
    assert [line.split(":")[0] for line in advice] == [
        "weights and states in host memory (runtime.offload",
        "LoRA over experts in 4 bits (--mode lora --lora-base int4)",
        "LoRA with weights in host memory (--mode lora --offload)",
        "more GPUs",
    ]
    bound = remedies(MIXTRAL, Job(mode="lora", seq_len=16384), 2, H100, recompute="none")
    assert bound[0].startswith("runtime.recompute: selective")


def test_host_memory_holds_what_its_step_needs() -> None:
    """With offload the optimiser steps in host memory: only what ZeRO leaves whole is held."""
    layout, job = ParallelLayout(zero=3).resolve(8), Job(offload=True)

    def update(job: Job) -> float:
        planner = Planner(MIXTRAL, job)
        moments = planner.moments(layout, planner.stages(layout)[0])
        return next(memory for memory in moments if memory.moment == "update").update

    assert 0.0 < update(job) < 1e-3 * update(replace(job, offload=False))


def test_reasons_where_no_layout_is_legal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "mixtral:8x7b", "--gpus", "64", "--dp-replicate", "3"]) == 1
    out = capsys.readouterr().out
    assert "no layout of 64 GPUs is legal" in out
    assert "dp_replicate=3 does not divide" in out
    assert "another number of GPUs: 18" in out
    assert any("global_batch" in reason for reason in why_none(MIXTRAL, Job(), 1000003, most=9))


def test_no_rank_gets_more_than_there_is() -> None:
    """A token has 2 choices: of 8 ranks with an expert each one gets at most half of all."""
    planner = Planner(MIXTRAL, Job(skew=50.0))
    even, most = (planner.skew(ParallelLayout(ep=8).resolve(8), asked) for asked in (1.0, 50.0))
    assert (even, most) == (1.0, 4.0)
    assert planner.skew(ParallelLayout(ep=2).resolve(8), 50.0) == 2.0
    alone = ParallelLayout().resolve(8)
    skewed, plain = (
        Clock(Planner(MIXTRAL, Job(skew=skew)), H100).step(alone).compute for skew in (4.0, 1.0)
    )
    assert skewed == plain


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--micro-batch 300", "micro_batch=300 is more than global_batch=256"),
        ("--dp-replicate 0", "dp_replicate=0"),
        ("--skew inf", "skew=inf"),
        ("--lora-base int8", "mode='lora'"),
        ("--mode lora --bf16-weights", "--bf16-weights"),
        ("--mode lora --lora-base int4 --offload", "leave one of them out"),
        ("--mode lora --lora-base int8 --dp-replicate 2", "dp_replicate=2 is about"),
        ("--optimizer sgd --moments 8bit", "sgd"),
        ("--top 0", "--top 0"),
        ("--gpu-memory nvlink4", "80GiB"),
        ("--network fast", "ib400"),
        ("--gpu-memory 1e300GB", "at most 1e+30"),
    ],
)
def test_odd_words_are_refused_in_one_sentence(
    words: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "mixtral:8x7b", "--gpus", "8", *words.split()]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("flops", "Infinity"),
        ("flops", "1e-300"),
        ("latency", "-1"),
        ("latency", "1e30"),
        ("half_rows", "-500"),
        ("overlap", "7"),
        ("matmul_efficiency", "7"),
        ("node_size", "2.5"),
        ("name", "5"),
    ],
)
def test_odd_hardware_is_refused(field: str, value: str, tmp_path: Path) -> None:
    file = tmp_path / "odd.json"
    file.write_text(f'{{"gpu": "H100", "{field}": {value}}}')
    with pytest.raises(ConfigError, match=field):
        read_hardware(file)


def test_the_block_says_what_it_was_planned_for(capsys: pytest.CaptureFixture[str]) -> None:
    """And is YAML whose sections a run takes."""
    words = ["--gpus", "8", "--mode", "lora", "--micro-batch", "2", "--seq-len", "8192"]
    assert main(["plan", "mixtral:8x7b", *words, "--recompute", "full"]) == 0
    block = capsys.readouterr().out.split("\n\n")[-1]
    assert block.startswith("# planned for seq_len 8192, micro_batch 2, global_batch 256")
    assert "lora.rank 16" in block
    found = yaml.safe_load(block)
    assert ParallelLayout(**found["parallel"]).resolve(8)
    assert found["runtime"] == {"recompute": "full"}
    assert json.loads(json.dumps(found)) == found
