"""verify is itself verified: each fault put into a layout's run must make it fail."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from verify_models import MODELS, write_folder

from moe_tp.errors import ConfigError
from moe_tp.experts import all_to_all, losses
from moe_tp.experts.layer import GroupedExperts
from moe_tp.models import decoder, tokens
from moe_tp.models.decoder import Decoder
from moe_tp.parallel import gradients, linear, vocab
from moe_tp.parallel.layout import ParallelLayout
from moe_tp.parallel.parameter import named_specs
from moe_tp.parallel.shards import to_local
from moe_tp.testing import run_ranks
from moe_tp.train import step
from moe_tp.verify import run as verify_run
from moe_tp.verify import verify

Patch = contextlib.AbstractContextManager[Any]


def _wrap(owner: Any, name: str, change: Callable[..., Any]) -> Patch:
    """Replace `owner.name` by `change(original, *args)`."""
    original = getattr(owner, name)
    return mock.patch.object(owner, name, lambda *a, **k: change(original, *a, **k))


def _settling(before: Callable[[Decoder], Any], after: Callable[[Decoder, Any], None]) -> Patch:
    """Do something before and after the gradients are settled."""

    def change(settle: Callable[[Decoder], None], model: Decoder) -> None:
        kept = before(model)
        settle(model)
        after(model, kept)

    return _wrap(verify_run, "settle_gradients", change)


def _unsettled(part: str) -> Patch:
    """Leave the gradients of matching parameters as they were before settling."""

    def before(model: Decoder) -> dict[str, torch.Tensor]:
        entries = [e for e in named_specs(model) if part in e.fqn]
        assert entries
        return {e.fqn: to_local(e.param.grad).clone() for e in entries}

    def after(model: Decoder, kept: dict[str, torch.Tensor]) -> None:
        for entry in named_specs(model):
            if entry.fqn in kept:
                to_local(entry.param.grad).copy_(kept[entry.fqn])

    return _settling(before, after)


def _expert_gradient_doubled() -> Patch:
    def double(model: Decoder, _: Any) -> None:
        for entry in named_specs(model):
            if entry.spec.domain == "expert":
                to_local(entry.param.grad).mul_(2.0)

    return _settling(lambda model: None, double)


def _contribution_lost() -> Patch:
    def drop(model: Decoder) -> None:
        for param in model.parameters():
            if model.mesh.coordinate("dp") == 1 and param.grad is not None:
                to_local(param.grad).zero_()

    return _settling(drop, lambda model, _: None)


def _etp_reduce_skipped() -> Patch:
    def own_rows(_: Any, rows: torch.Tensor, counts: list[int], group: Any, **__: Any) -> Any:
        return rows.split(counts)[group.rank].contiguous()

    return _wrap(all_to_all, "raw_reduce_scatter_rows", own_rows)


def _expert_lost() -> Patch:
    def lose(forward: Any, self: Any, rows: Any, weight_P: torch.Tensor, received: Any) -> Any:
        if self.mesh.rank == 0:
            first = torch.arange(len(weight_P)) < received.counts_e[0]
            weight_P = torch.where(first, 0.0, weight_P)
        return forward(self, rows, weight_P, received)

    return _wrap(GroupedExperts, "forward", lose)


def _experts_in_wrong_order() -> Patch:
    def swap(load: Any, *args: Any, **kwargs: Any) -> Decoder:
        model: Decoder = load(*args, **kwargs)
        with torch.no_grad():
            for block in model.blocks:
                local = to_local(block.moe.experts.down)
                local.copy_(local.flip(0))
        return model

    return _wrap(verify_run, "from_pretrained", swap)


def _norm_counted_twice() -> Patch:
    return mock.patch.object(gradients, "_weight_of_shard", return_value=1.0)


def _clip_by_own_norm() -> Patch:
    def alone(reduce: Any, x: torch.Tensor, group: Any, op: str = "sum", **k: Any) -> Any:
        return x if group.axis == "world" else reduce(x, group, op, **k)

    return _wrap(gradients, "raw_all_reduce", alone)


def _bias_added_per_shard() -> Patch:
    def add_early(
        scatter: Any, x: Any, weight: Any, bias: torch.Tensor | None, group: Any, **k: Any
    ) -> Any:
        return scatter(x, weight, None if bias is None else bias * group.size, group, **k)

    return _wrap(linear, "linear_scatter", add_early)


def _expert_bias_added_per_shard() -> Patch:
    def first_everywhere(forward: Any, self: Any, *args: Any) -> Any:
        with _wrap(self.mesh, "coordinate", lambda real, axis: 0 if axis == "etp" else real(axis)):
            return forward(self, *args)

    return _wrap(GroupedExperts, "forward", first_everywhere)


def _padding_counted() -> Patch:
    def unmask(prepare: Any, *args: Any) -> Any:
        return replace(prepare(*args), mask_T=None)

    return _wrap(decoder, "prepare", unmask)


def _padding_is_a_target() -> Patch:
    def unmask(targets: Any, labels: Any, mask: Any = None, positions: Any = None) -> Any:
        return targets(labels, None, positions)

    stack = contextlib.ExitStack()
    for owner in (tokens, step):
        stack.enter_context(_wrap(owner, "next_token_targets", unmask))
    return stack


def _target_across_documents() -> Patch:
    def forget(targets: Any, labels: Any, mask: Any = None, positions: Any = None) -> Any:
        return targets(labels, mask, None)

    stack = contextlib.ExitStack()
    for owner in (tokens, step):
        stack.enter_context(_wrap(owner, "next_token_targets", forget))
    return stack


def _documents_see_each_other() -> Patch:
    def forget(masks: Any, length: int, windows: Any, mask: Any, positions: Any, *a: Any) -> Any:
        return masks(length, windows, mask, None, *a)

    return _wrap(tokens, "attention_masks", forget)


def _wrong_divisor() -> Patch:
    def local(agree: Any, *args: Any) -> Any:
        plan = agree(*args)
        return replace(plan, target_tokens=plan.target_tokens // 2)

    return _wrap(step, "_agree", local)


def _aux_loss_of_own_tokens() -> Patch:
    return mock.patch.object(losses, "raw_all_reduce", lambda x, group, *a, **k: x.clone())


def _aux_loss_reported_wrong() -> Patch:
    """The value alone; its gradients are right."""

    def report(run: Any, *args: Any, **kwargs: Any) -> Any:
        out = run(*args, **kwargs)
        return replace(out, aux=replace(out.aux, loss=out.aux.loss * 1.01))

    return _wrap(verify_run, "forward_backward", report)


def _vocabulary_padding_speaks() -> Patch:
    return mock.patch.object(vocab._Head, "real_rows", lambda self, rows: rows)


def _choice_of_another_expert() -> Patch:
    """The second best instead of the best for every fifth token, by the layout's own router."""
    module = sys.modules["moe_tp.routing.route"]  # the package's attribute is the function

    def other(select: Any, values_TE: torch.Tensor, config: Any) -> torch.Tensor:
        ids_TK = select(values_TE, config)
        worst_T = values_TE.argmin(-1)
        ids_TK[::5, 0] = worst_T[::5]
        return ids_TK

    return _wrap(module, "select_top_k", other)


