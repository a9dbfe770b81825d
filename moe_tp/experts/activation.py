"""Gated activations of experts, with their backward written out so that little is saved.

Letters: N pairs in a slice · F expert hidden.

Each activation maps a gate and an up projection to `act(gate, up)`. `apply` is the plain form that
autograd differentiates; `forward_into` and `backward_into` do the same work into buffers they are
given, because on a CPU allocating a fresh buffer can cost as much as filling it.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.nn.functional as F

from moe_tp.errors import ConfigError


class Activation(Protocol):
    """A gated activation; see the module docstring."""

    def apply(self, gate_NF: torch.Tensor, up_NF: torch.Tensor) -> torch.Tensor:
        """Return `act(gate, up)`, differentiable."""
        ...

    def forward_into(
        self, out_NF: torch.Tensor, gate_NF: torch.Tensor, up_NF: torch.Tensor
    ) -> None:
        """Fill `out_NF` with `act(gate, up)`."""
        ...

    def backward_into(self, step: ActivationStep) -> None:
        """Do the backward of `weight * act(gate, up)` as `ActivationStep` describes."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationStep:
    """What the backward of a weighted activation reads and the buffers that it fills.

    Args:
        grad_NF: gradient of the weighted activation; overwritten.
        gate_NF, up_NF: the inputs of the activation.
        weight_N1: the routing weights.
        hidden_NF: filled with `weight * act`, the input of the down projection.
        d_gate_NF, d_up_NF: filled with the gradients of the inputs.
        d_weight_N: filled with `sum over F of grad * act`, the gradient of the weights.
    """

    grad_NF: torch.Tensor
    gate_NF: torch.Tensor
    up_NF: torch.Tensor
    weight_N1: torch.Tensor
    hidden_NF: torch.Tensor
    d_gate_NF: torch.Tensor
    d_up_NF: torch.Tensor
    d_weight_N: torch.Tensor

    def weigh(self) -> None:
        """Take `hidden_NF` holding `act`: settle the weights' gradient, weigh hidden and grad."""
        torch.mul(self.grad_NF, self.hidden_NF, out=self.d_gate_NF)
        torch.sum(self.d_gate_NF, dim=1, dtype=self.d_weight_N.dtype, out=self.d_weight_N)
        self.hidden_NF.mul_(self.weight_N1)
        self.grad_NF.mul_(self.weight_N1)


class _Gated(abc.ABC):
    """`f(gate) * up` for a function f whose value and gradient torch writes into a buffer."""

    __slots__ = ()

    @abc.abstractmethod
    def value(self, gate_NF: torch.Tensor, out_NF: torch.Tensor) -> None:
        """Fill `out_NF` with f(gate)."""

    @abc.abstractmethod
    def slope(self, grad_NF: torch.Tensor, gate_NF: torch.Tensor, out_NF: torch.Tensor) -> None:
        """Fill `out_NF` with grad times the derivative of f at gate."""

    def forward_into(
        self, out_NF: torch.Tensor, gate_NF: torch.Tensor, up_NF: torch.Tensor
    ) -> None:
        """Fill `out_NF` with f(gate) * up."""
        self.value(gate_NF, out_NF)
        out_NF.mul_(up_NF)

    def backward_into(self, step: ActivationStep) -> None:
        """Do the backward of `weight * f(gate) * up`."""
        self.value(step.gate_NF, step.d_up_NF)
        torch.mul(step.d_up_NF, step.up_NF, out=step.hidden_NF)
        step.weigh()
        step.d_up_NF.mul_(step.grad_NF)
        step.grad_NF.mul_(step.up_NF)
        self.slope(step.grad_NF, step.gate_NF, step.d_gate_NF)


@dataclass(frozen=True, slots=True)
class SwiGLU(_Gated):
    """`silu(gate) * up` (arXiv:2002.05202, eq. 6)."""

    def apply(self, gate_NF: torch.Tensor, up_NF: torch.Tensor) -> torch.Tensor:
        """Return `silu(gate) * up`."""
        return F.silu(gate_NF) * up_NF

    def value(self, gate_NF: torch.Tensor, out_NF: torch.Tensor) -> None:
        """Fill `out_NF` with silu(gate)."""
        torch.ops.aten.silu.out(gate_NF, out=out_NF)

    def slope(self, grad_NF: torch.Tensor, gate_NF: torch.Tensor, out_NF: torch.Tensor) -> None:
        """Fill `out_NF` with the gradient of silu."""
        torch.ops.aten.silu_backward.grad_input(grad_NF, gate_NF, grad_input=out_NF)


