"""Low-rank terms beside frozen weights, in activation space: `y += s (x A^T) B^T`.

Letters: T owned tokens · N tokens of the tp group · D width · F expert hidden · E experts · r rank.

No product of B and A is formed, so nothing as large as a weight is made or kept. What travels is r
wide, and what a gradient owes follows from where its factor stands:

| base          | A                          | B                         | over tp                |
|---------------|----------------------------|---------------------------|------------------------|
| split outputs | whole, on owned tokens     | split like the outputs    | all-gather of `x A^T`  |
| split inputs  | split like the inputs      | whole, on owned tokens    | scatter of `x A^T`     |
| whole         | whole, on owned tokens     | whole, on owned tokens    | nothing                |
| experts, etp  | gate and up: whole, a part | split like F              | nothing: B's linearity |
|               | down: split like F         | whole, a part             | nothing                |

With DoRA (`moe_tp.train.lora_dora`) the sum is then scaled for each output by `m / ||W + s B A||`,
whose m lies as B does.

Whole factors see a part of the sum on each rank, so their specs say `partial`. All are kept in fp32
(fp64 for fp64) and never sharded by ZeRO: each is reduced by itself.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
import torch.nn.functional as F

from moe_tp.experts.grouped import LowRank
from moe_tp.experts.layer import GroupedExperts
from moe_tp.experts.row_dropout import RowDropout
from moe_tp.models.blocks import Call
from moe_tp.models.heads import HeadLinear
from moe_tp.parallel.collectives import all_gather, raw_all_gather
from moe_tp.parallel.functions import working_dtype
from moe_tp.parallel.linear import ColumnParallelLinear, RowParallelLinear, linear_scatter
from moe_tp.parallel.parameter import ParallelModule
from moe_tp.parallel.random import dropout, key_of
from moe_tp.parallel.shards import local_index, to_local
from moe_tp.parallel.spec import ONES, ZEROS, Init, ParamSpec
from moe_tp.train.lora_dora import row_lengths

Flow = Literal["gather", "scatter", "owned"]


def _init_a(width: int) -> Init:
    """Return the variance of PEFT's A (uniform after He, arXiv:1502.01852, with a = sqrt 5)."""
    return Init(value=(3 * width) ** -0.5)


