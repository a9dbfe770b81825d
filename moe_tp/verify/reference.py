"""A whole model in one process, as a plain function of hub tensors: what layouts must equal.

Letters: B batch · S sequence · T tokens (B * S) · D width · H heads · G key/value heads · h head
size · E experts · K choices · V vocabulary.

Nothing here is shared with the code under test: no dispatcher, no collective, no module, no name
rule. Weights are the tensors of the folder under their own names, gradients come from autograd on
those leaves, experts run in a Python loop, attention is an explicit softmax.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from moe_tp.errors import CheckpointError
from moe_tp.verify import gate as gating
from moe_tp.verify.attention import attend, documents, rms_norm, rotation, turn, visible
from moe_tp.verify.data import Batch, Losses, Outcome, Trace, targets
from moe_tp.verify.family import Facts, facts
from moe_tp.verify.gate import Routing
from moe_tp.verify.hub import read_config, read_tensors

__all__ = ["Reference"]

_GATE_NAMES = ("block_sparse_moe.gate", "block_sparse_moe.router.layer", "mlp.router", "mlp.gate")
_SHARED_NAMES = ("mlp.shared_expert", "mlp.shared_experts")


class Reference:
    """The leaf tensors of a model and the function of them."""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        config: Mapping[str, Any],
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.facts: Facts = facts(config)
        self.dtype = dtype
        self._used: set[str] = set()
        self.weights: dict[str, torch.Tensor] = {}
        self.buffers: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            if name.endswith("e_score_correction_bias"):
                self.buffers[name] = tensor.to(_at_least_fp32(dtype))
            elif not self._passed_through(name):
                self.weights[name] = tensor.to(dtype).clone().requires_grad_()

    @classmethod
    def load(cls, path: str | os.PathLike[str], dtype: torch.dtype = torch.float32) -> Reference:
        """Return the model of a hub folder, every tensor in `dtype` (fp32 or fp64)."""
        config = read_config(path)
        return cls(read_tensors(path), config, dtype)

    def step(
        self,
        micro_batches: Sequence[Sequence[Batch]],
        losses: Losses | None = None,
        *,
        forced: Sequence[Sequence[Sequence[torch.Tensor]]] | None = None,
        backward: bool = True,
    ) -> Outcome:
        """Return losses, logits, routing and gradients of one optimiser step.

        The loss is the sum over all targets divided by their number; router losses are those of the
        micro-batches (each over the union of its ranks), averaged over the micro-batches, or of the
        whole step where their kind is `global_batch`.

        Args:
            micro_batches: for each micro-batch the part of each rank.
            losses: router losses; None: none.
            forced: routing to compute instead of the own, `[micro-batch][rank][MoE layer] -> [T,
                K]`.
            backward: False leaves the gradients empty.
        """
        losses = losses or Losses()
        total = torch.zeros((), dtype=self.dtype)
        count = 0
        logits: list[list[torch.Tensor]] = []
        routing: list[list[list[Routing]]] = []
        hidden: list[list[list[torch.Tensor]]] = []
        for m, parts in enumerate(micro_batches):
            logits.append([])
            routing.append([])
            hidden.append([])
            for r, batch in enumerate(parts):
                trace = self.forward(batch, forced[m][r] if forced is not None else None)
                logits[m].append(trace.logits_BSV.detach())
                routing[m].append(trace.routing)
                hidden[m].append([x.detach() for x in trace.hidden])
                target_BS = targets(batch)
                count += int((target_BS != -100).sum())
                total = total + _cross_entropy_sum(trace.logits_BSV, target_BS)
        aux = self._router_losses(micro_batches, routing, losses)
        loss = total / max(count, 1)
        gradients = self._gradients(loss + aux) if backward else {}
        return Outcome(
            loss=loss.detach(),
            aux_loss=aux.detach(),
            targets=count,
            logits=logits,
            routing=routing,
            hidden=hidden,
            gradients=gradients,
        )

    def forward(self, batch: Batch, forced: Sequence[torch.Tensor] | None = None) -> Trace:
        """Return logits, the routing of each MoE layer and the residual stream after each layer.

        Args:
            batch: one part of a micro-batch.
            forced: `[T, K]` experts for each MoE layer; None: the model's own choice.
        """
        f = self.facts
        x_BSD = F.embedding(batch.input_ids, self._get("model.embed_tokens.weight"))
        x_BSD = x_BSD * f.embedding_scale
        turns = rotation(f.rope, batch.positions, self.dtype)
        routing: list[Routing] = []
        hidden: list[torch.Tensor] = []
        for i in range(f.layers):
            prefix = f"model.layers.{i}."
            normed = rms_norm(x_BSD, self._get(prefix + "input_layernorm.weight"), f.eps)
            seen_BSS = visible(batch.positions, batch.real, f.windows[i])
            attention = self._latent_attention if f.latent else self._attention
            out = attention(prefix + "self_attn.", normed, turns, seen_BSS)
            x_BSD = x_BSD + out * f.residual_scale
            normed = rms_norm(x_BSD, self._get(prefix + "post_attention_layernorm.weight"), f.eps)
            if i in f.moe_layers:
                own = None if forced is None else forced[len(routing)]
                out, routed = self._moe(prefix, normed, batch.real, own)
                routing.append(routed)
            else:
                out = self._mlp(prefix + "mlp", normed)
            x_BSD = x_BSD + out * f.residual_scale
            hidden.append(x_BSD)
        x_BSD = rms_norm(x_BSD, self._get("model.norm.weight"), f.eps)
        head = "model.embed_tokens.weight" if f.tied else "lm_head.weight"
        logits_BSV = F.linear(x_BSD, self._get(head)) * f.logit_scale
        self._check_all_used()
        return Trace(logits_BSV=logits_BSV, routing=routing, hidden=hidden)

    def _router_losses(
        self,
        micro_batches: Sequence[Sequence[Batch]],
        routing: Sequence[Sequence[Sequence[Routing]]],
        losses: Losses,
    ) -> torch.Tensor:
        """Return the weighted router losses of a step."""
        gate, aux = self.facts.gate, torch.zeros((), dtype=self.dtype)
        steps = [[list(layer) for layer in zip(*parts, strict=True)] for parts in routing]
        if not steps or not steps[0]:
            return aux
        if losses.kind.startswith("global_batch"):
            exact = losses.kind == "global_batch_exact"
            if losses.balance:
                aux = aux + losses.balance * gating.step_balance_loss(steps, gate, exact=exact)
            if losses.z:
                whole = [[p for layers in steps for p in layers[at]] for at in range(len(steps[0]))]
                aux = aux + losses.z * gating.z_loss(whole)
            return aux
        for batches, layers in zip(micro_batches, steps, strict=True):
            if losses.balance:
                aux = aux + losses.balance * self._balance(batches, layers, losses.kind)
            if losses.z:
                aux = aux + losses.z * gating.z_loss(layers)
        return aux / len(steps)

    def _balance(
        self, batches: Sequence[Batch], layers: Sequence[Sequence[Routing]], kind: str
    ) -> torch.Tensor:
        """Return the balance loss of one micro-batch, without its weight."""
        if kind == "pooled":
            return gating.pooled_balance_loss(layers, self.facts.gate)
        if kind == "sequence":
            numbers = []
            for batch in batches:
                rows, length = batch.input_ids.shape
                row_B1 = torch.arange(rows)[:, None] * max(length, 1)
                numbers.append((row_B1 + documents(batch.positions)).flatten())
            return gating.sequence_balance_loss(layers, numbers, self.facts.gate)
        return gating.balance_loss(layers, self.facts.gate)

    def _gradients(self, loss: torch.Tensor) -> dict[str, torch.Tensor]:
        leaves = list(self.weights.values())
        grads: Sequence[torch.Tensor | None] = [None] * len(leaves)
        if loss.requires_grad:
            grads = torch.autograd.grad(loss, leaves, allow_unused=True)
        return {
            name: torch.zeros_like(leaf) if grad is None else grad
            for (name, leaf), grad in zip(self.weights.items(), grads, strict=True)
        }

    def _attention(
        self,
        prefix: str,
        x_BSD: torch.Tensor,
        turns: tuple[torch.Tensor, ...],
        seen_BSS: torch.Tensor,
    ) -> torch.Tensor:
        """Return grouped-query attention of normed tokens."""
        f = self.facts
        q, k, v = (self._linear(f"{prefix}{n}_proj", x_BSD) for n in "qkv")
        full_width = f.family == "olmoe"
        if full_width:
            q = self._norm(prefix + "q_norm", q)
            k = self._norm(prefix + "k_norm", k)
        if f.clip_qkv is not None:
            q, k, v = (t.clamp(-f.clip_qkv, f.clip_qkv) for t in (q, k, v))
        q, k, v = (t.unflatten(-1, (-1, f.head_dim)) for t in (q, k, v))
        if not full_width and prefix + "q_norm.weight" in self.weights:
            q = self._norm(prefix + "q_norm", q)
            k = self._norm(prefix + "k_norm", k)
        cos, sin = turns
        q, k = turn(q, f.rope, cos, sin), turn(k, f.rope, cos, sin)
        sink_H = self._get(prefix + "sinks") if prefix + "sinks" in self.weights else None
        out_BSHh = attend(q, k, v, seen_BSS, f.softmax_scale, sink_H)
        return self._linear(prefix + "o_proj", out_BSHh.flatten(-2))

    def _latent_attention(
        self,
        prefix: str,
        x_BSD: torch.Tensor,
        turns: tuple[torch.Tensor, ...],
        seen_BSS: torch.Tensor,
    ) -> torch.Tensor:
        """Return multi-head latent attention of normed tokens (arXiv:2405.04434, section 2.1)."""
        f, latent = self.facts, self.facts.latent
        assert latent is not None
        if prefix + "q_proj.weight" in self.weights:
            q = self._linear(prefix + "q_proj", x_BSD)
        else:
            low = self._linear(prefix + "q_a_proj", x_BSD)
            q = self._linear(
                prefix + "q_b_proj", self._norm(prefix + "q_a_layernorm", low, eps=1e-6)
            )
        q_plain, q_turned = q.unflatten(-1, (f.heads, -1)).split([latent.nope, latent.rope], -1)
        compressed = self._linear(prefix + "kv_a_proj_with_mqa", x_BSD)
        kv, k_turned = compressed.split([latent.kv_rank, latent.rope], -1)
        kv = self._linear(prefix + "kv_b_proj", self._norm(prefix + "kv_a_layernorm", kv, eps=1e-6))
        k_plain, v = kv.unflatten(-1, (f.heads, -1)).split([latent.nope, latent.value], -1)
        cos, sin = turns
        q_turned = turn(q_turned, f.rope, cos, sin)
        k_turned = turn(k_turned.unsqueeze(2), f.rope, cos, sin).expand(-1, -1, f.heads, -1)
        q = torch.cat([q_plain, q_turned], -1)
        k = torch.cat([k_plain, k_turned], -1)
        out_BSHh = attend(q, k, v, seen_BSS, f.softmax_scale, None)
        return self._linear(prefix + "o_proj", out_BSHh.flatten(-2))

    def _mlp(self, prefix: str, x: torch.Tensor) -> torch.Tensor:
        gate, up = self._linear(prefix + ".gate_proj", x), self._linear(prefix + ".up_proj", x)
        return self._linear(prefix + ".down_proj", F.silu(gate) * up)

    def _moe(
        self,
        prefix: str,
        x_BSD: torch.Tensor,
        real_BS: torch.Tensor,
        forced_TK: torch.Tensor | None,
    ) -> tuple[torch.Tensor, Routing]:
        """Return the MoE layer's output and routing."""
        x_TD = x_BSD.flatten(0, 1)
        name = self._first(prefix, _GATE_NAMES)
        wide = _at_least_fp32(self.dtype)
        logits_TE = F.linear(x_TD.to(wide), self._get(name + ".weight").to(wide))
        if name + ".bias" in self.weights:
            logits_TE = logits_TE + self._get(name + ".bias").to(wide)
        bias_E = self.buffers.get(name + ".e_score_correction_bias")
        routed = gating.choose(logits_TE, self.facts.gate, bias_E, real_BS.flatten(), forced_TK)
        out_TD = torch.zeros_like(x_TD)
        for e in range(logits_TE.shape[1]):
            token, choice = torch.where(routed.ids_TK == e)
            if token.numel():
                row = self._expert(prefix, e, x_TD[token])
                weight = routed.weights_TK[token, choice, None].to(row.dtype)
                out_TD = out_TD.index_add(0, token, row * weight)
        return (out_TD + self._shared(prefix, x_TD)).view_as(x_BSD), routed

    def _expert(self, prefix: str, e: int, x: torch.Tensor) -> torch.Tensor:
        """Return the rows' output of one expert, whichever way the folder stores it."""
        for block, names in (
            ("block_sparse_moe.experts.", ("w1", "w3", "w2")),
            ("mlp.experts.", ("gate_proj", "up_proj", "down_proj")),
        ):
            stem = f"{prefix}{block}{e}."
            if f"{stem}{names[0]}.weight" in self.weights:
                gate, up = (self._linear(stem + n, x) for n in names[:2])
                return self._linear(stem + names[2], F.silu(gate) * up)
        if self.facts.gate_limit is not None:
            return self._clamped_expert(prefix + "mlp.experts.", e, x)
        fused = self._first(
            prefix, ("block_sparse_moe.input_linear.weight", "mlp.experts.gate_up_proj"), ""
        )
        down = fused.replace("input_linear", "output_linear").replace("gate_up_proj", "down_proj")
        gate, up = F.linear(x, self._get(fused)[e]).chunk(2, -1)
        return F.linear(F.silu(gate) * up, self._get(down)[e])

    def _clamped_expert(self, prefix: str, e: int, x: torch.Tensor) -> torch.Tensor:
        """Return GPT-OSS's expert: clamped, biased, gate and up interleaved, `[in, out]`."""
        limit, alpha = self.facts.gate_limit, self.facts.gate_alpha
        assert limit is not None
        mixed = (
            x @ self._get(prefix + "gate_up_proj")[e] + self._get(prefix + "gate_up_proj_bias")[e]
        )
        gate = mixed[:, 0::2].clamp(max=limit)
        up = mixed[:, 1::2].clamp(-limit, limit)
        hidden = (up + 1) * gate * torch.sigmoid(alpha * gate)
        return hidden @ self._get(prefix + "down_proj")[e] + self._get(prefix + "down_proj_bias")[e]

    def _shared(self, prefix: str, x_TD: torch.Tensor) -> torch.Tensor:
        """Return the output of the expert that every token visits, zeros if there is none."""
        for name in _SHARED_NAMES:
            if f"{prefix}{name}.gate_proj.weight" in self.weights:
                out = self._mlp(prefix + name, x_TD)
                switch = f"{prefix}{name}_gate"
                if switch + ".weight" in self.weights:
                    out = out * torch.sigmoid(self._linear(switch, x_TD))
                return out
        return torch.zeros_like(x_TD)

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        bias = self._get(name + ".bias") if name + ".bias" in self.weights else None
        return F.linear(x, self._get(name + ".weight"), bias)

    def _norm(self, name: str, x: torch.Tensor, eps: float | None = None) -> torch.Tensor:
        return rms_norm(x, self._get(name + ".weight"), self.facts.eps if eps is None else eps)

    def _first(self, prefix: str, names: Sequence[str], suffix: str = ".weight") -> str:
        for name in names:
            if prefix + name + suffix in self.weights:
                return prefix + name
        raise CheckpointError(
            f"the folder has none of {', '.join(prefix + n + suffix for n in names)}; "
            f"a {self.facts.family} model needs one of them"
        )

    def _get(self, name: str) -> torch.Tensor:
        if name not in self.weights:
            raise CheckpointError(
                f"the folder has no tensor {name!r}, which a {self.facts.family} model needs"
            )
        self._used.add(name)
        return self.weights[name]

    def _passed_through(self, name: str) -> bool:
        """Return True for what a decoder does not use: further-token heads, angles, a tied head."""
        if name.endswith("rotary_emb.inv_freq") or name.startswith("mtp."):
            return True
        if name == "lm_head.weight" and self.facts.tied:
            return True
        parts = name.split(".")
        return parts[:2] == ["model", "layers"] and int(parts[2]) >= self.facts.layers

    def _check_all_used(self) -> None:
        """Refuse tensors that had no part in the forward, so that none is left out in silence."""
        idle = sorted(n for n in set(self.weights) - self._used if not _is_expert(n))
        if idle:
            raise CheckpointError(
                f"the reference has no use for {len(idle)} tensors of the folder, "
                f"the first is {idle[0]!r}; "
                f"is model_type={self.facts.family!r} right?"
            )


def _is_expert(name: str) -> bool:
    """Return True for an expert's own tensor, which is unused where no token visits it."""
    return ".experts." in name


def _at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _cross_entropy_sum(logits_BSV: torch.Tensor, target_BS: torch.Tensor) -> torch.Tensor:
    """Return the sum over targets of -log p."""
    kept_BS = target_BS != -100
    log_p_NV = logits_BSV[kept_BS].log_softmax(-1)
    picked = log_p_NV.gather(1, target_BS[kept_BS][:, None])
    return -picked.sum()
