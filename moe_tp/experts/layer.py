"""The experts of one layer as parameters on a mesh.

Letters: R rows · D width · F expert hidden · E experts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch
from torch import nn

from moe_tp.errors import ConfigError
from moe_tp.experts.activation import Activation, SwiGLU
from moe_tp.experts.dispatch import Received
from moe_tp.experts.grouped import BACKENDS, Backend, LowRank, experts_forward
from moe_tp.experts.quantized import Kind, QuantizedStack, blocks_of
from moe_tp.parallel.functions import working_dtype
from moe_tp.parallel.mesh import Mesh
from moe_tp.parallel.parameter import ParallelModule
from moe_tp.parallel.shards import to_local
from moe_tp.parallel.spec import ZEROS, Init, ParamSpec
from moe_tp.routing.table import ExpertTable

_WEIGHTS = ("gate_up", "down")


class Adapter(Protocol):
    """What LoRA puts on the experts: `GroupedExperts.adapter` holds one."""

    @property
    def keyed(self) -> bool:
        """Whether its terms depend on the tokens, whose identity must travel with the rows."""
        ...

    def terms(self) -> LowRank:
        """Return this rank's low-rank terms, on the autograd path, in the compute dtype."""
        ...


class GroupedExperts(ParallelModule):
    """All experts of a layer: `gate_up [E, 2, F, D]` and `down [E, D, F]`.

    E is split over ep (by the expert table's slots), F over etp. While `quantized` is set both are
    frozen and lie there (see `moe_tp.experts.quantized`), and the parameters are None.

    Args:
        dim: D.
        expert_dim: F, over all ranks.
        table: which slot holds which expert.
        mesh: the mesh.
        dtype: parameter dtype.
        bias: biases on both projections.
        activation: of gate and up.
        init: first values of the weights.

    Raises:
        ConfigError: etp does not divide F, or the mesh's back end is unknown.
    """

    def __init__(
        self,
        dim: int,
        expert_dim: int,
        table: ExpertTable,
        mesh: Mesh,
        *,
        dtype: torch.dtype = torch.float32,
        bias: bool = False,
        activation: Activation | None = None,
        init: Init | None = None,
    ) -> None:
        super().__init__(mesh)
        etp, experts = mesh.size("etp"), table.num_experts
        if expert_dim % etp:
            raise ConfigError(
                f"expert_dim={expert_dim} does not split over etp={etp}; choose etp among the "
                f"divisors of {expert_dim}"
            )
        if mesh.runtime.experts not in BACKENDS:
            raise ConfigError(
                f"experts={mesh.runtime.experts!r} is no back end of the expert compute; choose "
                f"one of {', '.join(BACKENDS)}"
            )
        self.table = table
        self.activation = activation or SwiGLU()
        self.adapter: Adapter | None = None
        self.quantized: nn.ModuleDict | None = None
        shards, slots = {"ep": 0, "etp": 2}, table.slots
        shapes = {"gate_up": (experts, 2, expert_dim, dim), "down": (experts, dim, expert_dim)}
        for name, shape in shapes.items():
            spec = ParamSpec(
                shape=shape, shards=shards, domain="expert", init=init or Init(), slots=slots
            )
            self.add_parameter(name, spec, dtype)
        if bias:
            spec = ParamSpec(
                shape=(experts, 2, expert_dim),
                shards=shards,
                domain="expert",
                init=ZEROS,
                role="bias",
                slots=slots,
            )
            self.add_parameter("gate_up_bias", spec, dtype)
            # whole on every etp rank, added by the first: the others' gradient is zero
            spec = ParamSpec(
                shape=(experts, dim),
                shards={"ep": 0},
                domain="expert",
                partial=True,
                init=ZEROS,
                role="bias",
                slots=slots,
            )
            self.add_parameter("down_bias", spec, dtype)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the projections, which a quantised one had when it was loaded."""
        if self.quantized is not None:
            return self._stack("gate_up").dtype
        weight = self.gate_up  # no parameter in a functional call
        assert isinstance(weight, torch.Tensor)
        return weight.dtype

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype in which rows must arrive."""
        return working_dtype(self.mesh.runtime.compute_dtype, self.dtype, self.mesh.device)

    def quantize(self, kind: Kind) -> None:
        """Keep the projections in few bits, frozen; they are no parameters from here on.

        Raises:
            ConfigError: no block size fits the widths; torchao is not installed.
        """
        hidden, width = self.specs["gate_up"].shape[-2:]
        blocks = blocks_of(width, hidden, self.mesh.size("etp"), kind)
        stacks = nn.ModuleDict()
        for name, block in blocks.items():
            weight = to_local(self.get_parameter(name))
            stacks[name] = QuantizedStack(weight.flatten(1, -2), kind, block)
            self._parameters[name] = None
        self.quantized = stacks

    def dequantize(self) -> None:
        """Make the projections parameters again, in the dtype they had, of their present values."""
        for name in _WEIGHTS:
            stack = self._stack(name)
            self.add_parameter(name, self.specs[name], stack.dtype)
            with torch.no_grad():
                for place, local in enumerate(to_local(self.get_parameter(name)).unbind(0)):
                    local.copy_(stack.matrix(place, stack.dtype).view_as(local))
            assert self.quantized is not None
            del self.quantized[name]  # one at a time
        self.quantized = None

    def _stack(self, name: str) -> QuantizedStack:
        assert self.quantized is not None
        stack = self.quantized[name]
        assert isinstance(stack, QuantizedStack)
        return stack

    def forward(
        self, rows_RD: torch.Tensor, pair_weight_P: torch.Tensor, received: Received
    ) -> torch.Tensor:
        """Return `[R, D]`, each row's partial sum in fp32 (fp64 for fp64).

        Args:
            rows_RD, pair_weight_P: of `received`; apart so that wrappers see the tensors.
            received: rows and pairs.

        Collectives: none.
        """
        received = replace(received, rows_RD=rows_RD, pair_weight_P=pair_weight_P)
        backend: Backend = self.mesh.runtime.experts  # type: ignore[assignment]  # checked above
        biases: list[torch.Tensor | None] = [None, None]
        if "gate_up_bias" in self.specs:
            once = 1.0 if self.mesh.coordinate("etp") == 0 else 0.0
            biases = [self.local("gate_up_bias"), self.local("down_bias") * once]
        return experts_forward(
            received,
            *(self.local(n) if self.quantized is None else self._stack(n) for n in _WEIGHTS),
            activation=self.activation,
            gate_up_bias_e2F=biases[0],
            down_bias_eD=biases[1],
            adapter=None if self.adapter is None else self.adapter.terms(),
            backend=backend,
            recompute=self.mesh.runtime.recompute == "selective",
        )
