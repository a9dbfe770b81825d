"""Balance losses and the z-loss: exact figures, ranks, micro-batches, masks, sequences."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from moe_tp.errors import ConfigError
from moe_tp.routing import (
    Assignment,
    RouterConfig,
    load_balance_loss,
    pooled_load_balance_loss,
    route,
    sequence_counts,
    z_loss,
)

TOP1 = RouterConfig(2, 1, normalize=False)
ROWS = torch.tensor([[3.0, 0], [3, 0], [3, 0], [0, 3]])
WANT_GRAD = torch.tensor([[0.101647, 0.033882], [-0.101647, -0.033882]])


def test_per_layer_and_pooled() -> None:
    """L5, C11: the pooled form hides two unbalanced layers; each form's value is documented."""
    layers = [torch.tensor([[3.0, 0], [3, 0]]), torch.tensor([[0.0, 3], [0, 3]])]
    per_layer = torch.stack([load_balance_loss(route(layer, TOP1)) for layer in layers]).mean()
    assert float(per_layer) == pytest.approx(1.905148, abs=1e-6)
    assert float(pooled_load_balance_loss(layers, 1)) == pytest.approx(1.0, abs=1e-6)


def test_balance_is_one_here_and_k_in_transformers() -> None:
    """L5, C11: E = 4, k = 2, each expert used twice with equal mean probabilities."""
    logits = torch.tensor([[2.0, 2, 0, 0], [0, 2, 2, 0], [0, 0, 2, 2], [2, 0, 0, 2]])
    assert float(load_balance_loss(route(logits, RouterConfig(4, 2)))) == pytest.approx(1.0)
    assert float(pooled_load_balance_loss([logits], 2)) == pytest.approx(2.0)


def test_pooled_equals_transformers() -> None:
    """L5: value and gradient equal transformers' function, with and without its mask."""
    logits = torch.randn(3, 10, 8, generator=torch.manual_seed(0), requires_grad=True)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    for attention_mask in (None, mask):
        theirs = load_balancing_loss_func(tuple(logits), 8, 2, attention_mask)
        mask_T = None if attention_mask is None else mask.flatten().bool()
        ours = pooled_load_balance_loss(list(logits), 2, mask_T=mask_T)
        assert float(ours.detach()) == pytest.approx(float(theirs.detach()), rel=1e-6)
        (grad,) = torch.autograd.grad(theirs, logits)
        (mine,) = torch.autograd.grad(ours, logits)
        assert torch.allclose(mine, grad, atol=1e-8)


def test_logits_are_not_taken_for_probabilities() -> None:
    """C12: the exact value, in both forms."""
    logits = torch.tensor([[4.0, 0, 0, 0]] * 4)
    config = RouterConfig(4, 1, normalize=False)
    assert float(load_balance_loss(route(logits, config))) == pytest.approx(3.791660, abs=1e-5)
    assert float(pooled_load_balance_loss([logits], 1)) == pytest.approx(3.791660, abs=1e-5)
    assert not torch.allclose(route(logits, config).logits_TE.sum(-1), torch.ones(4))


def test_sigmoid_scores_are_normalised_at_any_scale() -> None:
    """C16: the loss does not vanish when a router shrinks all its scores."""
    scores = torch.tensor([[0.1, 0.01], [0.2, 0.1]], dtype=torch.float64)
    config = RouterConfig(2, 1, score="sigmoid", normalize=False)
    for scale in (1.0, 1e-22):
        logits = torch.logit(scores * scale)
        for dtype in (torch.float64, torch.float32):
            leaf = logits.to(dtype, copy=True).requires_grad_()
            loss = load_balance_loss(route(leaf, config))
            assert float(loss.detach()) == pytest.approx(1.575758, abs=1e-5)
            loss.backward()
            assert leaf.grad.abs().max() > 0.05  # type: ignore[union-attr]


def test_each_sequence_by_itself() -> None:
    """L2, C16: sequence-wise 1.905148 where the flattened batch looks balanced; any numbers."""
    logits = torch.tensor([[3.0, 0], [3, 0], [0, 3], [0, 3]])
    sequence = torch.tensor([7, 7, 3, 3])
    out = route(logits, TOP1)
    loss = load_balance_loss(out, kind="sequence", sequence_T=sequence)
    assert float(loss) == pytest.approx(1.905148, abs=1e-6)
    assert float(load_balance_loss(out)) == pytest.approx(1.0, abs=1e-6)
    order = torch.tensor([2, 0, 3, 1])
    shuffled = route(logits[order], TOP1)
    loss = load_balance_loss(shuffled, kind="sequence", sequence_T=sequence[order])
    assert float(loss) == pytest.approx(1.905148, abs=1e-6)
    with pytest.raises(ConfigError, match="sequence_T"):
        load_balance_loss(out, kind="sequence")


