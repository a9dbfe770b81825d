"""Which parameters a LoRA target names, over the whole model whatever this rank holds."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from moe_tp.checkpoint.rules import NameRules
from moe_tp.errors import ConfigError
from moe_tp.log import get_logger

_log = get_logger(__name__)

GROUPS = {
    "attention": r"layers\.\d+\.attention\.(q|k|v|o|q_a|q_b|kv_a|kv_b)\.weight",
    "experts": r"layers\.\d+\.moe\.experts\.(gate_up|down)",
    "shared_experts": r"layers\.\d+\.moe\.shared\.(gate|up|down)\.weight",
    "router": r"layers\.\d+\.moe\.router\.weight",
    # reached by a pattern, or by all-linear
    "mlp": r"layers\.\d+\.(mlp\.(gate|up|down)|moe\.shared_gate)\.weight",
}
ALL_LINEAR = "all-linear"
_NAMED = 3  # kinds of matrix that a warning names


def group_of(fqn: str) -> str | None:
    """Return which group of adaptable parameters a parameter belongs to, or None."""
    return next((g for g, pattern in GROUPS.items() if re.fullmatch(pattern, fqn)), None)


def layer_of(fqn: str) -> int:
    """Return the number of the layer that an adaptable parameter lies in."""
    return int(fqn.split(".")[1])


def hub_modules(rules: NameRules, fqn: str) -> list[str]:
    """Return the hub names of a parameter's pieces, without `.weight`."""
    names = dict.fromkeys(piece.hub_name for piece in rules.pieces[fqn])
    return [name.removesuffix(".weight") for name in names]


def hub_kinds(rules: NameRules, fqn: str) -> list[str]:
    """Return the hub names of a parameter's pieces with `*` for numbers, without `.weight`."""
    return list(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", m) for m in hub_modules(rules, fqn)))


def warn_of_rank(rules: NameRules, rank: int, sizes: Mapping[str, tuple[int, int]]) -> None:
    """Warn where adapters of a rank are larger than their matrices.

    Args:
        rules: name rules of the model.
        rank: r.
        sizes: outputs and inputs of each adapted matrix, by the name of its parameter.
    """
    small = {re.sub(r"\d+", "*", fqn): fqn for fqn, size in sizes.items() if rank > min(size)}
    if not small:
        return
    found = [(" and ".join(hub_kinds(rules, fqn)), *sizes[fqn]) for fqn in small.values()]
    named = [f"{name} ({out} x {width})" for name, out, width in found[:_NAMED]]
    if len(found) > _NAMED:
        named.append(f"{len(found) - _NAMED} more kinds of matrix")
    _log.warning(
        "lora rank=%d is above the smaller size of %s, where an adapter takes more than the whole "
        "matrix and can learn no more; lower lora.rank to %d, or leave them out of lora.targets",
        rank,
        ", ".join(named),
        min(min(size) for _, *size in found),
    )


def choose_parameters(rules: NameRules, targets: Sequence[str]) -> list[str]:
    """Return the names of all parameters of the model that the targets name.

    A target is a group (`attention`, `experts`, `shared_experts`, `router`), `all-linear` (every
    group but the router), a pattern over hub names (a whole name, its last parts such as `q_proj`,
    or either with `*` and `?`), or this library's name of one parameter. The router is adapted only
    where `router`, or a pattern whose last part has no wildcard, names it.

    Args:
        rules: name rules of the whole model.
        targets: see above.

    Raises:
        ConfigError: a target names nothing, or a part of a parameter.
    """
    groups = {fqn: group for fqn in rules.pieces if (group := group_of(fqn)) is not None}
    chosen: set[str] = set()
    unmatched = []
    for target in targets:
        found = [fqn for fqn in groups if _names(rules, fqn, groups[fqn], target)]
        chosen.update(found)
        if not found:
            unmatched.append(target)
    if unmatched:
        raise ConfigError(_nothing(rules, groups, unmatched))
    return [fqn for fqn in groups if fqn in chosen]


def _names(rules: NameRules, fqn: str, group: str, target: str) -> bool:
    if target in ("attention", "experts", "shared_experts", "router"):
        return group == target
    if target == ALL_LINEAR:
        return group != "router"
    if target == fqn:
        return True
    if group == "router" and any(c in target.rsplit(".", 1)[-1] for c in "*?["):
        return False
    modules = hub_modules(rules, fqn)
    hits = [m for m in modules if fnmatchcase(m, target) or fnmatchcase(m, f"*.{target}")]
    if hits and len(hits) < len(modules):
        missed = next(m for m in modules if m not in hits)
        raise ConfigError(
            f"LoRA target {target!r} matches {hits[0]!r} but not {missed!r}, which is adapted "
            f"together with it; choose 'experts' or a pattern that matches both"
        )
    return bool(hits)


def _nothing(rules: NameRules, groups: dict[str, str], unmatched: list[str]) -> str:
    present = [g for g in GROUPS if g != "mlp" and g in groups.values()]
    kinds: dict[str, None] = {}
    for fqn in groups:
        kinds.update(dict.fromkeys(hub_kinds(rules, fqn)))
    known = [*present, ALL_LINEAR, *kinds, *(k.rsplit(".", 1)[-1] for k in kinds)]
    near = difflib.get_close_matches(unmatched[0], known, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return (
        f"LoRA targets {unmatched} match nothing in this model{hint}; choose among "
        f"{', '.join([*present, ALL_LINEAR])}, or patterns over {', '.join(kinds)}"
    )
