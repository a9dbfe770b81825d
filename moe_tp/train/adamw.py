"""AdamW in less memory: moments in bf16 or 8 bits, weights in bf16 that lose no small update.

A value that is stored in bf16 is rounded up or down at random, with probabilities that make it
right on average: under round-to-nearest an update below half a unit of the last place never
arrives. The draws are hashes of (seed, step, parameter, logical element), so every layout rounds
alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch

from moe_tp.errors import ConfigError
from moe_tp.parallel.parameter import NamedSpec
from moe_tp.parallel.random import hash_bits, key_of
from moe_tp.parallel.shards import local_index, to_local

Moments = Literal["float32", "bfloat16", "8bit"]
_CHUNK = 1 << 22  # elements that are updated at a time
_BLOCK = 256  # elements that share a scale in 8 bits
_SMALL = 4096  # tensors of fewer elements keep their moments in fp32
_LOW = 0xFFFF


class SmallAdamW(torch.optim.Optimizer):
    """AdamW (arXiv:1711.05101, algorithm 2) with a choice of what its state is kept in.

    All arithmetic is in fp32, or fp64 where the parameter is.

    Args:
        groups: as `torch.optim.AdamW` takes them.
        entries: the parameters by name, as `named_specs` gives them.
        lr, betas, eps, weight_decay: as of `torch.optim.AdamW`.
        moments: what moments are kept in. `8bit`: by torchao, blocks of 256 local elements with a
            scale (arXiv:2110.02861); local tensors of less than 4096 elements, or no multiple of
            256, keep fp32.
        seed: of stochastic rounding.

    Raises:
        ConfigError: 8 bits are asked for and torchao is not installed.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        entries: Iterable[NamedSpec],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        moments: Moments = "float32",
        seed: int = 0,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(list(groups), defaults)
        self.moments, self.seed = moments, seed
        self._entries = {entry.param: entry for entry in entries}
        self._quantised = _quantised_type() if moments == "8bit" else None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient.

        Args:
            closure: none; a step takes no closure.

        Collectives: none.
        """
        assert closure is None, "a step takes no closure"
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["step"] = torch.zeros(())
                    for name in self.moment_names(group):
                        state[name] = self._fresh(param, signed=name != "exp_avg_sq")
                state["step"] += 1
                self.update(param, group, state)

    def moment_names(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the names of the moments of a group's parameters."""
        return ("exp_avg", "exp_avg_sq")

    def update(
        self, param: torch.Tensor, group: Mapping[str, Any], state: Mapping[str, torch.Tensor]
    ) -> None:
        """Update one parameter and its state."""
        (first, second), count = group["betas"], float(state["step"])
        decay = group["lr"] * group["weight_decay"]
        rate = group["lr"] / (1.0 - first**count)
        stored = to_local(param), to_local(state["exp_avg"]), to_local(state["exp_avg_sq"])
        assert param.grad is not None
        for rows in self.row_ranges(stored):
            weight, mean, square = wide_copies(stored, rows)
            grad = to_local(param.grad)[rows].to(weight.dtype)
            mean.lerp_(grad, 1.0 - first)
            square.mul_(second).addcmul_(grad, grad, value=1.0 - second)
            below = (square / (1.0 - second**count)).sqrt_().add_(group["eps"])
            weight.mul_(1.0 - decay).addcdiv_(mean, below, value=-rate)
            self.store(param, state, rows, zip(stored, (weight, mean, square), strict=True))

    def row_ranges(self, stored: Iterable[torch.Tensor]) -> Iterator[slice]:
        """Yield ranges of rows of local tensors that lie alike, small enough to work on at once."""
        tensors = list(stored)
        count, total = len(tensors[0]), tensors[0].numel()
        each = max(1, total // max(1, count))
        whole = any(_is_quantised(tensor) for tensor in tensors)
        rows = count if whole else max(1, _CHUNK // each)
        for start in range(0, count if total else 0, max(1, rows)):
            yield slice(start, min(start + rows, count))

    def store(
        self,
        param: torch.Tensor,
        state: Mapping[str, torch.Tensor],
        rows: slice,
        pairs: Iterable[tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        """Write rows of local tensors, in bf16 with stochastic rounding.

        Args:
            param: whose.
            state: its state; the step enters the draws.
            rows: which rows.
            pairs: tensor to write to, and the values of its rows; at most four.
        """
        bits: torch.Tensor | None = None
        for number, (target, values) in enumerate(pairs):
            if _is_quantised(target):
                target.copy_(values)
            elif target.dtype != torch.bfloat16:
                target[rows] = values.to(target.dtype)
            else:
                bits = self._bits(param, state, rows) if bits is None else bits
                target[rows] = round_stochastic(values, bits >> (16 * number))

    def adopt_state(self) -> None:
        """Take state that a checkpoint has filled in: what is kept in 8 bits becomes so again."""
        for param, state in self.state.items():
            for name, value in state.items():
                if name != "step" and value.shape == param.shape:
                    kept = self._fresh(param, signed=name != "exp_avg_sq")
                    to_local(kept).copy_(to_local(value))
                    state[name] = kept

    def _fresh(self, param: torch.Tensor, *, signed: bool) -> torch.Tensor:
        """Return a moment of zeros, in what moments are kept in."""
        dtype = torch.promote_types(param.dtype, torch.float32)
        if self.moments == "bfloat16":
            dtype = torch.bfloat16
        zeros = torch.zeros_like(param, dtype=dtype, requires_grad=False)
        local = to_local(zeros)
        if self._quantised is None or local.numel() < _SMALL or local.numel() % _BLOCK:
            return zeros
        small: torch.Tensor = self._quantised.zeros(local.shape, signed, _BLOCK, local.device)
        return small

    def _bits(
        self, param: torch.Tensor, state: Mapping[str, torch.Tensor], rows: slice
    ) -> torch.Tensor:
        """Return 64 random bits for each element of the rows."""
        entry = self._entries[param]  # type: ignore[index]
        spec = entry.module.specs[entry.name]  # experts may have moved since
        index = [i.to(param.device) for i in local_index(entry.param, spec)]
        number = index[0][rows] if index else torch.zeros((), dtype=torch.int64)
        for i, size in zip(index[1:], entry.spec.shape[1:], strict=True):
            number = number.unsqueeze(-1) * size + i
        return hash_bits(key_of(self.seed, int(state["step"]), entry.fqn, "rounding"), number)


def round_stochastic(values: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Return values in bf16, rounded away from zero as often as they lie near the upper neighbour.

    Args:
        values: fp32 or wider.
        bits: int64; the low 16 bits of each are used.
    """
    exact = values.to(torch.float32).contiguous()
    raised = exact.view(torch.int32) + (bits & _LOW).to(torch.int32)
    rounded = (raised & ~_LOW).view(torch.float32)
    return torch.where(torch.isfinite(exact), rounded, exact).to(torch.bfloat16)


def wide_copies(tensors: Sequence[torch.Tensor], rows: slice = slice(None)) -> list[torch.Tensor]:
    """Return copies of rows of local tensors, all in fp32 or, where the first is, in fp64.

    Args:
        tensors: the weight and its moments.
        rows: which rows.
    """
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    return [
        tensor.dequantize().to(wide) if _is_quantised(tensor) else tensor[rows].to(wide, copy=True)
        for tensor in tensors
    ]


def _is_quantised(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "codes")


def _quantised_type() -> Any:
    """Return torchao's tensor of 8-bit optimiser state."""
    try:
        from torchao.optim.subclass_8bit import OptimState8bit
    except ImportError as error:
        raise ConfigError(
            "train.moments='8bit' needs torchao, which is not installed; pip install "
            "'moe-tp[torchao]', or choose moments='bfloat16'"
        ) from error
    return OptimState8bit