class LinearLowRank(ParallelModule):
    """The term of one linear module: `a [r, in]` and `b [out, r]`.

    Args:
        base: the module that it stands beside.
        rank: r.
        scale: s, alpha / r or alpha / sqrt r.
        drop: probability of dropping an element of the input.
        layer: number of the layer, for the dropout's key.
        site: name of the base parameter, for the dropout's key.
        dora: with a length for each output, `m [out]`.
    """

    def __init__(
        self,
        base: ParallelModule,
        rank: int,
        scale: float,
        *,
        drop: float,
        layer: int,
        site: str,
        dora: bool = False,
    ) -> None:
        super().__init__(base.mesh)
        self._base = (base,)  # a tuple: the base holds this module, not the other way round
        self.scale, self.drop, self.layer, self.site = scale, drop, layer, site
        self.call: Call | None = None
        spec = base.specs["weight"]
        out, width = spec.shape
        self.rows = base.rows if isinstance(base, HeadLinear) else None
        self.flow: Flow = "owned"
        if isinstance(base, HeadLinear | ColumnParallelLinear):
            self.flow = "gather"
        elif isinstance(base, RowParallelLinear):
            self.flow = "scatter"
        dtype = to_local(base.get_parameter("weight")).dtype
        splits = {axis: 0 for axis, dim in spec.shards.items() if dim == 0}
        self.add_parameter(
            "b",
            ParamSpec(
                shape=(out, rank), shards=splits, partial=not splits, init=ZEROS, keep_fp32=True
            ),
            dtype,
        )
        splits = {axis: 1 for axis, dim in spec.shards.items() if dim == 1}
        self.add_parameter(
            "a",
            ParamSpec(
                shape=(rank, width),
                shards=splits,
                partial=not splits,
                init=_init_a(width),
                keep_fp32=True,
            ),
            dtype,
        )
        if dora:
            spec = self.specs["b"]
            self.add_parameter("m", replace(spec, shape=(out,), init=ONES, role="norm"), dtype)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return what becomes of the base's product.

        Args:
            x: the base's input: owned tokens `[T, in]`, or `[N, in / tp]` of split inputs.
            y: the base's product for it, with its bias.

        Collectives: over tp, all-gather or reduce-scatter of `[N, r]`, and its dual; with DoRA on
        split inputs, an all-reduce of `[out]`.
        """
        x = self._dropped(x)
        a, b = self.local("a").to(x.dtype), self.local("b").to(x.dtype)
        group = self.mesh.group("tp")
        low = linear_scatter(x, a, None, group) if self.flow == "scatter" else F.linear(x, a)
        if self.flow == "gather":
            low = all_gather(low, group)
            b = b if self.rows is None else b[self.rows]
        term = F.linear(low, b) * self.scale
        return y + term if "m" not in self.specs else self._rescaled(y, term)

    def _rescaled(self, y: torch.Tensor, term: torch.Tensor) -> torch.Tensor:
        """Return the product with each output at DoRA's length; the bias is left as it is."""
        (base,) = self._base
        part = slice(None) if self.rows is None else self.rows
        lengths = row_lengths(
            to_local(base.get_parameter("weight"))[part],
            to_local(self.get_parameter("a")),
            to_local(self.get_parameter("b"))[part],
            self.scale,
            self.mesh.group("tp") if self.flow == "scatter" else None,
        )
        ratio = self.local("m")[part] / lengths
        plain = y - base.local("bias")[part] if "bias" in base.specs else y
        # ratio - 1 is rounded, not ratio: in bf16 a length that has hardly moved would be lost
        return y + (ratio - 1.0).to(y.dtype) * plain + ratio.to(y.dtype) * term

    def _dropped(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input with elements dropped by token, feature, step and site."""
        if not (self.training and self.drop):
            return x
        assert self.call is not None, "the block's hook has not run"
        ids, features = self.call.tokens.token_ids_T, None
        if self.flow == "scatter":
            ids = raw_all_gather(ids, self.mesh.group("tp"))
            first = self.mesh.coordinate("tp") * x.shape[1]
            features = torch.arange(first, first + x.shape[1], device=x.device)
        key = self.call.key(self.layer, f"lora/{self.site}", ids)
        return dropout(x, self.drop, key, features=features)


class ExpertLowRank(ParallelModule):
    """The terms of all experts of a layer, each expert with its own factors.

    Gate and up share A, as they are one parameter in transformers 5 and so in PEFT.

    Args:
        base: the experts.
        rank: r.
        scale: s, alpha / r or alpha / sqrt r.
        gate_up, down: which projections are adapted.
        drop: probability of dropping an element of an input, by token and expert.
        layer: number of the layer, for the dropout's key.
    """

    def __init__(
        self,
        base: GroupedExperts,
        rank: int,
        scale: float,
        *,
        gate_up: bool,
        down: bool,
        drop: float = 0.0,
        layer: int = 0,
    ) -> None:
        super().__init__(base.mesh)
        self.scale, self.drop, self.layer = scale, drop, layer
        self.call: Call | None = None
        weight = base.specs["gate_up"]
        self._base_dtype = base.dtype
        self._slots = weight.slots
        experts, _, hidden, width = weight.shape
        self._first = self.mesh.coordinate("etp") * (hidden // self.mesh.size("etp"))
        split, whole = {"ep": 0, "etp": 2}, {"ep": 0}
        if gate_up:
            self._add("gate_up_a", (experts, 1, rank, width), whole, _init_a(width))
            self._add("gate_up_b", (experts, 2, hidden, rank), split, ZEROS)
        if down:
            self._add("down_a", (experts, rank, hidden), split, _init_a(hidden))
            self._add("down_b", (experts, width, rank), whole, ZEROS)

    def _add(self, name: str, shape: tuple[int, ...], shards: dict[str, int], init: Init) -> None:
        spec = ParamSpec(
            shape=shape,
            shards=shards,
            domain="expert",
            # whole on every etp rank, which sees a part of F
            partial="etp" not in shards,
            init=init,
            keep_fp32=True,
            slots=self._slots,
        )
        self.add_parameter(name, spec, self._base_dtype)

    def terms(self) -> LowRank:
        """Return this rank's low-rank terms in the compute dtype."""
        runtime = self.mesh.runtime
        dtype = working_dtype(runtime.compute_dtype, self._base_dtype, self.mesh.device)
        factors = {name: self.local(name).to(dtype) for name in self.specs}
        if runtime.experts == "grouped_mm" or self.mesh.device.type == "cuda":
            factors = {name: _aligned(name, value) for name, value in factors.items()}
        return LowRank(scale=self.scale, dropout=self._dropout(), **factors)

    @property
    def keyed(self) -> bool:
        """Whether elements are dropped now, by the tokens that the rows belong to."""
        return self.training and self.drop > 0.0

    def _dropout(self) -> RowDropout | None:
        if not self.keyed:
            return None
        assert self.call is not None, "the block's hook has not run"
        name = next(iter(self.specs))
        (expert_e, *_) = local_index(self.get_parameter(name), self.specs[name])
        gate_up, down = (
            key_of(self.call.seed, self.call.step, self.layer, f"lora/experts.{site}")
            for site in ("gate_up", "down")
        )
        return RowDropout(
            p=self.drop,
            gate_up=gate_up,
            down=down,
            expert_e=expert_e.to(self.mesh.device),
            first=self._first,
        )


def _aligned(name: str, factor: torch.Tensor) -> torch.Tensor:
    """Return a factor with zeros up to a rank whose rows are multiples of 16 bytes.

    Grouped matrix products of torch take no others.
    """
    dim = -2 if name.endswith("_a") else -1
    missing = -factor.shape[dim] % (16 // factor.element_size())
    return F.pad(factor, (0, 0, 0, missing) if dim == -2 else (0, missing))
