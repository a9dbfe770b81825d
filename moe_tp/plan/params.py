"""Parameter elements of a rank, by the rules with which the library builds a model.

Letters: D width · F expert hidden · E experts · V vocabulary.

A piece is what is left of one parameter after the model axes; ZeRO then splits the dimension that
`moe_tp.parallel.zero` would. Counts are those of the fullest rank (the first of its group).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from moe_tp.experts.quantized import blocks_of, bytes_of
from moe_tp.models.config import ModelConfig
from moe_tp.parallel.layout import ParallelLayout
from moe_tp.parallel.mesh import Domain
from moe_tp.plan.job import MOMENT_BYTES, Job
from moe_tp.routing.table import first_table

_SMALL, _BLOCK = 4096, 256  # elements of train/adamw.py: fewer, or no multiple, keep fp32 moments

Kind = Literal["dense", "moe", "embed", "head"]


@dataclass(frozen=True, slots=True)
class Piece:
    """One parameter on one rank before ZeRO.

    Args:
        shape: local.
        domain: the grid it lies on.
        split: dimensions that model axes have split.
        partial: its gradient owes a sum over the model axes that do not split it.
        fp32: kept in fp32, and out of ZeRO.
        adapted: LoRA puts an adapter on it: (input width, output width, copies), local.
        trained: it has a gradient in full training.
        copies: pipeline ranks that hold it.
        inputs: a model axis splits its input width rather than its outputs.
        factor: it is one of an adapter's.
        several: experts of it that lie in several slots, of this rank or of others.
    """

    shape: tuple[int, ...]
    domain: Domain = "dense"
    split: tuple[int, ...] = ()
    partial: bool = False
    fp32: bool = False
    adapted: tuple[int, int, int] | None = None
    trained: bool = True
    copies: int = 1
    inputs: bool = False
    factor: bool = False
    several: int = 0

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def matrix(self) -> bool:
        """Whether Muon is for it; adapters' factors are matrices too."""
        if len(self.shape) < 2 or (self.fp32 and self.adapted is None and not self.factor):
            return False
        return self.factor or self.adapted is not None or self.domain == "dense"

    def quantized(self, job: Job) -> bool:
        """Whether it rests in few bits."""
        few = job.mode == "lora" and job.lora_base != "loaded"
        return few and self.domain == "expert" and self.adapted is not None

    @property
    def zero_sharded(self) -> bool:
        """Whether ZeRO may split it, as `ParamSpec.zero_sharded` says."""
        return not (self.partial or self.fp32 or self.copies > 1)

    def at_rest(self, replicas: int) -> int:
        """Return the elements after ZeRO over `replicas`, as `parallel.zero` splits."""
        if replicas == 1 or not self.zero_sharded:
            return self.size
        dim = self.zero_dim(replicas)
        return self.size // self.shape[dim] * -(-self.shape[dim] // replicas)

    def zero_dim(self, replicas: int) -> int:
        """Return the dimension that ZeRO splits over `replicas`."""
        even = [dim for dim, n in enumerate(self.shape) if n % replicas == 0]
        free = [dim for dim in even if dim not in self.split]
        return (free or even or [0])[0]

    def replica_sums(self, replicas: int) -> tuple[tuple[str, ...], int]:
        """Return the axes and elements of the sum over replicas, as `parallel.replicas` takes it.

        Args:
            replicas: over which ZeRO splits; it splits the sum too, unless it deals the slots.
        """
        if replicas == 1 or not self.zero_sharded:
            return ("ep",), self.several * self.size // self.shape[0]
        if self.zero_dim(replicas) == 0:
            return ("ep", "edp"), self.several * self.size // self.shape[0]
        return ("ep",), self.several * self.at_rest(replicas) // self.shape[0]


