"""From logits to an assignment: the whole of gating, without parameters, ranks or files.

T tokens on this rank · E experts · K choices · V vocabulary
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_tp.errors import ConfigError, RoutingError
from moe_tp.routing.assignment import Assignment, assign, choice_weights
from moe_tp.routing.config import RouterConfig
from moe_tp.routing.kinds import (
    select_balanced,
    select_by_experts,
    select_by_hash,
    select_random,
    select_sinkhorn,
)
from moe_tp.routing.masks import as_mask
from moe_tp.routing.noise import add_noise, draw_kept_experts, draw_uniform
from moe_tp.routing.scores import choice_scores, compute_scores, full_precision, promote
from moe_tp.routing.select import select_top_k

__all__ = ["choose", "route"]

_CHECKED = "_moe_tp_table_checked"  # on a table of experts: its version when it was looked through


def route(
    logits_TE: Tensor,
    config: RouterConfig,
    *,
    bias_E: Tensor | None = None,
    mask_T: Tensor | None = None,
    token_ids_T: Tensor | None = None,
    generator: torch.Generator | None = None,
    uniform_TE: Tensor | None = None,
    noise_logits_TE: Tensor | None = None,
    kept_E: Tensor | None = None,
    table_VK: Tensor | None = None,
    replay_TK: Tensor | None = None,
    placed_TK: Tensor | None = None,
    layer: int | str | None = None,
    rank: int | None = None,
    check: bool = True,
) -> Assignment:
    """Return where each token goes, with what weight.

    Scores and choice are computed in fp32 or more, also under autocast (R4). Without a source of
    noise the choice is a function of the row of logits (R1), but for the kinds that
    `config.layout_dependence` names. The only host synchronisation is the check.

    Args:
        logits_TE: raw router logits, not probabilities; any floating dtype, any strides.
        config: the router.
        bias_E: correction bias, fp32 or fp64: moves the choice, never the weights (R3).
        mask_T: bool, True where a token is real; others are routed nowhere (R6).
        token_ids_T: int64 vocabulary ids, for `kind="hash"`.
        generator: source of noise; None turns noise off, as in evaluation.
        uniform_TE: draws in [0, 1) in place of the generator's, the same in every layout.
        noise_logits_TE: logits of a learnt noise scale, see `add_noise`.
        kept_E: bool, the experts that take part, in place of a draw for `expert_dropout`.
        table_VK: int64, the experts of each vocabulary id, for `kind="hash"`; looked through once,
            and again after it was written to.
        replay_TK: int64, recorded choices to use again; weights come from these logits.
        placed_TK: int64, the part of `replay_TK` that found a place; None: capacity decides again.
        layer, rank: named in the error.
        check: refuse rows with a NaN, +inf or nothing but -inf (R7), at one host synchronisation.
    """
    _check_shapes(logits_TE, config, bias_E, mask_T, token_ids_T, replay_TK)
    if mask_T is not None:
        mask_T = as_mask(mask_T)
    with full_precision(logits_TE.device):
        logits_TE = promote(logits_TE, config.dtype).contiguous()
        if mask_T is not None:
            # Padding may hold anything; a NaN there must not reach the gradient as 0 * NaN.
            logits_TE = torch.where(mask_T.unsqueeze(-1), logits_TE, 0.0)
        if check:
            _refuse_bad_rows(logits_TE, config, bias_E, replay_TK, layer, rank)
            if config.kind == "hash" and replay_TK is None:
                _refuse_bad_ids(token_ids_T, table_VK, mask_T, config)
        if config.function is not None and replay_TK is None:
            return _call_function(logits_TE, config, bias_E, mask_T, token_ids_T, generator)
        steered_TE = _steer(logits_TE, config, generator, uniform_TE, noise_logits_TE, kept_E)
        scores_TE = compute_scores(steered_TE, config.score)
        if replay_TK is not None:
            ids_TK = replay_TK.to(device=logits_TE.device, dtype=torch.int64)
        else:
            if uniform_TE is None and generator is not None and config.kind == "random":
                uniform_TE = draw_uniform(logits_TE, generator)
            with torch.no_grad():
                ids_TK = _select(
                    steered_TE, scores_TE, config, bias_E, mask_T, token_ids_T, uniform_TE, table_VK
                )
        return assign(
            ids_TK,
            logits_TE,
            config,
            mask_T=mask_T,
            steered_TE=steered_TE,
            scores_TE=scores_TE,
            placed_TK=placed_TK,
        )


def choose(
    logits_TE: Tensor, config: RouterConfig, *, bias_E: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return ids_TK and weights_TK, what `route` says of real tokens without noise, and no more.

    For `kind="top_k"`, outside autocast. Nothing is checked, counted or dropped.

    Args:
        logits_TE: fp32 or fp64.
        config: the router.
        bias_E: correction bias.
    """
    logits_TE = promote(logits_TE, config.dtype)
    scores_TE = compute_scores(logits_TE, config.score)
    ids_TK = select_top_k(choice_scores(logits_TE, scores_TE, config, bias_E), config)
    return ids_TK, choice_weights(ids_TK, logits_TE, scores_TE, config)


