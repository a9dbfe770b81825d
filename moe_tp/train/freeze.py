"""Which parameters of a model are trained: by patterns over hub names, down to single experts.

A pattern is a whole hub name, its last parts (`q_proj.weight`, `q_proj`), or either with `*` and
`?`; `router`, `experts`, `shared_experts`, `attention`, `norms` and `embeddings` are names of
groups, and `experts.3` is expert 3 of every layer in whatever form the folder has. Experts of a
layer are one parameter here; where a pattern names some of them, the gradient of the others is
zero, and the parameter gets no weight decay, which would move them.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from torch import nn

from moe_tp.checkpoint.rules import Piece
from moe_tp.errors import ConfigError
from moe_tp.experts.router import Router
from moe_tp.models.decoder import Decoder
from moe_tp.parallel.parameter import ParallelModule, named_specs

GROUPS = {
    "attention": r"layers\.\d+\.attention\..*",
    "experts": r"layers\.\d+\.moe\.experts\..*",
    "shared_experts": r"layers\.\d+\.moe\.shared(_gate)?\..*",
    "router": r"layers\.\d+\.moe\.router\..*",
    "norms": r"(.*_norm|norm)\.weight",
    "embeddings": r"(embed|head)\.weight",
}


def choose_trained(model: Decoder, freeze: Sequence[str], only: Sequence[str]) -> None:
    """Freeze what `freeze` names, and all that `only` does not name where it names something.

    A frozen router's correction bias stands still too. Call before the optimiser is made.

    Args:
        model: from `build` or `from_pretrained`.
        freeze, only: patterns, alike on all ranks.

    Raises:
        ConfigError: a pattern names nothing, nothing is left to train, or a router is that would
            never learn (R5).
    """
    if not (freeze or only):
        _check_routers(model)
        return
    count = model.config.moe.router.num_experts
    atoms = {fqn: _atoms(fqn, pieces, count) for fqn, pieces in model.name_rules.pieces.items()}
    named: dict[str, dict[str, set[int]]] = {}
    for pattern in (*freeze, *only):
        named[pattern] = {fqn: _named(fqn, parts, pattern) for fqn, parts in atoms.items()}
        if not any(named[pattern].values()):
            raise ConfigError(_nothing(model, pattern))
    trained: dict[str, set[int]] = {}
    for fqn, parts in atoms.items():
        kept = set().union(*(named[p][fqn] for p in only)) if only else set(parts)
        trained[fqn] = kept.difference(*(named[p][fqn] for p in freeze))
    if not any(trained.values()):
        raise ConfigError(
            f"train.freeze={list(freeze)} and train.only={list(only)} leave nothing to train"
        )
    for entry in named_specs(model):
        if not trained[entry.fqn]:
            entry.param.requires_grad_(False)
        elif len(trained[entry.fqn]) < len(atoms[entry.fqn]):
            train_rows(entry.module, entry.name, trained[entry.fqn])
    for module in model.modules():
        if isinstance(module, Router) and not module.get_parameter("weight").requires_grad:
            module.config = replace(module.config, frozen=True)
    _check_routers(model)


def _check_routers(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, Router):
            module.check_trainable()


def train_rows(module: ParallelModule, name: str, experts: Collection[int]) -> None:
    """Train only these experts' part of a parameter whose first dimension is the expert.

    Args:
        module: that holds it.
        name: of the parameter.
        experts: their numbers.
    """
    module.trained_rows[name] = frozenset(experts)
    module.specs[name] = replace(
        module.specs[name], role="norm"
    )  # the optimiser's group without decay


def check_experts(model: nn.Module, experts: Sequence[int], setting: str) -> None:
    """Check that these experts exist.

    Raises:
        ConfigError: one does not, or there is none.
    """
    assert isinstance(model, Decoder)
    count = model.config.moe.router.num_experts
    if not experts or min(experts) < 0 or max(experts) >= count:
        raise ConfigError(
            f"{setting}={list(experts)} must name experts of 0 to {count - 1}, one at least"
        )


def _atoms(fqn: str, pieces: Sequence[Piece], num_experts: int) -> dict[int, list[str]]:
    """Return the parts of a parameter that can be trained apart, and the hub tensors of each.

    They are its experts; a parameter of another kind is one part.
    """
    if not re.fullmatch(GROUPS["experts"], fqn):
        return {0: [piece.hub_name for piece in pieces]}
    atoms: dict[int, list[str]] = {expert: [] for expert in range(num_experts)}
    for piece in pieces:
        first = piece.param_index[0] if piece.param_index else None
        for expert in [first] if isinstance(first, int) else atoms:
            atoms[expert].append(piece.hub_name)
    return atoms


def _named(fqn: str, atoms: Mapping[int, list[str]], pattern: str) -> set[int]:
    """Return the parts that a pattern names.

    Raises:
        ConfigError: it names a part of one.
    """
    if pattern in GROUPS:
        return set(atoms) if re.fullmatch(GROUPS[pattern], fqn) else set()
    one = re.fullmatch(r"experts\.(\d+)", pattern)
    if one is not None:
        return {int(one[1])} & set(atoms) if re.fullmatch(GROUPS["experts"], fqn) else set()
    found = set()
    for atom, names in atoms.items():
        hits = [name for name in names if _matches(name, pattern)]
        if hits and len(hits) < len(names):
            missed = next(name for name in names if name not in hits)
            raise ConfigError(
                f"the pattern {pattern!r} matches {hits[0]!r} but not {missed!r}, which is one "
                "parameter with it; choose a pattern that matches both"
            )
        if hits:
            found.add(atom)
    return found


def _matches(name: str, pattern: str) -> bool:
    forms = (name, name.removesuffix(".weight"))
    return any(fnmatchcase(form, p) for form in forms for p in (pattern, f"*.{pattern}"))


def _nothing(model: Decoder, pattern: str) -> str:
    kinds: dict[str, None] = {}
    for pieces in model.name_rules.pieces.values():
        for piece in pieces:
            kinds[re.sub(r"\.\d+\.", ".*.", piece.hub_name)] = None
    near = difflib.get_close_matches(pattern, [*GROUPS, *kinds], n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return (
        f"the pattern {pattern!r} matches no tensor of this model{hint}; choose among "
        f"{', '.join(GROUPS)}, or patterns over {', '.join(kinds)}"
    )
