"""Which slot of which rank holds which expert; the only place that knows.

E experts · T tokens on this rank · K choices
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moe_tp.errors import ConfigError

__all__ = ["ExpertTable", "balanced_table", "first_table", "slots_of_ids"]


@dataclass(frozen=True, slots=True)
class ExpertTable:
    """Experts to slots. Rank r of ep holds slots [r * slots_per_rank, (r + 1) * slots_per_rank).

    Args:
        num_experts: E.
        ep: ranks that share the experts.
        slots: expert of each slot, -1 for an empty one; equally many a rank. An expert may lie in
            several slots (replicas). None: contiguous runs, the first E % ep ranks one longer.
    """

    num_experts: int
    ep: int = 1
    slots: tuple[int, ...] = None  # type: ignore[assignment]  # filled in below
    slots_per_rank: int = field(init=False)
    replicas: tuple[tuple[int, ...], ...] = field(init=False)

    def __post_init__(self) -> None:
        if self.num_experts < 1 or self.ep < 1:
            raise ConfigError(
                f"num_experts={self.num_experts} and ep={self.ep} must both be at least 1"
            )
        if self.ep > self.num_experts and self.slots is None:
            raise ConfigError(
                f"num_experts={self.num_experts} is fewer than ep={self.ep}, so some ranks would "
                f"hold no expert; choose ep <= {self.num_experts} "
                "(etp splits each expert over the rest)"
            )
        slots = _contiguous(self.num_experts, self.ep) if self.slots is None else tuple(self.slots)
        if not slots or len(slots) % self.ep:
            raise ConfigError(
                f"{len(slots)} slots cannot lie equally on ep={self.ep} ranks; pad with -1"
            )
        where: list[list[int]] = [[] for _ in range(self.num_experts)]
        for slot, expert in enumerate(slots):
            if not -1 <= expert < self.num_experts:
                raise ConfigError(
                    f"slot {slot} holds expert {expert}, and num_experts={self.num_experts}"
                )
            if expert >= 0:
                where[expert].append(slot)
        lost = [expert for expert, held in enumerate(where) if not held]
        if lost:
            raise ConfigError(f"experts {lost} lie in no slot; every expert needs at least one")
        object.__setattr__(self, "slots", slots)
        object.__setattr__(self, "slots_per_rank", len(slots) // self.ep)
        object.__setattr__(self, "replicas", tuple(tuple(held) for held in where))

    @property
    def rank_of_expert(self) -> tuple[int, ...]:
        """Return the rank that holds each expert (its first replica)."""
        return tuple(held[0] // self.slots_per_rank for held in self.replicas)

    @property
    def local_slot_of_expert(self) -> tuple[int, ...]:
        """Return each expert's slot on that rank."""
        return tuple(held[0] % self.slots_per_rank for held in self.replicas)

    @property
    def replicated(self) -> bool:
        """Return whether any expert lies in more than one slot."""
        return any(len(held) > 1 for held in self.replicas)

    @property
    def contiguous(self) -> bool:
        """Return whether slots are experts in order, so that a slot is an expert id."""
        return self.slots == tuple(range(self.num_experts))

    def experts_of_rank(self, rank: int) -> tuple[int, ...]:
        """Return the expert of each slot of a rank, -1 for an empty one.

        Args:
            rank: in [0, ep).
        """
        return self.slots[rank * self.slots_per_rank : (rank + 1) * self.slots_per_rank]

    def lookup(
        self, device: torch.device | str = "cpu", *, owner: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Return slots_ER (padded by repeating) and replicas_E, both int64, for `slots_of_ids`.

        Args:
            device: of both; keep them, this copies from the host.
            owner: rank that owns the tokens. Each begins with another replica, so that ranks with
                few tokens do not all visit the first one.
        """
        most = max(len(held) for held in self.replicas)
        slots = [[held[(i + owner) % len(held)] for i in range(most)] for held in self.replicas]
        return (
            torch.tensor(slots, dtype=torch.int64, device=device),
            torch.tensor([len(held) for held in self.replicas], dtype=torch.int64, device=device),
        )


def slots_of_ids(ids_TK: Tensor, slots_ER: Tensor, replicas_E: Tensor) -> Tensor:
    """Return slot_TK: the slot that serves each choice, -1 for none; replicas take rows in turn.

    Args:
        ids_TK: int64, -1 for none.
        slots_ER, replicas_E: from `ExpertTable.lookup`.
    """
    index_TK = ids_TK.clamp_min(0)
    if slots_ER.shape[1] == 1:
        slot_TK = slots_ER[:, 0][index_TK]
    else:
        row_T1 = torch.arange(ids_TK.shape[0], device=ids_TK.device).unsqueeze(-1)
        slot_TK = slots_ER[index_TK, row_T1 % replicas_E[index_TK]]
    return torch.where(ids_TK >= 0, slot_TK, -1)


def balanced_table(load_E: Sequence[float], ep: int, *, extra_slots: int = 0) -> ExpertTable:
    """Return a table that evens the measured load over ranks, hot experts replicated.

    Greedy, after the published idea of DeepSeek's expert-parallel load balancer (DeepSeek-V3, arXiv
    2412.19437, section 3.4): each extra slot goes to the expert with the most load a replica; then
    the heaviest replica goes to the rank with the least load that has a free slot and does not
    hold the expert yet. A slot that would serve nothing stays empty: of an expert without load, of
    one that lies on every rank already. Ties to the lowest number: same answer on every rank.

    Args:
        load_E: measured load of each expert, any unit.
        ep: ranks.
        extra_slots: replicas to add at most; the number of slots is that of all experts and
            replicas, rounded up to a multiple of ep.
    """
    experts = len(load_E)
    if any(not load >= 0 for load in load_E):
        raise ConfigError("load_E holds a negative number or NaN; pass counts")
    if ep > experts + extra_slots:
        raise ConfigError(
            f"num_experts={experts} and extra_slots={extra_slots} fill fewer than ep={ep} ranks; "
            "choose a smaller ep or more extra_slots"
        )
    copies = [1] * experts
    for _ in range(extra_slots):
        free = [e for e in range(experts) if load_E[e] > 0 and copies[e] < ep]
        if not free:
            break
        copies[max(free, key=lambda e: (load_E[e] / copies[e], -copies[e], -e))] += 1
    pieces = [(load_E[e] / copies[e], e) for e in range(experts) for _ in range(copies[e])]
    pieces.sort(key=lambda piece: (-piece[0], piece[1]))
    per_rank = -(-(experts + extra_slots) // ep)
    held: list[list[int]] = [[] for _ in range(ep)]
    load = [0.0] * ep
    for weight, expert in pieces:
        open_ranks = [r for r in range(ep) if len(held[r]) < per_rank]
        rank = min(open_ranks, key=lambda r: (expert in held[r], load[r], len(held[r]), r))
        if expert not in held[rank]:
            held[rank].append(expert)
            load[rank] += weight
    slots = [e for mine in held for e in sorted(mine) + [-1] * (per_rank - len(mine))]
    return ExpertTable(experts, ep, tuple(slots))


def first_table(num_experts: int, ep: int, spare_slots: int = 0) -> ExpertTable:
    """Return the table before any load was measured.

    Without spare slots it is contiguous. With them every load is taken to be equal, so that the
    first experts begin with a replica.

    Args:
        num_experts: E.
        ep: ranks.
        spare_slots: slots of each rank beyond its share of the experts; on one rank they would
            serve nothing and are left out.
    """
    plain = ExpertTable(num_experts, ep)  # refuses what does not fit
    if ep == 1 or spare_slots == 0:
        return plain
    return balanced_table(
        [1.0] * num_experts, ep, extra_slots=(plain.slots_per_rank + spare_slots) * ep - num_experts
    )


def _contiguous(num_experts: int, ep: int) -> tuple[int, ...]:
    short, longer = divmod(num_experts, ep)
    per_rank = short + (longer > 0)
    slots: list[int] = []
    for rank in range(ep):
        first = rank * short + min(rank, longer)
        mine = range(first, first + short + (rank < longer))
        slots += [*mine, *[-1] * (per_rank - len(mine))]
    return tuple(slots)
