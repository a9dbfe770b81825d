"""Runs of neighbouring experts that get equally many places, so that one batched product does all.

On a processor with AMX a bf16 product of an expert is over so soon that the call itself shows, and
oneDNN does not share every product out to threads as well as it shares whole experts. Places that
no pair takes cost work too, so experts come together only where that is the smaller loss.
"""

from __future__ import annotations

from collections.abc import Sequence

_LENGTHS = (2, 4, 8)  # few, because oneDNN compiles each number of experts anew
_MOST = 1 << 21  # elements of a run's activation: beyond, products lose little to calls and threads
_CALL = 1 << 26  # multiplications of one matrix that the six products of a run more are worth
_MOST_ROWS = 128  # the same in rows


def find_runs(
    counts: Sequence[int], sizes: Sequence[int], *, dim: int, hidden: int
) -> tuple[int, ...]:
    """Return how many experts each run has, so that places and calls cost the least together.

    A run has at most a fifth more places than pairs. Empty if each expert is best alone.

    Args:
        counts: pairs of each expert; those without any stay alone.
        sizes: places of each expert by itself.
        dim: width of the rows, D.
        hidden: of an expert, F.
    """
    call = min(_CALL // max(dim * hidden, 1), _MOST_ROWS)
    costs, last = [0], [0]  # of the first experts, and the length of their last run
    for end in range(1, len(sizes) + 1):
        size = sizes[end - 1]
        best, length = costs[-1] + (size + call if size else 0), 1
        for many in _LENGTHS:
            own = slice(end - many, end)
            if many > end or not min(sizes[own]):
                break
            taken = many * max(sizes[own])
            cost = costs[end - many] + taken + call
            fits = taken * hidden <= _MOST and 5 * taken <= 6 * sum(counts[own])
            if fits and cost < best:
                best, length = cost, many
        costs.append(best)
        last.append(length)
    runs, end = [], len(sizes)
    while end:
        runs.append(last[end])
        end -= last[end]
    return tuple(reversed(runs)) if len(runs) < len(sizes) else ()


def even_out(sizes: Sequence[int], runs: Sequence[int]) -> tuple[int, ...]:
    """Return the places of each expert: as many as the largest of its run has."""
    even: list[int] = []
    for many in runs:
        even += [max(sizes[len(even) : len(even) + many])] * many
    return tuple(even)