def pieces(
    config: ModelConfig, kind: Kind, layout: ParallelLayout, spare_slots: int = 0
) -> list[Piece]:
    """Return the parameters of one layer, of the embedding, or of final norm and head.

    Args:
        config: the model.
        kind: a layer with a dense MLP or with experts, or an end of the model.
        layout: its tp, ep, etp and pp count.
        spare_slots: for replicas of experts.
    """
    dim, tp = config.dim, layout.tp
    words = -(-config.vocab_size // tp)
    if kind == "embed":
        copies = 2 if config.tie_embeddings and layout.pp > 1 else 1
        return [Piece((words, dim), split=(0,), copies=copies)]
    norm = Piece((dim,), partial=True, fp32=True)
    if kind == "head":
        if not config.tie_embeddings:
            return [norm, Piece((words, dim), split=(0,))]
        if layout.pp > 1:
            return [norm, Piece((words, dim), split=(0,), copies=2)]
        return [norm]
    found = [norm, *_attention(config, tp), norm]
    if kind == "dense":
        return found + _mlp(dim, config.dense_dim, tp)
    return found + _experts(config, layout, spare_slots)


def _attention(config: ModelConfig, tp: int) -> list[Piece]:
    a, dim = config.attention, config.dim
    heads = a.num_heads // tp
    found: list[Piece] = []

    def linear(width: int, out: int, *, adapter_out: int | None = None) -> Piece:
        return Piece((out, width), split=(0,), adapted=(width, adapter_out or out, 1))

    def whole(width: int, out: int, bias: bool) -> list[Piece]:
        made = [Piece((out, width), partial=True, adapted=(width, out, 1))]
        return made + ([Piece((out,), partial=True)] if bias else [])

    def norm(width: int) -> Piece:
        return Piece((width,), partial=True, fp32=True)

    if a.mla is not None:
        mla = a.mla
        if mla.q_rank is None:
            found.append(linear(dim, heads * mla.qk_dim))
        else:
            found += [*whole(dim, mla.q_rank, a.qkv_bias), norm(mla.q_rank)]
            found.append(linear(mla.q_rank, heads * mla.qk_dim))
        found += [*whole(dim, mla.kv_rank + mla.rope_dim, a.qkv_bias), norm(mla.kv_rank)]
        found.append(linear(mla.kv_rank, heads * (mla.nope_dim + mla.value_dim)))
        value = mla.value_dim
    else:
        split_kv = a.num_kv_heads % tp == 0
        found.append(linear(dim, heads * a.head_dim))
        if a.qkv_bias:
            found.append(Piece((heads * a.head_dim,), split=(0,)))
        for _ in ("k", "v"):
            if split_kv:
                width = a.num_kv_heads // tp * a.head_dim
                found.append(linear(dim, width))
                if a.qkv_bias:
                    found.append(Piece((width,), split=(0,)))
            else:  # whole on every rank of tp
                found += whole(dim, a.num_kv_heads * a.head_dim, a.qkv_bias)
        value = a.head_dim
        if a.qk_norm == "head":
            found += [norm(a.head_dim), norm(a.head_dim)]
        elif a.qk_norm == "full":
            kv = a.num_kv_heads // tp if split_kv else a.num_kv_heads
            for width, parted in ((heads * a.head_dim, True), (kv * a.head_dim, split_kv)):
                found.append(Piece((width,), partial=True, fp32=True, split=(0,) if parted else ()))
    found.append(
        Piece((dim, heads * value), split=(1,), adapted=(heads * value, dim, 1), inputs=True)
    )
    if a.out_bias:
        found.append(Piece((dim,), partial=True))
    if a.sinks and a.mla is None:
        found.append(Piece((heads,), split=(0,)))
    return found


def _mlp(dim: int, hidden: int, tp: int) -> list[Piece]:
    up = Piece((hidden // tp, dim), split=(0,))
    return [up, up, Piece((dim, hidden // tp), split=(1,))]


def _experts(config: ModelConfig, layout: ParallelLayout, spare_slots: int) -> list[Piece]:
    dim, moe, tp = config.dim, config.moe, layout.tp
    router = moe.router
    slots, several = _slots(router.num_experts, layout.ep, spare_slots)
    hidden = moe.expert_dim // layout.etp
    routed = Piece((router.num_experts, dim), partial=True, fp32=True, trained=not router.frozen)
    found = [routed]
    if router.linear_bias:
        found.append(
            Piece((router.num_experts,), partial=True, fp32=True, trained=not router.frozen)
        )
    if router.correction_bias:
        found.append(Piece((router.num_experts,), fp32=True, trained=False))
    found += [
        Piece((slots, 2, hidden, dim), "expert", (0, 2), adapted=(dim, 2 * hidden, slots)),
        Piece((slots, dim, hidden), "expert", (0, 2), adapted=(hidden, dim, slots), inputs=True),
    ]
    if moe.expert_bias:
        found += [
            Piece((slots, 2, hidden), "expert", (0, 2)),
            Piece((slots, dim), "expert", (0,), partial=True),
        ]
    found = [replace(p, several=several) if p.domain == "expert" else p for p in found]
    if moe.shared_dim:
        found += _mlp(dim, moe.shared_dim, tp)
        if moe.shared_gate:
            found.append(Piece((1, dim), partial=True))
    return found


@cache
def _slots(num_experts: int, ep: int, spare_slots: int) -> tuple[int, int]:
    """Return the slots of a rank, and how many experts lie in several."""
    # the first table replicates as many experts as any later one
    table = first_table(num_experts, ep, spare_slots)
    return table.slots_per_rank, sum(len(held) > 1 for held in table.replicas)


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """What one rank holds of one layer or end of the model.

    Args:
        elements: of parameters between steps.
        weights, adapters, gradients, states: bytes on the device between steps.
        trained: elements of trained parameters between steps, by domain.
        stepped: those of them that the optimiser steps on the device, not in host memory.
        casts: elements whose compute copy lies in the graph (what ZeRO does not gather).
        whole: elements that ZeRO splits, before it does, by domain.
        accumulated: elements of whole gradients that ZeRO 1 adds up, beyond the split ones.
        largest: elements of the largest trained parameter before ZeRO.
        largest_rest: of the largest that is stepped on the device, between steps.
        taken_back: elements of the largest matrix of one expert that rests in few bits.
    """

    elements: int
    weights: float
    adapters: float
    gradients: float
    states: float
    trained: dict[Domain, int]
    stepped: dict[Domain, int]
    casts: int
    whole: dict[Domain, int]
    accumulated: int
    largest: int
    largest_rest: int
    taken_back: int


def adapters(found: list[Piece], rank: int) -> list[Piece]:
    """Return LoRA's two factors of every adapted parameter, as `train/lora_layers.py` makes them.

    The factor on the side that a model axis splits is split with it; the other is whole, and its
    gradient a part of a sum. All are fp32 and out of ZeRO.

    Args:
        found: from `pieces`.
        rank: of the factors.
    """
    made = []
    for piece in found:
        if piece.adapted is None:
            continue
        width, out, count = piece.adapted
        for size, split in ((width, piece.inputs), (out, bool(piece.split) and not piece.inputs)):
            made.append(
                Piece(
                    (count, rank, size),
                    piece.domain,
                    split=(2,) if split else (),
                    partial=not split,
                    fp32=True,
                    factor=True,
                    several=piece.several,
                )
            )
    return made


def zero_ranks(layout: ParallelLayout, job: Job) -> dict[Domain, int]:
    """Return over how many ranks ZeRO splits the parameters of each domain."""
    assert layout.dp is not None
    if not layout.zero:
        return {"dense": 1, "expert": 1}
    experts = layout.edp // job.dp_replicate if layout.edp > 1 else 1
    return {"dense": layout.dp * layout.cp // job.dp_replicate, "expert": experts}


def hold(
    config: ModelConfig, kind: Kind, found: list[Piece], layout: ParallelLayout, job: Job
) -> Holding:
    """Return what the fullest rank holds of one layer or end of the model.

    Args:
        config: the model.
        kind: which part.
        found: its `pieces`.
        layout: resolved.
        job: the run.
    """
    replicas, full = zero_ranks(layout, job), job.mode == "full"
    sharded, ends = layout.zero > 0, kind in ("embed", "head")
    base = job.master_bytes if full else job.compute_bytes

    def at_rest(piece: Piece) -> int:
        return piece.at_rest(replicas[piece.domain]) if sharded else piece.size

    # elements between steps, and bytes of one; whether ZeRO splits it, whether it lies on the host
    held = [
        (p, at_rest(p), 4 if p.fp32 else base, split, split and job.offload)
        for p, split in ((p, sharded and p.zero_sharded) for p in found)
    ]
    added = [] if full else adapters(found, job.lora_rank)
    trained = [each for each in held if each[0].trained]
    if not full:
        trained = [(p, at_rest(p), 4, False, False) for p in added]
    stepped = [(p, rest, width) for p, rest, width, _, host in trained if not host]
    quantized = [p for p in found if p.quantized(job)]

    def weight(piece: Piece, rest: int, width: int) -> float:
        if piece in quantized:
            blocks = blocks_of(config.dim, config.moe.expert_dim, layout.etp, job.lora_base)
            block = blocks["down" if piece.inputs else "gate_up"]
            return bytes_of(piece.size, job.lora_base, block)
        return rest * width

    return Holding(
        elements=sum(rest for _, rest, *_ in held),
        weights=float(sum(weight(p, rest, width) for p, rest, width, _, host in held if not host)),
        taken_back=max((p.size // p.shape[0] for p in quantized), default=0),
        adapters=float(sum(p.size * 4 for p in added)),
        gradients=float(sum(rest * width for _, rest, width in stepped)),
        states=sum(_state(p, rest, width, job, ends) for p, rest, width in stepped),
        trained=_by_domain((p, rest) for p, rest, *_ in trained),
        stepped=_by_domain((p, rest) for p, rest, _ in stepped),
        casts=sum(p.size for p, _, _, split, _ in held if not (p.fp32 or split)),
        whole=_by_domain((p, p.size) for p, _, _, split, _ in held if split),
        accumulated=sum(p.size - rest for p, rest, _, split, _ in trained if split) if full else 0,
        largest=max((p.size for p, *_ in trained), default=0),
        largest_rest=max((rest for _, rest, _ in stepped), default=0),
    )


def _by_domain(found: Iterable[tuple[Piece, int]]) -> dict[Domain, int]:
    """Return sums of elements by domain."""
    sums: dict[Domain, int] = {"dense": 0, "expert": 0}
    for piece, elements in found:
        sums[piece.domain] += elements
    return sums


def _state(piece: Piece, size: int, width: int, job: Job, ends: bool) -> float:
    """Return the optimiser's bytes for `size` elements, as `train/optim.py` makes them."""
    if job.optimizer == "sgd":
        return float(size * width)
    each = MOMENT_BYTES[job.moments]
    if job.moments == "8bit" and (size < _SMALL or size % _BLOCK):
        each = 4.0
    matrix = not ends and piece.matrix
    return size * each * (1 if job.optimizer == "muon" and matrix else 2)


def owed_bytes(found: list[Piece], job: Job, *, zero: bool) -> dict[tuple[str, ...], int]:
    """Return the bytes, in fp32, of gradients that `settle_gradients` sums, by axes.

    Args:
        found: parameters of one part.
        job: the run.
        zero: ZeRO sums what it splits.
    """
    owed: dict[tuple[str, ...], int] = {}
    for piece in found if job.mode == "full" else adapters(found, job.lora_rank):
        if not piece.trained or (zero and piece.zero_sharded):
            continue
        axes: tuple[str, ...]
        if piece.domain == "expert":
            axes = ("edp", "etp") if piece.partial else ("edp",)
        else:
            axes = ("stage",) if piece.partial and not piece.split else ("dp_cp",)
        if piece.copies > 1:
            axes += ("pp_ends",)
        owed[axes] = owed.get(axes, 0) + 4 * piece.size
    return owed
