"""The MoE layer in a model of your own, under DistributedDataParallel.

Four local ranks: each has its own tokens, the layer spreads its 6 experts over two of them (`ep`)
and splits each expert in two (`etp`). DDP averages your parameters' gradients; the layer's are
the library's, told by `gradient="mean"` that the host averages.

    python examples/moe_in_ddp.py
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from moe_tp import (
    Mesh,
    MoE,
    ParallelLayout,
    clip_grad_norm,
    parameter_groups,
    prepare_for_ddp,
    settle_gradients,
)
from moe_tp.routing import RouterConfig
from moe_tp.testing import run_ranks


class Net(nn.Module):
    """Your own layers around one MoE layer."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        router = RouterConfig(num_experts=6, top_k=2, balance_coef=0.01)
        self.lift = nn.Linear(16, 32)
        self.moe = MoE(32, 64, router, mesh, gradient="mean", seed=0)
        self.out = nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = torch.relu(self.lift(x))
        y, aux = self.moe(h)
        return self.out(h + y), aux.loss


def train(steps: int) -> list[float]:
    """Return the losses of this rank; runs on every rank."""
    mesh = Mesh(ParallelLayout(ep=2, etp=2))
    torch.manual_seed(0)
    net = prepare_for_ddp(Net(mesh))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(parameter_groups(net, weight_decay=0.01), lr=1e-2)
    generator = torch.Generator().manual_seed(mesh.rank)
    losses = []
    for _ in range(steps):
        x = torch.randn(20 + mesh.rank, 16, generator=generator)
        prediction, balance = model(x)
        loss = (prediction.squeeze(-1) - x.square().mean(-1)).square().mean()
        optimizer.zero_grad()
        (loss + balance).backward()
        settle_gradients(net)
        clip_grad_norm(net, 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    """Print the first and last losses of each rank."""
    for rank, losses in enumerate(run_ranks(train, 4, 60)):
        print(f"rank {rank}: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
        assert losses[-1] < losses[0]


if __name__ == "__main__":
    main()
