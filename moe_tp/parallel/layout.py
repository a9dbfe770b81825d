"""The parallel degrees of a run (`ParallelLayout`) and the way they are run (`Runtime`)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch

from moe_tp.errors import ConfigError

Recompute = Literal["none", "selective", "full"]
ContextKind = Literal["ulysses", "ring"]
PipelineSchedule = Literal["gpipe", "1f1b", "interleaved_1f1b", "zbv"]

_DEGREES = ("dp", "cp", "tp", "pp", "ep", "etp")


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """Degrees of parallelism over the ranks of a run.

    The same ranks are seen twice: as the dense grid `(pp, dp, cp, tp)` and as the expert grid
    `(pp, edp, ep, etp)`, both row-major, with `dp * cp * tp == edp * ep * etp`. `ep` and `etp`
    are free of `tp`.

    Args:
        dp: data-parallel replicas; None fills the world.
        cp: ranks that share a sequence.
        tp: ranks that split attention, vocabulary and dense layers.
        pp: pipeline stages.
        ep: ranks that share the experts of a layer.
        etp: ranks that split each expert.
        zero: ZeRO stage 0-3 over dp x cp (experts: over edp).

    Raises:
        ConfigError: a degree is not a positive whole number, or zero is not 0-3.
    """

    dp: int | None = None
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    zero: int = 0

    def __post_init__(self) -> None:
        for name in _DEGREES:
            value = getattr(self, name)
            if name == "dp" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name}={value!r} must be a whole number of at least 1")
        if isinstance(self.zero, bool) or self.zero not in (0, 1, 2, 3):
            raise ConfigError(f"zero={self.zero!r} is no ZeRO stage; choose 0, 1, 2 or 3")

    def resolve(self, world_size: int) -> ParallelLayout:
        """Return the layout with `dp` filled in for `world_size` ranks.

        Raises:
            ConfigError: the degrees do not fill `world_size` exactly.
        """
        if world_size < 1:
            raise ConfigError(f"world_size={world_size} must be at least 1")
        rest = self.cp * self.tp * self.pp
        if world_size % rest:
            raise ConfigError(
                f"cp*tp*pp={rest} does not divide the {world_size} ranks that were started; "
                f"start a multiple of {rest} ranks or lower cp, tp or pp"
            )
        dp = world_size // rest
        if self.dp is not None and self.dp != dp:
            raise ConfigError(
                f"dp*cp*tp*pp={self.dp * rest} is not the {world_size} ranks that were started; "
                f"choose dp={dp} (or leave dp out), or start {self.dp * rest} ranks"
            )
        stage = dp * self.cp * self.tp
        if stage % (self.ep * self.etp):
            raise ConfigError(
                f"ep*etp={self.ep * self.etp} does not divide dp*cp*tp={stage}, the ranks of a "
                f"stage; choose ep*etp among the divisors of {stage}"
            )
        return replace(self, dp=dp)

    @property
    def stage_size(self) -> int:
        """Ranks of one pipeline stage, each the owner of its own tokens."""
        if self.dp is None:
            raise ConfigError("dp is not known yet; call resolve(world_size) first")
        return self.dp * self.cp * self.tp

    @property
    def edp(self) -> int:
        """Ranks that hold the same expert shard."""
        return self.stage_size // (self.ep * self.etp)

    @property
    def world_size(self) -> int:
        """All ranks of the layout."""
        return self.stage_size * self.pp

    def __str__(self) -> str:
        parts = [f"{n}{getattr(self, n)}" for n in _DEGREES if getattr(self, n) not in (None, 1)]
        if self.zero:
            parts.append(f"zero{self.zero}")
        return " ".join(parts) or "one process"


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """How a layout is run; nothing here changes the answer beyond rounding.

    Args:
        compute_dtype: dtype of matmuls and activations; None keeps the parameters' dtype.
            float16 is for answers: `moe-tp finetune`, which does not scale the loss, refuses it.
        master_dtype: dtype in which parameters lie between steps; None keeps the loaded dtype, and
            is float32 in `moe-tp finetune`, whatever the folder holds.
        recompute: activations that backward computes again.
        resend_rows: under selective recompute send rows to experts again in backward, instead of
            keeping them.
        pp_schedule: pipeline schedule.
        virtual_stages: model pieces a pipeline rank holds (interleaved; ZBV has always 2).
        stage_layers: layers of each stage, in order; None divides them by cost.
        cp_kind: attention exchange over cp.
        dp_replicate: replicas of what ZeRO shards (HSDP): parameters are sharded within each of
            that many runs of neighbouring ranks (nodes, say) and replicated across them. 1 shards
            over all replicas.
        offload: keep parameters and optimiser state in host memory.
        deterministic: only bitwise repeatable kernels, by `torch.use_deterministic_algorithms`
            for the whole process; on CPUs runs repeat bit by bit without it.
        dispatcher: `auto` or the name of a dispatcher of `moe_tp.experts`.
        experts: `auto` or the name of an expert back end of `moe_tp.experts`.
        wire_dtype: dtype in which partial expert sums travel back; None means fp32.
        spare_slots: slots for experts of each rank of ep beyond its share: replicas of hot experts.
        dispatch_rows: rows that a rank may receive at a time from a dispatcher; None: any number.
        loss_chunk: tokens whose logits are held at a time by the loss.
        overlap: send expert rows while other work of the layer runs.
        timeout: seconds before a collective that does not finish is an error.

    Raises:
        ConfigError: a value is outside its set.
    """

    compute_dtype: torch.dtype | None = None
    master_dtype: torch.dtype | None = None
    recompute: Recompute = "none"
    resend_rows: bool = False
    pp_schedule: PipelineSchedule = "1f1b"
    virtual_stages: int = 1
    stage_layers: tuple[int, ...] | None = None
    cp_kind: ContextKind = "ulysses"
    dp_replicate: int = 1
    offload: bool = False
    deterministic: bool = False
    dispatcher: str = "auto"
    experts: str = "auto"
    wire_dtype: torch.dtype | None = None
    spare_slots: int = 0
    dispatch_rows: int | None = None
    loss_chunk: int = 1024
    overlap: bool = True
    timeout: float = 600.0

    def __post_init__(self) -> None:
        for name, kind in (
            ("recompute", Recompute),
            ("cp_kind", ContextKind),
            ("pp_schedule", PipelineSchedule),
        ):
            value = getattr(self, name)
            if value not in get_args(kind):
                raise ConfigError(f"{name}={value!r} is not one of {', '.join(get_args(kind))}")
        for name in ("virtual_stages", "dp_replicate", "loss_chunk"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name}={value!r} must be a whole number of at least 1")
        if self.spare_slots < 0:
            raise ConfigError(f"spare_slots={self.spare_slots} must be at least 0")
        for name in ("compute_dtype", "master_dtype", "wire_dtype"):
            value = getattr(self, name)
            known = isinstance(value, torch.dtype) and value.is_floating_point
            if known and name != "wire_dtype":
                known = value.itemsize > 1  # nothing adds or multiplies numbers of 8 bits
            if value is not None and not known:
                raise ConfigError(
                    f"{name}={value!r} is no floating-point dtype to compute in; choose "
                    f"torch.bfloat16, say"
                )
        if self.dispatch_rows is not None and self.dispatch_rows < 1:
            raise ConfigError(f"dispatch_rows={self.dispatch_rows} must be at least 1, or None")
        if not math.isfinite(self.timeout) or self.timeout <= 0:
            raise ConfigError(f"timeout={self.timeout} must be a positive number of seconds")


def check_sharding(layout: ParallelLayout, runtime: Runtime) -> None:
    """Refuse what ZeRO cannot do in a resolved layout.

    Raises:
        ConfigError: `dp_replicate` or `offload` without ZeRO, or `dp_replicate` does not divide
            the replicas of dense parameters or of experts.
    """
    replicate = runtime.dp_replicate
    if replicate > 1 and layout.zero == 0:
        raise ConfigError(
            f"dp_replicate={replicate} says how ZeRO shards, but zero=0 shards nothing; choose "
            f"zero=1, 2 or 3, or leave dp_replicate out"
        )
    assert layout.dp is not None
    if layout.dp % replicate:
        raise ConfigError(
            f"dp_replicate={replicate} does not divide dp={layout.dp}; choose dp_replicate among "
            f"the divisors of {layout.dp}"
        )
    # Experts that lie on one rank each have no replicas: nothing to shard, nothing to replicate.
    if layout.edp > 1 and layout.edp % replicate:
        raise ConfigError(
            f"dp_replicate={replicate} does not divide edp={layout.edp}, the ranks that hold the "
            f"same experts; choose dp_replicate among the divisors of {layout.edp}, or lower ep "
            f"or etp so that each of the {replicate} parts holds all experts"
        )
    if runtime.offload and layout.zero == 0:
        raise ConfigError(
            "offload=True moves what ZeRO shards to host memory, but zero=0 shards nothing; "
            "choose zero=1, 2 or 3 (on any number of ranks, also one)"
        )
