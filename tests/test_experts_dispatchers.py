"""Dispatchers beyond the plain one: two hops, pieces, fp8 rows, overlap."""

from __future__ import annotations

import math
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from experts_cases import draw, joined, layer_step, mesh_of_layout, worst_error
from model_cases import BASE, CASES
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from moe_tp import Mesh, MoE, forward_backward, settle_gradients
from moe_tp.errors import ConfigError
from moe_tp.experts import workspace
from moe_tp.experts.all_gather import AllGatherDispatcher
from moe_tp.experts.dispatch import Dispatcher, Received
from moe_tp.experts.events import record_events
from moe_tp.experts.local import LocalDispatcher, sort_pairs
from moe_tp.experts.losses import SUMS
from moe_tp.experts.two_hop import TwoHopDispatcher
from moe_tp.models import ModelConfig, build
from moe_tp.parallel.collectives import record_traffic
from moe_tp.parallel.shards import to_local
from moe_tp.routing import Assignment, ExpertTable, RouterConfig
from moe_tp.testing import run_ranks

ROUTER = {"balance_coef": 0.1, "top_k": 3}


@pytest.mark.parametrize("layout", [{"ep": 4}, {"ep": 4, "etp": 2}, {"ep": 8}], ids=str)
def test_two_hops_equal_one_process(layout: dict[str, int]) -> None:
    """D1, D2: nodes of two ranks, unequal tokens, uneven experts."""
    world = 8 if sum(layout.values()) > 4 else 4
    tokens = [3, 0, 5, 2, 1, 0, 0, 4][:world]
    want = layer_step(None, {"experts": "loop"}, tokens, 12, {}, ROUTER)
    got = joined(run_ranks(_two_hop_step, world, layout, tokens))
    assert worst_error(got, want) < 1e-12


def _two_hop_step(layout: dict[str, int], tokens: list[int]) -> dict[str, torch.Tensor]:
    mesh = mesh_of_layout(layout)
    dispatcher = TwoHopDispatcher(mesh, ExpertTable(12, mesh.size("ep")), node_ranks=2)
    return layer_step(layout, {}, tokens, 12, {"dispatcher": dispatcher}, ROUTER, mesh=mesh)


def test_two_hops_cross_between_nodes_once_per_node() -> None:
    """D11, issue 5: rows between nodes are the distinct (token, other node) pairs."""
    for sent, want_between, want_inside in run_ranks(_two_hop_rows, 4):
        assert sent["ep_between"] == want_between * 512 * 4
        assert sent["ep_inside"] == want_inside * 512 * 4


