"""Selection: ties, position, groups, masks and bad rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_tp.errors import ConfigError, RoutingError
from moe_tp.routing import RouterConfig, route
from moe_tp.routing.config import Score
from moe_tp.routing.select import count_experts, stable_top_k


def tied(rows: int, experts: int, seed: int = 0) -> Tensor:
    """Return logits of few different values, so that most rows have ties at the boundary."""
    return torch.randint(-2, 3, (rows, experts), generator=torch.manual_seed(seed)).float()


def test_lowest_id_wins_a_tie() -> None:
    """R1, C01: exact ids and weights of the case, fp32 and bf16."""
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        logits = torch.tensor([[1, 3, 3, 3, 0], [0, 0, 0, 0, 0]], dtype=dtype)
        out = route(logits, RouterConfig(5, 2))
        assert out.ids_TK.tolist() == [[1, 2], [0, 1]]
        assert torch.equal(out.weights_TK, torch.full_like(out.weights_TK, 0.5))


@pytest.mark.parametrize("experts", [8, 16, 64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zero_logits_choose_the_first_experts(experts: int, dtype: torch.dtype) -> None:
    """R1, C01: a freshly made router with zero weights, at every size of the case."""
    for score in ("softmax", "softmax_topk", "sigmoid"):
        out = route(torch.zeros(4, experts, dtype=dtype), RouterConfig(experts, 2, score=score))
        assert out.ids_TK.tolist() == [[0, 1]] * 4
        assert out.weights_TK.tolist() == [[0.5, 0.5]] * 4


@pytest.mark.parametrize("experts", [5, 37, 128])
@pytest.mark.parametrize("score", ["softmax", "softmax_topk", "sigmoid"])
@pytest.mark.parametrize("biased", [False, True])
def test_a_row_routes_alike_wherever_it_lies(experts: int, score: str, biased: bool) -> None:
    """R1, C01: alone, inside a batch, in a strided view, in 20 calls: the same bits."""
    config = RouterConfig(experts, 3, score=score)  # type: ignore[arg-type]
    bias = torch.linspace(-1, 1, experts) if biased else None
    for source in (tied(7, experts), torch.randn(7, experts, generator=torch.manual_seed(1)) * 6):
        whole = route(source, config, bias_E=bias)
        strided = source.t().contiguous().t()
        views = [torch.cat([source[3:], source])[-7:], strided, torch.stack([source] * 2, 1)[:, 1]]
        for view in [*views, *[source] * 20]:
            out = route(view, config, bias_E=bias)
            assert torch.equal(out.ids_TK, whole.ids_TK)
            assert torch.equal(out.weights_TK, whole.weights_TK)
        for t in range(7):
            alone = route(source[t : t + 1].clone(), config, bias_E=bias)
            assert torch.equal(alone.ids_TK[0], whole.ids_TK[t])
            assert torch.equal(alone.weights_TK[0], whole.weights_TK[t])
            assert torch.equal(alone.scores_TE[0], whole.scores_TE[t])


@pytest.mark.parametrize("experts", [1, 2, 8, 16, 17, 64, 200, 512])
def test_both_ways_of_selecting_agree(experts: int) -> None:
    """R1: composite key and stable sort, with ties, both zeros, infinities and tiny numbers."""
    rows = torch.cat([tied(50, experts), torch.randn(50, experts)])
    rows[0] = 0.0
    rows[1, ::2] = -0.0
    rows[1, 1::2] = 0.0
    rows[2, : experts // 2] = float("-inf")
    rows[3] = rows[3] * 1e-42
    k = min(experts, 9)
    want = torch.sort(rows.double(), dim=-1, descending=True, stable=True).indices[:, :k]
    assert torch.equal(stable_top_k(rows, k), want)
    assert torch.equal(stable_top_k(rows.double(), k), want)
    assert torch.equal(stable_top_k(rows.t().contiguous().t(), k), want)


def test_groups_limit_the_choice() -> None:
    """R3: the sum of the two best ranks groups, or the best one does."""
    logits = torch.tensor([[5.0, -9.0, 3.0, 3.1, 0.0, 0.0]])
    pick = {"top2_sum": [[3, 2]], "max": [[0, 1]]}
    for group_score, ids in pick.items():
        config = RouterConfig(6, 2, score="softmax_topk", num_groups=3, group_score=group_score)  # type: ignore[arg-type]
        assert route(logits, config).ids_TK.tolist() == ids


def test_tied_groups_choose_the_first() -> None:
    """R1: ties between groups go to the lowest group too."""
    config = RouterConfig(32, 4, score="sigmoid", num_groups=8, top_groups=3)
    assert route(torch.zeros(2, 32), config).ids_TK.tolist() == [[0, 1, 2, 3]] * 2
    bias = torch.zeros(32).index_fill_(0, torch.tensor([9]), 0.5)
    assert route(torch.zeros(1, 32), config, bias_E=bias).ids_TK.tolist() == [[9, 0, 1, 2]]


def test_masked_tokens_go_nowhere() -> None:
    """R6: ids -1, weights and scores 0, no count, whatever padding holds; no gradient to it."""
    logits = torch.randn(5, 8, generator=torch.manual_seed(0))
    logits[2] = float("nan")
    logits[4] = float("-inf")
    logits.requires_grad_()
    mask = torch.tensor([True, True, False, True, False])
    out = route(logits, RouterConfig(8, 3), mask_T=mask)
    assert out.ids_TK[~mask].tolist() == [[-1] * 3] * 2
    assert not out.weights_TK[~mask].any()
    assert not out.scores_TE[~mask].any()
    assert int(out.counts_E.sum()) == 9
    assert torch.equal(out.ids_TK[mask], route(logits.detach()[mask], RouterConfig(8, 3)).ids_TK)
    (out.weights_TK.square().sum() + out.scores_TE.square().sum()).backward()
    assert torch.isfinite(logits.grad).all()  # type: ignore[arg-type]
    assert not logits.grad[~mask].any()  # type: ignore[index]


@pytest.mark.parametrize(
    ("row", "word"),
    [
        ([float("nan"), 0.0, 1.0, 2.0], "NaN"),
        ([float("-inf")] * 4, "all -inf"),
        ([float("inf"), 0.0, 0.0, 0.0], "+inf"),
    ],
)
def test_a_bad_row_is_an_error(row: list[float], word: str) -> None:
    """R7: the error names rank, layer and token, and what was found."""
    logits = torch.zeros(6, 4)
    logits[3] = torch.tensor(row)
    with pytest.raises(RoutingError, match="rank 2, layer 7, token 3") as caught:
        route(logits, RouterConfig(4, 2), layer=7, rank=2)
    assert word in str(caught.value)


def test_a_bad_bias_is_an_error() -> None:
    """R7, L4: a bias that is not finite or not fp32 is refused."""
    config = RouterConfig(4, 2, score="sigmoid")
    with pytest.raises(RoutingError, match="correction bias"):
        route(torch.zeros(3, 4), config, bias_E=torch.full((4,), float("nan")))
    with pytest.raises(ConfigError, match="float32"):
        route(torch.zeros(3, 4), config, bias_E=torch.zeros(4, dtype=torch.bfloat16))


def test_an_expert_at_minus_infinity_is_never_chosen() -> None:
    """R7: fewer admissible experts than K leave a slot empty, not a silent index."""
    logits = torch.tensor([[0.0, float("-inf"), 2.0, float("-inf")]])
    for score in ("softmax", "softmax_topk", "sigmoid"):
        out = route(logits, RouterConfig(4, 3, score=score))
        assert out.ids_TK.tolist() == [[2, 0, -1]]
        assert out.weights_TK[0, 2] == 0
        assert out.weights_TK.sum() == pytest.approx(1)


@pytest.mark.parametrize("score", ["softmax", "softmax_topk", "sigmoid"])
def test_a_bias_does_not_bring_an_expert_back(score: Score) -> None:
    """R7: an expert at -inf (dropped for the call, say) stays out, whatever its bias."""
    config = RouterConfig(4, 2, score=score, correction_bias=True)
    logits = torch.tensor([[0.0, float("-inf"), float("-inf"), 1.0]])
    out = route(logits, config, bias_E=torch.tensor([0.0, 9.0, 9.0, 0.0]))
    assert out.ids_TK.tolist() == [[3, 0]]
    assert out.weights_TK.sum() == pytest.approx(1)


def test_a_group_is_worth_its_admissible_experts() -> None:
    """R3, R7: one good expert beside one that is out ranks above two poor ones, and no group
    whose experts are all out is chosen for its bias.
    """
    config = RouterConfig(6, 1, score="sigmoid", normalize=False, num_groups=3, top_groups=1)
    out = float("-inf")
    logits = torch.tensor([[4.0, out, -4.0, -4.0, out, out]])
    assert route(logits, config).ids_TK.tolist() == [[0]]
    bias = torch.tensor([0.0, 9.0, 0.0, 0.0, 9.0, 9.0])
    assert route(logits, config, bias_E=bias).ids_TK.tolist() == [[0]]


def test_no_tokens() -> None:
    """D2: an empty batch gives empty tensors that are connected to the graph."""
    logits = torch.zeros(0, 8, requires_grad=True)
    out = route(logits, RouterConfig(8, 2, capacity_factor=1.0))
    assert out.ids_TK.shape == (0, 2)
    assert out.counts_E.tolist() == [0] * 8
    out.weights_TK.sum().backward()
    assert logits.grad is not None


def test_counts_are_exact() -> None:
    """C14: the sum of counts is T*K, in int64."""
    ids = torch.tensor([[0, 3], [3, -1], [3, 2]])
    counts = count_experts(ids, 5)
    assert counts.dtype == torch.int64
    assert counts.tolist() == [1, 0, 1, 3, 0]


def test_shapes_that_do_not_fit_are_refused() -> None:
    """F3: nothing is broadcast into nonsense."""
    config = RouterConfig(4, 2)
    with pytest.raises(ConfigError, match="num_experts=4"):
        route(torch.zeros(3, 5), config)
    with pytest.raises(ConfigError, match="mask_T"):
        route(torch.zeros(3, 4), config, mask_T=torch.ones(3, 1, dtype=torch.bool))
    with pytest.raises(ConfigError, match="bias_E"):
        route(torch.zeros(3, 4), config, bias_E=torch.zeros(1))
