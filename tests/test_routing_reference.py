"""The fast forms against the slow reference on random input, and gradients against differences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_tp.routing import Assignment, RouterConfig, load_balance_loss, route, z_loss
from moe_tp.routing.reference import (
    ReferenceAssignment,
    reference_load_balance_loss,
    reference_route,
    reference_sequence_loss,
    reference_z_loss,
)

SWEEP = settings(max_examples=150, deadline=None, derandomize=True)


def compare(fast: Assignment, slow: ReferenceAssignment) -> None:
    """Compare ids, weights and counts, slot by slot."""
    assert fast.counts_E.tolist() == slow.counts
    assert fast.chosen_E.tolist() == slow.chosen_counts
    for t, kept in enumerate(slow.kept):
        taken = fast.ids_TK[t] >= 0
        assert fast.ids_TK[t][taken].tolist() == [expert for expert, _ in kept]
        got = fast.weights_TK[t][taken].tolist()
        assert got == pytest.approx([weight for _, weight in kept], rel=1e-9, abs=1e-15)
        assert not fast.weights_TK[t][~taken].any()


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    """Return a router and a batch: sizes that are no power of two, masks, groups, empty batches."""
    groups = draw(st.integers(1, 4))
    experts = groups * draw(st.integers(1, 5))
    top_groups = draw(st.integers(1, groups))
    k = draw(st.integers(1, top_groups * (experts // groups)))
    score = draw(st.sampled_from(["softmax", "softmax_topk", "sigmoid"]))
    normalize = draw(st.booleans())
    assume(experts == 1 or k > 1 or (not normalize and score != "softmax_topk"))
    rows = draw(st.integers(0, 9))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    tied = draw(st.booleans())
    if tied:
        logits = torch.randint(-1, 2, (rows, experts), generator=generator).double()
    else:
        logits = torch.randn(rows, experts, generator=generator, dtype=torch.float64) * 2
        logits += torch.randn(experts, generator=generator, dtype=torch.float64) * 2  # skewed
    mask = torch.rand(rows, generator=generator) < 0.8 if draw(st.booleans()) else None
    bias = None
    if not tied and draw(st.booleans()):
        bias = torch.randn(experts, generator=generator, dtype=torch.float64)
    return {
        "config": {
            "num_experts": experts,
            "top_k": k,
            "score": score,
            "normalize": normalize,
            "scale": draw(st.sampled_from([1.0, 2.5])),
            "num_groups": groups,
            "top_groups": top_groups,
            "group_score": draw(st.sampled_from(["top2_sum", "max"])),
        },
        "tied": tied,
        "logits": logits,
        "mask": mask,
        "bias": bias,
        "sequence": torch.randint(0, 3, (rows,), generator=generator),
    }


def listed(x: Tensor | None) -> Any:
    return None if x is None else x.tolist()


@SWEEP
@given(problems())
def test_top_k_equals_the_reference(problem: dict[str, Any]) -> None:
    """R1, R3, R6, D1: ids, weights, counts and every loss of token-choice routing in fp64."""
    config = RouterConfig(**problem["config"])
    logits, mask, bias = problem["logits"], problem["mask"], problem["bias"]
    fast = route(logits, config, bias_E=bias, mask_T=mask)
    slow = reference_route(logits.tolist(), config, bias=listed(bias), mask=listed(mask))
    compare(fast, slow)
    loss = reference_load_balance_loss(slow.scores, slow.chosen, mask=listed(mask))
    assert float(load_balance_loss(fast)) == pytest.approx(loss, rel=1e-9)
    sequence = problem["sequence"]
    loss = reference_sequence_loss(slow.scores, slow.chosen, sequence.tolist(), mask=listed(mask))
    ours = load_balance_loss(fast, kind="sequence", sequence_T=sequence)
    assert float(ours) == pytest.approx(loss, rel=1e-9)
    loss = reference_z_loss(logits.tolist(), mask=listed(mask))
    assert float(z_loss(logits, mask_T=mask)) == pytest.approx(loss, rel=1e-9)


@SWEEP
@given(
    problems(),
    st.sampled_from(["expert_choice", "sinkhorn", "hash", "random", "balanced", "top_k"]),
    st.sampled_from([None, 0.3, 0.7, 1.1, 2.0]),
    st.sampled_from(["weight", "position"]),
    st.integers(1, 3),
)
def test_other_kinds_equal_the_reference(
    problem: dict[str, Any], kind: str, factor: float | None, policy: str, multiple: int
) -> None:
    """R1, R6, D7: every kind, and every capacity and drop policy, in fp64."""
    assume(not problem["tied"])
    assume(kind != "expert_choice" or problem["config"]["score"] != "softmax_topk")
    plain = {**problem["config"], "num_groups": 1, "top_groups": 1}
    config = RouterConfig(
        **plain,
        kind=kind,  # type: ignore[arg-type]
        capacity_factor=factor,
        drop_policy=policy,  # type: ignore[arg-type]
        capacity_multiple=multiple,
        seed=11,
    )
    logits, mask = problem["logits"], problem["mask"]
    tokens = torch.arange(len(logits)) * 7 % 5
    fast = route(logits, config, mask_T=mask, token_ids_T=tokens)
    slow = reference_route(logits.tolist(), config, mask=listed(mask), token_ids=tokens.tolist())
    compare(fast, slow)


@pytest.mark.parametrize("score", ["softmax", "softmax_topk", "sigmoid"])
@pytest.mark.parametrize("normalize", [False, True])
def test_gradients_of_weights_and_losses(score: str, normalize: bool) -> None:
    """R3, L2: analytic gradients equal differences in fp64, masks and groups included."""
    config = RouterConfig(6, 2, score=score, normalize=normalize, scale=1.5)  # type: ignore[arg-type]
    mask = torch.tensor([True, True, False, True, True])
    sequence = torch.tensor([0, 0, 1, 1, 1])
    counts = torch.tensor([4, 1, 0, 7, 2, 2])
    bias = torch.linspace(-0.5, 0.5, 6, dtype=torch.float64)

    def everything(logits: Tensor) -> tuple[Tensor, ...]:
        out = route(logits, config, bias_E=bias, mask_T=mask)
        return (
            out.weights_TK,
            load_balance_loss(out),
            load_balance_loss(out, kind="global_batch", counts_E=counts, num_tokens=8),
            load_balance_loss(out, kind="sequence", sequence_T=sequence),
            z_loss(logits, mask_T=mask),
        )

    generator = torch.manual_seed(0)
    logits = torch.randn(5, 6, generator=generator, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(everything, logits)
