"""Random layers over random layouts and dispatchers, in fp64, against loops over tokens.

The reference shares nothing with the layer but its weights: it ranks, weighs and computes one token
after the other. Kinds that look across tokens look over those that a rank owns, and so does it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from experts_cases import draw, joined, mesh_of_layout, own_rows, worst_error
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe_tp import Mesh, MoE, settle_gradients
from moe_tp.experts.two_hop import TwoHopDispatcher
from moe_tp.parallel.shards import full_logical
from moe_tp.routing import ExpertTable, RouterConfig
from moe_tp.routing.reference import reference_route
from moe_tp.testing import run_ranks

DIM, HIDDEN = 6, 8
LAYOUTS: list[dict[str, int]] = [
    {"ep": 4}, {"ep": 2}, {"ep": 2, "etp": 2}, {"tp": 2, "ep": 2, "etp": 2}, {"tp": 4, "ep": 4},
    {"tp": 2, "etp": 4},
]  # fmt: skip
QUIET = settings(
    deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)


@st.composite
def layers(drawn: st.DrawFn) -> dict[str, Any]:
    """Return a layout, its runtime, a router and unequal numbers of tokens, masked ones too."""
    layout = drawn(st.sampled_from(LAYOUTS))
    groups = drawn(st.sampled_from([1, 1, 2, 3]))
    most = 12 // groups
    experts = groups * drawn(st.integers(-(-4 // groups), most))
    top_groups = drawn(st.integers(1, groups))
    choices = drawn(st.integers(1, min(5, top_groups * (experts // groups))))
    score = drawn(st.sampled_from(["softmax", "sigmoid", "softmax_topk"]))
    normalize = drawn(st.booleans())
    if choices == 1:
        score, normalize = "sigmoid", False
    return {
        "layout": layout,
        "dispatcher": drawn(st.sampled_from(["all_to_all", "all_gather", "two_hop"])),
        "dispatch_rows": drawn(st.sampled_from([None, 2, 5])),
        "overlap": drawn(st.booleans()),
        "experts": drawn(st.sampled_from(["loop", "sliced"])),
        "spare": drawn(st.integers(0, 2)),
        "order": drawn(st.permutations(range(experts))),
        "router": {
            "num_experts": experts, "top_k": choices, "num_groups": groups,
            "top_groups": top_groups, "score": score, "normalize": normalize,
            "scale": drawn(st.sampled_from([1.0, 2.5])),
        },
        "tokens": drawn(st.lists(st.integers(0, 6), min_size=4, max_size=4)),
        "masked": drawn(st.floats(0, 1)),
        "skew": drawn(st.sampled_from([0.0, 3.0])),
    }  # fmt: skip


@st.composite
def crossing_layers(drawn: st.DrawFn) -> dict[str, Any]:
    """Return such a layer with a router that looks across the tokens of a rank."""
    case = drawn(layers())
    kind = drawn(st.sampled_from(["expert_choice", "sinkhorn", "balanced", "top_k"]))
    router = {**case["router"], "kind": kind}
    if kind != "top_k":
        router |= {"num_groups": 1, "top_groups": 1}
    if kind == "expert_choice" and router["score"] == "softmax_topk":
        router["score"] = "softmax"
    if kind == "top_k" or drawn(st.booleans()):
        router |= {
            "capacity_factor": drawn(st.sampled_from([0.25, 0.6, 1.0, 1.5])),
            "drop_policy": drawn(st.sampled_from(["weight", "position"])),
            "min_capacity": drawn(st.integers(1, 2)),
            "capacity_multiple": drawn(st.integers(1, 2)),
        }
    return {**case, "router": router}


@given(layers())
@settings(QUIET, max_examples=8)
def test_random_layers(case: dict[str, Any]) -> None:
    """D1, D2, D3, D4, R3, R6: outputs, input gradients and every weight's gradient."""
    _check(case)


@pytest.mark.slow
@given(layers())
@settings(QUIET, max_examples=150)
def test_many_random_layers(case: dict[str, Any]) -> None:
    """D1, D2, D3, D4, R3, R6: the same, widely."""
    _check(case)