def test_sequences_over_ranks() -> None:
    """L2: the parts of two ranks that share sequences add up, in value and gradient."""
    generator = torch.manual_seed(5)
    logits = torch.randn(11, 6, generator=generator, dtype=torch.float64)
    sequence = torch.tensor([0, 0, 2, 2, 2, 0, 1, 1, 2, 2, 0])
    mask = torch.ones(11, dtype=torch.bool)
    mask[[3, 6, 7]] = False  # sequence 1 has no real token and does not count
    config = RouterConfig(6, 2, score="sigmoid")
    leaf = logits.clone().requires_grad_()
    whole = load_balance_loss(
        route(leaf, config, mask_T=mask), kind="sequence", sequence_T=sequence
    )
    whole.backward()
    two = logits.clone().requires_grad_()
    parts = [slice(0, 4), slice(4, 11)]
    outs = [route(two[part], config, mask_T=mask[part]) for part in parts]
    both = [sequence_counts(out, sequence[p], 3) for out, p in zip(outs, parts, strict=True)]
    counts, tokens = both[0][0] + both[1][0], both[0][1] + both[1][1]
    assert tokens.tolist() == [4, 0, 4]
    losses = [
        load_balance_loss(
            out,
            kind="sequence",
            counts_E=counts,
            num_tokens=tokens,
            sequence_T=sequence[part],
            num_sequences=2,
        )
        for out, part in zip(outs, parts, strict=True)
    ]
    torch.stack(losses).sum().backward()
    assert float(sum(losses).detach()) == pytest.approx(float(whole.detach()), rel=1e-12)
    assert torch.allclose(two.grad, leaf.grad, atol=1e-14)  # type: ignore[arg-type]


def rank_parts(shares: list[Tensor], weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return value and weight gradient of the micro-batch loss over ranks that own `shares`."""
    leaf = weight.clone().requires_grad_()
    outs = [route(share @ leaf.t(), TOP1) for share in shares]
    counts = torch.stack([out.chosen_E for out in outs]).sum(0)
    tokens = sum(len(share) for share in shares)
    loss = torch.stack(
        [load_balance_loss(out, counts_E=counts, num_tokens=tokens) for out in outs]
    ).sum()
    loss.backward()
    assert leaf.grad is not None
    return loss.detach(), leaf.grad


@pytest.mark.parametrize(
    "shares", [[ROWS], [ROWS, ROWS], [ROWS[:2], ROWS[2:]], [ROWS[:0], ROWS[:3], ROWS[3:]]]
)
def test_strength_does_not_depend_on_the_ranks(shares: list[Tensor]) -> None:
    """L2, C17: a), c), d) and an empty rank: the exact value and gradient of the case."""
    value, grad = rank_parts(shares, torch.eye(2))
    assert float(value) == pytest.approx(1.226287, rel=1e-5)
    assert torch.allclose(grad, WANT_GRAD, rtol=1e-4, atol=1e-6)


def test_strength_does_not_depend_on_micro_batches() -> None:
    """L2, C17: b) two identical micro-batches, averaged over the step's tokens."""
    weight = torch.eye(2).requires_grad_()
    out = route(ROWS @ weight.t(), TOP1)
    loss = sum(load_balance_loss(out) * 4 / 8 for _ in range(2))
    assert float(loss.detach()) == pytest.approx(1.226287, rel=1e-5)
    loss.backward()  # type: ignore[union-attr]
    assert torch.allclose(weight.grad, WANT_GRAD, rtol=1e-4, atol=1e-6)  # type: ignore[arg-type]


def test_balanced_only_as_a_whole() -> None:
    """L2, C17: e) each rank is collapsed, the union is balanced: 1.0 and exactly no gradient."""
    rows = torch.tensor([[3.0, 0], [3, 0], [0, 3], [0, 3]])
    value, grad = rank_parts([rows[:2], rows[2:]], torch.eye(2))
    assert float(value) == pytest.approx(1.0, abs=1e-6)
    assert torch.equal(grad, torch.zeros(2, 2))


def global_batch(shares: list[Tensor], exact: bool) -> tuple[float, Tensor]:
    config = RouterConfig(5, 2)
    leaves = [share.clone().requires_grad_() for share in shares]
    outs = [route(leaf, config) for leaf in leaves]
    tokens = sum(len(share) for share in shares)
    total = torch.stack([out.chosen_E for out in outs]).sum(0)
    so_far, value = torch.zeros(5, dtype=torch.int64), 0.0
    for out in outs:
        so_far = so_far + out.chosen_E
        counts = total if exact else so_far
        loss = load_balance_loss(out, kind="global_batch", counts_E=counts, num_tokens=tokens)
        loss.backward()
        value += float(loss.detach())
    return value, torch.cat([leaf.grad for leaf in leaves if leaf.grad is not None])


def test_global_batch_exact_equals_one_process() -> None:
    """L2: with a counting pass, unlike micro-batches equal the whole; the estimate is near."""
    rows = torch.randn(24, 5, generator=torch.manual_seed(2), dtype=torch.float64)
    shares = list(rows.split([3, 11, 0, 10]))
    whole, grad = global_batch([rows], exact=True)
    value, parts = global_batch(shares, exact=True)
    assert value == pytest.approx(whole, rel=1e-12)
    assert torch.allclose(parts, grad, atol=1e-15)
    estimate, near = global_batch(shares, exact=False)
    assert estimate != pytest.approx(whole, rel=1e-9)
    assert estimate == pytest.approx(whole, rel=0.1)
    assert torch.equal(near[14:], parts[14:])  # the last micro-batch has seen everything


