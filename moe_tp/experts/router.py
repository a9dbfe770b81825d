"""The router of one layer: its parameters, its noise, and the counters of its correction bias.

Letters: T tokens on this rank · D width · E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd import Function

from moe_tp.errors import ConfigError, RoutingError
from moe_tp.log import warn_once
from moe_tp.parallel.collectives import raw_all_reduce
from moe_tp.parallel.functions import apply_function
from moe_tp.parallel.mesh import Mesh
from moe_tp.parallel.parameter import ParallelModule
from moe_tp.parallel.product import product
from moe_tp.parallel.random import DropoutKey, hash_bits, key_of
from moe_tp.parallel.recompute import recall, remember
from moe_tp.parallel.shards import to_local
from moe_tp.parallel.spec import ZEROS, Init, ParamSpec
from moe_tp.routing.assignment import Assignment
from moe_tp.routing.balance import bias_rate_at, update_bias
from moe_tp.routing.config import RouterConfig
from moe_tp.routing.noise import jitter_input
from moe_tp.routing.route import route
from moe_tp.routing.scores import router_logits


class Router(ParallelModule):
    """Scores tokens in fp32 and chooses experts; see `moe_tp.routing.route`.

    Args:
        dim: D.
        config: the router.
        mesh: the mesh.
        dtype: of the layer; the router's is never below fp32.
        init: first values of the weight.
        layer: number of the layer, for messages and noise.
    """

    step_counts_E: torch.Tensor
    bias_steps: torch.Tensor

    def __init__(
        self,
        dim: int,
        config: RouterConfig,
        mesh: Mesh,
        *,
        dtype: torch.dtype = torch.float32,
        init: Init | None = None,
        layer: int = 0,
    ) -> None:
        super().__init__(mesh)
        self.config, self.layer, self.lr_scale = config, layer, config.lr_scale
        experts, dtype = (
            config.num_experts,
            torch.promote_types(dtype, getattr(torch, config.dtype)),
        )
        spec = ParamSpec(
            shape=(experts, dim), partial=True, init=init or Init(), role="router", keep_fp32=True
        )
        self.add_parameter("weight", spec, dtype)
        if config.linear_bias:
            spec = ParamSpec(
                shape=(experts,), partial=True, init=ZEROS, role="router", keep_fp32=True
            )
            self.add_parameter("bias", spec, dtype)
        if config.correction_bias:
            spec = ParamSpec(shape=(experts,), init=ZEROS, role="bias", keep_fp32=True)
            self.add_parameter("correction_bias", spec, torch.float32)
            self.get_parameter("correction_bias").requires_grad_(False)
        if config.frozen:
            for param in self.parameters():
                param.requires_grad_(False)
        # explicit device: these hold values also when parameters are made on the meta device
        counts = torch.zeros(experts, dtype=torch.int64, device=mesh.device)
        self.register_buffer("step_counts_E", counts, persistent=False)
        steps = torch.zeros((), dtype=torch.int64, device=mesh.device)
        self.register_buffer("bias_steps", steps)
        self._counted = False
        # choices of a whole step over all ranks, where a counting pass has found them
        self.total_E: torch.Tensor | None = None

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Move the counters with the module; `to_empty` would leave numbers of nothing in them."""
        kept = {name: self._buffers[name] for name in ("step_counts_E", "bias_steps")}
        super()._apply(fn, recurse)
        for name, value in kept.items():
            fresh = self._buffers[name]
            if value is not None and fresh is not None and fresh is not value:
                self._buffers[name] = value.to(fresh.device)
        return self

    @property
    def wants_total(self) -> bool:
        """Whether a loss needs the load of the whole step before its first backward."""
        config = self.config
        exact = config.balance_kind == "global_batch" and config.balance_exact
        return exact and config.balance_coef > 0

    @property
    def counts_load(self) -> bool:
        """Whether the load of a step is wanted: by the bias, or by a loss over the whole step."""
        config = self.config
        by_loss = config.balance_coef > 0 and config.balance_kind == "global_batch"
        by_loss = by_loss and not config.balance_exact
        return (config.correction_bias and not config.frozen) or by_loss

    def forward(
        self,
        x_TD: torch.Tensor,
        *,
        mask_T: torch.Tensor | None = None,
        token_ids_T: torch.Tensor | None = None,
        key: DropoutKey | None = None,
        replay_TK: torch.Tensor | None = None,
    ) -> Assignment:
        """Return where each token goes.

        Args:
            x_TD: owned tokens.
            mask_T: True where a token is real.
            token_ids_T: vocabulary ids, for `kind="hash"`.
            key: makes noise a function of the token (same in every layout); None draws it from
                torch's generator. In training only.
            replay_TK: recorded choices to use again.

        Raises:
            RoutingError: a row of logits holds a NaN; names rank, layer and token.
            ConfigError: it is trained, and would never learn (R5).

        Collectives: none.
        """
        config = self.config
        if self.training and torch.is_grad_enabled():
            self.check_trainable()
        names = [name for name in ("bias", "correction_bias") if name in self.specs]
        biases = {name: self.local(name) for name in names}
        noise: dict[str, Any] = {}
        seen_TD = x_TD
        if self.training and (config.noisy or config.input_jitter):
            seen_TD, noise = self._draw(x_TD, key)
        logits_TE = router_logits(
            seen_TD, self.local("weight"), biases.get("bias"), dtype=config.dtype, product=product
        )
        logits_TE = self.with_low_rank(seen_TD.to(logits_TE.dtype), logits_TE)
        first = recall()
        if first is not None and config.function is None:
            # the second run of a recomputed block decides nothing again (N3)
            replay_TK, noise["placed_TK"] = first
        check = first is None
        if check and config.pad_to_capacity:
            check = self._bad_row_found(logits_TE, mask_T)
        assignment = route(
            logits_TE,
            config,
            bias_E=biases.get("correction_bias"),
            mask_T=mask_T,
            token_ids_T=token_ids_T,
            replay_TK=replay_TK,
            layer=self.layer,
            rank=self.mesh.rank,
            check=check,
            **noise,
        )
        own_rule = config.function is not None
        if first is not None and own_rule and not torch.equal(first[1], assignment.ids_TK):
            raise RoutingError(
                f"rank {self.mesh.rank}, layer {self.layer}: the routing function chose other "
                "experts in the recompute than in the forward; make it a function of its arguments"
            )
        remember((assignment.chosen_TK, assignment.ids_TK))
        return assignment

    def check_trainable(self) -> None:
        """Check that the router learns, if it is to be trained (R5).

        Raises:
            ConfigError: its weights are constant by construction.
        """
        reason = self.config.constant
        if reason is not None and any(p.requires_grad for p in self.parameters()):
            raise ConfigError(
                f"layer {self.layer}: {reason}; freeze it (train.freeze: [router]), or evaluate "
                "the model by model.eval() or under torch.no_grad()"
            )

    def _bad_row_found(self, logits_TE: torch.Tensor, mask_T: torch.Tensor | None) -> bool:
        """Return whether a row cannot be ranked, as far as that costs no synchronisation (R7).

        On a GPU the device itself stops, with a message that names rank and layer.
        """
        good_T = torch.isfinite(logits_TE.detach().amax(dim=-1))
        if mask_T is not None:
            good_T = good_T | ~mask_T
        try:
            torch._assert_async(
                good_T.all(),
                f"rank {self.mesh.rank}, layer {self.layer}: the router's logits hold a NaN or "
                "inf; set pad_to_capacity=False to learn which token's",
            )
        except RuntimeError:
            return True
        return False

    def _draw(
        self, x_TD: torch.Tensor, key: DropoutKey | None
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return the jittered input, and the draws that `route` takes."""
        config, (tokens, width) = self.config, x_TD.shape
        noise: dict[str, Any] = {}
        if config.input_jitter:
            draw_TD = _uniform(key, "jitter", tokens, width, x_TD.device)
            x_TD = jitter_input(x_TD, config, uniform_TD=draw_TD)
        if config.noise_std or config.kind == "random":
            noise["uniform_TE"] = _uniform(key, "noise", tokens, config.num_experts, x_TD.device)
        if config.expert_dropout:
            draw_E = _uniform_row(key, "experts", config.num_experts, x_TD.device)
            kept_E = draw_E >= config.expert_dropout
            best = torch.topk(draw_E, config.top_k).indices
            noise["kept_E"] = kept_E.scatter(0, best, True)
        return x_TD, noise

    def count(self, chosen_E: torch.Tensor) -> None:
        """Add the load of one backward to the step's, and warn where the last step's is there."""
        weight = self.get_parameter("weight")
        # gradients were cleared since the last count, so an optimiser step lies between
        if self._counted and weight.requires_grad and weight.grad is None:
            warn_once(
                f"update_router_bias/{id(self)}",
                f"layer {self.layer}: the router was optimised but its load was not used; call "
                "update_router_bias(model) after every optimiser step",
            )
        self._counted = True
        self.step_counts_E.add_(chosen_E)

    def finish_step(self, counts_E: torch.Tensor) -> None:
        """Move the correction bias by the step's load, and forget it.

        Args:
            counts_E: choices of the step, summed over all owners of tokens.
        """
        if self.config.correction_bias and not self.config.frozen:
            bias_E = to_local(self.get_parameter("correction_bias"))
            rate = bias_rate_at(self.config, int(self.bias_steps))
            bias_E.copy_(update_bias(bias_E, counts_E, rate))
        self.bias_steps += 1
        self.forget_step()

    def forget_step(self) -> None:
        """Forget the step's load, as where a step is left out."""
        self.step_counts_E.zero_()
        self._counted = False


class _CountLoad(Function):
    """The identity, which counts in backward: once under recompute, never in evaluation."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, router: Router, chosen_E: torch.Tensor) -> torch.Tensor:
        ctx.router, ctx.chosen_E = router, chosen_E
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.router.count(ctx.chosen_E)
        return grads[0], None, None


def count_load(y_TD: torch.Tensor, router: Router, assignment: Assignment) -> torch.Tensor:
    """Return `y_TD`; its backward adds the assignment's load to the router's counters."""
    if not (router.training and router.counts_load):
        return y_TD
    counted: torch.Tensor = apply_function(_CountLoad, y_TD, router, assignment.chosen_E)
    return counted


def update_router_bias(model: nn.Module) -> None:
    """Move each layer's correction bias by the load of the optimiser step that has just ended.

    Call after every optimiser step, on every rank, where a router asks for a correction bias or
    for a loss over the whole step. Layers that ask for neither are left alone. Wang et al.,
    arXiv:2408.15664, algorithm 1.

    Collectives: one all-reduce of a count for each layer and expert over all owners of tokens.
    """
    routers = [m for m in model.modules() if isinstance(m, Router) and m.counts_load]
    if not routers:
        return
    with torch.no_grad():
        for router, counts_E in _summed({r: r.step_counts_E for r in routers}).items():
            router.finish_step(counts_E)


def _summed(counts: dict[Router, torch.Tensor]) -> dict[Router, torch.Tensor]:
    """Return counts an expert summed over all owners of tokens.

    Collectives: one all-reduce over the owners, where there is a router.
    """
    if not counts:
        return {}
    group = next(iter(counts)).mesh.group("stage")
    total = raw_all_reduce(torch.cat(list(counts.values())), group)
    parts = total.split([len(counts_E) for counts_E in counts.values()])
    return dict(zip(counts, parts, strict=True))


@contextmanager
def counted_step(model: nn.Module, count: Callable[[], object]) -> Iterator[None]:
    """Give each router the load of the whole step, for `balance_exact`, while the context is open.

    `count` runs the forward of every micro-batch of the step, with the tokens, keys and training
    mode of the real ones, so that they are routed alike; nothing is kept for backward. In a model
    of your own call the layers with `key=`, or without noise.

        with counted_step(model, lambda: [model(x) for x in micro_batches]):
            for x in micro_batches:
                loss(model(x)).backward()

    Qiu et al., arXiv:2501.11873, with the counts of the step itself.

    Args:
        model: holds MoE layers.
        count: runs the forwards.

    Collectives: those of the forwards; one all-reduce of a count for each layer and expert over
        all owners of tokens.
    """
    routers = [m for m in model.modules() if isinstance(m, Router) and m.wants_total]

    def add(router: nn.Module, _: object, assignment: Assignment) -> None:
        assert isinstance(router, Router)
        found[router] += assignment.chosen_E

    found = {router: torch.zeros_like(router.step_counts_E) for router in routers}
    hooks = [router.register_forward_hook(add) for router in routers]
    try:
        with torch.no_grad():
            count()
    finally:
        for hook in hooks:
            hook.remove()
    try:
        for router, total_E in _summed(found).items():
            router.total_E = total_E
        yield
    finally:
        for router in routers:
            router.total_E = None


def forget_router_load(model: nn.Module) -> None:
    """Forget the load of a step that was left out: the correction biases stay as they are."""
    for module in model.modules():
        if isinstance(module, Router):
            module.forget_step()


def _uniform(
    key: DropoutKey | None, site: str, rows: int, columns: int, device: torch.device
) -> torch.Tensor:
    """Return draws in [0, 1) for each token and column."""
    if key is None:
        return torch.rand(rows, columns, device=device)
    base = key_of(key.seed, key.step, key.layer, key.site, site)
    token_T = hash_bits(base, key.token_ids_T.to(device))
    return _fraction(hash_bits(token_T[:, None], torch.arange(columns, device=device)[None, :]))


def _uniform_row(
    key: DropoutKey | None, site: str, columns: int, device: torch.device
) -> torch.Tensor:
    """Return one draw in [0, 1) a column, the same for all tokens of the step."""
    if key is None:
        return torch.rand(columns, device=device)
    base = key_of(key.seed, key.step, key.layer, key.site, site)
    return _fraction(hash_bits(base, torch.arange(columns, device=device)))


def _fraction(bits: torch.Tensor) -> torch.Tensor:
    return (bits & 0xFFFFFF).to(torch.float32) / (1 << 24)