def _select(
    steered_TE: Tensor,
    scores_TE: Tensor,
    config: RouterConfig,
    bias_E: Tensor | None,
    mask_T: Tensor | None,
    token_ids_T: Tensor | None,
    uniform_TE: Tensor | None,
    table_VK: Tensor | None,
) -> Tensor:
    """Return the chosen ids by the config's kind."""
    rows, device = steered_TE.shape[0], steered_TE.device
    if config.kind == "expert_choice":
        return select_by_experts(steered_TE, scores_TE, config, mask_T)
    if config.kind == "sinkhorn":
        return select_sinkhorn(steered_TE, config, mask_T)
    if config.kind == "hash":
        return select_by_hash(token_ids_T, config, table_VK, mask_T)
    if config.kind == "random":
        return select_random(uniform_TE, rows, device, config)
    if config.kind == "balanced":
        return select_balanced(rows, device, config, mask_T)
    return select_top_k(choice_scores(steered_TE, scores_TE, config, bias_E), config)


def _steer(
    logits_TE: Tensor,
    config: RouterConfig,
    generator: torch.Generator | None,
    uniform_TE: Tensor | None,
    noise_logits_TE: Tensor | None,
    kept_E: Tensor | None,
) -> Tensor:
    """Return the logits with this call's noise and without its dropped experts."""
    if kept_E is None and config.expert_dropout > 0 and generator is not None:
        kept_E = draw_kept_experts(config, generator, logits_TE.device)
    steered_TE = logits_TE
    if config.noise_std > 0 or noise_logits_TE is not None:
        if uniform_TE is None and generator is not None:
            uniform_TE = draw_uniform(logits_TE, generator)
        if uniform_TE is not None:
            steered_TE = add_noise(steered_TE, uniform_TE, config, noise_logits_TE)
    return steered_TE if kept_E is None else steered_TE.masked_fill(~kept_E, float("-inf"))


def _call_function(
    logits_TE: Tensor,
    config: RouterConfig,
    bias_E: Tensor | None,
    mask_T: Tensor | None,
    token_ids_T: Tensor | None,
    generator: torch.Generator | None,
) -> Assignment:
    """Return what the user's routing function returns, after a look at its shapes."""
    assert config.function is not None
    out = config.function(
        logits_TE,
        config,
        bias_E=bias_E,
        mask_T=mask_T,
        token_ids_T=token_ids_T,
        generator=generator,
    )
    name = getattr(config.function, "__name__", repr(config.function))
    if not isinstance(out, Assignment):
        raise RoutingError(
            f"the routing function {name} returned {type(out).__name__}; end it with `return "
            "assign(ids_TK, logits_TE, config, mask_T=mask_T)`"
        )
    rows, experts = logits_TE.shape
    if out.ids_TK.shape[0] != rows or out.ids_TK.shape != out.weights_TK.shape:
        raise RoutingError(
            f"the routing function {name} returned ids {tuple(out.ids_TK.shape)} and weights "
            f"{tuple(out.weights_TK.shape)} for {rows} tokens; both must be [{rows}, choices]"
        )
    if out.counts_E.shape != (experts,):
        raise RoutingError(
            f"the routing function {name} returned counts {tuple(out.counts_E.shape)}; they must "
            f"be [{experts}]"
        )
    return out