@dataclass(frozen=True, slots=True)
class GeluGLU(_Gated):
    """`gelu(gate) * up` (arXiv:2002.05202, eq. 6); `approximate` as in torch's gelu."""

    approximate: Literal["none", "tanh"] = "none"

    def apply(self, gate_NF: torch.Tensor, up_NF: torch.Tensor) -> torch.Tensor:
        """Return `gelu(gate) * up`."""
        return F.gelu(gate_NF, approximate=self.approximate) * up_NF

    def value(self, gate_NF: torch.Tensor, out_NF: torch.Tensor) -> None:
        """Fill `out_NF` with gelu(gate)."""
        torch.ops.aten.gelu.out(gate_NF, approximate=self.approximate, out=out_NF)

    def slope(self, grad_NF: torch.Tensor, gate_NF: torch.Tensor, out_NF: torch.Tensor) -> None:
        """Fill `out_NF` with the gradient of gelu."""
        torch.ops.aten.gelu_backward.grad_input(
            grad_NF, gate_NF, approximate=self.approximate, grad_input=out_NF
        )


@dataclass(frozen=True, slots=True)
class ClampedSwiGLU:
    """`(up + 1) * gate * sigmoid(alpha * gate)` with both inputs clamped, as GPT-OSS has it.

    The gate is clamped from above only, the up projection on both sides; the gradient is zero
    where a clamp holds (arXiv:2508.10925, section 2.1).
    """

    alpha: float = 1.702
    limit: float = 7.0

    def apply(self, gate_NF: torch.Tensor, up_NF: torch.Tensor) -> torch.Tensor:
        """Return the clamped activation."""
        gate_NF = gate_NF.clamp(max=self.limit)
        up_NF = up_NF.clamp(-self.limit, self.limit)
        return (up_NF + 1) * (gate_NF * torch.sigmoid(self.alpha * gate_NF))

    def forward_into(
        self, out_NF: torch.Tensor, gate_NF: torch.Tensor, up_NF: torch.Tensor
    ) -> None:
        """Fill `out_NF` with the clamped activation."""
        # many steps, so all of them in fp32
        exact = torch.promote_types(out_NF.dtype, torch.float32)
        out_NF.copy_(self.apply(gate_NF.to(exact), up_NF.to(exact)))

    def backward_into(self, step: ActivationStep) -> None:
        """Do the backward of `weight * act(gate, up)`."""
        exact = torch.promote_types(step.grad_NF.dtype, torch.float32)
        gate = step.gate_NF.to(exact).clamp(max=self.limit)
        up = step.up_NF.to(exact).clamp(-self.limit, self.limit)
        sigmoid = torch.sigmoid(self.alpha * gate)
        step.hidden_NF.copy_((up + 1) * gate * sigmoid)
        step.weigh()
        slope = sigmoid * (1 + self.alpha * gate * (1 - sigmoid))
        # clamp passes the gradient at the limit itself, as torch's own backward does
        gate_open = step.gate_NF <= self.limit
        up_open = (step.up_NF >= -self.limit) & (step.up_NF <= self.limit)
        step.d_gate_NF.copy_(step.grad_NF * (up + 1) * slope * gate_open)
        step.d_up_NF.copy_(step.grad_NF * gate * sigmoid * up_open)


def activation(name: str) -> Activation:
    """Return the activation a config names.

    Args:
        name: `silu` or `swiglu`, `gelu`, `gelu_tanh` (`gelu_pytorch_tanh`), or `clamped_swiglu`
            with GPT-OSS's constants.
    """
    table: dict[str, Activation] = {
        "silu": SwiGLU(),
        "swiglu": SwiGLU(),
        "gelu": GeluGLU(),
        "gelu_tanh": GeluGLU("tanh"),
        "gelu_pytorch_tanh": GeluGLU("tanh"),
        "clamped_swiglu": ClampedSwiGLU(),
    }
    if name not in table:
        raise ConfigError(f"activation={name!r} is not known; choose one of {', '.join(table)}")
    return table[name]