def test_masked_tokens_count_in_no_loss() -> None:
    """R6: losses of a padded batch equal those of its real tokens, value and gradient."""
    rows = torch.randn(7, 6, generator=torch.manual_seed(4))
    mask = torch.tensor([True, False, True, True, False, False, True])
    padded = rows.clone()
    padded[~mask] = float("nan")
    padded.requires_grad_()
    real = rows[mask].clone().requires_grad_()
    sequence = torch.tensor([0, 0, 0, 1, 1, 2, 1])
    config = RouterConfig(6, 2, score="sigmoid")
    out, want = route(padded, config, mask_T=mask), route(real, config)
    pairs = [
        (load_balance_loss(out), load_balance_loss(want)),
        (z_loss(padded, mask_T=mask), z_loss(real)),
        (
            load_balance_loss(out, kind="sequence", sequence_T=sequence),
            load_balance_loss(want, kind="sequence", sequence_T=sequence[mask]),
        ),
    ]
    for ours, theirs in pairs:
        assert float(ours.detach()) == pytest.approx(float(theirs.detach()), rel=1e-6)
        (grad,) = torch.autograd.grad(ours, padded, retain_graph=True)
        (small,) = torch.autograd.grad(theirs, real, retain_graph=True)
        assert torch.allclose(grad[mask], small, atol=1e-8)
        assert not grad[~mask].any()


def test_a_mask_given_to_the_loss_narrows() -> None:
    """R6: mask_T of the loss recounts the choices of the tokens that are left."""
    rows = torch.randn(6, 4, generator=torch.manual_seed(4))
    mask = torch.tensor([True, False, True, True, False, True])
    config = RouterConfig(4, 2)
    loss = load_balance_loss(route(rows, config), mask_T=mask)
    assert float(loss) == pytest.approx(float(load_balance_loss(route(rows[mask], config))))


def test_no_token_is_zero() -> None:
    """L2, D2, C19: no tokens, or none that is real: 0, not NaN, with a graph."""
    for rows, mask in ((0, None), (3, torch.zeros(3, dtype=torch.bool))):
        logits = torch.zeros(rows, 4, requires_grad=True)
        out = route(logits, RouterConfig(4, 2), mask_T=mask)
        losses = [
            load_balance_loss(out),
            load_balance_loss(
                out, kind="sequence", sequence_T=torch.zeros(rows, dtype=torch.int64)
            ),
            z_loss(logits, mask_T=mask),
            pooled_load_balance_loss([logits], 2, mask_T=mask),
        ]
        total = torch.stack(losses).sum()
        total.backward()
        assert float(total) == 0
        assert logits.grad is not None


def test_z_loss_is_the_mean_square_of_the_log_sum() -> None:
    """L2: the value by hand, also in bf16 under autocast, and in parts."""
    rows = torch.tensor([[0.0, 0.0], [2.0, 2.0]])
    log2 = 0.6931471805599453
    want = (log2**2 + (2 + log2) ** 2) / 2
    assert float(z_loss(rows)) == pytest.approx(want, rel=1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        assert float(z_loss(rows.bfloat16())) == pytest.approx(want, rel=1e-6)
    parts = z_loss(rows[:1], num_tokens=2) + z_loss(rows[1:], num_tokens=torch.tensor(2))
    assert float(parts) == pytest.approx(want, rel=1e-6)


def test_dropped_choices_still_count() -> None:
    """D7: the loss looks at what tokens asked for, or capacity would hide the imbalance."""
    logits = torch.tensor([[4.0, 0, 0, 0]] * 4)
    config = RouterConfig(4, 1, normalize=False, capacity_factor=1.0)
    out = route(logits, config)
    assert out.counts_E.tolist() == [1, 0, 0, 0]
    assert float(load_balance_loss(out)) == pytest.approx(3.791660, abs=1e-5)


def test_losses_under_autocast_are_fp32() -> None:
    """R4: autocast and bf16 logits change nothing."""
    rows = torch.randn(9, 8, generator=torch.manual_seed(1)).bfloat16()
    plain = load_balance_loss(route(rows, RouterConfig(8, 2)))
    with torch.autocast("cpu", torch.bfloat16):
        lowered = load_balance_loss(route(rows, RouterConfig(8, 2)))
    assert lowered.dtype == torch.float32
    assert torch.equal(plain, lowered)


def test_unknown_kind_is_refused() -> None:
    """F3: a misspelt kind is named."""
    out: Assignment = route(torch.zeros(2, 4), RouterConfig(4, 2))
    with pytest.raises(ConfigError, match="micro_batch"):
        load_balance_loss(out, kind="batch")  # type: ignore[arg-type]
