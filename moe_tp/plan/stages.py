"""What a pipeline rank holds, and the operations of each part of a model."""

from __future__ import annotations

from dataclasses import dataclass, field

from moe_tp.models.config import ModelConfig
from moe_tp.models.counts import attention_params, expert_params
from moe_tp.plan.params import Kind


@dataclass(frozen=True, slots=True)
class Stage:
    """What a pipeline rank holds: layers of each kind, and the ends of the model.

    Args:
        rank: of the pipeline.
        dense, moe: layers.
        first, last: it holds the embedding, or final norm and head.
        shape: all but the rank.
        kinds: its parts, and how many there are of each.
    """

    rank: int
    dense: int
    moe: int
    first: bool
    last: bool
    shape: tuple[int, int, bool, bool] = field(init=False, compare=False)
    kinds: tuple[tuple[Kind, int], ...] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        found: list[tuple[Kind, int]] = [("dense", self.dense), ("moe", self.moe)]
        found += [("embed", int(self.first)), ("head", int(self.last))]
        kinds = tuple((kind, count) for kind, count in found if count)
        object.__setattr__(self, "shape", (self.dense, self.moe, self.first, self.last))
        object.__setattr__(self, "kinds", kinds)


def part_flops(config: ModelConfig, kind: Kind, length: int) -> tuple[float, float, float]:
    """Return operations of one token's forward: dense matmuls, routed experts, attention scores.

    Args:
        config: the model.
        kind: which part.
        length: tokens a sequence.
    """
    if kind == "embed":
        return 0.0, 0.0, 0.0
    if kind == "head":
        return 2.0 * config.vocab_size * config.dim, 0.0, 0.0
    a, mla = config.attention, config.attention.mla
    width = 2 * a.head_dim if mla is None else mla.qk_dim + mla.value_dim
    scores = 1.0 * length * a.num_heads * width  # half the keys, 2 operations each
    dense = 2.0 * attention_params(a, config.dim)
    if kind == "dense":
        return dense + 6.0 * config.dim * config.dense_dim, 0.0, scores
    moe = config.moe
    dense += 6.0 * config.dim * moe.shared_dim + 2.0 * config.dim * moe.router.num_experts
    chosen = min(moe.router.top_k, moe.router.num_experts)
    return dense, 2.0 * chosen * expert_params(config), scores
