"""A model cut into pipeline stages, and one step of it.

Letters: B batch · S sequence · T owned tokens · D width · L layers · E experts · M micro-batches.

Every pipeline rank sees the ids of every micro-batch, so positions, masks and targets need not
travel: a stage hands on the residual stream and the router losses so far, nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from moe_tp.models.blocks import Call
from moe_tp.models.config import ModelConfig
from moe_tp.models.counts import layer_flops
from moe_tp.models.head import Aux
from moe_tp.models.tokens import IGNORE, owned_tokens
from moe_tp.parallel.collectives import accumulate_dtype, raw_all_reduce
from moe_tp.parallel.mesh import Mesh
from moe_tp.parallel.pipeline.schedule import run_forward, train_pipeline
from moe_tp.parallel.pipeline.stages import (
    deal_layers,
    fitting_micro_batches,
    given_layers,
    num_stages,
    stages_of,
)

if TYPE_CHECKING:
    from moe_tp.models.decoder import Decoder

_TYPICAL_LENGTH = 4096  # tokens a sequence, for the cost of attention scores


def stage_layers(config: ModelConfig, mesh: Mesh) -> list[range]:
    """Return the layers of each pipeline stage, in order.

    Raises:
        ConfigError: more stages than layers, or a division that does not add up.
    """
    total = num_stages(mesh.layout, mesh.runtime)
    given = mesh.runtime.stage_layers
    if given is not None and total > 1:
        return given_layers(given, config.num_layers, total)
    costs = [layer_flops(config, layer, _TYPICAL_LENGTH) for layer in range(config.num_layers)]
    # The embedding is a look-up; the head is a product with every word.
    head = 2.0 * config.vocab_size * config.dim
    return deal_layers(costs, total, last=head if total > 1 else 0.0)


def own_stages(config: ModelConfig, mesh: Mesh) -> dict[int, range]:
    """Return the stages that this rank holds, with their layers."""
    layers = stage_layers(config, mesh)
    mine = stages_of(mesh.layout, mesh.runtime, mesh.stage)
    return {number: layers[number] for number in mine}


class DecoderStage(nn.Module):
    """One stage of a decoder; its modules are the decoder's own.

    Args:
        decoder: holds the layers.
        layers: the run of this stage.
        first, last: whether it embeds and whether it takes the loss.
    """

    def __init__(self, decoder: Decoder, layers: range, *, first: bool, last: bool) -> None:
        super().__init__()
        # Not a submodule: the decoder holds this stage, and its other stages are not this one's.
        self.__dict__["decoder"] = decoder
        self.blocks = nn.ModuleList(decoder.layers[str(layer)] for layer in layers)
        self.embed = decoder.embed if first else None
        self.norm = decoder.norm if last else None
        self.head = decoder.head if last else None
        self.numbers, self.first, self.last = layers, first, last
        self.load: tuple[torch.Tensor, torch.Tensor] | None = None

    def forward(
        self, value: torch.Tensor, aux_1: torch.Tensor | None = None, **arguments: Any
    ) -> Any:
        """Return `(x_TD, aux [1])`, or for the last stage `[2]`: loss and router losses.

        Without labels the last stage returns `(logits, aux [1])`; with an opened `call` of
        generation these are the last columns' logits, see `Decoder.last_logits`.

        Args:
            value: ids `[B, S]` for the first stage, else the residual stream `[T, D]`.
            aux_1: router losses of the stages before; None for the first.
            arguments: of `Decoder.open`, and `divisor` `[1]` with labels; or `call`, opened.

        Collectives: those of the layers and of the loss.
        """
        decoder: Decoder = self.__dict__["decoder"]
        divisor = arguments.pop("divisor", None)
        opened: Call | None = arguments.get("call")
        call = _open(decoder, arguments) if opened is None else opened
        if self.first:
            x_TD = decoder.embed_tokens(call)
            if torch.is_grad_enabled() and not x_TD.requires_grad:
                x_TD = x_TD.requires_grad_()  # frozen: the next stage still sends a gradient
            # Connected to the graph, so that the next stage's gradient has somewhere to go.
            aux_1 = x_TD.flatten()[:0].sum().view(1).to(accumulate_dtype(x_TD.dtype))
        else:
            x_TD = value
        assert aux_1 is not None
        x_TD, layer_aux = decoder.run_layers(x_TD, call, self.numbers)
        aux = decoder.gather_aux(layer_aux)
        aux_1 = aux_1 + aux.loss.to(aux_1.dtype)
        self.count(aux)
        if not self.last:
            return x_TD, aux_1
        x_TD = decoder.final_norm(x_TD)
        if opened is not None:
            return decoder.last_logits(x_TD, call), aux_1
        if divisor is None:
            return decoder.logits(x_TD, call), aux_1
        loss = decoder.loss(x_TD, call, divisor[0])
        return torch.cat([loss.view(1).to(aux_1.dtype), aux_1])

    def count(self, aux: Aux) -> None:
        """Add the load of one micro-batch."""
        load = (aux.counts_LE.detach(), aux.sums_LM.detach())
        if self.load is not None:
            load = (load[0] + self.load[0], load[1] + self.load[1])
        self.load = load


def _open(decoder: Decoder, arguments: Mapping[str, Any]) -> Call:
    """Return the call that the tensors of one micro-batch describe."""
    step, offset = (int(arguments[name][0]) for name in ("step", "sample_offset"))
    return decoder.open(
        arguments["input_ids"],
        arguments.get("labels"),
        arguments.get("attention_mask"),
        arguments.get("position_ids"),
        step=step,
        sample_offset=offset,
        step_tokens=int(arguments["step_tokens"][0]) if "step_tokens" in arguments else None,
    )


def make_stages(decoder: Decoder) -> dict[int, DecoderStage]:
    """Return this rank's stages of a decoder by number."""
    mesh = decoder.mesh
    last = num_stages(mesh.layout, mesh.runtime) - 1
    return {
        number: DecoderStage(decoder, layers, first=number == 0, last=number == last)
        for number, layers in own_stages(decoder.config, mesh).items()
    }


