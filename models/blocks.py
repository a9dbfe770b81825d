"""One decoder layer: attention, then experts or a dense MLP, each behind a norm, on a residual.

Letters: T owned tokens · D width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from moe_tp.experts.activation import Activation, ClampedSwiGLU
from moe_tp.experts.activation import activation as activation_of
from moe_tp.experts.mlp import GatedMLP
from moe_tp.experts.moe import MoE, MoEAux, Sequences
from moe_tp.models.attention import Attention
from moe_tp.models.cache import LayerCache
from moe_tp.models.config import ModelConfig
from moe_tp.models.mla import LatentAttention
from moe_tp.models.tokens import Tokens
from moe_tp.parallel.mesh import Mesh
from moe_tp.parallel.random import DropoutKey, dropout
from moe_tp.parallel.sequence import RMSNorm
from moe_tp.parallel.spec import Init


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What every layer of one call shares.

    Args:
        tokens: the batch.
        seed, step: of the dropout masks.
        step_tokens: real tokens of the whole optimiser step, for router losses that add up over
            its micro-batches; None: they are means over this call.
        caches: what each layer keeps of earlier columns, by its number; None outside generation.
        even: all ranks of the stage own equally many tokens (a step of generation).
    """

    tokens: Tokens
    seed: int
    step: int
    step_tokens: int | None = None
    caches: Mapping[int, LayerCache] | None = None
    even: bool = False

    def key(self, layer: int, site: str, token_ids: torch.Tensor) -> DropoutKey:
        """Return the identity of one dropout site of one layer."""
        return DropoutKey(
            seed=self.seed, step=self.step, layer=layer, site=site, token_ids_T=token_ids
        )


class Block(nn.Module):
    """Decoder layer number `layer` of a model.

    Args:
        config: the model.
        layer: global number of the layer.
        mesh: the mesh.
        dtype: parameter dtype.
    """

    def __init__(self, config: ModelConfig, layer: int, mesh: Mesh, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        eps, init = config.norm_eps, Init(value=config.init_std)
        self.attention_norm = RMSNorm(config.dim, eps, mesh, dtype=dtype)
        latent = config.attention.mla is not None
        self.attention = (LatentAttention if latent else Attention)(config, mesh, dtype=dtype)
        self.mlp_norm = RMSNorm(config.dim, eps, mesh, dtype=dtype)
        if config.is_dense(layer):
            self.mlp = GatedMLP(config.dim, config.dense_dim, mesh, dtype=dtype, init=init)
        else:
            self.moe = make_moe(config, layer, mesh, dtype=dtype)

    def forward(self, x_TD: torch.Tensor, call: Call) -> tuple[torch.Tensor, MoEAux | None]:
        """Return the residual stream after the layer, and what its router has to say.

        Args:
            x_TD: owned tokens.
            call: what layers share.

        Collectives: those of attention and of the experts or the MLP.
        """
        tokens, config = call.tokens, self.config
        key = None
        if self.training and config.attention.dropout:
            key = call.key(self.layer, "attention_weights", tokens.token_ids_BS.flatten())
        cache = None if call.caches is None else call.caches[self.layer]
        sequences = tokens.sequences(config.window(self.layer), key, cache)
        y_TD = self.attention(self.attention_norm(x_TD), sequences)
        x_TD = self._join(x_TD, y_TD, "attention", call)
        y_TD, aux = self._feed_forward(self.mlp_norm(x_TD), call)
        return self._join(x_TD, y_TD, "mlp", call), aux

    def _feed_forward(self, x_TD: torch.Tensor, call: Call) -> tuple[torch.Tensor, MoEAux | None]:
        if self.config.is_dense(self.layer):
            return self.mlp(x_TD, whole=call.tokens.whole), None
        tokens = call.tokens
        if call.caches is not None:
            x_TD = self.moe.serve(
                x_TD, tokens.mask_T, tokens.ids_T, even=call.even, whole=tokens.whole
            )
            return x_TD, None
        y_TD, aux = self.moe(
            x_TD,
            mask=tokens.mask_T,
            token_ids=tokens.ids_T,
            key=call.key(self.layer, "router", tokens.token_ids_T) if self.training else None,
            sequences=Sequences(sequence_T=tokens.sequence_T, count=tokens.num_sequences),
            step_tokens=call.step_tokens,
            identity=tokens.token_ids_T,
        )
        return y_TD, aux

    def _join(self, x_TD: torch.Tensor, y_TD: torch.Tensor, site: str, call: Call) -> torch.Tensor:
        """Return the residual with what a sub-layer adds to it."""
        config = self.config
        if self.training and config.residual_dropout:
            key = call.key(self.layer, site, call.tokens.token_ids_T)
            y_TD = dropout(y_TD, config.residual_dropout, key)
        scale = config.residual_scale
        return x_TD + (y_TD if scale == 1.0 else y_TD * scale)


def make_moe(config: ModelConfig, layer: int, mesh: Mesh, *, dtype: torch.dtype) -> MoE:
    """Return the experts of one layer."""
    moe = config.moe
    activation: Activation = activation_of(moe.activation)
    if isinstance(activation, ClampedSwiGLU):
        activation = ClampedSwiGLU(alpha=moe.activation_alpha, limit=moe.activation_limit)
    return MoE(
        config.dim,
        moe.expert_dim,
        moe.router,
        mesh,
        shared_dim=moe.shared_dim,
        shared_gate=moe.shared_gate,
        activation=activation,
        expert_bias=moe.expert_bias,
        dtype=dtype,
        init=Init(value=config.init_std),
        layer=layer,
        even_tokens=True,
        seed=0,
    )