def _check_shapes(
    logits_TE: Tensor,
    config: RouterConfig,
    bias_E: Tensor | None,
    mask_T: Tensor | None,
    token_ids_T: Tensor | None,
    replay_TK: Tensor | None,
) -> None:
    """Refuse tensors that do not fit, before they are broadcast into nonsense."""
    if logits_TE.is_complex():
        raise ConfigError(f"logits of {logits_TE.dtype} have no order; pass real numbers")
    if logits_TE.ndim != 2 or logits_TE.shape[1] != config.num_experts:
        raise ConfigError(
            f"logits of shape {tuple(logits_TE.shape)} do not fit num_experts="
            f"{config.num_experts}; pass [tokens, {config.num_experts}]"
        )
    rows = logits_TE.shape[0]
    for name, tensor in (("mask_T", mask_T), ("token_ids_T", token_ids_T)):
        if tensor is not None and tensor.shape != (rows,):
            raise ConfigError(
                f"{name} of shape {tuple(tensor.shape)} does not fit {rows} rows of logits; pass "
                "one entry a token"
            )
    if replay_TK is not None and (replay_TK.ndim != 2 or replay_TK.shape[0] != rows):
        raise ConfigError(
            f"replay_TK of shape {tuple(replay_TK.shape)} does not fit {rows} rows of logits; pass "
            "the recording of the same tokens"
        )
    if bias_E is None:
        return
    if bias_E.shape != (config.num_experts,):
        raise ConfigError(
            f"bias_E of shape {tuple(bias_E.shape)} does not fit num_experts={config.num_experts}"
        )
    if bias_E.dtype not in (torch.float32, torch.float64):
        raise ConfigError(
            f"bias_E is {bias_E.dtype}, which rounds away its small differences; keep it in float32"
        )


def _refuse_bad_rows(
    logits_TE: Tensor,
    config: RouterConfig,
    bias_E: Tensor | None,
    replay_TK: Tensor | None,
    layer: int | str | None,
    rank: int | None,
) -> None:
    """Raise if a row cannot be ranked or a replayed id does not exist (R7): one synchronisation."""
    if logits_TE.device.type == "meta" or logits_TE.shape[0] == 0:
        return
    # The maximum passes NaN on; it is -inf only if all are.
    bad_T = ~torch.isfinite(logits_TE.detach().amax(dim=-1))
    if replay_TK is not None:
        outside_TK = (replay_TK < -1) | (replay_TK >= config.num_experts)
        bad_T = bad_T | outside_TK.any(dim=-1).to(bad_T.device)
    if bias_E is not None:
        bad_T = bad_T | ~torch.isfinite(bias_E).all()
    if not bool(bad_T.any()):
        return
    token = int(bad_T.nonzero()[0, 0])
    row_E = logits_TE[token].detach()
    if bool(row_E.isnan().any()):
        found = "hold a NaN"
    elif bool(torch.isneginf(row_E).all()):
        found = "are all -inf"
    elif not bool(torch.isfinite(row_E.amax())):
        found = "hold +inf"
    elif bias_E is not None and not bool(torch.isfinite(bias_E).all()):
        found = "are ranked with a correction bias that is not finite"
    else:
        assert replay_TK is not None
        found = (
            f"are to be replayed with experts {replay_TK[token].tolist()} of {config.num_experts}"
        )
    where = [f"rank {rank}"] if rank is not None else []
    where += [f"layer {layer}"] if layer is not None else []
    where += [f"token {token}"]
    raise RoutingError(
        f"{', '.join(where)}: the router's logits {found} ({int(bad_T.sum())} of "
        f"{bad_T.shape[0]} tokens); look for an overflow in the layers before, or a learning rate "
        "that is too high"
    )


def _refuse_bad_ids(
    token_ids_T: Tensor | None, table_VK: Tensor | None, mask_T: Tensor | None, config: RouterConfig
) -> None:
    """Raise if a real token has no row in the table, or the table is none for this router."""
    if token_ids_T is None or table_VK is None or table_VK.device.type == "meta":
        return
    ids_T = token_ids_T if mask_T is None else token_ids_T[mask_T]
    if table_VK.ndim != 2 or table_VK.shape[1] != config.top_k:
        raise ConfigError(
            f"table_VK of shape {tuple(table_VK.shape)} does not fit top_k={config.top_k}; pass "
            f"[vocabulary, {config.top_k}]"
        )
    outside_T = (ids_T < 0) | (ids_T >= table_VK.shape[0])
    if bool(outside_T.any()):
        raise RoutingError(
            f"kind='hash': token id {int(ids_T[outside_T][0])} has no row in table_VK of "
            f"{table_VK.shape[0]} rows; mask padding, or pass a table for the whole vocabulary"
        )
    _refuse_bad_table(table_VK, config.num_experts)


def _refuse_bad_table(table_VK: Tensor, num_experts: int) -> None:
    """Raise if a row names an expert that does not exist; the table of before is not read again."""
    # inference tensors have no version: they may have been written to
    seen = None if table_VK.is_inference() else (table_VK._version, num_experts)
    if seen is not None and getattr(table_VK, _CHECKED, None) == seen:
        return
    bad_VK = (table_VK < -1) | (table_VK >= num_experts)
    if bool(bad_VK.any()):
        raise RoutingError(
            f"kind='hash': table_VK names expert {int(table_VK[bad_VK][0])}, and num_experts="
            f"{num_experts}"
        )
    setattr(table_VK, _CHECKED, seen)
