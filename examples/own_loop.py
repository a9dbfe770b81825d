"""A training loop of your own over a hub folder, on any layout.

    moe-tp init mixtral tiny-mixtral
    torchrun --nproc-per-node 4 examples/own_loop.py tiny-mixtral out --tp 2 --ep 2 --etp 2

The same script runs in one process, and gives the same losses on every layout.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist

from moe_tp import (
    Mesh,
    ParallelLayout,
    clip_grad_norm,
    forward_backward,
    parameter_groups,
    settle_gradients,
    update_router_bias,
)
from moe_tp.models import from_pretrained, save_pretrained


def batches(step: int, vocab_size: int, mesh: Mesh) -> list[dict[str, torch.Tensor]]:
    """Return this data-parallel rank's two micro-batches of a step: rows of a counting sequence."""
    replicas, replica = mesh.size("dp"), mesh.coordinate("dp")
    rows = torch.arange(8).unsqueeze(1) * 7 + torch.arange(33) + step
    own = (rows % vocab_size)[replica::replicas]
    return [{"input_ids": part, "labels": part} for part in own.chunk(2)]


def train(source: str, target: str, layout: ParallelLayout, steps: int) -> list[float]:
    """Return the losses; the same on every rank."""
    mesh = Mesh(layout) if dist.is_initialized() else Mesh.single()
    model = from_pretrained(source, mesh, dtype=torch.float32)
    optimizer = torch.optim.AdamW(parameter_groups(model, weight_decay=0.1), lr=1e-3, eps=1e-6)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        out = forward_backward(model, batches(step, model.config.vocab_size, mesh), step=step)
        settle_gradients(model)
        norm = clip_grad_norm(model, 1.0)
        optimizer.step()
        update_router_bias(model)
        losses.append(out.loss.item())
        if mesh.rank == 0:
            print(f"step {step}: loss {losses[-1]:.4f}, gradient norm {norm:.3f}")
    save_pretrained(model, target, dtype=torch.bfloat16)
    return losses


def main() -> None:
    """Run under torchrun, or in one process."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source")
    parser.add_argument("target")
    for name in ("tp", "ep", "etp"):
        parser.add_argument(f"--{name}", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group()
    layout = ParallelLayout(tp=options.tp, ep=options.ep, etp=options.etp)
    train(options.source, options.target, layout, options.steps)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