def _token_left_out() -> Patch:
    def cut(prepare: Any, *args: Any) -> Any:
        found = prepare(*args)
        mask_T = torch.ones_like(found.ids_T, dtype=torch.bool)
        mask_T = mask_T if found.mask_T is None else found.mask_T.clone()
        mask_T[:1] = False
        return replace(found, mask_T=mask_T)

    return _wrap(decoder, "prepare", cut)


def _router_not_optimised() -> Patch:
    def drop(groups: Any, model: Decoder, **k: Any) -> Any:
        routers = {id(e.param) for e in named_specs(model) if e.spec.role == "router"}
        found = groups(model, **k)
        for group in found:
            group["params"] = [p for p in group["params"] if id(p) not in routers]
        return found

    return _wrap(verify_run, "parameter_groups", drop)


def _stale_gradient() -> Patch:
    return mock.patch.object(Decoder, "zero_grad")


L = ParallelLayout
FAULTS: dict[str, tuple[Callable[[], Patch], str, ParallelLayout, str]] = {
    # name: (fault, model, layout, what the report must complain of)
    "expert gradient doubled": (_expert_gradient_doubled, "mixtral-6", L(ep=2), "gradients"),
    "ETP reduce skipped": (_etp_reduce_skipped, "mixtral-6", L(tp=2, etp=2), "logits"),
    "KV sum missing": (lambda: _unsettled("attention.v"), "mixtral-6", L(tp=4), "gradients"),
    "one expert lost": (_expert_lost, "mixtral-8", L(tp=2, ep=2), "logits"),
    "experts in wrong order": (_experts_in_wrong_order, "mixtral-6", L(ep=2), "logits"),
    "norm counted twice": (_norm_counted_twice, "mixtral-8", L(tp=2), "grad_norm"),
    "each rank clips by its own norm": (_clip_by_own_norm, "mixtral-8", L(ep=2), "grad_norm"),
    "bias added per shard": (_bias_added_per_shard, "gpt-oss-4", L(tp=2), "logits"),
    "expert bias per shard": (_expert_bias_added_per_shard, "gpt-oss-4", L(etp=2), "logits"),
    "router gradient left Partial": (
        lambda: _unsettled("router"), "mixtral-8", L(tp=2), "gradients",
    ),
    "norm gradient left Partial": (
        lambda: _unsettled("attention_norm"), "mixtral-8", L(tp=2), "gradients",
    ),
    "dp contribution lost": (_contribution_lost, "mixtral-8", L(), "gradients"),
    "padding counted": (_padding_counted, "mixtral-8", L(), "real tokens"),
    "padding is a target": (_padding_is_a_target, "mixtral-8", L(), "target tokens"),
    "target across documents": (_target_across_documents, "mixtral-8", L(), "target tokens"),
    "documents see each other": (_documents_see_each_other, "mixtral-8", L(), "logits"),
    "wrong divisor": (_wrong_divisor, "mixtral-8", L(), "loss"),
    "aux loss of own tokens": (_aux_loss_of_own_tokens, "mixtral-8", L(), "loss"),
    "aux loss reported wrong": (_aux_loss_reported_wrong, "mixtral-8", L(), "loss"),
    "padded vocabulary speaks": (_vocabulary_padding_speaks, "mixtral-8", L(tp=2), "loss"),
    "another expert chosen": (_choice_of_another_expert, "mixtral-8", L(), "routing"),
    "token left out": (_token_left_out, "mixtral-8", L(tp=2), "real tokens"),
    "router not optimised": (_router_not_optimised, "mixtral-8", L(), "weights"),
    "gradients not cleared": (_stale_gradient, "mixtral-8", L(), "later_grad_norms"),
}  # fmt: skip


