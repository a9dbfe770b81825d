"""One MoE layer of this library, to be timed.

Letters: T tokens on this rank · D width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from moe_tp.bench.floor import LayerShape
from moe_tp.experts.moe import MoE
from moe_tp.parallel.mesh import Mesh
from moe_tp.routing.assignment import Assignment
from moe_tp.routing.config import RouterConfig

_PULL = 8.0  # logits by which a skewed token prefers expert 0


def make_layer(shape: LayerShape, mesh: Mesh, dtype: torch.dtype) -> MoE:
    """Return the layer with seeded weights; each output is of the size of its input.

    Collectives: none.
    """
    router = RouterConfig(num_experts=shape.experts, top_k=shape.top_k)
    layer = MoE(shape.dim, shape.expert_dim, router, mesh, dtype=dtype, seed=0)
    with torch.no_grad():
        for param in layer.parameters():
            param.mul_(shape.dim**-0.5 / 0.02)
    return layer


def make_tokens(
    router_ED: torch.Tensor, tokens: int, dtype: torch.dtype, *, skew: bool, seed: int = 0
) -> torch.Tensor:
    """Return `[T, D]` seeded tokens, with `skew` half of them bound for expert 0.

    Args:
        router_ED: the router's weight.
        tokens: T.
        dtype: of the tokens.
        skew: add expert 0's direction to every other token.
        seed: of the draw.
    """
    generator = torch.Generator().manual_seed(seed)
    x_TD = torch.randn(tokens, router_ED.shape[1], generator=generator).to(router_ED.device)
    if skew:
        first_D = router_ED[0].float()
        x_TD[::2] += _PULL * first_D / first_D.square().sum()
    return x_TD.to(dtype)


def training_step(
    layer: Callable[[torch.Tensor], torch.Tensor],
    x_TD: torch.Tensor,
    parameters: Sequence[torch.Tensor],
) -> Callable[[], None]:
    """Return a function that runs forward and backward, from tokens to all gradients.

    Args:
        layer: from tokens to outputs.
        x_TD: the tokens.
        parameters: whose gradients are dropped before.

    Collectives: those of the layer.
    """
    dy_TD = torch.randn(x_TD.shape, generator=torch.Generator().manual_seed(1)).to(x_TD)

    def run() -> None:
        for param in parameters:
            param.grad = None
        leaf = x_TD.detach().requires_grad_()
        layer(leaf).backward(dy_TD)

    return run


def routing_of(layer: MoE, x_TD: torch.Tensor) -> Assignment:
    """Return where the layer's router sends the tokens.

    Collectives: none.
    """
    with torch.no_grad():
        assignment: Assignment = layer.router(x_TD)
    return assignment
