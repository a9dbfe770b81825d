"""What torch.compile makes of a model that holds an MoE layer (C58)."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_hubs import SMALLEST
from torch import nn

from moe_tp import Mesh, MoE
from moe_tp.models import ModelConfig, build
from moe_tp.parallel.shards import to_local
from moe_tp.routing import RouterConfig

HUB = SMALLEST


class Host(nn.Module):
    """A user's model: a part that compiles, and the layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        router = RouterConfig(num_experts=4, top_k=2, balance_coef=0.01)
        self.moe = MoE(16, 24, router, Mesh.single(), seed=0)
        self.proj = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, aux = self.moe(torch.relu(self.proj(x)))
        return y * 2 + x, aux.loss


def results(host: Host, call: Any, x: torch.Tensor) -> list[torch.Tensor]:
    host.zero_grad()
    x = x.clone().requires_grad_()
    y, loss = call(x)
    (y.square().sum() + loss).backward()
    grads = [to_local(p.grad).clone() for p in host.parameters() if p.grad is not None]
    return [y.detach(), x.grad, *grads]  # type: ignore[list-item]


@pytest.mark.parametrize(
    "backend",
    [
        "aot_eager",
        pytest.param(
            "inductor",  # torch.compile's default: half a minute of a C++ compiler
            marks=[
                pytest.mark.slow,
                pytest.mark.skipif(
                    shutil.which(os.environ.get("CXX", "g++")) is None, reason="no C++ compiler"
                ),
            ],
        ),
    ],
)
def test_a_compiled_model_has_one_break_around_the_layer(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C58: values and gradients as without, for T = 0, 1 and empty experts; few recompiles."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    host = Host()
    compiled = torch.compile(host, backend=backend)
    for tokens in (5, 7, 1, 0, 9, 11, 13, 2, 3, 6):
        x = torch.randn(tokens, 16)
        x[1:] = x[:1].clone()  # all choose the same two experts: the other two are empty
        pairs = zip(results(host, host, x), results(host, compiled, x), strict=True)
        assert all(torch.allclose(a, b, rtol=0, atol=1e-6) for a, b in pairs), tokens
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs <= 2 * (1 + 3)  # before and behind the layer: once, and three times again
    found = torch._dynamo.explain(host)(torch.randn(5, 16))
    assert (found.graph_count, found.graph_break_count) == (2, 1)
    assert "MoE.forward" in found.break_reasons[0].reason


def test_fullgraph_is_refused_by_name() -> None:
    """C58: the message names what cannot be in the graph."""
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"MoE\.forward"):
        torch.compile(Host(), fullgraph=True, backend="aot_eager")(torch.randn(5, 16))


def test_a_compiled_decoder_runs_as_it_is() -> None:
    """C58: no failure inside, equal losses."""
    torch._dynamo.reset()
    model = build(ModelConfig.from_hub(HUB), Mesh.single(), seed=1)
    ids = torch.arange(12).view(2, 6)
    compiled = torch.compile(model, backend="aot_eager")
    assert torch.equal(compiled(ids, ids).loss, model(ids, ids).loss)