CROSSING: list[tuple[str, dict[str, int], dict[str, Any]]] = [
    ("two_hop", {"ep": 4}, {"kind": "expert_choice", "capacity_factor": 0.6}),
    ("all_gather", {"ep": 2, "etp": 2}, {"kind": "sinkhorn", "capacity_factor": 1.0}),
    ("all_to_all", {"tp": 2, "ep": 2, "etp": 2}, {"kind": "balanced"}),
    ("all_to_all", {"ep": 4}, {"capacity_factor": 0.6, "drop_policy": "position"}),
    ("all_to_all", {"tp": 4, "ep": 4}, {"capacity_factor": 0.6, "capacity_multiple": 2}),
]


@pytest.mark.parametrize(("dispatcher", "layout", "router"), CROSSING, ids=str)
def test_layers_that_look_across_tokens(
    dispatcher: str, layout: dict[str, int], router: dict[str, Any]
) -> None:
    """R1, D7: expert choice, Sinkhorn, turns and capacity over the tokens of each rank."""
    plain = {"num_experts": 7, "top_k": 3, "score": "softmax", "normalize": True, "scale": 2.5}
    plain |= {"kind": "top_k", "num_groups": 1, "top_groups": 1}
    case = {"layout": layout, "dispatcher": dispatcher, "dispatch_rows": 2, "overlap": True}
    case |= {"experts": "sliced", "spare": 1, "order": [3, 0, 6, 1, 5, 2, 4], "skew": 3.0}
    _check({**case, "tokens": [5, 0, 6, 3], "masked": 0.3, "router": {**plain, **router}})


@pytest.mark.slow
@given(crossing_layers())
@settings(QUIET, max_examples=100)
def test_many_random_layers_that_look_across_tokens(case: dict[str, Any]) -> None:
    """R1, D7: the same, widely."""
    _check(case)


def _check(case: dict[str, Any]) -> None:
    got = joined(run_ranks(_layer, 4, case))
    want = _slow(case)
    assert worst_error(got, want) < 1e-10, case


