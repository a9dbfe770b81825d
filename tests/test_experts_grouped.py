"""The expert compute: every back end against the plain loop, in fp64 where it can."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from moe_tp.errors import ConfigError
from moe_tp.experts import blocks, workspace
from moe_tp.experts.activation import (
    Activation,
    ClampedSwiGLU,
    GeluGLU,
    SwiGLU,
    activation,
)
from moe_tp.experts.dispatch import Received
from moe_tp.experts.grouped import LowRank, experts_forward

ACTIVATIONS = [SwiGLU(), GeluGLU(), GeluGLU("tanh"), ClampedSwiGLU(limit=0.5)]
D, F, E, K = 16, 24, 5, 2


def make(
    tokens: int, *, bias: bool = False, rank: int = 0, shared_a: int = 2, tail: int = 0
) -> tuple[Received, dict[str, torch.Tensor]]:
    """Return pairs on E experts, the last one without any, and the tensors that get gradients."""
    torch.manual_seed(tokens)
    ids = torch.stack([torch.randperm(E - 1)[:K] for _ in range(tokens)]) if tokens else (
        torch.zeros(0, K, dtype=torch.int64))  # fmt: skip
    order = torch.argsort(ids.flatten(), stable=True)
    rows = torch.arange(tokens).repeat_interleave(K)[order]
    counts = torch.bincount(ids.flatten(), minlength=E)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64) / 2

    t = {
        "x": normal(tokens, D),
        "w": normal(tokens * K + tail).abs(),
        "gate_up": normal(E, 2, F, D),
        "down": normal(E, D, F),
    }
    if bias:
        t |= {"gate_up_bias": normal(E, 2, F), "down_bias": normal(E, D)}
    if rank:
        t |= {
            "gate_up_a": normal(E, shared_a, rank, D),
            "gate_up_b": normal(E, 2, F, rank),
            "down_a": normal(E, rank, F),
            "down_b": normal(E, D, rank),
        }
    rows = torch.cat([rows, rows.new_zeros(tail)])
    received = Received(rows_RD=t["x"], pair_row_P=rows, pair_weight_P=t["w"], counts_e=counts)
    return received, t


def step(
    received: Received,
    tensors: dict[str, torch.Tensor],
    act: Activation,
    backend: str,
    dtype: torch.dtype = torch.float64,
    *,
    recompute: bool = False,
    dy: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """Return the output and every gradient."""
    least = torch.promote_types(dtype, torch.float32)
    t = {
        n: v.to(least if n == "w" else dtype).detach().requires_grad_() for n, v in tensors.items()
    }
    received = replace(received, rows_RD=t["x"], pair_weight_P=t["w"])
    names = ("gate_up_a", "gate_up_b", "down_a", "down_b")
    adapter = LowRank(**{n: t[n] for n in names}, scale=0.7) if "down_a" in t else None
    out = experts_forward(
        received, t["gate_up"], t["down"], activation=act,
        gate_up_bias_e2F=t.get("gate_up_bias"), down_bias_eD=t.get("down_bias"),
        adapter=adapter, backend=backend, recompute=recompute,
    )  # fmt: skip
    if dy is None:
        dy = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    out.backward(dy.to(out.dtype))
    assert all(v.grad is not None for v in t.values())
    return {"out": out.detach()} | {n: v.grad for n, v in t.items()}


def close(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], tolerance: float) -> None:
    for name, b in want.items():
        error = (got[name].double() - b.double()).norm() / max(b.double().norm().item(), 1e-6)
        assert error < tolerance, f"{name}: {error:.1e}"


@pytest.mark.parametrize("act", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("recompute", [False, True])
def test_sliced_equals_loop(act: Activation, recompute: bool) -> None:
    """D1: outputs and all gradients in fp64, with biases, adapters, and neither."""
    for bias, rank, shared_a in itertools.product((False, True), (0, 3), (1, 2)):
        received, tensors = make(23, bias=bias, rank=rank, shared_a=shared_a)
        want = step(received, tensors, act, "loop")
        close(step(received, tensors, act, "sliced", recompute=recompute), want, 1e-13)


@pytest.mark.parametrize("elements", [1, 9 * F, 1 << 20])
def test_blocks_of_few_and_many_experts_agree(
    elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D1, D3: whatever number of experts one elementwise pass takes."""
    monkeypatch.setattr(blocks, "PASS", elements)
    for bias, rank in ((True, 3), (False, 0)):
        received, tensors = make(23, bias=bias, rank=rank)
        found = blocks.make_blocks(received.counts_e, None, 23 * K, grouped=False, hidden=F)
        assert [block.first + i for block in found for i in range(len(block.counts))] == list(
            range(E)
        )
        assert len(found) == {1: E, 9 * F: 5, 1 << 20: 1}[elements]
        want = step(received, tensors, SwiGLU(), "loop")
        close(step(received, tensors, SwiGLU(), "sliced"), want, 1e-13)


