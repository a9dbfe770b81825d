"""The causal language model: embedding, layers, head and loss over owned tokens.

Letters: B batch · S sequence · N tokens of a (cp, tp) group · T owned tokens · D width · V
vocabulary · L layers · E experts.

A call walks through four steps, each a method, so that a pipeline stage can take some of them:
`open` (ids to tokens), `embed_tokens`, `run_layers`, and `loss` or `logits`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo

from moe_tp.errors import ConfigError, DataError
from moe_tp.experts.losses import SUMS
from moe_tp.experts.moe import MoEAux
from moe_tp.models.batches import batch_problem, count_agreed, fingerprints, share_numbers
from moe_tp.models.blocks import Block, Call
from moe_tp.models.config import ModelConfig
from moe_tp.models.families import rules_for
from moe_tp.models.head import Aux, Head, Output
from moe_tp.models.stages import DecoderStage, make_stages, pipeline_logits
from moe_tp.models.tokens import prepare
from moe_tp.parallel.collectives import accumulate_dtype, all_gather, all_reduce
from moe_tp.parallel.context.sequence import order
from moe_tp.parallel.context.ulysses import check_heads
from moe_tp.parallel.functions import working_dtype
from moe_tp.parallel.mesh import Mesh
from moe_tp.parallel.recompute import run_block
from moe_tp.parallel.sequence import RMSNorm
from moe_tp.parallel.spec import Init
from moe_tp.parallel.vocab import (
    VocabParallelEmbedding,
    gather_shards,
)
from moe_tp.parallel.whole import sharers
from moe_tp.parallel.zero import hooked, reshard


class Decoder(nn.Module):
    """A decoder-only MoE language model on a mesh.

    Args:
        config: the model.
        mesh: the mesh.
        dtype: parameter dtype.
        layers: the layers it holds; None for all.
        with_embedding, with_head: whether it holds the first and the last step.

    Attributes:
        seed: of dropout masks.
        source: the folder, URL or hub id it was read from, or None.
        name_rules: how its parameters lie in a hub folder.

    Raises:
        ConfigError: the layout does not fit the model.
    """

    def __init__(
        self,
        config: ModelConfig,
        mesh: Mesh,
        *,
        dtype: torch.dtype = torch.float32,
        layers: Sequence[int] | None = None,
        with_embedding: bool = True,
        with_head: bool = True,
    ) -> None:
        super().__init__()
        _check_layout(config, mesh)
        self.config, self.mesh, self.seed = config, mesh, 0
        self.source: Path | str | None = None
        self.name_rules = rules_for(config)
        init = Init(value=config.init_std)
        self.embed: VocabParallelEmbedding | None = None
        self.norm: RMSNorm | None = None
        self.head: Head | None = None
        if with_embedding or (with_head and config.tie_embeddings):
            self.embed = VocabParallelEmbedding(
                config.vocab_size,
                config.dim,
                mesh,
                dtype=dtype,
                init=init,
                copies=1 if with_embedding and with_head else 1 + config.tie_embeddings,
            )
        numbers = range(config.num_layers) if layers is None else layers
        self.layers = nn.ModuleDict({str(i): Block(config, i, mesh, dtype=dtype) for i in numbers})
        if with_head:
            self.norm = RMSNorm(config.dim, config.norm_eps, mesh, dtype=dtype)
            self.head = Head(
                config.vocab_size,
                config.dim,
                mesh,
                dtype=dtype,
                init=init,
                tied=self.embed if config.tie_embeddings else None,
            )

        self.stages: dict[int, DecoderStage] = {}
        if mesh.size("pp") > 1:
            # Beside the module tree: the layers keep one name each.
            self.__dict__["stages"] = make_stages(self)

    @property
    def hub_config(self) -> dict[str, Any]:
        """The `config.json` of this model."""
        return self.config.to_hub()

    @property
    def blocks(self) -> Iterator[Block]:
        """The layers it holds, in order."""
        for block in self.layers.values():
            assert isinstance(block, Block)
            yield block

    @property
    def activation_dtype(self) -> torch.dtype:
        """Dtype of the residual stream."""
        own = next(self.parameters()).dtype
        return working_dtype(self.mesh.runtime.compute_dtype, own, self.mesh.device)

    @_disable_dynamo  # torch.compile: the model runs as it is
    def forward(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        *,
        target_tokens: int | torch.Tensor | None = None,
        step: int = 0,
        sample_offset: int = 0,
        step_tokens: int | None = None,
        return_logits: bool | None = None,
        call: Call | None = None,
    ) -> Output:
        """Return loss, router losses and logits of one batch; collective.

        Ranks that share a batch (same dp) pass the same tensors; dp ranks pass their own, of any
        shape, also with no tokens.

        Args:
            input_ids: `[B, S]`.
            labels: hub-style, same shape, shifted inside; -100 is ignored.
            attention_mask: `[B, S]`, true where a token is real.
            position_ids: `[B, S]`; where they do not go on by one a new document begins.
            target_tokens: what the loss is divided by; None: the targets of this call on all ranks.
            step, sample_offset: seed dropout; the offset is the number of the first row in the
                global batch.
            step_tokens: real tokens of the step on all ranks, for router losses over the step.
            return_logits: None: where there are no labels.
            call: an opened call of generation in place of all others: the logits are then this
                rank's part of the vocabulary for the last columns, see `last_logits`.

        Raises:
            DataError: the batch cannot be used (checked before anything is sent).
            RankMismatchError: ranks that share a batch were given unlike ones (not looked at where
                `target_tokens` is given: what counted them has).

        Collectives: without `target_tokens` an all-gather of eight integers over the world;
            those of the layers; the loss over the stage.
        """
        if call is not None:
            x_TD, _ = self.run_layers(self.embed_tokens(call), call)
            part_BV = self.last_logits(self.final_norm(x_TD), call)
            return Output(loss=None, aux=self.gather_aux({}), logits=part_BV)
        if self.stages and labels is not None:
            raise ConfigError(
                f"a call with labels needs pp=1, but pp={self.mesh.layout.pp}; use "
                f"forward_backward(model, micro_batches), which runs the pipeline"
            )
        problem = batch_problem(
            self.config.vocab_size, input_ids, labels, attention_mask, position_ids
        )
        batch = {
            "input_ids": input_ids,
            "labels": labels,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "sample_offset": sample_offset,
        }
        if labels is not None and target_tokens is None:
            target_tokens = count_agreed([batch], problem, self.mesh, step)
        if labels is None:
            prints = fingerprints([batch], self.mesh, step, problem=problem)
            share_numbers(self.mesh, (), prints, problem, "a batch")
        if problem is not None:
            raise DataError(problem)
        if self.stages:
            whole, aux = pipeline_logits(self, {**batch, "step": step})
            reshard(self)
            return Output(loss=None, aux=aux, logits=whole)
        call = self.open(
            input_ids,
            labels,
            attention_mask,
            position_ids,
            step=step,
            sample_offset=sample_offset,
            step_tokens=step_tokens,
        )
        x_TD, layer_aux = self.run_layers(self.embed_tokens(call), call)
        x_TD = self.final_norm(x_TD)
        loss = None
        if target_tokens is not None and labels is not None:
            loss = self.loss(x_TD, call, target_tokens)
        wanted = labels is None if return_logits is None else return_logits
        logits = self.logits(x_TD, call) if wanted else None
        if not torch.is_grad_enabled():
            reshard(self)
        return Output(loss=loss, aux=self.gather_aux(layer_aux), logits=logits)

    def open(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        *,
        step: int = 0,
        sample_offset: int = 0,
        step_tokens: int | None = None,
    ) -> Call:
        """Return what the layers of one call share, from checked tensors; see `forward`."""
        tokens = prepare(
            self.config,
            self.mesh,
            self.activation_dtype,
            input_ids,
            labels,
            attention_mask,
            position_ids,
            sample_offset,
        )
        return Call(tokens=tokens, seed=self.seed, step=step, step_tokens=step_tokens)

    def embed_tokens(self, call: Call) -> torch.Tensor:
        """Return `[T, D]`, the embeddings of owned tokens.

        Collectives: reduce-scatter over tp; backward all-gather; of whole tokens a sum over tp.
        """
        assert self.embed is not None
        x_TD: torch.Tensor = self.embed(call.tokens.ids_N, whole=call.tokens.whole)
        scale = self.config.embedding_scale
        return x_TD if scale == 1.0 else x_TD * scale

    def run_layers(
        self, x_TD: torch.Tensor, call: Call, layers: Iterable[int] | None = None
    ) -> tuple[torch.Tensor, dict[int, MoEAux]]:
        """Return the residual stream after some layers, and each router's word by layer.

        Args:
            x_TD: owned tokens.
            call: what layers share.
            layers: numbers of the layers; None for all that this model holds.
        """
        result: dict[int, MoEAux] = {}
        for layer in self.layers if layers is None else map(str, layers):
            block = self.layers[layer]
            runtime = self.mesh.runtime
            x_TD, aux = run_block(
                block, runtime.recompute, x_TD, call, resend_rows=runtime.resend_rows
            )
            if aux is not None:
                result[int(layer)] = aux
        return x_TD, result

    def carried(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what a pipeline stage hands on, on the meta device.

        Args:
            tokens: T.
        """
        dtype = self.activation_dtype
        return (
            torch.empty(tokens, self.config.dim, dtype=dtype, device="meta", requires_grad=True),
            torch.empty(1, dtype=accumulate_dtype(dtype), device="meta", requires_grad=True),
        )

    def final_norm(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Return owned tokens after the last norm."""
        assert self.norm is not None
        normed: torch.Tensor = self.norm(x_TD)
        return normed

    def loss(
        self, x_TD: torch.Tensor, call: Call, target_tokens: int | torch.Tensor
    ) -> torch.Tensor:
        """Return the global cross entropy, 0 without targets; each rank's gradient is its part.

        Args:
            x_TD: owned tokens after the last norm.
            call: with targets.
            target_tokens: the divisor.

        Collectives: those of the vocabulary-parallel loss over tp; all-reduce over the stage.
        """
        assert self.head is not None
        assert call.tokens.targets_N is not None
        total: torch.Tensor = self.head(x_TD, call.tokens.targets_N, self.config.logit_scale)
        if isinstance(target_tokens, torch.Tensor):
            part = total / target_tokens.to(total.device).clamp_min(1)
        else:
            part = total / max(target_tokens, 1)
        return all_reduce(part, self.mesh.group("stage"))

    def logits(self, x_TD: torch.Tensor, call: Call) -> torch.Tensor:
        """Return `[B, S, V]` on every rank that shares the batch.

        Collectives: all-gathers of x and of the logits over tp, and of the logits over cp.
        """
        assert self.head is not None
        tokens = call.tokens
        logits_NV: torch.Tensor = self.head(x_TD, None, self.config.logit_scale)
        rows_NV = logits_NV[: tokens.batch * tokens.length]
        logits_BSV = rows_NV.view(tokens.batch, tokens.length, logits_NV.shape[-1])
        cp = self.mesh.group("cp")
        if cp.size > 1:
            place = order(cp.size * tokens.length, cp.size).to(logits_NV.device)
            logits_BSV = gather_shards(logits_BSV, cp, 1)[:, place]
        return hooked(logits_BSV[:, : tokens.given], self.mesh)

    def last_logits(self, x_TD: torch.Tensor, call: Call) -> torch.Tensor:
        """Return `[B, V / tp]`, this rank's part of the vocabulary for each row's last column.

        Args:
            x_TD: owned tokens after the last norm.
            call: with no cp.

        Collectives: all-gather of x over tp; of whole tokens none.
        """
        assert self.head is not None
        tokens = call.tokens
        x_ND = all_gather(x_TD, sharers(self.mesh, tokens.whole))
        x_BSD = x_ND[: tokens.batch * tokens.length].view(tokens.batch, tokens.length, -1)
        part: torch.Tensor = self.head(x_BSD[:, -1], None, self.config.logit_scale, shard=True)
        return part

    def gather_aux(self, layer_aux: dict[int, MoEAux]) -> Aux:
        """Return the routers' losses summed over layers and the load of each layer."""
        device = self.mesh.device
        experts = self.config.moe.router.num_experts
        counts = torch.zeros(self.config.num_layers, experts, dtype=torch.int64, device=device)
        sums = torch.zeros(len(counts), len(SUMS), dtype=torch.float64, device=device)
        loss = torch.zeros((), device=device)
        for layer, aux in layer_aux.items():
            counts[layer] = aux.counts_E.detach()
            sums[layer] = aux.sums()
            loss = loss + aux.loss
        return Aux(loss=loss, counts_LE=counts, sums_LM=sums)


def _check_layout(config: ModelConfig, mesh: Mesh) -> None:
    """Refuse what attention cannot do when cp shares the sequences."""
    cp, tp = mesh.size("cp"), mesh.size("tp")
    if cp == 1:
        return
    if config.attention.dropout:
        raise ConfigError(
            f"attention_dropout={config.attention.dropout} is not supported with cp={cp}; set it "
            f"to 0, or choose cp=1"
        )
    if mesh.runtime.cp_kind == "ulysses" and config.attention.num_heads % tp == 0:
        check_heads(config.attention.num_heads // tp, cp)