def _not_summed_over(axis: str) -> Patch:
    def own(reduce: Any, x: torch.Tensor, group: Any, *args: Any, **k: Any) -> Any:
        return x.clone() if group.axis == axis else reduce(x, group, *args, **k)

    return _wrap(losses, "raw_all_reduce", own)


def _packing_ignored() -> Patch:
    def rows(number: Any, position_ids: torch.Tensor) -> Any:
        batch, length = position_ids.shape
        return torch.arange(batch)[:, None].expand(batch, length), batch

    return _wrap(tokens, "_documents", rows)


def _counts_of(part: str) -> Patch:
    def other(_: Any, config: Any, chosen_E: Any, before_E: Any, *args: Any) -> Any:
        return chosen_E if part == "micro-batch" else chosen_E + before_E

    return _wrap(losses, "_step_counts", other)


def _step_of_own_tokens() -> Patch:
    def local(agree: Any, *args: Any) -> Any:
        plan = agree(*args)
        return replace(plan, step_tokens=plan.step_tokens // 2)

    return _wrap(step, "_agree", local)


BALANCE_FAULTS: dict[str, tuple[Callable[[], Patch], str, ParallelLayout]] = {
    # name: (fault, load-balance loss, layout)
    "a sequence's counts not summed": (lambda: _not_summed_over("cp_tp"), "sequence", L(tp=2)),
    "sequences of own rank": (lambda: _not_summed_over("dp"), "sequence", L()),
    "documents of a row as one": (_packing_ignored, "sequence", L()),
    "counts of one micro-batch": (lambda: _counts_of("micro-batch"), "global_batch", L()),
    "counts of the step so far": (lambda: _counts_of("before"), "global_batch_exact", L()),
    "step of too few tokens": (_step_of_own_tokens, "global_batch", L(tp=2)),
}


def _run(
    folder: str, layout: ParallelLayout, fault: str | None, balance: Any = None
) -> dict[str, Any]:
    patch: Patch = contextlib.nullcontext()
    if fault is not None:
        patch = ({**FAULTS, **BALANCE_FAULTS})[fault][0]()
    with patch:
        return verify(folder, layout, tokens=45, steps=2, balance=balance).to_json()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("verify")
    return {name: str(write_folder(root / name, config)) for name, config in MODELS.items()}


def _world(layout: ParallelLayout) -> int:
    return max(2, layout.tp, layout.ep * layout.etp)


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_found(fault: str, folders: dict[str, str]) -> None:
    """G1, G2, G3, L1, L2, D8, K3, R2, R6: this fault makes verify fail, and it says where."""
    _, model, layout, complaint = FAULTS[fault]
    for report in run_ranks(_run, _world(layout), folders[model], layout, fault):
        assert not report["passed"], report
        assert any(complaint in failure for failure in report["failures"]), report["failures"]


@pytest.mark.parametrize(
    ("model", "layout"), sorted({(f[1], f[2]) for f in FAULTS.values()}, key=str), ids=str
)
def test_unmodified_run_passes(model: str, layout: ParallelLayout, folders: dict[str, str]) -> None:
    """G1: without a fault the very same runs pass."""
    reports = run_ranks(_run, _world(layout), folders[model], layout, None)
    assert reports[0]["passed"], reports[0]["failures"]
    assert all(report == reports[0] for report in reports)


@pytest.mark.parametrize("fault", BALANCE_FAULTS)
def test_fault_of_a_balance_loss_is_found(fault: str, folders: dict[str, str]) -> None:
    """L2: of the losses over sequences and over the step, by the reference's own arithmetic."""
    _, balance, layout = BALANCE_FAULTS[fault]
    for report in run_ranks(_run, 2, folders["mixtral-8"], layout, fault, balance):
        assert not report["passed"], report
        assert any("loss" in failure for failure in report["failures"]), report["failures"]


@pytest.mark.parametrize(
    "balance",
    ["global_batch_exact"]
    + [pytest.param(kind, marks=pytest.mark.slow) for kind in ("sequence", "global_batch")],
)
def test_balance_losses_pass_in_every_layout(balance: str, folders: dict[str, str]) -> None:
    """L2: value and gradient, over dp, tp, ep, pipelines' micro-batches and cp, packed rows too."""
    layouts = (L(), L(tp=2, ep=2), L(pp=2), L(cp=2), L(dp=2, tp=2, ep=2, etp=2), L(dp=4, zero=2))
    for layout in layouts:
        if balance == "global_batch" and layout.pp > 1:
            with pytest.raises(ConfigError, match="pp=2 a stage runs several micro-batches"):
                run_ranks(_run, 2, folders["mixtral-8"], layout, None, balance)
            continue
        world = 4 if layout.dp else 2
        report = run_ranks(_run, world, folders["mixtral-8"], layout, None, balance)[0]
        assert report["passed"], (layout, report["failures"])
