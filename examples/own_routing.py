"""Route by a rule of your own: a function from logits to an `Assignment` is all it takes.

Here each token may use only the experts of its own half: even token ids the first half, odd ids the
second. `assign` gathers the weights and counts, so balance losses, capacity, replay and every
dispatcher work as with the built-in kinds.
"""

from __future__ import annotations

import torch

from moe_tp.routing import Assignment, RouterConfig, assign, load_balance_loss, route


def by_parity(
    logits_TE: torch.Tensor,
    config: RouterConfig,
    *,
    bias_E: torch.Tensor | None,
    mask_T: torch.Tensor | None,
    token_ids_T: torch.Tensor | None,
    generator: torch.Generator | None,
) -> Assignment:
    """Return the best experts within the half that the token id allows."""
    assert token_ids_T is not None, "this rule needs token ids"
    second_half_E = torch.arange(config.num_experts) >= config.num_experts // 2
    allowed_TE = second_half_E == (token_ids_T % 2 == 1).unsqueeze(-1)
    ids_TE = logits_TE.masked_fill(~allowed_TE, float("-inf")).sort(
        dim=-1, descending=True, stable=True
    )
    return assign(ids_TE.indices[:, : config.top_k], logits_TE, config, mask_T=mask_T)


def main() -> None:
    """Print where six tokens go."""
    config = RouterConfig(8, 2, function=by_parity, function_looks_across=False)
    logits = torch.randn(6, 8, generator=torch.manual_seed(0))
    out = route(logits, config, token_ids_T=torch.arange(6))
    for token, (ids, weights) in enumerate(zip(out.ids_TK, out.weights_TK, strict=True)):
        print(f"token {token}: experts {ids.tolist()}, weights {weights.tolist()}")
        assert all((expert >= 4) == (token % 2 == 1) for expert in ids.tolist())
    print(f"load-balance loss {float(load_balance_loss(out)):.4f} (1 is perfect balance)")


if __name__ == "__main__":
    main()
