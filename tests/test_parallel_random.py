"""Random numbers: good enough as noise, and the same bits whatever shard they are drawn for."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch

from moe_tp.parallel.layout import ParallelLayout
from moe_tp.parallel.mesh import Mesh
from moe_tp.parallel.parameter import ParallelModule, initialise, named_specs
from moe_tp.parallel.random import (
    DropoutKey,
    dropout,
    fill_normal,
    hash_bits,
    hash_normal,
    key_of,
)
from moe_tp.parallel.shards import full_logical, to_local
from moe_tp.parallel.spec import Init, ParamSpec
from moe_tp.testing import run_ranks


def ones_in(bits: torch.Tensor) -> torch.Tensor:
    """Return the share of ones at each of the 64 places."""
    return torch.stack([(bits >> place) & 1 for place in range(64)]).double().mean(1)


def test_bits_are_even_and_avalanche() -> None:
    """N1: every bit is 1 half the time, and one changed input bit changes half of the output."""
    counter = torch.arange(1 << 14)
    spread = 6 * 0.5 / 2**7  # six standard deviations of a mean of 2^14 coins
    bits = hash_bits(key_of("a"), counter)
    assert (ones_in(bits) - 0.5).abs().max() < spread
    assert len(bits.unique()) == len(counter)
    for flip in (0, 1, 7, 31, 40):
        assert (ones_in(bits ^ hash_bits(key_of("a"), counter ^ (1 << flip))) - 0.5).abs().max() < (
            spread
        )
        assert (ones_in(bits ^ hash_bits(key_of("a") ^ (1 << flip), counter)) - 0.5).abs().max() < (
            spread
        )
    assert hash_bits(3, torch.tensor([0, 1])).tolist() == hash_bits(3, torch.arange(2)).tolist()
    # Frozen values: the key of a name, and the first output of SplitMix64 for seed 0.
    assert key_of(0, "embed.weight") == 4850275650344083566
    assert hash_bits(0, torch.tensor([1])).item() == 0xE220A8397B1DCDAF - (1 << 64)


def splitmix(key: int, counter: int) -> int:
    """Return the mixed bits in Python's own integers."""
    whole = (1 << 64) - 1
    z = (counter * 0x9E3779B97F4A7C15 + key) & whole
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & whole
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & whole
    z ^= z >> 31
    return z - (1 << 64) if z >> 63 else z


def test_bits_are_those_of_whole_numbers() -> None:
    """N1: wrapping arithmetic of any shape and stride has the bits of exact integers."""
    counters = torch.tensor([[0, 1, -1], [2**40 + 3, 2**62, -(2**63)]])
    keys = torch.tensor([[7], [key_of("b")]])
    for shape in (counters, counters.t(), counters[:, ::2], counters[:, :0]):
        got = hash_bits(key_of("a"), shape)
        want = [[splitmix(key_of("a"), c) for c in row] for row in shape.tolist()]
        assert got.tolist() == want
    per_row = hash_bits(keys, torch.arange(3)[None, :])
    assert per_row.tolist() == [[splitmix(int(k), c) for c in range(3)] for k in keys]
    before = counters.clone()
    hash_bits(3, counters)
    assert torch.equal(counters, before)


def test_normals_have_their_moments() -> None:
    """N1: mean 0, variance 1, symmetric, bounded; twelve uniforms have excess kurtosis -0.1."""
    x = hash_normal(key_of(1, "w"), torch.arange(200_000))
    assert abs(x.mean()) < 0.01
    assert abs(x.var() - 1) < 0.02
    assert abs((x**3).mean()) < 0.03
    assert abs((x**4).mean() / x.var() ** 2 - 3 + 0.1) < 0.06
    assert x.abs().max() < 6
    inside = (x.abs() < 1).double().mean()
    assert abs(inside - 0.683) < 0.01
    lag = (x[1:] * x[:-1]).mean()
    assert abs(lag) < 0.015


SHAPES = [(7,), (5, 3), (3, 5, 2), (2, 3, 3, 5), (1, 1), (4, 1, 3)]