@pytest.mark.parametrize("act", ACTIVATIONS[:2], ids=str)
def test_grouped_mm_equals_loop(act: Activation) -> None:
    """D1: the one-call back end, in the dtypes that it knows."""
    for bias, rank in itertools.product((False, True), (0, 8)):
        received, tensors = make(23, bias=bias, rank=rank)
        want = step(received, tensors, act, "loop")
        close(step(received, tensors, act, "grouped_mm", torch.float32), want, 1e-5)
        close(step(received, tensors, act, "grouped_mm", torch.bfloat16), want, 3e-2)
        close(step(received, tensors, act, "sliced", torch.bfloat16), want, 3e-2)


@pytest.mark.parametrize("act", ACTIVATIONS, ids=str)
def test_bf16_is_as_close_as_the_loop(act: Activation) -> None:
    """Passes that round to bf16 lose no more than plain bf16 autograd does."""
    received, tensors = make(23, bias=True)
    want = step(received, tensors, act, "loop")
    rounded = {backend: step(received, tensors, act, backend, torch.bfloat16)
               for backend in ("loop", "sliced", "grouped_mm")}  # fmt: skip
    for name, exact in want.items():
        loop, *others = ((got[name].double() - exact).norm() for got in rounded.values())
        assert all(error <= 2 * loop for error in others), name


@pytest.mark.parametrize("backend", ["loop", "sliced", "grouped_mm"])
def test_expert_without_tokens_has_zero_gradient(backend: str) -> None:
    """D3: exactly zero, also in memory that held another gradient before."""
    received, tensors = make(300, bias=True, rank=8)
    # wide enough for its gradient to lie in the workspace's memory
    wide = {"x": (-1,), "gate_up": (-1, -2), "down": (-1, -2), "gate_up_bias": (-1,)}
    wide |= {"down_bias": (-1,), "gate_up_a": (-1,), "gate_up_b": (-2,), "down_a": (-1,)}
    for name, dims in (wide | {"down_b": (-2,)}).items():
        for dim in dims:
            tensors[name] = tensors[name].repeat_interleave(16, dim)
    for _ in range(2):
        got = step(received, tensors, SwiGLU(), backend, torch.float32)
        for name in set(tensors) - {"x", "w"}:
            assert torch.equal(got[name][E - 1], torch.zeros_like(got[name][E - 1])), name
            assert got[name][0].abs().sum() > 0
        for tensor in got.values():
            tensor.fill_(float("nan"))
        del got


