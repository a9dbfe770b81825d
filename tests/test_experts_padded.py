"""Dispatch of fixed sizes: equal to the plain one, and the host waits for nothing."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
from experts_cases import draw, joined, layer_step, mesh_of_layout, worst_error
from torch.utils._python_dispatch import TorchDispatchMode

from moe_tp import Mesh, MoE
from moe_tp.errors import ConfigError, RoutingError
from moe_tp.experts.padded import PaddedDispatcher
from moe_tp.parallel.collectives import record_traffic
from moe_tp.routing import ExpertTable, RouterConfig
from moe_tp.testing import run_ranks

PAD = {"capacity_factor": 1.3, "pad_to_capacity": True, "balance_coef": 0.1, "top_k": 3}


@pytest.mark.parametrize(
    ("world", "layout", "tokens", "experts"),
    [(4, {"ep": 4}, 5, 7), (4, {"ep": 2, "etp": 2}, 4, 5), (2, {"tp": 2, "ep": 2}, 0, 4),
     (2, {"ep": 2}, 1, 4)],
    ids=str,
)  # fmt: skip
def test_padding_changes_nothing(
    world: int, layout: dict[str, int], tokens: int, experts: int
) -> None:
    """D1, D4, D5, D7: the same drops, outputs and gradients as with exact sizes, in fp64."""
    args = ([tokens] * world, experts, {"num_shared": 1})
    plain = {**PAD, "pad_to_capacity": False}
    want = joined(run_ranks(layer_step, world, layout, {"experts": "loop"}, *args, plain))
    got = joined(run_ranks(layer_step, world, layout, {}, *args, PAD))
    assert worst_error(got, want) < 1e-12
    if tokens == 5:
        assert got["counts"].sum() < 3 * tokens * world  # some found no place


def test_one_process_and_a_placement() -> None:
    """D1: size 1 is a value; experts elsewhere than in order, one of them twice."""
    args = ([9], 5, {}, {**PAD, "pad_to_capacity": False})
    want = layer_step(None, {}, *args)
    got = layer_step(None, {}, *args[:3], PAD)
    assert worst_error(got, want) < 1e-12


class _Waits(TorchDispatchMode):
    """Counts the reads of single values."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        self.count += func in (aten._local_scalar_dense.default, aten.equal.default)
        self.count += func is aten.nonzero.default
        return func(*args, **(kwargs or {}))


def test_the_host_waits_for_nothing() -> None:
    """Issue 5: no value is read from the device, no counts go before the rows; else one a layer."""
    for (padded, fixed), (plain, counted) in zip(
        run_ranks(_waits, 2, True), run_ranks(_waits, 2, False), strict=True
    ):
        assert padded == 0
        assert plain > 0
        # the number of tokens, pairs, their weights, rows, sums; with exact sizes counts come first
        assert len(fixed) == 5
        assert min(fixed) == 4
        assert counted[0] == 16


def _waits(pad: bool) -> tuple[int, list[int]]:
    mesh = mesh_of_layout({"ep": 2})
    config = RouterConfig(4, **{**PAD, "pad_to_capacity": pad})
    layer = MoE(8, 8, config, mesh, num_shared=1, seed=0)
    x = draw(6, 8, dtype=torch.float32, seed=mesh.rank).requires_grad_()
    reads: list[str] = []
    with ExitStack() as stack:
        for name in ("tolist", "cpu", "numpy"):
            spy = _spy(getattr(torch.Tensor, name), reads)
            stack.enter_context(mock.patch.object(torch.Tensor, name, spy))
        log = stack.enter_context(record_traffic())
        waits = stack.enter_context(_Waits())
        y, aux = layer(x)
        (y.square().sum() + aux.loss).backward()
    found = waits.count + len(reads)
    sent = [size for axis, _, phase, size in log.entries if (axis, phase) == ("ep", "forward")]
    return found, sent


def _spy(original: Any, reads: list[str]) -> Any:
    def spy(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        reads.append(original.__name__)
        return original(self, *args, **kwargs)

    return spy


def test_bytes_are_told() -> None:
    """D11: what the layer tells is what the collectives counted."""
    for told, counted in run_ranks(_told, 4):
        assert told == counted


def _told() -> tuple[int, int]:
    mesh = mesh_of_layout({"ep": 2, "etp": 2})
    layer = MoE(8, 8, RouterConfig(5, **PAD), mesh, seed=0)
    with record_traffic() as log, torch.no_grad():
        aux = layer(draw(6, 8, dtype=torch.float32, seed=mesh.rank))[1]
    return aux.wire.bytes_sent, log.total(axis="ep") + log.total(axis="etp")


def test_what_does_not_fit_is_said() -> None:
    """R7, F2, F3: a NaN names its token on a CPU; unequal tokens; others."""
    layer = MoE(8, 8, RouterConfig(5, **PAD), Mesh.single(), seed=0, layer=2)
    x = draw(6, 8, dtype=torch.float32)
    x[4] = float("nan")
    with pytest.raises(RoutingError, match="layer 2, token 4"):
        layer(x)
    dispatcher = PaddedDispatcher(Mesh.single(), ExpertTable(5))
    plain = MoE(8, 8, RouterConfig(5, 3), Mesh.single(), seed=0, dispatcher=dispatcher)
    with pytest.raises(ConfigError, match="set capacity_factor and pad_to_capacity=True"):
        plain(x[:4])
    for messages in run_ranks(_refused, 2):
        assert "choose dispatcher='all_to_all'" in messages[0]
        assert "bring equally many to every rank" in messages[1]


def _refused() -> list[str]:
    messages = []
    mesh = mesh_of_layout({"ep": 2}, dispatcher="all_gather")
    with pytest.raises(ConfigError) as refused:
        MoE(8, 8, RouterConfig(5, **PAD), mesh)
    messages.append(str(refused.value))
    # so small that both ranks' buffers have one size, which is how it can be told
    layer = MoE(8, 8, RouterConfig(2, 1, normalize=False, capacity_factor=0.1,
                pad_to_capacity=True), mesh_of_layout({"ep": 2}), seed=0)  # fmt: skip
    with pytest.raises(RuntimeError) as unequal:
        layer(draw(3 + mesh.rank, 8, dtype=torch.float32))
    messages.append(str(unequal.value))
    return messages