@pytest.mark.parametrize("shape", SHAPES)
def test_any_part_has_the_bits_of_the_whole(shape: tuple[int, ...]) -> None:
    """N1: rows, columns, scattered and padded parts equal the whole, for 1 to 4 dimensions."""

    def draw(index: tuple[torch.Tensor, ...], dtype: torch.dtype) -> torch.Tensor:
        out = torch.full([len(i) for i in index], torch.nan, dtype=dtype)
        fill_normal(out, key_of(0, "w"), index, shape, 0.02)
        return out

    everything = tuple(torch.arange(n) for n in shape)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        whole = draw(everything, dtype)
        assert len(whole.unique()) > min(whole.numel(), 8) / 2
        for dim in range(len(shape)):
            for step in (2, 3):
                index = list(everything)
                index[dim] = everything[dim][1::step].flip(0)
                want = whole.index_select(dim, index[dim])
                assert torch.equal(draw(tuple(index), dtype), want)
        padded = list(everything)
        padded[0] = torch.cat([torch.tensor([-1]), everything[0], torch.tensor([-1])])
        got = draw(tuple(padded), dtype)
        assert torch.equal(got[1:-1], whole)
        assert not got[[0, -1]].any()
        assert torch.equal(draw(everything, torch.float64).to(dtype), whole)


def test_names_and_seeds_give_other_numbers() -> None:
    """N1, C36: the seed, the name and each expert of one tensor have numbers of their own."""
    draws = [
        hash_normal(key_of(*parts), torch.arange(64))
        for parts in [
            (0, "a.w"),
            (1, "a.w"),
            (0, "a.v"),
            (0, "b.w"),
            ("0", "a", "w"),
            (0, "a", ".w"),
        ]
    ]
    for a, b in combinations(draws, 2):
        assert (a != b).all()
    experts = torch.empty(4, 3, 5)
    index = tuple(torch.arange(n) for n in experts.shape)
    fill_normal(experts, key_of(0, "experts"), index, (4, 3, 5), 1.0)
    for a, b in combinations(experts, 2):
        assert (a != b).all()


def test_large_tensors_are_filled_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """N1: how many rows are drawn at a time changes nothing."""
    index = (torch.tensor([2, -1, 0, 1]), torch.arange(6))
    want, got = torch.empty(4, 6), torch.empty(4, 6)
    fill_normal(want, 5, index, (3, 6), 1.0)
    monkeypatch.setattr("moe_tp.parallel.random._BLOCK", 7)
    fill_normal(got, 5, index, (3, 6), 1.0)
    assert torch.equal(got, want)
    fill_normal(torch.empty(0, 6), 5, (torch.arange(0), torch.arange(6)), (3, 6), 1.0)


