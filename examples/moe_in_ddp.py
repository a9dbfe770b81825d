"""The MoE layer in a model of your own, under DistributedDataParallel, then under FSDP2.

Four local ranks: each has its own tokens, the layer spreads its 6 experts over two of them (`ep`)
and splits each expert in two (`etp`). The wrapper averages your parameters' gradients; the layer's
are the library's, told by `gradient="mean"` that the host averages.

    python examples/moe_in_ddp.py
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from moe_tp import (
    Mesh,
    MoE,
    ParallelLayout,
    clip_grad_norm,
    library_parameters,
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


def wrap(net: Net, wrapper: str) -> nn.Module:
    """Return the model to call; `net` keeps the parameters."""
    if wrapper == "ddp":
        return DistributedDataParallel(prepare_for_ddp(net))
    return fully_shard(net, ignored_params=set(library_parameters(net)))


def train(wrapper: str, steps: int) -> list[float]:
    """Return the losses of this rank; runs on every rank."""
    mesh = Mesh(ParallelLayout(ep=2, etp=2))
    torch.manual_seed(0)
    net = Net(mesh)
    model = wrap(net, wrapper)
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
    for wrapper in ("ddp", "fsdp2"):
        for rank, losses in enumerate(run_ranks(train, 4, wrapper, 60)):
            print(f"{wrapper}, rank {rank}: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
            assert losses[-1] < losses[0]


if __name__ == "__main__":
    main()
