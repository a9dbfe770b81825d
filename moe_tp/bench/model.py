"""The matmuls of a whole training step alone, and the operations that a step counts as useful.

Letters: N tokens · D width · S tokens a sequence · H heads · h head size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from moe_tp.bench.floor import LayerShape, matmul_floor
from moe_tp.errors import ConfigError
from moe_tp.models import ModelConfig
from moe_tp.parallel.mesh import Mesh
from moe_tp.plan.params import Kind
from moe_tp.plan.stages import part_flops


def step_flops(config: ModelConfig, length: int) -> float:
    """Return useful operations of one token's forward and backward; nothing computed twice.

    Args:
        config: the model.
        length: S.
    """
    dense = len(config.dense_layers)
    counts: dict[Kind, int] = {"dense": dense, "moe": config.num_layers - dense, "head": 1}
    total = 0.0
    for kind, count in counts.items():
        if count:
            total += 3.0 * count * sum(part_flops(config, kind, length))
    return total


def model_floor(
    config: ModelConfig, batch: int, length: int, mesh: Mesh, dtype: torch.dtype
) -> Callable[[], None]:
    """Return a function that runs the matmuls of one process's training step, and nothing else.

    Projections, attention over half the keys (causal), balanced experts, and the head in chunks of
    the runtime's `loss_chunk`; forward and backward, in memory that is there already.

    Args:
        config: with ordinary attention and experts in every layer.
        batch: sequences.
        length: S.
        mesh: of one process.
        dtype: of everything.

    Raises:
        ConfigError: the model has latent attention or dense layers.
    """
    if config.attention.mla is not None or config.dense_layers or config.moe.shared_dim:
        raise ConfigError(
            f"the matmul floor of {config.model_type} is not known; choose a model with ordinary "
            "attention and routed experts alone, mixtral or qwen3_moe say"
        )
    a, tokens = config.attention, batch * length
    wide, narrow = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
    linears = [_linear(tokens, config.dim, out, dtype, mesh) for out in (wide, narrow, narrow)]
    linears.append(_linear(tokens, wide, config.dim, dtype, mesh))
    router = config.moe.router
    shape = LayerShape(
        dim=config.dim,
        expert_dim=config.moe.expert_dim,
        experts=router.num_experts,
        top_k=router.top_k,
    )
    layer = [*linears, _scores(batch, length, a.num_heads, a.head_dim, dtype, mesh)]
    layer.append(matmul_floor(shape, tokens, mesh, dtype))
    chunk = min(mesh.runtime.loss_chunk, tokens)
    head = _linear(chunk, config.dim, config.vocab_size, dtype, mesh)

    def run() -> None:
        for _ in range(config.num_layers):
            for part in layer:
                part()
        for _ in range(-(-tokens // chunk)):
            head()

    return run


def _linear(rows: int, width: int, out: int, dtype: torch.dtype, mesh: Mesh) -> Callable[[], None]:
    """Return the three matmuls of a linear layer."""
    x_ND = torch.randn(rows, width, device=mesh.device).to(dtype)
    weight = torch.randn(out, width, device=mesh.device).to(dtype)
    y_NO = torch.randn(rows, out, device=mesh.device).to(dtype)
    d_x, d_weight = torch.empty_like(x_ND), torch.empty_like(weight)

    def run() -> None:
        torch.mm(x_ND, weight.t(), out=y_NO)
        torch.mm(y_NO, weight, out=d_x)
        torch.mm(y_NO.t(), x_ND, out=d_weight)

    return run


def _scores(
    batch: int, length: int, heads: int, size: int, dtype: torch.dtype, mesh: Mesh
) -> Callable[[], None]:
    """Return attention's two matmuls and their four of backward, over half the keys."""
    q = torch.randn(batch * heads, length, size, device=mesh.device).to(dtype)
    k = torch.randn(batch * heads, max(length // 2, 1), size, device=mesh.device).to(dtype)
    p = torch.randn(batch * heads, length, k.shape[1], device=mesh.device).to(dtype)

    def run() -> None:
        torch.bmm(q, k.mT, out=p)
        torch.bmm(p, k, out=q)
        torch.bmm(q, k.mT, out=p)
        torch.bmm(p.mT, q, out=k)
        torch.bmm(p, k, out=q)
        torch.bmm(p.mT, q, out=k)

    return run
