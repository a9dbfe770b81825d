"""What is planned for: the run's sizes and settings, and whether a layout serves a model.

Nothing here starts a rank or allocates a weight.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Literal, get_args

from moe_tp.errors import ConfigError
from moe_tp.experts.quantized import blocks_of
from moe_tp.models.config import ModelConfig
from moe_tp.parallel.context.sequence import padded_length
from moe_tp.parallel.context.ulysses import check_heads
from moe_tp.parallel.layout import (
    ContextKind,
    ParallelLayout,
    Recompute,
    Runtime,
    check_sharding,
)
from moe_tp.parallel.pipeline.stages import num_stages
from moe_tp.routing.table import ExpertTable

Mode = Literal["full", "lora"]
Base = Literal["loaded", "int8", "int4"]
Optimizer = Literal["adamw", "muon", "sgd"]  # as in the train section of a run
Moments = Literal["float32", "bfloat16", "8bit"]
Kernel = Literal["loop", "foreach", "fused"]
MOMENT_BYTES: dict[Moments, float] = {"float32": 4.0, "bfloat16": 2.0, "8bit": 1.0 + 4.0 / 256}
_CHOICES = {
    "mode": Mode,
    "lora_base": Base,
    "recompute": Recompute,
    "optimizer": Optimizer,
    "moments": Moments,
    "kernel": Kernel,
    "cp_kind": ContextKind,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A training run without its layout.

    Args:
        mode: train everything in fp32 with bf16 compute, or LoRA over frozen bf16 weights.
        seq_len: tokens a sequence.
        global_batch: sequences of an optimiser step.
        micro_batch: sequences a data-parallel replica takes at a time.
        recompute: activations that backward computes again.
        resend_rows: selective recompute sends rows to experts again, instead of keeping them.
        optimizer, moments: what its states are.
        kernel: of AdamW with fp32 weights and moments; `foreach`, torch's choice on a GPU, holds
            the denominators of all weights at once.
        offload: what ZeRO shards rests in host memory, with its gradients and states.
        dp_replicate: replicas of what ZeRO shards (HSDP).
        cp_kind: attention exchange over cp.
        compute_bytes: of an element of activations and compute copies.
        master_bytes: of a trained parameter at rest; its gradient takes as many.
        spare_slots: of each rank of ep beyond its share of the experts, for replicas of hot ones.
        lora_rank: of adapters on attention and experts; adapters are fp32.
        lora_base: what the experts' frozen weights are kept in: `loaded` (bf16), `int8` or `int4`.
        loss_chunk: tokens whose logits are held at a time.
        skew: rows and pairs of the busiest rank over the mean, in all layers together.
        layer_skew: the same in its fullest layer; None takes `skew`.
        margin: fraction added for fragmentation.
        reserve: bytes of the context and of communication buffers.

    Raises:
        ConfigError: a value is outside its range.
    """

    mode: Mode = "full"
    seq_len: int = 4096
    global_batch: int = 256
    micro_batch: int = 1
    recompute: Recompute = "none"
    resend_rows: bool = False
    optimizer: Optimizer = "adamw"
    moments: Moments = "float32"
    kernel: Kernel = "foreach"
    offload: bool = False
    dp_replicate: int = 1
    cp_kind: ContextKind = "ulysses"
    spare_slots: int = 0
    compute_bytes: int = 2
    master_bytes: int = 4
    lora_rank: int = 16
    lora_base: Base = "loaded"
    loss_chunk: int = 1024
    skew: float = 1.25
    layer_skew: float | None = None
    margin: float = 0.05
    reserve: float = 1.5e9

    def __post_init__(self) -> None:
        for name, kind in _CHOICES.items():
            if getattr(self, name) not in get_args(kind):
                raise ConfigError(
                    f"{name}={getattr(self, name)!r} is not one of {', '.join(get_args(kind))}"
                )
        counts = ("seq_len", "global_batch", "micro_batch", "dp_replicate", "lora_rank")
        for name in (*counts, "loss_chunk"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        if self.spare_slots < 0:
            raise ConfigError(f"spare_slots={self.spare_slots} must be at least 0")
        for name in ("skew", "layer_skew"):
            value = getattr(self, name)
            if value is not None and not 1.0 <= value < math.inf:
                raise ConfigError(f"{name}={value} is the busiest rank over the mean: at least 1")
        self._check_together()

    def _check_together(self) -> None:
        """Refuse settings that do not go together, as a run would."""
        if self.micro_batch > self.global_batch:
            raise ConfigError(
                f"micro_batch={self.micro_batch} is more than global_batch={self.global_batch}, "
                f"so no rank would have a full one; choose micro_batch <= {self.global_batch}"
            )
        if self.mode == "full" and self.lora_base != "loaded":
            raise ConfigError(
                f"lora_base={self.lora_base!r} is for frozen weights, but mode='full' trains all; "
                f"choose mode='lora', or leave it out"
            )
        if self.lora_base != "loaded" and (self.offload or self.dp_replicate > 1):
            what = "offload" if self.offload else f"dp_replicate={self.dp_replicate}"
            raise ConfigError(
                f"lora_base={self.lora_base!r} is not sharded by ZeRO, and {what} is about what "
                f"ZeRO shards; leave one of them out"
            )
        if self.mode == "lora" and self.master_bytes != 4:
            raise ConfigError(
                f"master_bytes={self.master_bytes} is of trained weights, but adapters stay in "
                f"fp32; leave it (--bf16-weights) out with mode='lora'"
            )
        if self.optimizer == "sgd" and self.moments != "float32":
            raise ConfigError(
                f"moments={self.moments!r} is for adamw and muon; leave it out with sgd"
            )

    @property
    def runtime(self) -> Runtime:
        """The runtime that the job asks for, as far as layouts depend on it."""
        return Runtime(
            recompute=self.recompute,
            resend_rows=self.resend_rows,
            cp_kind=self.cp_kind,
            offload=self.offload,
            dp_replicate=self.dp_replicate,
            spare_slots=self.spare_slots,
        )

    def micro_batches(self, layout: ParallelLayout) -> int:
        """Return the micro-batches of a step."""
        assert layout.dp is not None
        return -(-self.global_batch // (layout.dp * self.micro_batch))

    def owned_tokens(self, layout: ParallelLayout) -> int:
        """Return T, the tokens of a micro-batch that each rank owns, padding included."""
        length = padded_length(self.seq_len, layout.cp) // layout.cp
        return -(-self.micro_batch * length // layout.tp)


def check(config: ModelConfig, layout: ParallelLayout, job: Job) -> None:
    """Refuse a resolved layout that the library would refuse for this model, or that idles ranks.

    Args:
        config: the model.
        layout: with `dp` filled in.
        job: the run.

    Raises:
        ConfigError: names the setting and the values that fit.
    """
    attention, moe, tp = config.attention, config.moe, layout.tp
    _divides("num_attention_heads", attention.num_heads, "tp", tp)
    if config.dense_layers:
        _divides("intermediate_size of dense layers", config.dense_dim, "tp", tp)
    if moe.shared_dim:
        _divides("hidden size of the shared expert", moe.shared_dim, "tp", tp)
    if attention.qk_norm == "full" and attention.num_kv_heads % tp == 0:
        _divides("width of the query norm", attention.num_heads * attention.head_dim, "tp", tp)
    _divides("expert_dim", moe.expert_dim, "etp", layout.etp)
    if config.moe_layers and layout.ep > moe.router.num_experts:
        ExpertTable(moe.router.num_experts, layout.ep)  # raises, with the fix
    if layout.cp > 1:
        if attention.dropout:
            raise ConfigError(
                f"attention_dropout={attention.dropout} is not supported with cp={layout.cp}; "
                f"choose cp=1"
            )
        if job.cp_kind == "ulysses":
            check_heads(attention.num_heads // tp, layout.cp)
    if num_stages(layout, job.runtime) > config.num_layers:
        raise ConfigError(
            f"{layout.pp} pipeline stages are more than the model's {config.num_layers} layers; "
            f"lower pp"
        )
    assert layout.dp is not None
    if layout.dp * job.micro_batch > job.global_batch:
        raise ConfigError(
            f"dp={layout.dp} replicas of {job.micro_batch} sequences are more than "
            f"global_batch={job.global_batch}, so some would have no work; raise the batch, or "
            f"tp, cp or pp"
        )
    check_sharding(layout, job.runtime)
    if job.mode == "lora" and job.lora_base != "loaded":
        blocks_of(config.dim, moe.expert_dim, layout.etp, job.lora_base)
        if layout.zero:
            raise ConfigError(
                f"lora_base={job.lora_base!r} is not sharded by zero={layout.zero}; choose 0"
            )
    if layout.zero and layout.dp * layout.cp == 1 and layout.edp == 1 and not job.offload:
        raise ConfigError(f"zero={layout.zero} has nothing to shard over one replica; choose 0")


def _divides(what: str, size: int, axis: str, degree: int) -> None:
    if size % degree:
        raise ConfigError(
            f"{what}={size} does not split over {axis}={degree}; choose {axis} among "
            f"{divisors(size)}"
        )


@cache
def divisors(number: int) -> list[int]:
    """Return all divisors, rising."""
    low = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*low, *(number // d for d in low)})
