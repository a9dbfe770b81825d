"""What comes out of a model: the head, the loss or logits it gives, and the routers' word.

Letters: B batch · S sequence · N tokens of a (cp, tp) group · T owned tokens · D width · V
vocabulary · L layers · E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe_tp.parallel.mesh import Mesh
from moe_tp.parallel.parameter import ParallelModule
from moe_tp.parallel.product import linear
from moe_tp.parallel.spec import Init, ParamSpec
from moe_tp.parallel.vocab import VocabParallelEmbedding, vocab_cross_entropy, vocab_logits
from moe_tp.parallel.zero import hooked


@dataclass(frozen=True, slots=True, kw_only=True)
class Aux:
    """What the routers of a call have to say.

    Args:
        loss: sum over layers of the weighted balance and z losses, its global value on every rank.
        counts_LE: tokens of each layer and expert over all ranks; zeros in dense layers.
        sums_LM: fp64, for each layer what `moe_tp.experts.losses.SUMS` names; adds up over calls.
    """

    loss: torch.Tensor
    counts_LE: torch.Tensor
    sums_LM: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What a call returns.

    Args:
        loss: cross entropy, its global value on every rank; None without labels.
        aux: balance losses and load.
        logits: `[B, S, V]` on every rank of the group that shares the batch, where asked for.
    """

    loss: torch.Tensor | None
    aux: Aux
    logits: torch.Tensor | None = None


class Head(ParallelModule):
    """The output projection, its rows split over tp; with tied embeddings their very parameter.

    Args:
        vocab_size: number of tokens.
        dim: width.
        mesh: the mesh.
        dtype: parameter dtype.
        init: first values.
        tied: the embedding whose weight it shares.
    """

    def __init__(
        self,
        vocab_size: int,
        dim: int,
        mesh: Mesh,
        *,
        dtype: torch.dtype,
        init: Init,
        tied: VocabParallelEmbedding | None = None,
    ) -> None:
        super().__init__(mesh)
        if tied is None:
            spec = ParamSpec(
                shape=(vocab_size, dim), shards={"tp": 0}, pad=True, init=init, role="weight"
            )
            self.add_parameter("weight", spec, dtype)
        else:
            self.specs["weight"] = tied.specs["weight"]
            self.register_parameter("weight", tied._parameters["weight"])
        self.vocab_size = vocab_size

    def forward(
        self,
        x_TD: torch.Tensor,
        targets_N: torch.Tensor | None,
        logit_scale: float,
        *,
        shard: bool = False,
    ) -> torch.Tensor:
        """Return the summed loss of owned tokens, or without targets full logits `[N, V]`.

        Args:
            x_TD: owned tokens after the last norm.
            targets_N: targets of all tokens of the tp group.
            logit_scale: factor on the logits.
            shard: x is the same on all ranks of tp, and the logits are this rank's `[N, V / tp]`;
                padded words are not cut off.

        Collectives: those of `vocab_cross_entropy` or `vocab_logits` over tp; none with `shard`.
        """
        weight, group = self.local("weight"), self.mesh.group("tp")
        if shard:
            part_NV = linear(x_TD, weight, None)
            return part_NV if logit_scale == 1.0 else part_NV * logit_scale
        if targets_N is None:
            logits_NV = vocab_logits(
                x_TD, weight, group, vocab_size=self.vocab_size, logit_scale=logit_scale
            )
            return hooked(logits_NV, self.mesh)
        return vocab_cross_entropy(
            x_TD,
            weight,
            targets_N,
            group,
            vocab_size=self.vocab_size,
            chunk_tokens=self.mesh.runtime.loss_chunk,
            logit_scale=logit_scale,
        )