def _inputs(case: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    total = sum(case["tokens"])
    x_TD = draw(total, DIM, dtype=torch.float64) + case["skew"]
    mask_T = torch.rand(total, generator=torch.Generator().manual_seed(1)) >= case["masked"]
    return x_TD, mask_T, draw(total, DIM, dtype=torch.float64, seed=2)


def _made(case: dict[str, Any], mesh: Mesh) -> MoE:
    config = RouterConfig(**case["router"])
    order, ep = case["order"], mesh.size("ep")
    share = -(-len(order) // ep)
    slots: list[int] = []
    for rank in range(ep):  # experts in any order, the last ranks with fewer, none without
        mine = order[rank * len(order) // ep : (rank + 1) * len(order) // ep]
        others = [expert for expert in order if expert not in mine]
        copies = [
            others[(3 * i + rank) % len(others)] for i in range(case["spare"] if others else 0)
        ]
        slots += [*mine, *[-1] * (share - len(mine)), *copies]
    table = ExpertTable(len(order), ep, tuple(slots))
    dispatcher = None
    if case["dispatcher"] == "two_hop":
        nodes = 2 if ep % 2 == 0 else 1
        dispatcher = TwoHopDispatcher(mesh, table, node_ranks=nodes)
    return MoE(
        DIM, HIDDEN, config, mesh,
        dtype=torch.float64, seed=3, table=table, dispatcher=dispatcher,
    )  # fmt: skip


def _layer(case: dict[str, Any]) -> dict[str, torch.Tensor]:
    names = ("dispatch_rows", "overlap", "experts")
    runtime = {name: case[name] for name in names}
    if case["dispatcher"] != "two_hop":
        runtime["dispatcher"] = case["dispatcher"]
    mesh = mesh_of_layout(case["layout"], **runtime)
    layer = _made(case, mesh)
    x_TD, mask_T, dy_TD = (t[own_rows(case["tokens"], mesh.rank)] for t in _inputs(case))
    x_TD = x_TD.clone().requires_grad_()
    y_TD, _ = layer(x_TD, mask=mask_T)
    (y_TD * dy_TD).sum().backward()
    settle_gradients(layer)
    assert x_TD.grad is not None
    return {"y": y_TD.detach(), "dx": x_TD.grad, **_full(layer, grad=True)}


def _full(layer: MoE, *, grad: bool) -> dict[str, torch.Tensor]:
    params = {"router": (layer.router, "weight"), "gate_up": (layer.experts, "gate_up"),
              "down": (layer.experts, "down")}  # fmt: skip
    found = {}
    for name, (module, key) in params.items():
        param = module.get_parameter(key)
        value = param.grad if grad else param.detach()
        found[name] = full_logical(value, module.specs[key], layer.mesh)
    return found


def _slow(case: dict[str, Any]) -> dict[str, torch.Tensor]:
    weights = _full(_made({**case, "dispatcher": "local"}, Mesh.single()), grad=False)
    for weight in weights.values():
        weight.requires_grad_()
    x_TD, mask_T, dy_TD = _inputs(case)
    x_TD.requires_grad_()
    rows = []
    for x_D, pairs in zip(x_TD, _choices(x_TD, mask_T, weights["router"], case), strict=True):
        y_D = 0.0 * x_D
        for expert, share in pairs:
            gate_F, up_F = (half @ x_D for half in weights["gate_up"][expert])
            hidden_F = gate_F * torch.sigmoid(gate_F) * up_F
            y_D = y_D + share * (weights["down"][expert] @ hidden_F)
        rows.append(y_D)
    y_TD = torch.stack(rows) if rows else x_TD * 1.0
    grads = torch.autograd.grad(
        (y_TD * dy_TD).sum(), [x_TD, *weights.values()], allow_unused=True, materialize_grads=True
    )
    return {"y": y_TD.detach(), "dx": grads[0], **dict(zip(weights, grads[1:], strict=True))}


def _choices(
    x_TD: torch.Tensor, mask_T: torch.Tensor, router_ED: torch.Tensor, case: dict[str, Any]
) -> list[list[tuple[int, torch.Tensor]]]:
    """Return the experts of each token with their weights."""
    router, found = case["router"], []
    if "kind" not in router:
        return [
            _choose(router_ED @ x_D, router) if real else []
            for x_D, real in zip(x_TD, mask_T.tolist(), strict=True)
        ]
    for rank in range(4):
        rows = own_rows(case["tokens"], rank)
        logits_TE = x_TD[rows] @ router_ED.t()
        slow = reference_route(
            logits_TE.tolist(), RouterConfig(**router), mask=mask_T[rows].tolist()
        )
        for row_E, chosen, kept in zip(logits_TE, slow.chosen, slow.kept, strict=True):
            stay, shares = {expert for expert, _ in kept}, _shares(row_E, chosen, router)
            found.append([(e, s) for e, s in zip(chosen, shares, strict=True) if e in stay])
    return found


def _choose(logits_E: torch.Tensor, router: dict[str, Any]) -> list[tuple[int, torch.Tensor]]:
    """Return the experts of one token with their weights."""
    kind, experts, groups = router["score"], router["num_experts"], router["num_groups"]
    score_E = torch.sigmoid(logits_E) if kind == "sigmoid" else torch.softmax(logits_E, 0)
    rank_E = (logits_E if kind == "softmax_topk" else score_E).tolist()
    size = experts // groups
    runs = [range(g * size, (g + 1) * size) for g in range(groups)]
    value = [sum(sorted((rank_E[e] for e in run), reverse=True)[:2]) for run in runs]
    best = sorted(range(groups), key=lambda g: (-value[g], g))[: router["top_groups"]]
    allowed = [e for g in best for e in runs[g]] if groups > 1 else list(range(experts))
    chosen = sorted(allowed, key=lambda e: (-rank_E[e], e))[: router["top_k"]]
    return list(zip(chosen, _shares(logits_E, chosen, router), strict=True))


def _shares(
    logits_E: torch.Tensor, chosen: list[int], router: dict[str, Any]
) -> list[torch.Tensor]:
    """Return the weights of one token's experts."""
    if router["score"] == "softmax_topk":
        return [router["scale"] * share for share in torch.softmax(logits_E[chosen], 0)]
    sigmoid = router["score"] == "sigmoid"
    score_E = torch.sigmoid(logits_E) if sigmoid else torch.softmax(logits_E, 0)
    shares = score_E[chosen]
    if router["normalize"]:
        shares = shares / shares.sum()
    return [router["scale"] * share for share in shares]
