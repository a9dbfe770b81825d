"""Name rules: every element once, experts by number."""

from __future__ import annotations

import random

import pytest
import torch
from checkpoint_toy import DIM, HIDDEN, Toy, toy_rules
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_tp.checkpoint import NameRules, Piece
from moe_tp.checkpoint import rules as R
from moe_tp.checkpoint.blocks import Aligned, boxes_of, clip, split
from moe_tp.checkpoint.export import param_shape
from moe_tp.errors import CheckpointError
from moe_tp.parallel.mesh import Mesh
from moe_tp.parallel.parameter import named_specs

FORMATS: tuple[R.ExpertFormat, ...] = (
    "per_expert",
    "fused",
    "fused_transposed",
    "fused_interleaved",
    "flat",
)


def shapes_of(num_experts: int) -> dict[str, tuple[int, ...]]:
    model = Toy(Mesh.single(), num_experts)
    shapes = {n.fqn: n.spec.shape for n in named_specs(model)}
    return {**shapes, "router.bias": (num_experts,)}


def test_experts_are_ordered_by_number() -> None:
    """K3: expert 2 before expert 10, also where numbers have leading zeros or stand first."""
    names = [f"layers.{layer}.experts.{e}.w1" for layer in (0, 2, 10) for e in range(12)]
    shuffled = random.Random(0).sample(names, len(names))
    assert sorted(shuffled, key=R.natural_key) == names
    assert sorted(["a10", "a9", "a"], key=R.natural_key) == ["a", "a9", "a10"]
    rules = toy_rules(12)
    experts = [n for n in rules.hub_shapes() if n.endswith(".w1")]
    assert experts == [f"mlp.experts.{e}.w1" for e in range(12)]


@pytest.mark.parametrize("form", FORMATS)
def test_builders_cover_every_element_once(form: R.ExpertFormat) -> None:
    """C39: pieces cover parameters and hub tensors exactly once in all expert formats."""
    rules = toy_rules(12, form)
    R.check_cover(rules, shapes_of(12))
    for fqn, shape in shapes_of(12).items():
        assert param_shape(rules.pieces[fqn]) == shape


@pytest.mark.parametrize("form", FORMATS)
def test_expert_pieces_put_values_in_their_places(form: R.ExpertFormat) -> None:
    """K1, K3: each format against the plain indexing that it describes, with F == D too."""
    for hidden, dim in ((HIDDEN, DIM), (4, 4)):
        sizes = {"num_experts": 3, "hidden": hidden, "dim": dim}
        gate = torch.randn(3, hidden, dim)
        up, down = torch.randn(3, hidden, dim), torch.randn(3, dim, hidden)
        hub: dict[str, torch.Tensor] = {}
        names = ["w1.{e}", "w3.{e}"] if form == "per_expert" else ["a", "b"]
        if form == "per_expert":
            for e in range(3):
                hub.update({f"w1.{e}": gate[e], f"w3.{e}": up[e], f"w2.{e}": down[e]})
        elif form == "flat":
            hub = {"a": gate.flatten(0, 1), "b": up.flatten(0, 1)}
            hub["w2"] = down.transpose(1, 2).flatten(0, 1)
        elif form == "fused":
            hub = {"a": torch.cat([gate, up], 1), "w2": down}
        else:
            parts = [gate.transpose(1, 2), up.transpose(1, 2)]
            joined = torch.cat(parts, 2)
            mixed = torch.stack(parts, 3).flatten(2)
            hub = {"a": joined if form == "fused_transposed" else mixed}
            hub["w2"] = down.transpose(1, 2)
        used = names if form in ("per_expert", "flat") else ["a"]
        pieces = R.expert_gate_up(form, used, **sizes)
        assert torch.equal(assemble(pieces, hub, (3, 2, hidden, dim)), torch.stack([gate, up], 1))
        name = "w2.{e}" if form == "per_expert" else "w2"
        pieces = R.expert_down(form, name, **sizes)
        assert torch.equal(assemble(pieces, hub, (3, dim, hidden)), down)


