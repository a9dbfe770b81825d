"""The lists of mutants fit the tree (the mutants themselves run in `make mutants`)."""

from __future__ import annotations

from run_mutants import load


def test_every_listed_mutant_fits_the_tree() -> None:
    mutants = load()
    assert len(mutants) >= 10
    problems = [f"{m.room} {m.rule}: {problem}" for m in mutants if (problem := m.problem())]
    assert problems == []
    assert len({(m.file, m.find, m.replace, m.test) for m in mutants}) == len(mutants)
