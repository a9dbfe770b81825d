"""The moments of a step at which a rank may be fullest, and their bytes by part."""

from __future__ import annotations

from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Literal, NamedTuple

from moe_tp.plan.job import Job
from moe_tp.plan.stages import Stage

Moment = Literal["loss", "backward", "end", "settle", "update"]
Resident = tuple[float, float, float, float]  # weights, adapters, gradients, states


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of one rank at one moment of a step.

    Args:
        stage: pipeline rank.
        moment: `loss`, `backward` (of the last layer), `end` (of a backward that is the step's
            only one), `settle` or `update`.
        weights: the model's parameters between steps.
        adapters: LoRA's, in fp32.
        copies: of the parameters in the compute dtype, or gathered by ZeRO.
        gradients, states: of what is trained; `states` of the optimiser.
        activations: kept for backward, all micro-batches in flight.
        dispatch: rows and sums of the experts.
        working: one layer's backward, with what it computes again.
        logits: chunk of logits, and the gradients that the loss takes with it.
        settle: flat buffers of gradient sums.
        update: what the optimiser holds besides its states.
        margin: fragmentation, context, communication buffers.
    """

    stage: int
    moment: Moment
    weights: float
    adapters: float
    gradients: float
    states: float
    copies: float = 0.0
    activations: float = 0.0
    dispatch: float = 0.0
    working: float = 0.0
    logits: float = 0.0
    settle: float = 0.0
    update: float = 0.0
    margin: float = 0.0

    @property
    def resident(self) -> float:
        """Bytes that lie there between the passes of a step."""
        return self.weights + self.adapters + self.gradients + self.states

    @property
    def total(self) -> float:
        """All bytes."""
        found: tuple[float, ...] = _values(self)
        return sum(found)

    def parts(self) -> dict[str, float]:
        """Return bytes by part."""
        return dict(zip(_PARTS, _values(self), strict=True))


_PARTS = (
    "weights", "adapters", "copies", "gradients", "states", "activations", "dispatch", "working",
    "logits", "settle", "update", "margin",
)  # fmt: skip
_values = attrgetter(*_PARTS)
_SIZES = tuple(field.name for field in fields(Memory))[2:]


class Fullness(NamedTuple):
    """Bytes of one moment: all of them, and the fields of `Memory` from `weights` to `margin`."""

    total: float
    name: Moment
    sizes: tuple[float, ...]

    def memory(self, stage: Stage) -> Memory:
        """Return it as of a pipeline rank."""
        sizes = dict(zip(_SIZES, self.sizes, strict=True))
        return Memory(stage=stage.rank, moment=self.name, **sizes)


def fullness(
    job: Job,
    name: Moment,
    resident: Resident,
    copies: float = 0.0,
    activations: float = 0.0,
    dispatch: float = 0.0,
    working: float = 0.0,
    logits: float = 0.0,
    settle: float = 0.0,
    update: float = 0.0,
) -> Fullness:
    """Return the bytes of one moment, with the job's margin and reserve.

    Args:
        job: the run.
        name: of the moment.
        resident: bytes between the passes of a step.
        copies, activations, dispatch, working, logits, settle, update: as in `Memory`.
    """
    weights, adapters, gradients, states = resident
    passing = copies + activations + dispatch + working + logits + settle + update
    margin = weights + adapters + gradients + states + passing
    margin = margin * job.margin + job.reserve
    total = weights + adapters + copies + gradients + states + activations + dispatch
    total = total + working + logits + settle + update + margin
    passed = (copies, activations, dispatch, working, logits, settle, update)
    return Fullness(total, name, (*resident, *passed, margin))
