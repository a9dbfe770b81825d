"""What the MoE layer keeps for backward, counted by saved-tensor hooks (issue 7, memory)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from moe_tp import Mesh, MoE, ParallelLayout, Runtime
from moe_tp.parallel.shards import to_local
from moe_tp.routing import RouterConfig
from moe_tp.testing import run_ranks

T, D, F, E, K = 48, 256, 96, 8, 2
SMALL = 4 * (6 * E + 12 * K) + 8 * (4 * K + 2)  # bytes a token: scores, weights, indices


def kept_bytes(layer: MoE, x_TD: torch.Tensor) -> tuple[int, int]:
    """Return bytes kept beside parameters, and those of copies of whole parameters."""
    own = {to_local(param).untyped_storage().data_ptr() for param in layer.parameters()}
    sizes = {to_local(layer.experts.get_parameter(n)).numel() for n in ("gate_up", "down")}
    found: dict[int, tuple[int, int]] = {}

    def pack(saved: torch.Tensor) -> torch.Tensor:
        local = to_local(saved)
        found[local.untyped_storage().data_ptr()] = (local.nbytes, local.numel())
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        y_TD, _ = layer(x_TD.requires_grad_())
    others = [value for place, value in found.items() if place not in own]
    copies = sum(nbytes for nbytes, numel in others if numel in sizes)
    y_TD.sum().backward()
    return sum(nbytes for nbytes, _ in others), copies


def layer_of(mesh: Mesh, dtype: torch.dtype) -> MoE:
    return MoE(D, F, RouterConfig(num_experts=E, top_k=K), mesh, dtype=dtype, seed=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_kept_for_backward(dtype: torch.dtype, recompute: str) -> None:
    """2FK + D elements a token, D with selective recompute; no second copy of any weight.

    No expert output, no gathered rows, and no wide copy of the router's input.
    """
    layer = layer_of(Mesh.single(Runtime(recompute=recompute)), dtype)
    x_TD = torch.randn(T, D, dtype=dtype)
    kept, copies = kept_bytes(layer, x_TD)
    elements = D + (2 * F * K if recompute == "none" else 0)
    assert elements * dtype.itemsize <= kept / T <= elements * dtype.itemsize + SMALL
    assert copies == 0


def kept_on_a_rank(runtime: Runtime) -> tuple[int, int, int]:
    """Return bytes kept, pairs and rows received from other ranks."""
    mesh = Mesh(ParallelLayout(ep=2), runtime)
    layer = layer_of(mesh, torch.float32)
    counts: list[int] = []
    inner: Callable[..., torch.Tensor] = layer.experts.forward

    def forward(rows_RD: torch.Tensor, weight_P: torch.Tensor, received: object) -> torch.Tensor:
        counts[:] = [rows_RD.shape[0], weight_P.shape[0]]
        return inner(rows_RD, weight_P, received)  # type: ignore[arg-type]

    layer.experts.forward = forward  # type: ignore[method-assign,assignment]
    kept, copies = kept_bytes(layer, torch.randn(T, D) + mesh.rank)
    assert copies == 0
    return kept, counts[0], counts[1]


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_kept_for_backward_over_ranks(recompute: str) -> None:
    """Under EP the rows received are kept besides: D a distinct (token, rank)."""
    for kept, rows, pairs in run_ranks(kept_on_a_rank, 2, Runtime(recompute=recompute)):
        least = 4 * D * (T + rows) + (8 * F * pairs if recompute == "none" else 0)
        # The router keeps x; a token that stays here is a row too.
        assert kept <= least + SMALL * T + 32 * (rows + pairs)
        assert rows <= 2 * T


def peak_of_loss(chunk: int, vocabulary: int, tokens: int, dtype: torch.dtype) -> int:
    from moe_tp.parallel.collectives import Group
    from moe_tp.parallel.live import LiveBytes
    from moe_tp.parallel.vocab import vocab_cross_entropy

    x_TD = torch.randn(tokens, 16, requires_grad=True, dtype=dtype)
    weight = torch.randn(vocabulary, 16, requires_grad=True, dtype=dtype)
    targets = torch.randint(vocabulary, (tokens,))
    with LiveBytes() as live:
        vocab_cross_entropy(
            x_TD, weight, targets, Group("tp"), vocab_size=vocabulary, chunk_tokens=chunk
        ).backward()
        return live.peak


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_holds_the_logits_of_one_chunk_once(dtype: torch.dtype) -> None:
    """Issue 7: beside the head's gradients, chunk x vocabulary numbers in fp32 and no more."""
    vocabulary, tokens = 4000, 2048
    gradients = 3 * 4 * 16 * (vocabulary + tokens)
    for chunk in (512, 1024):
        logits = 4 * chunk * vocabulary
        # in bf16 also the logits and gradients of 128 tokens on their way
        moving = 2 * 128 * vocabulary if dtype == torch.bfloat16 else 0
        peak = peak_of_loss(chunk, vocabulary, tokens, dtype)
        assert logits < peak <= 1.05 * logits + gradients + moving