def _two_hop_rows() -> tuple[dict[str, int], int, int]:
    mesh = mesh_of_layout({"ep": 4})
    dispatcher = TwoHopDispatcher(mesh, ExpertTable(16, 4), node_ranks=2)
    layer = MoE(512, 2, RouterConfig(16, 6), mesh, seed=0, dispatcher=dispatcher)
    xs = [draw(40, 512, dtype=torch.float32, seed=r) for r in range(4)]
    rank_ids = [layer.router(x).ids_TK // 4 for x in xs]
    node, place = divmod(mesh.rank, 2)
    between = int((rank_ids[mesh.rank] // 2 != node).any(1).sum())
    # what this rank forwards inside its node: tokens of both nodes' ranks of its place
    other = node * 2 + 1 - place
    inside = sum(int((rank_ids[r] == other).any(1).sum()) for r in (place, 2 + place))
    with record_traffic() as log, torch.no_grad():
        layer(xs[mesh.rank])
    forward: dict[str, int] = {}
    for axis in ("ep_between", "ep_inside"):
        sizes = [size for a, _, _, size in log.entries if a == axis]
        forward[axis] = sizes[2]  # counts, pairs, rows, and sums on the way back
    return forward, between, inside


def test_nodes_must_divide_ep() -> None:
    """F3: with what to choose."""
    for message in run_ranks(_odd_nodes, 4):
        assert "nodes of 3 ranks do not divide ep=4" in message


def _odd_nodes() -> str:
    with pytest.raises(ConfigError) as info:
        TwoHopDispatcher(mesh_of_layout({"ep": 4}), ExpertTable(4, 4), node_ranks=3)
    return str(info.value)


@pytest.mark.parametrize("dispatcher", ["all_to_all", "all_gather"])
def test_pieces_change_nothing(dispatcher: str) -> None:
    """D10, D1: all tokens on few experts, sent a few rows at a time and again in backward."""
    for layout, tokens in (({"ep": 4}, [9, 0, 5, 2]), ({"ep": 2, "etp": 2}, [9, 0, 5, 2])):
        args = (tokens, 6, {"num_shared": 1}, ROUTER)
        want = layer_step(None, {"experts": "loop"}, *args)
        runtime = {"dispatcher": dispatcher, "dispatch_rows": 3}
        assert worst_error(joined(run_ranks(layer_step, 4, layout, runtime, *args)), want) < 1e-12


class _Peak(TorchDispatchMode):
    """Counts the bytes of storages that operators made and that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, DTensor):  # its own storage is a fiction of the global size
                tensor = tensor._local_tensor
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        place, size = storage._cdata, storage.nbytes()
        if place in self.seen:
            return
        self.seen.add(place)
        self.now += size
        self.most = max(self.most, self.now)

        def freed() -> None:
            self.now -= size
            self.seen.discard(place)

        weakref.finalize(storage, freed)


def test_memory_stays_bounded_under_total_imbalance() -> None:
    """D10: every token to one expert; the peak over the even case stays within the formula."""
    results = run_ranks(_peaks, 4)
    dim, hidden, limit, ranks, tokens = 128, 128, 64, 4, 400
    rows = limit + ranks
    bound = rows * dim * (3 * 4 + 3 * 4) + rows * hidden * 2 * 4
    bound += rows * (6 * hidden + 4 * dim) * 4
    bound += 3 * (2 * 3 * dim * hidden * 4) + 5 * tokens * dim * 4
    assert max(bounded for _, bounded in results) < bound
    assert max(free for free, _ in results) > 3 * bound


def _peaks() -> list[int]:
    peaks = []
    for limit in (None, 64):
        mesh = mesh_of_layout({"ep": 4}, dispatch_rows=limit)
        layer = MoE(128, 128, RouterConfig(8, 1, normalize=False), mesh, seed=0)
        with torch.no_grad():
            to_local(layer.router.weight).zero_()[3] = 1.0
        x = draw(400, 128, dtype=torch.float32).abs().requires_grad_()
        smallest, workspace.SMALLEST = workspace.SMALLEST, 1 << 40
        try:
            with _Peak() as peak:
                layer(x)[0].sum().backward()
        finally:
            workspace.SMALLEST = smallest
        peaks.append(peak.most)
    return peaks


def test_fp8_rows_stay_within_their_error() -> None:
    """Issue 5: 8 bits an element and a scale a row; output error measured, bytes counted."""
    exact = run_ranks(_fp8, 2, None)
    short = run_ranks(_fp8, 2, torch.float8_e4m3fn)
    for (y, row_bytes, dx), (z, short_bytes, dz) in zip(exact, short, strict=True):
        assert short_bytes * 4 * 64 == row_bytes * (64 + 4)
        for a, b in ((y, z), (dx, dz)):
            error = ((a - b).norm() / a.norm()).item()
            assert 1e-4 < error < 0.05


def _fp8(wire: torch.dtype | None) -> tuple[torch.Tensor, int, torch.Tensor]:
    mesh = mesh_of_layout({"ep": 2}, wire_dtype=wire)
    layer = MoE(64, 32, RouterConfig(4, 2), mesh, seed=0)
    x = draw(50, 64, dtype=torch.float32, seed=mesh.rank).requires_grad_()
    with record_traffic() as log:
        y, _ = layer(x)
        y.square().sum().backward()
    sizes = [s for axis, _, phase, s in log.entries if (axis, phase) == ("ep", "forward")]
    return y.detach(), sizes[2], x.grad


def test_fp8_rows_are_not_added_up() -> None:
    """F3: an all-gather's sums would be in fp8; refused when it is made."""
    with pytest.raises(ConfigError, match="dispatcher='all_to_all' or wire_dtype"):
        AllGatherDispatcher(Mesh.single(), ExpertTable(4), torch.float8_e4m3fn)


@pytest.mark.parametrize("tokens", [[0, 5], [0, 0]], ids=str)
def test_fp8_rows_of_a_rank_without_any(tokens: list[int]) -> None:
    """D2: a rank that sends nothing, in every way of sending, also in pieces."""
    args = (tokens, 5, {}, ROUTER)
    want = layer_step(None, {"experts": "loop"}, *args)
    wire = {"wire_dtype": torch.float8_e4m3fn}
    for layout in ({"ep": 2}, {"etp": 2}):
        for way in ({}, {"dispatch_rows": 2, "overlap": False}):
            got = joined(run_ranks(layer_step, 2, layout, {**wire, **way}, *args))
            assert worst_error(got, want) < 0.1, (layout, way)


def test_other_work_runs_while_rows_are_in_flight() -> None:
    """Issue 5: between issue and wait, forward and backward; not with overlap off; same bits."""
    on, off = run_ranks(_overlap, 2, True), run_ranks(_overlap, 2, False)
    ways = (("issue dispatch", "wait dispatch"),
            ("issue dispatch backward", "wait dispatch backward"))  # fmt: skip
    for (events, values), (plain, others) in zip(on, off, strict=True):
        between = [events[events.index(a) + 1 : events.index(b)] for a, b in ways]
        assert between == [["shared expert"], ["expert weight gradients", "shared backward"]]
        for first, last in ways:
            assert plain.index(last) == plain.index(first) + 1
        assert all(torch.equal(a, b) for a, b in zip(values, others, strict=True))


@pytest.mark.parametrize("backend", ["sliced", "grouped_mm"])
def test_pieces_travel_while_experts_work(backend: str) -> None:
    """Issue 5, D10: the next piece is in flight during one's compute, forward and backward."""
    on = run_ranks(_overlap, 2, True, 2, backend)
    off = run_ranks(_overlap, 2, False, 2, backend)
    for (events, values), (plain, others) in zip(on, off, strict=True):
        assert _in_flight(events) == [1, 1, 0, 1, 1, 0]  # three pieces, twice
        assert _in_flight(plain) == [0] * 6
        assert all(torch.equal(a, b) for a, b in zip(values, others, strict=True))


def _in_flight(events: list[str]) -> list[int]:
    """Return the dispatches on their way at each of the experts' forwards."""
    found, now = [], 0
    for event in events:
        now += (event == "issue dispatch") - (event == "wait dispatch")
        if event == "experts":
            found.append(now)
    return found


def _overlap(
    on: bool, limit: int | None = None, backend: str = "auto"
) -> tuple[list[str], list[torch.Tensor]]:
    mesh = mesh_of_layout({"ep": 2}, overlap=on, dispatch_rows=limit, experts=backend)
    layer = MoE(8, 8, RouterConfig(4, 2), mesh, num_shared=1, seed=0)
    with torch.no_grad():  # all tokens to the first rank, so that there are three pieces
        if limit is not None:
            to_local(layer.router.weight)[:2] += 1.0
    share = 3 if limit is not None else 5
    x = draw(share, 8, dtype=torch.float32, seed=mesh.rank).abs().requires_grad_()
    with record_events() as events:
        layer.shared.register_full_backward_pre_hook(
            lambda module, grad: events.append("shared backward")
        )
        y, _ = layer(x)
        y.square().sum().backward()
    settle_gradients(layer)
    return events, [y.detach(), x.grad, *(to_local(p.grad) for p in layer.parameters())]


def test_what_travelled_is_told() -> None:
    """Issue 5, D11: rows and bytes of each rank, equal to the collectives' own count."""
    cases: list[tuple[int, dict[str, int], dict[str, Any]]] = [
        (4, {"ep": 2, "etp": 2}, {}),
        (4, {"ep": 4}, {"wire_dtype": torch.float8_e4m3fn}),
        (4, {"ep": 2, "etp": 2}, {"dispatcher": "all_gather", "wire_dtype": torch.bfloat16}),
    ]
    for world, layout, runtime in cases:
        told = run_ranks(_told, world, layout, runtime)
        for (_, rows_sent, _, sent, _), counted, pairs in told:
            assert sent == counted
            assert pairs is None or rows_sent == pairs
        for at in (0, 2):  # what all send is what all get
            assert sum(t[0][at + 1] for t in told) == sum(t[0][at + 2] for t in told)
    assert told[0][0][0] == 0.0


def _told(
    layout: dict[str, int], runtime: dict[str, Any]
) -> tuple[tuple[float, int, int, int, int], int, int | None]:
    mesh = mesh_of_layout(layout, **runtime)
    layer = MoE(16, 8, RouterConfig(8, 3), mesh, seed=0)
    x = draw(5 + 4 * mesh.rank, 16, dtype=torch.float32, seed=mesh.rank)
    with record_traffic() as log, torch.no_grad():
        aux = layer(x)[1]
    counted = sum(size for axis, _, _, size in log.entries if axis in ("ep", "etp"))
    pairs = None
    if layout == {"ep": 4}:
        ranks_TK = layer.router(x).ids_TK // 2
        pairs = sum(int((ranks_TK == r).any(1).sum()) for r in range(4) if r != mesh.rank)
    entropy = torch.special.entr(layer.router(x).scores_TE).sum().double()
    total = [torch.zeros((), dtype=torch.float64) for _ in range(4)]
    dist.all_gather(total, entropy)
    error = round(abs(float(aux.entropy_sum - sum(total))), 3)
    wire = aux.wire
    return (
        (error, wire.rows_sent, wire.rows_received, wire.bytes_sent, wire.bytes_received),
        counted, pairs,
    )  # fmt: skip


class ReverseDispatcher:
    """A user's own: local, with the rows in reverse order."""

    def __init__(self, mesh: Mesh, table: ExpertTable) -> None:
        self.table = table

    def dispatch(self, x_TD: torch.Tensor, assignment: Assignment) -> Received:
        return Received(
            rows_RD=x_TD.flip(0),
            **sort_pairs(
                assignment.ids_TK.flip(0), self.table.slots_per_rank, assignment.weights_TK.flip(0)
            ),
        )

    def combine(
        self, partial_RD: torch.Tensor, received: Received, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        return partial_RD.flip(0)


def test_a_users_own_dispatcher() -> None:
    """Issue 5: the contract is public; whatever keeps it plugs in."""
    mesh = Mesh.single()
    table = ExpertTable(5)
    x = draw(9, 8, dtype=torch.float32)
    results = []
    for dispatcher in (ReverseDispatcher(mesh, table), LocalDispatcher(mesh, table)):
        typed: Dispatcher = dispatcher
        layer = MoE(8, 8, RouterConfig(5, 2), mesh, seed=0, dispatcher=typed)
        results.append(layer(x)[0])
    assert torch.allclose(results[0], results[1], atol=1e-7)


def test_every_dispatcher_runs_on_one_process() -> None:
    """Size 1 is a value: the all-to-all dispatcher runs in one process and equals the local one."""
    args = ([7], 5, {}, ROUTER)
    want = layer_step(None, {"dispatcher": "local"}, *args)
    for name in ("all_to_all", "all_gather", "two_hop"):
        got = layer_step(None, {"dispatcher": name}, *args)
        assert worst_error(got, want) < 1e-13


def test_a_models_load_adds_up() -> None:
    """Issue 5: tokens, choices, dropped, entropy, rows and bytes by layer, also under pp."""
    want = _sums(None)
    kept = want[:, SUMS.index("kept")]
    assert (want[:, :2] == torch.tensor([20.0, 40.0], dtype=torch.float64)).all()
    assert (kept <= 40).all()
    assert (want[:, SUMS.index("entropy")] < 20 * math.log(6)).all()
    assert (want[:, 4:] == 0).all()
    for layout in ({"pp": 2}, {"ep": 2, "tp": 2}):
        results = run_ranks(_sums, 2, layout)
        for got in results:
            assert torch.allclose(got[:, :4], want[:, :4], rtol=1e-5)
        total = sum(results)[:, 4:]
        assert torch.equal(total[:, ::2], total[:, 1::2])  # what all send is what all get
        assert (total > 0).all() == ("ep" in layout)


def _sums(layout: dict[str, int] | None) -> torch.Tensor:
    config = ModelConfig.from_hub({**BASE, **CASES["mixtral"]})
    model = build(config, mesh_of_layout(layout), seed=1)
    ids = torch.arange(20).view(2, 2, 5)
    out = forward_backward(model, [{"input_ids": i, "labels": i} for i in ids])
    return out.aux.sums_LM