class Some(ParallelModule):
    """One parameter of each kind of sharding, of odd sizes."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh)
        slots = (0, 1, 2, -1) if mesh.size("ep") > 1 else None
        for name, spec in {
            "column": ParamSpec(shape=(8, 5), shards={"tp": 0}),
            "row": ParamSpec(shape=(5, 12), shards={"tp": 1}),
            "words": ParamSpec(shape=(7, 3), shards={"tp": 0}, pad=True),
            "bias": ParamSpec(shape=(8,), shards={"tp": 0}),
            "router": ParamSpec(shape=(3, 5), partial=True, keep_fp32=True),
            "experts": ParamSpec(
                shape=(3, 2, 4, 5), shards={"ep": 0, "etp": 2}, domain="expert", slots=slots
            ),
            "norm": ParamSpec(shape=(5,), init=Init("constant", 1.0), role="norm"),
        }.items():
            self.add_parameter(name, spec, torch.float32)


def weights(layout: ParallelLayout | None, seed: int) -> dict[str, torch.Tensor]:
    mesh = Mesh.single() if layout is None else Mesh(layout)
    model = Some(mesh)
    initialise(model, seed)
    full = {e.fqn: full_logical(e.param, e.spec, mesh) for e in named_specs(model)}
    local = {f"local {e.fqn}": to_local(e.param) for e in named_specs(model)}
    return full | local


def test_every_layout_draws_the_same_weights() -> None:
    """N1, R2, C36: weights of ep, etp and tp layouts equal one process bitwise; experts differ."""
    want = weights(None, 3)
    for layout in (
        ParallelLayout(),
        ParallelLayout(tp=2, ep=2, etp=2),
        ParallelLayout(tp=4, ep=2),
        ParallelLayout(tp=1, etp=4),
        ParallelLayout(pp=2, ep=2),
    ):
        results = run_ranks(weights, 4, layout, 3)
        for got in results:
            for name in Some(Mesh.single()).specs:
                assert torch.equal(got[name], want[name]), (layout, name)
            # A replica has the bits of its sisters without asking them.
            assert torch.equal(got["local router"], results[0]["local router"])
    for a, b in combinations(want["experts"], 2):
        assert (a != b).all()
    drawn = [v.flatten()[:8] for k, v in want.items() if k != "norm" and "local" not in k]
    for a, b in combinations(drawn, 2):
        assert not torch.equal(a, b)
    for name, other in weights(None, 4).items():
        assert torch.equal(other, want[name]) == (name in ("norm", "local norm"))


D = 64


def key(ids: torch.Tensor, **changes: object) -> DropoutKey:
    fields = {"seed": 0, "step": 2, "layer": 3, "site": "mlp"} | changes
    return DropoutKey(token_ids_T=ids, **fields)  # type: ignore[arg-type]


IDS = (torch.tensor([0, 1, 5])[:, None] * 2**32 + torch.arange(16)).flatten()


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_has_its_rate_and_scale(p: float) -> None:
    """N2: a share p is zero, the rest is x/(1-p), so the mean stays; also in the gradient."""
    x = torch.full((48, 256), 3.0, requires_grad=True)
    y = dropout(x, p, key(IDS))
    dropped = (y == 0).double().mean().item()
    assert abs(dropped - p) < 6 * (p * (1 - p) / y.numel()) ** 0.5
    torch.testing.assert_close(y[y != 0], torch.full_like(y[y != 0], 3.0 / (1 - p)))
    y.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, torch.where(y != 0, 1 / (1 - p), 0.0))
    assert dropout(x, 0.0, key(IDS)) is x
    spoilt = torch.where(y == 0, torch.inf, 1.0).detach()
    assert torch.isfinite(dropout(spoilt, p, key(IDS))).all()


def test_dropout_in_bf16_keeps_the_factor() -> None:
    """N2: the factor is not rounded before it is applied, and the mask is that of fp32."""
    x = torch.full((48, D), 1.5)
    wide, narrow = dropout(x, 0.1, key(IDS)), dropout(x.bfloat16(), 0.1, key(IDS))
    assert narrow.dtype is torch.bfloat16
    assert torch.equal(narrow, wide.bfloat16())


def test_the_mask_belongs_to_the_token() -> None:
    """N2, N3, C36: shards of tokens and features have the whole's mask; anything else differs."""
    x = torch.randn(len(IDS), D)
    whole = dropout(x, 0.5, key(IDS))
    assert torch.equal(whole, dropout(x, 0.5, key(IDS)))
    order = torch.randperm(len(IDS))
    assert torch.equal(dropout(x[order], 0.5, key(IDS[order])), whole[order])
    for part in (slice(0, 0), slice(0, 1), slice(7, 19), slice(40, 48)):
        assert torch.equal(dropout(x[part], 0.5, key(IDS[part])), whole[part])
    for columns in (torch.arange(16, 40), torch.tensor([3])):
        share = dropout(x[:, columns], 0.5, key(IDS), features=columns)
        assert torch.equal(share, whole[:, columns])
    masks = [whole != 0]
    for change in ({"seed": 1}, {"step": 3}, {"layer": 4}, {"site": "attention"}):
        masks.append(dropout(x, 0.5, key(IDS, **change)) != 0)
    masks.append(dropout(x, 0.5, key(IDS + 2**33)) != 0)
    for a, b in combinations(masks, 2):
        assert 0.4 < (a == b).double().mean() < 0.6
    rows = masks[0].unbind(0)
    for a, b in combinations(rows, 2):
        assert not torch.equal(a, b)


def ranks_masks(layout: ParallelLayout) -> tuple[torch.Tensor, torch.Tensor, int]:
    mesh = Mesh(layout)
    tokens = IDS[:16] + 2**32 * mesh.coordinate("dp")
    group = mesh.group("tp")
    owned = tokens.chunk(group.size)[group.rank]
    x = torch.ones(16, D)
    return dropout(x, 0.5, key(tokens)), dropout(x[: len(owned)], 0.5, key(owned)), group.rank


def test_masks_over_ranks() -> None:
    """C36, N2: alike on replicas, different on sequence shards and dp ranks, equal to no layout."""
    results = run_ranks(ranks_masks, 4, ParallelLayout(tp=2))
    whole = dropout(torch.ones(32, D), 0.5, key(IDS[:32]))
    for rank, (replicated, shard, tp) in enumerate(results):
        want = whole[16 * (rank // 2) :][:16]
        assert torch.equal(replicated, want)
        assert torch.equal(shard, want[8 * tp :][:8])
    shards = [shard for _, shard, _ in results]
    assert all(not torch.equal(a, b) for a, b in combinations(shards, 2))
