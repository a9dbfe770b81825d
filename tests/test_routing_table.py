"""The expert table: uneven counts, replicas, placement from load."""

from __future__ import annotations

import pytest
import torch

from moe_tp.errors import ConfigError
from moe_tp.routing import ExpertTable, balanced_table, slots_of_ids


def test_contiguous_and_even() -> None:
    """D9: without padding a slot is an expert id."""
    table = ExpertTable(8, 4)
    assert table.slots == tuple(range(8))
    assert table.contiguous
    assert table.rank_of_expert == (0, 0, 1, 1, 2, 2, 3, 3)
    assert table.local_slot_of_expert == (0, 1) * 4
    assert ExpertTable(3).slots == (0, 1, 2)


def test_uneven_counts_are_padded() -> None:
    """D9: 60 experts on 8 ranks; every rank holds at least one."""
    table = ExpertTable(60, 8)
    assert table.slots_per_rank == 8
    held = [[e for e in table.experts_of_rank(r) if e >= 0] for r in range(8)]
    assert [len(mine) for mine in held] == [8, 8, 8, 8, 7, 7, 7, 7]
    assert [e for mine in held for e in mine] == list(range(60))
    assert not table.contiguous
    for experts in range(1, 20):
        for ep in range(1, experts + 1):
            ranks = ExpertTable(experts, ep)
            assert all(max(ranks.experts_of_rank(r)) >= 0 for r in range(ep))


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ((4, 8), "ep <= 4"),
        ((4, 2, (0, 1, 2)), "3 slots"),
        ((4, 2, (0, 1, 2, 2)), "\\[3\\]"),
        ((4, 2, (0, 1, 2, 4)), "expert 4"),
        ((0, 1), "at least 1"),
    ],
)
def test_a_bad_table_is_refused(arguments: tuple[int, ...], word: str) -> None:
    """D9, F3: the fix is named."""
    with pytest.raises(ConfigError, match=word):
        ExpertTable(*arguments)  # type: ignore[arg-type]


def test_slots_of_choices() -> None:
    """D9: each choice finds its slot; replicas take rows in turn; -1 stays -1."""
    ids = torch.tensor([[0, 2], [2, -1], [2, 1], [2, 0]])
    table = ExpertTable(3, 2, (0, 2, 1, 2))
    assert table.replicated
    slots = slots_of_ids(ids, *table.lookup())
    assert slots.tolist() == [[0, 1], [3, -1], [1, 2], [3, 0]]
    plain = ExpertTable(3, 2)
    assert slots_of_ids(ids, *plain.lookup()).tolist() == [[0, 2], [2, -1], [2, 1], [2, 0]]
    assert plain.slots == (0, 1, 2, -1)


def load_by_rank(table: ExpertTable, load: list[float]) -> list[float]:
    ranks = [0.0] * table.ep
    for slot, expert in enumerate(table.slots):
        if expert >= 0:
            ranks[slot // table.slots_per_rank] += load[expert] / len(table.replicas[expert])
    return ranks


def test_placement_evens_the_load() -> None:
    """D9: hot experts get replicas on different ranks; every expert stays; same answer always."""
    load = [100.0, 40, 5, 5, 5, 5, 5, 5]
    before = max(load_by_rank(ExpertTable(8, 4), load))
    table = balanced_table(load, 4, extra_slots=4)
    after = load_by_rank(table, load)
    assert before == 140
    assert max(after) < 1.25 * sum(load) / 4
    assert len(table.replicas[0]) > 1
    ranks = [slot // table.slots_per_rank for slot in table.replicas[0]]
    assert len(set(ranks)) == len(ranks)
    assert table == balanced_table(load, 4, extra_slots=4)
    assert len(balanced_table([0.0] * 6, 4).slots) == 8
    assert all(max(balanced_table([0.0] * 6, 4).experts_of_rank(r)) >= 0 for r in range(4))
    with pytest.raises(ConfigError, match="negative"):
        balanced_table([1.0, float("nan")], 1)
    with pytest.raises(ConfigError, match="ep=4"):
        balanced_table([1.0, 1.0], 4, extra_slots=1)
