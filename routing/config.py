"""What a router is: how scores become choices and weights, and which losses keep the load even."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Literal

from moe_tp.errors import ConfigError

if TYPE_CHECKING:
    from moe_tp.routing.assignment import Assignment

__all__ = [
    "BalanceKind",
    "DropPolicy",
    "GroupScore",
    "RouterConfig",
    "RouterKind",
    "Score",
    "switch_config",
]

Score = Literal["softmax", "softmax_topk", "sigmoid"]
GroupScore = Literal["top2_sum", "max"]
RouterKind = Literal["top_k", "expert_choice", "sinkhorn", "hash", "random", "balanced"]
BalanceKind = Literal["micro_batch", "global_batch", "sequence"]
DropPolicy = Literal["weight", "position"]

_CHOICES: dict[str, tuple[str, ...]] = {
    "score": ("softmax", "softmax_topk", "sigmoid"),
    "group_score": ("top2_sum", "max"),
    "kind": ("top_k", "expert_choice", "sinkhorn", "hash", "random", "balanced"),
    "balance_kind": ("micro_batch", "global_batch", "sequence"),
    "drop_policy": ("weight", "position"),
    "eps_use": ("add", "floor"),
    "bias_schedule": ("constant", "linear", "cosine"),
    "dtype": ("float32", "float64"),
}

_ACROSS_TOKENS = {
    "expert_choice": "each expert picks among the tokens of one rank",
    "sinkhorn": "the plan is balanced over the tokens of one rank",
    "random": "the choice depends on the row in which a rank holds the token",
    "balanced": "the choice depends on the row in which a rank holds the token",
}


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """One router, checked when it is made.

    Args:
        num_experts: E, all routed experts of the layer.
        top_k: K, experts a token (for `expert_choice`: experts a token on average).
        score: `softmax` over all experts, then top-k; `softmax_topk`: top-k, then softmax over
            those; `sigmoid` of each expert by itself.
        normalize: divide the chosen weights by their sum (no effect on `softmax_topk`).
        scale: constant factor on the weights, after normalising, whether or not that is on.
        num_groups, top_groups: experts lie in `num_groups` equal runs, and a token chooses among
            the `top_groups` best of them (node-limited routing when a group is a node).
        group_score: what ranks the groups: the sum of their two best choice scores, or the best.
        capacity_factor: None drops nothing; else an expert takes at most
            ceil(capacity_factor * tokens * K / E) of a rank's tokens.
        eps_use, normalize_eps: the divisor is sum + eps (`add`, DeepSeek-V3) or max(sum, eps)
            (`floor`, ERNIE-4.5).
        kind: how experts are chosen; `random` and `balanced` are for benchmarks.
        function: the user's own routing function, in place of `kind` (see `RoutingFunction`).
        function_looks_across: whether `function` looks across tokens; True unless promised.
        linear_bias: the router's matmul has a bias (gpt-oss).
        correction_bias: the layer keeps a correction bias for `bias_E` of `route`.
        bias_rate, bias_rate_end, bias_schedule, bias_steps: step size of `update_bias` by
            optimiser step, see `bias_rate_at`.
        balance_coef, balance_kind, balance_exact, z_coef: weighted losses that the layer adds; 0 is
            none. `balance_exact` makes `global_batch` wait for the counts of the whole step.
        dtype: least precision of scores and selection.
        noise_std: standard deviation of the Gaussian noise on the logits, in training.
        input_jitter: half-width of the uniform factor on the router's input, in training.
        expert_dropout: probability that an expert sits out a whole call, in training.
        drop_policy: who keeps a place under capacity: the largest weight, or the first position.
        capacity_multiple, min_capacity: capacity is rounded up to a multiple, and not below.
        pad_to_capacity: the dispatcher sends buffers of fixed size, without host synchronisation;
            every rank must bring equally many tokens.
        sinkhorn_iterations: row and column normalisations.
        seed: of the kinds `hash` and `random`.
        frozen: the router's parameters and its correction bias do not change.
        lr_scale: factor on the router's learning rate.
        allow_constant: a top-1 weight that is always 1 is no error here, since a published model
            may be evaluated so; the layer then refuses to train its router.
    """

    num_experts: int
    top_k: int
    score: Score = "softmax"
    normalize: bool = True
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_score: GroupScore = "top2_sum"
    capacity_factor: float | None = None
    _: KW_ONLY
    eps_use: Literal["add", "floor"] = "add"
    normalize_eps: float = 1e-20
    kind: RouterKind = "top_k"
    function: Callable[..., Assignment] | None = None
    function_looks_across: bool = True
    linear_bias: bool = False
    correction_bias: bool = False
    bias_rate: float = 0.0
    bias_rate_end: float = 0.0
    bias_schedule: Literal["constant", "linear", "cosine"] = "constant"
    bias_steps: int | None = None
    balance_coef: float = 0.0
    balance_kind: BalanceKind = "micro_batch"
    balance_exact: bool = False
    z_coef: float = 0.0
    dtype: Literal["float32", "float64"] = "float32"
    noise_std: float = 0.0
    input_jitter: float = 0.0
    expert_dropout: float = 0.0
    drop_policy: DropPolicy = "weight"
    capacity_multiple: int = 1
    min_capacity: int = 1
    pad_to_capacity: bool = False
    sinkhorn_iterations: int = 8
    seed: int = 0
    frozen: bool = False
    lr_scale: float = 1.0
    allow_constant: bool = False

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                raise ConfigError(
                    f"{name}={value!r} is not known to the router; choose one of "
                    + ", ".join(repr(choice) for choice in allowed)
                )
        _check_switches(self)
        _check_sizes(self)
        _check_groups(self)
        _check_numbers(self)
        _check_gradient(self)
        _check_bias(self)
        _check_kind(self)

    @property
    def layout_dependence(self) -> str | None:
        """Return why another layout may route otherwise (noise off), or None if it cannot (R1)."""
        if self.function is not None:
            return (
                "the routing function may look across tokens"
                if self.function_looks_across
                else None
            )
        if self.kind in _ACROSS_TOKENS:
            return f"kind={self.kind!r}: {_ACROSS_TOKENS[self.kind]}"
        if self.capacity_factor is not None:
            return (
                f"capacity_factor={self.capacity_factor}: places are counted on each rank by itself"
            )
        return None

    @property
    def layout_dependent(self) -> bool:
        """Return whether the choice depends on which tokens share a rank: `verify` refuses it."""
        return self.layout_dependence is not None

    @property
    def constant(self) -> str | None:
        """Return why a router of this kind would never learn, or None if it can.

        R5: a weight that is 1 whatever the logits are gives the router no gradient.
        """
        if self.top_k > 1 or self.num_experts == 1 or self.function is not None:
            return None
        if self.kind == "expert_choice" and not self.normalize:
            return None
        if self.score == "softmax_topk":
            by = "score='softmax_topk'"
        elif self.normalize:
            by = "normalize=True"
        else:
            return None
        return (
            f"top_k=1 with {by} gives every token the constant weight 1, so the router would never "
            "learn"
        )

    @property
    def noisy(self) -> bool:
        """Return whether training draws random numbers for the choice."""
        return self.noise_std > 0 or self.expert_dropout > 0 or self.kind == "random"


def switch_config(
    num_experts: int,
    *,
    capacity_factor: float | None = 1.25,
    input_jitter: float = 0.01,
    balance_coef: float = 0.01,
    z_coef: float = 0.0,
) -> RouterConfig:
    """Return the Switch Transformer's router: top-1, weighted by its probability.

    The probability over all experts is kept as the weight, so that the router gets a gradient.
    Fedus et al., arXiv 2101.03961, sections 2.1-2.2.

    Args:
        num_experts: E.
        capacity_factor, input_jitter, balance_coef, z_coef: as in `RouterConfig`.
    """
    return RouterConfig(
        num_experts,
        1,
        normalize=False,
        capacity_factor=capacity_factor,
        drop_policy="position",
        input_jitter=input_jitter,
        balance_coef=balance_coef,
        z_coef=z_coef,
    )


def _check_switches(config: RouterConfig) -> None:
    """Refuse what only looks like true or false: the string 'false' is true."""
    for name in (
        *("normalize", "linear_bias", "correction_bias", "balance_exact"),
        *("pad_to_capacity", "frozen", "function_looks_across", "allow_constant"),
    ):
        value = getattr(config, name)
        if not isinstance(value, bool):
            raise ConfigError(f"{name}={value!r} is neither true nor false; choose True or False")


def _check_sizes(config: RouterConfig) -> None:
    for name in (
        "num_experts",
        "top_k",
        "num_groups",
        "top_groups",
        "capacity_multiple",
        "min_capacity",
        "sinkhorn_iterations",
        *(() if config.bias_steps is None else ("bias_steps",)),
    ):
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
            raise ConfigError(f"{name}={value!r} is not a positive integer; choose {name} >= 1")
        object.__setattr__(config, name, int(value))  # numpy's integers are not in JSON
    if isinstance(config.seed, bool) or not isinstance(config.seed, int):
        raise ConfigError(f"seed={config.seed!r} is not an integer; choose one")
    if config.top_k > config.num_experts:
        raise ConfigError(
            f"top_k={config.top_k} is more than num_experts={config.num_experts}, so a token "
            f"cannot have that many different experts; choose top_k <= {config.num_experts}"
        )


def _check_groups(config: RouterConfig) -> None:
    if config.num_experts % config.num_groups:
        raise ConfigError(
            f"num_groups={config.num_groups} does not divide num_experts={config.num_experts}, so "
            "groups would differ in size; choose a divisor"
        )
    if config.top_groups > config.num_groups:
        raise ConfigError(
            f"top_groups={config.top_groups} is more than num_groups={config.num_groups}; choose "
            f"top_groups <= {config.num_groups}"
        )
    reachable = config.top_groups * (config.num_experts // config.num_groups)
    if config.top_k > reachable:
        raise ConfigError(
            f"top_k={config.top_k} is more than the {reachable} experts in top_groups="
            f"{config.top_groups} of num_groups={config.num_groups}; raise top_groups or lower "
            "top_k"
        )


def _check_numbers(config: RouterConfig) -> None:
    for name in (
        *("scale", "normalize_eps", "bias_rate", "bias_rate_end", "balance_coef", "z_coef"),
        *("noise_std", "input_jitter", "expert_dropout", "lr_scale"),
    ):
        value = getattr(config, name)
        if not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
            raise ConfigError(f"{name}={value!r} is not a finite number >= 0; choose {name} >= 0")
    if config.scale == 0:
        raise ConfigError("scale=0 switches every expert off; choose scale > 0")
    for name in ("input_jitter", "expert_dropout"):
        if getattr(config, name) >= 1:
            raise ConfigError(
                f"{name}={getattr(config, name)} is not below 1; choose 0 <= {name} < 1"
            )
    factor = config.capacity_factor
    number = isinstance(factor, int | float) and not isinstance(factor, bool)
    if factor is not None and not (number and 0 < factor < math.inf):
        raise ConfigError(
            f"capacity_factor={factor!r} leaves no place; choose a number > 0, or None to drop "
            "nothing"
        )
    if config.pad_to_capacity and config.capacity_factor is None:
        raise ConfigError("pad_to_capacity=True has no capacity to pad to; set capacity_factor")


def _check_gradient(config: RouterConfig) -> None:
    if config.constant is None or config.frozen or config.allow_constant:
        return
    fix = "score='softmax' with normalize=False"
    if config.score != "softmax_topk":
        fix = "normalize=False"
    raise ConfigError(f"{config.constant}; choose {fix}, or frozen=True")


def _check_bias(config: RouterConfig) -> None:
    if (config.bias_rate > 0 or config.bias_rate_end > 0) and not config.correction_bias:
        raise ConfigError(
            f"bias_rate={config.bias_rate} has no bias to update; set correction_bias=True"
        )
    if config.bias_schedule != "constant" and config.bias_steps is None:
        raise ConfigError(
            f"bias_schedule={config.bias_schedule!r} has no length; set bias_steps (in optimiser "
            "steps)"
        )


def _check_kind(config: RouterConfig) -> None:
    if config.kind == "top_k":
        return
    if config.correction_bias:
        raise ConfigError(
            f"correction_bias=True does nothing for kind={config.kind!r}, which balances by "
            "itself; choose kind='top_k' or correction_bias=False"
        )
    if config.num_groups > 1:
        raise ConfigError(
            f"num_groups={config.num_groups} does nothing for kind={config.kind!r}; choose "
            "kind='top_k' or num_groups=1"
        )
    if config.kind == "expert_choice" and config.score == "softmax_topk":
        raise ConfigError(
            "kind='expert_choice' needs scores before the choice; choose score='softmax' or "
            "'sigmoid'"
        )
    if config.expert_dropout > 0 and config.kind in ("hash", "random", "balanced"):
        raise ConfigError(
            f"expert_dropout={config.expert_dropout} cannot keep kind={config.kind!r} from "
            "choosing a dropped expert, since it does not look at scores; set expert_dropout=0"
        )
    if config.kind == "expert_choice" and config.pad_to_capacity:
        raise ConfigError(
            "pad_to_capacity=True does nothing for kind='expert_choice', where every expert takes "
            "the same number of tokens; leave it off"
        )