def same_shape(batches: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """Return micro-batches joined along the rows, padded with masked tokens to one shape.

    Args:
        batches: arguments of calls with `labels`; at least one.
    """
    rows = max(1, *(batch["input_ids"].shape[0] for batch in batches))
    length = max(1, *(batch["input_ids"].shape[1] for batch in batches))
    ragged = any(batch["input_ids"].shape != (rows, length) for batch in batches)
    masked = ragged or any(batch.get("attention_mask") is not None for batch in batches)
    packed = any(batch.get("position_ids") is not None for batch in batches)
    joined: dict[str, list[torch.Tensor]] = {"input_ids": [], "labels": []}
    for batch in batches:
        ids = batch["input_ids"]

        def pad(value: torch.Tensor, fill: int, like: torch.Tensor = ids) -> torch.Tensor:
            b, s = like.shape
            return F.pad(value, (0, length - s, 0, rows - b), value=fill)

        joined["input_ids"].append(pad(ids, 0))
        joined["labels"].append(pad(batch["labels"], IGNORE))
        if masked:
            mask = batch.get("attention_mask")
            mask = torch.ones_like(ids) if mask is None else mask.long()
            joined.setdefault("attention_mask", []).append(pad(mask, 0))
        if packed:
            positions = batch.get("position_ids")
            if positions is None:
                positions = torch.arange(ids.shape[1]).expand_as(ids)
            joined.setdefault("position_ids", []).append(pad(positions, 0))
    return {name: torch.cat(values) for name, values in joined.items()}


def pipeline_step(
    decoder: Decoder,
    batches: Sequence[Mapping[str, Any]],
    *,
    target_tokens: int,
    step_tokens: int | None,
    step: int,
    backward: bool,
) -> tuple[torch.Tensor, Aux]:
    """Return loss and router losses of all micro-batches, global values on every rank.

    Args:
        decoder: with its stages.
        batches: as many on every rank, with `labels` and `sample_offset`.
        target_tokens: what the loss is divided by.
        step_tokens: real tokens of the step, over which router losses add up; None averages them
            over the micro-batches.
        step: seeds dropout.
        backward: False computes values only.

    Collectives: those of the stages; point-to-point exchange along pp; all-reduce over pp of two
        numbers and of the load.
    """
    mesh, share = decoder.mesh, len(batches)
    if backward:
        batches = [*batches, *_nothing(batches, mesh)]
    count = len(batches)
    arguments = {name: value.to(mesh.device) for name, value in same_shape(batches).items()}
    numbers = {
        "step": [step] * count,
        "sample_offset": [int(batch["sample_offset"]) for batch in batches],
        "divisor": [target_tokens] * count,
    }
    if step_tokens is not None:
        numbers["step_tokens"] = [step_tokens] * count
        share = 1
    arguments |= {name: torch.tensor(n, device=mesh.device) for name, n in numbers.items()}
    rows, length = arguments["input_ids"].shape
    carried = decoder.carried(owned_tokens(rows // count, length, mesh))
    stages = decoder.stages
    for stage in stages.values():
        stage.load = None
    if backward:
        results = train_pipeline(
            stages,
            mesh,
            first_input=arguments["input_ids"],
            arguments=arguments,
            carried=carried,
            result=(carried[1].expand(2).detach().requires_grad_(),),
            micro_batches=count,
            loss_fn=lambda out: out[0] + out[1] / share,
        )
    else:
        results = []
        with torch.no_grad():
            for m in range(count):
                piece = {name: value.chunk(count)[m] for name, value in arguments.items()}
                out = run_forward(
                    stages,
                    mesh,
                    first_input=piece["input_ids"],
                    arguments=piece,
                    carried=carried,
                )
                results += [] if out is None else [out]
    total = torch.zeros(2, dtype=carried[1].dtype, device=mesh.device)
    for result in results:
        total = total + result
    return _shared(decoder, total, share)


def _nothing(batches: Sequence[Mapping[str, Any]], mesh: Mesh) -> list[Mapping[str, Any]]:
    """Return the empty micro-batches that the schedule needs besides those there are."""
    ids = batches[0]["input_ids"][:0, :1]
    empty = {"input_ids": ids, "labels": ids, "sample_offset": 0}
    return [empty] * (fitting_micro_batches(mesh.layout, mesh.runtime, len(batches)) - len(batches))


def _shared(decoder: Decoder, total: torch.Tensor, share: int) -> tuple[torch.Tensor, Aux]:
    """Return on every pipeline rank what the last one and all of them found.

    Collectives: all-reduce over pp of two numbers and of the load.
    """
    group = decoder.mesh.group("pp")
    total = raw_all_reduce(total, group)
    none = decoder.gather_aux({})
    counts, sums = none.counts_LE, none.sums_LM
    for stage in decoder.stages.values():
        if stage.load is not None:
            counts, sums = counts + stage.load[0], sums + stage.load[1]
    # a layer lies on one stage, so its rows and bytes stay those of this rank's place there
    return total[0], Aux(
        loss=total[1] / share,
        counts_LE=raw_all_reduce(counts, group),
        sums_LM=raw_all_reduce(sums, group),
    )


def pipeline_logits(decoder: Decoder, arguments: dict[str, Any]) -> tuple[torch.Tensor, Aux]:
    """Return logits `[B, S, V]` and router losses of one batch without labels, on every rank.

    Args:
        decoder: with its stages.
        arguments: of `Decoder.forward`, without labels.

    Collectives: those of the stages; sends along pp; the logits to every pipeline rank.
    """
    mesh = decoder.mesh
    ids = arguments["input_ids"]
    named = {
        name: value.to(mesh.device) if isinstance(value, torch.Tensor) else torch.tensor([value])
        for name, value in arguments.items()
        if value is not None
    }
    for stage in decoder.stages.values():
        stage.load = None
    carried = decoder.carried(owned_tokens(ids.shape[0], ids.shape[1], mesh))
    with torch.no_grad():
        out = run_forward(
            decoder.stages,
            mesh,
            first_input=named["input_ids"],
            arguments=named,
            carried=carried,
        )
    shape = (*ids.shape, decoder.config.vocab_size)
    aux_1 = torch.zeros(2, dtype=carried[1].dtype, device=mesh.device)
    logits = torch.zeros(shape, dtype=decoder.activation_dtype, device=mesh.device)
    if out is not None:
        logits, aux_1[1] = out[0].to(logits.dtype), out[1][0]
    # A sum with zeros: exact, and one collective that every rank joins.
    logits = raw_all_reduce(logits, mesh.group("pp"))
    return logits, _shared(decoder, aux_1, 1)[1]