def assemble(
    pieces: tuple[Piece, ...], hub: dict[str, torch.Tensor], shape: tuple[int, ...]
) -> torch.Tensor:
    out = torch.full(shape, float("nan"))
    box = boxes_of([torch.arange(n) for n in shape])[0]
    for piece in pieces:
        assert tuple(hub[piece.hub_name].shape) == piece.hub_shape
        aligned = Aligned(piece, shape)
        overlap = aligned.overlap(box)
        assert overlap is not None
        at = tuple(slice(r.start, r.stop, r.step) for r in overlap.hub)
        aligned.hub_view(out, overlap).copy_(hub[piece.hub_name][at])
    return out


def test_interleaved_bias() -> None:
    """K1: gate in the even, up in the odd places."""
    pieces = R.expert_gate_up_bias("fused_interleaved", "b", num_experts=2, hidden=3)
    bias = torch.arange(12.0).view(2, 6)
    out = assemble(pieces, {"b": bias}, (2, 2, 3))
    assert torch.equal(out[:, 0], bias[:, 0::2])
    assert torch.equal(out[:, 1], bias[:, 1::2])


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (R.rows("q", (8, 4), 0, 7), "hub tensor .q. has .7, 4."),
        (R.rows("q", (8, 4), 0, 8) + R.rows("q", (8, 4), 0, 8), "64 elements"),
        (R.whole("q", (4, 8)), "block has shape"),
    ],
)
def test_a_gap_an_overlap_or_a_wrong_shape_is_refused(
    broken: tuple[Piece, ...], message: str
) -> None:
    """C39: rules that would leave an element or write it twice never reach a file."""
    with pytest.raises(CheckpointError, match=message):
        R.check_cover(NameRules(pieces={"q": broken}), {"q": (8, 4)})


def test_equal_counts_do_not_hide_an_overlap() -> None:
    """C39: the number of elements is right, but one row stands twice and one is missing."""
    pieces = tuple(
        Piece(hub_name=f"r{i}", hub_shape=(4,), param_index=(row,))
        for i, row in enumerate((0, 1, 1, 3))
    )
    with pytest.raises(CheckpointError, match=r"parameter 'q': two pieces share element \[1"):
        R.check_cover(NameRules(pieces={"q": pieces}), {"q": (4, 4)})
    halves = tuple(
        Piece(
            hub_name="h", hub_shape=(6,), param_index=(slice(3 * i, 3 * i + 3),), hub_slices=(at,)
        )
        for i, at in enumerate((slice(0, None, 2), slice(0, None, 2)))
    )
    with pytest.raises(CheckpointError, match="hub tensor 'h': two pieces share element"):
        R.check_cover(NameRules(pieces={"q": halves}), {"q": (6,)})


def test_rules_that_speak_of_nothing_are_refused() -> None:
    """C39: a rule without parameter, and a parameter without rule, both by name."""
    rules = toy_rules(6)
    with pytest.raises(CheckpointError, match=r"'embed\.weight', which the model lacks"):
        R.check_cover(rules, {n: s for n, s in shapes_of(6).items() if n != "embed.weight"})
    with pytest.raises(CheckpointError, match="'new' has no name rule"):
        R.check_cover(rules, {**shapes_of(6), "new": (3,)})


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 5), min_size=0, max_size=4),
    st.integers(1, 40),
    st.randoms(use_true_random=False),
)
def test_split_covers_a_block_once(sizes: list[int], limit: int, rng: random.Random) -> None:
    """K6: parts of bounded size, in order, each element once."""
    ranges = [range(s := rng.randint(0, 3), s + n) for n in sizes]
    whole = torch.zeros([r.stop for r in ranges])
    for part in split(ranges, limit):
        count = 1
        for r in part:
            count *= len(r)
        assert count <= limit
        whole[tuple(slice(r.start, r.stop) for r in part)] += 1
    assert int(whole.sum()) == torch.Size(sizes).numel()
    assert int(whole.max()) == 1


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 5), st.integers(1, 9), st.integers(1, 3), st.integers(0, 12), st.integers(1, 9)
)
def test_clip_is_the_intersection(start: int, count: int, step: int, low: int, size: int) -> None:
    """K1: which part of a strided block lies in a window, and where."""
    block = range(start, start + count * step, step)
    window = range(low, low + size)
    expected = [x for x in block if x in window]
    shared = clip([block], [window])
    if not expected:
        assert shared is None
        return
    assert shared is not None
    (inside,), (placed,) = shared
    assert list(block[inside]) == expected
    assert list(window[placed]) == expected