@pytest.mark.parametrize("backend", ["loop", "sliced", "grouped_mm"])
def test_rows_past_the_last_pair_never_matter(backend: str) -> None:
    """D5: NaN in padding pairs and in rows that no pair names reaches nothing."""
    received, tensors = make(23, bias=True, tail=6)
    dy = torch.randn(24, D, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    clean = replace(received, pair_row_P=received.pair_row_P[:-6])
    want = step(clean, {**tensors, "w": tensors["w"][:-6]}, SwiGLU(), backend, torch.float32,
                dy=dy[:23])  # fmt: skip
    tensors["w"][-6:] = torch.nan
    tensors["x"] = torch.cat([tensors["x"], tensors["x"].new_full((1, D), torch.nan)])
    dy[23] = torch.nan
    rows = received.pair_row_P.clone()
    rows[-6:] = 23  # the row of NaN
    received = replace(received, pair_row_P=rows)
    got = step(received, tensors, SwiGLU(), backend, torch.float32, dy=dy)
    for name, poisoned in (
        ("out", slice(23, None)),
        ("x", slice(23, None)),
        ("w", slice(-6, None)),
    ):
        assert not got[name][poisoned].any(), name
    got |= {"out": got["out"][:23], "x": got["x"][:23], "w": got["w"][:-6]}
    close(got, want, 1e-6)


@pytest.mark.parametrize("backend", ["loop", "sliced", "grouped_mm"])
def test_no_rows(backend: str) -> None:
    """D2: nothing arrives; the output is connected and every gradient is zero."""
    received, tensors = make(0, bias=True, rank=8)
    got = step(received, tensors, SwiGLU(), backend, torch.float32)
    assert got["out"].shape == (0, D)
    assert all(not v.any() for v in got.values())


@pytest.mark.parametrize("backend", ["loop", "sliced", "grouped_mm"])
def test_strided_gradient_and_input(backend: str) -> None:
    """C23: the stride-0 gradient of a sum, and rows that are a transposed view."""
    received, tensors = make(23)
    strided = {**tensors, "x": tensors["x"].t().contiguous().t()}
    assert not strided["x"].is_contiguous()
    one = torch.ones((), dtype=torch.float64).expand(23, D)
    want = step(received, tensors, SwiGLU(), "loop", dy=torch.ones(23, D))
    close(step(received, strided, SwiGLU(), backend, torch.float32, dy=one), want, 1e-5)


def test_sums_are_fp32_and_rounded_once() -> None:
    """D6, C25: outputs 256 and seven times 1 of a bf16 layer add up to 264."""
    for backend in ("loop", "sliced", "grouped_mm"):
        zeros = torch.zeros(8, 2, 8, 8, dtype=torch.bfloat16)
        bias = torch.ones(8, 8, dtype=torch.bfloat16)
        bias[0] = 256
        received = Received(
            rows_RD=torch.ones(1, 8, dtype=torch.bfloat16),
            pair_row_P=torch.zeros(8, dtype=torch.int64),
            pair_weight_P=torch.ones(8),
            counts_e=torch.ones(8, dtype=torch.int64),
        )
        out = experts_forward(
            received, zeros, zeros[:, 0], activation=SwiGLU(), backend=backend,
            gate_up_bias_e2F=torch.zeros(8, 2, 8, dtype=torch.bfloat16), down_bias_eD=bias,
        )  # fmt: skip
        assert out.dtype == torch.float32
        assert torch.equal(out, torch.full((1, 8), 263.0))
        assert torch.equal(out.bfloat16(), torch.full((1, 8), 264.0, dtype=torch.bfloat16))


@pytest.mark.parametrize("backend", ["sliced", "grouped_mm"])
def test_twenty_runs_are_bitwise_equal(backend: str) -> None:
    """D6, C25: forward and backward, in reused memory."""
    received, tensors = make(64)
    first = step(received, tensors, SwiGLU(), backend, torch.bfloat16)
    for _ in range(20):
        again = step(received, tensors, SwiGLU(), backend, torch.bfloat16)
        assert all(torch.equal(again[name], value) for name, value in first.items())


def test_gate_and_up_layout() -> None:
    """C30: gate rows 1 and 2, up rows 10 and 20; also the clamped activation of gpt-oss."""
    gate_up = torch.tensor([[[[1.0], [2.0]], [[10.0], [20.0]]]])
    down = torch.ones(1, 1, 2)
    received = Received(
        rows_RD=torch.ones(1, 1), pair_row_P=torch.zeros(1, dtype=torch.int64),
        pair_weight_P=torch.ones(1), counts_e=torch.ones(1, dtype=torch.int64),
    )  # fmt: skip
    for backend in ("loop", "sliced"):
        for act, want in ((SwiGLU(), 42.542469), (ClampedSwiGLU(), 22.251635)):
            out = experts_forward(received, gate_up, down, activation=act, backend=backend)
            assert out.item() == pytest.approx(want, rel=1e-6)


def test_saved_bytes_a_pair() -> None:
    """Issue 7: 2F a pair, rows and indices; with recompute the 2F are not kept. No output is."""
    for recompute, kept in ((False, 2 * F), (True, 0)):
        received, tensors = make(50)
        t = {n: v.float().requires_grad_() for n, v in tensors.items()}
        received = replace(received, rows_RD=t["x"], pair_weight_P=t["w"])
        saved = []

        def pack(x: torch.Tensor, saved: list[torch.Tensor] = saved) -> torch.Tensor:
            saved.append(x)
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            experts_forward(
                received, t["gate_up"], t["down"], activation=SwiGLU(),
                backend="sliced", recompute=recompute,
            )  # fmt: skip
        own = {v.untyped_storage().data_ptr() for n, v in t.items() if n in ("gate_up", "down")}
        total = sum(x.nbytes for x in saved if x.untyped_storage().data_ptr() not in own)
        pairs = 50 * K
        assert total == pairs * kept * 4 + 50 * D * 4 + pairs * (8 + 4)


def test_backend_names_and_limits() -> None:
    """F3: what cannot run is refused, with the back end that can."""
    received, tensors = make(4)
    with pytest.raises(ConfigError, match="choose one of auto, loop"):
        step(received, tensors, SwiGLU(), "triton")
    with pytest.raises(ConfigError, match="choose experts='sliced'"):
        step(received, tensors, SwiGLU(), "grouped_mm", torch.float64)
    with pytest.raises(ConfigError, match="activation='tanh'"):
        activation("tanh")
    assert activation("gelu_pytorch_tanh") == GeluGLU("tanh")


def test_workspace_gives_out_no_memory_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """A buffer comes back only when nothing, not even a view, refers to its storage."""
    monkeypatch.setattr(workspace, "_kept", [])
    cpu, size = torch.device("cpu"), 1 << 20
    a = workspace.empty((size // 4,), torch.float32, cpu)
    view = a[5:]
    place = a.data_ptr()
    del a
    b = workspace.empty((size // 4,), torch.float32, cpu)
    assert b.data_ptr() != place
    del view
    c = workspace.empty((size // 4,), torch.float32, cpu)
    assert c.data_ptr() == place
    del b, c
    # what is kept while free stays under the limit
    monkeypatch.setattr(workspace, "LIMIT", 4 * size)
    workspace.empty((4 * size,), torch.uint8, cpu)
    assert sum(storage.nbytes() for storage in workspace._kept) <= 4 * size
