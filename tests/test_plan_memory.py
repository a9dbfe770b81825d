"""The planner's memory against measured peaks: the rows of `benchmarks/planner.py`."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from moe_tp.models import stages
from moe_tp.models.families import preset
from moe_tp.parallel import gradients, vocab
from moe_tp.parallel.layout import ParallelLayout
from moe_tp.plan import fixed, memory, params, parts
from moe_tp.plan.job import Job
from moe_tp.plan.memory import Planner
from moe_tp.plan.moments import Memory
from moe_tp.train import adamw

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import planner as measured


def errors(cases: list[measured.Case]) -> list[str]:
    """Return the rows that are off by more than 10 %."""
    found = []
    for case in cases:
        peak, memory = measured.compare(case)
        if abs(memory.total / peak - 1.0) > 0.10:
            found.append(f"{case}: planner {memory.total / 1e6:.2f}, measured {peak / 1e6:.2f} MB")
    return found


def test_peaks_are_within_a_tenth() -> None:
    """One process, ep 2, ZeRO 3, and LoRA at tp 2 x ep 2."""
    wrong = errors(measured.SHORT)
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_all_peaks_are_within_a_tenth() -> None:
    """Two models, and the ten layouts of a third that the constants have not seen."""
    wrong = errors(measured.SEEN + measured.UNSEEN)
    assert not wrong, "\n".join(wrong)


def test_the_fullest_moment_is_found() -> None:
    """Few tokens: the optimiser. Many: backward. A large vocabulary in one piece: the loss."""
    mixtral, layout = preset("mixtral", "8x7b"), ParallelLayout(tp=8, ep=8).resolve(8)

    def moment(layout: ParallelLayout = layout, **changes: object) -> Memory:
        return Planner(mixtral, replace(Job(), **changes)).peak(layout)

    assert moment(seq_len=512).moment == "update"
    assert moment(seq_len=65536).moment == "backward"
    words = Planner(preset("qwen3_moe", "30b-a3b"), Job(skew=1.0, kernel="fused"))
    assert words.peak(ParallelLayout(ep=8).resolve(8)).moment == "loss"
    one = moment(global_batch=1, kernel="fused", seq_len=512)
    assert one.moment == "end"
    assert one.gradients > moment(global_batch=1, seq_len=65536).gradients


def test_numbers_of_other_rooms_are_theirs() -> None:
    assert memory._LOSS_PIECE == vocab.LOSS_PIECE
    assert fixed._BUCKET_BYTES == gradients._BUCKET_BYTES
    assert fixed._UPDATED == adamw._CHUNK
    assert (params._SMALL, params._BLOCK) == (adamw._SMALL, adamw._BLOCK)
    assert parts._TYPICAL_LENGTH == stages._TYPICAL_LENGTH


def test_weights_in_the_compute_dtype() -> None:
    """Two bytes a parameter in the graph or gathered; one layer's under recompute or ZeRO 3."""
    config, weights = preset("mixtral", "8x7b"), 2.0 * preset("mixtral", "8x7b").num_params()

    def copies(zero: int, **changes: object) -> float:
        layout = ParallelLayout(zero=zero).resolve(8)
        planner = Planner(config, replace(Job(), **changes))
        moments = planner.moments(layout, planner.stages(layout)[0])
        return next(memory for memory in moments if memory.moment == "backward").copies

    for zero in (0, 1, 2):
        assert copies(zero) == pytest.approx(weights, rel=0.01)
    assert copies(0, recompute="full") == pytest.approx(weights / 32, rel=0.02)
    assert weights / 32 < copies(3) < 2.1 * weights / 32
    assert copies(0, compute_bytes=4) == 0.0
    assert copies(0, master_bytes=2) == 0.0


def test_skew_moves_what_experts_hold_and_nothing_else() -> None:
    config, layout = preset("qwen3_moe", "30b-a3b"), ParallelLayout(ep=8).resolve(8)

    def backward(skew: float) -> Memory:
        planner = Planner(config, Job(skew=skew))
        moments = planner.moments(layout, planner.stages(layout)[0])
        return next(memory for memory in moments if memory.moment == "backward")

    even, skewed = backward(1.0), backward(4.0)
    assert skewed.dispatch == pytest.approx(4.0 * even.dispatch)
    assert even.activations < skewed.activations < 4.0 * even.activations
    assert (skewed.weights, skewed.states) == (even.weights, even.states)


def test_pipeline_stages_hold_what_is_in_flight() -> None:
    """1F1B: the first stage keeps as many micro-batches as there are stages, the last one."""
    config, layout = preset("mixtral", "8x7b"), ParallelLayout(pp=8, ep=4).resolve(32)
    planner = Planner(config, Job(kernel="fused"))
    stages = planner.stages(layout)
    first, last = (planner.memory(layout, stages[i]).activations for i in (0, -1))
    assert 5.0 < first / last < 9.0
    assert planner.peak(layout).stage == 0
