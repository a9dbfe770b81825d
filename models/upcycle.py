"""A dense model as the start of an MoE (sparse upcycling, Komatsuzaki et al., arXiv:2212.05055).

Letters: E experts · K choices · F hidden size of the dense MLP · G parts of it · D width.

Every MLP becomes E experts and a router of small random rows; all else stays. With weights that are
rescaled to sum to 1 the MoE starts out as the dense model:

- `copy`: every expert is the dense MLP, so it does not matter which are chosen. Exact.
- `noise`: as `copy`, plus normal noise of `noise` times the rms of each expert's matrix. Not exact.
- `split`: fine-grained. A copy of the MLP is cut along F into G experts of F / G; there are E / G
  copies. The experts of a copy start with the same row of the router, so that they are chosen
  together, each with the same weight: with K a multiple of G, K / G whole copies are chosen, and
  down matrices times G make up for the weights of a copy's parts, which sum to that of the copy
  ("virtual groups", He et al., arXiv:2410.07524). Exact as long as no two copies tie in the
  router's dtype at the border between chosen and not chosen (there a choice could mix the parts of
  both), and in the dtype on disk if G is a power of two (else `G * down` is rounded there).

`llama` and `mistral` become `mixtral`, `qwen3` becomes `qwen3_moe`, and `qwen2`, whose biases only
`qwen2_moe` has, becomes that: its shared expert is the dense MLP too, behind a gate of
sigmoid(0) = 1/2, so that routed and shared experts bring one half each.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from moe_tp.checkpoint.agree import together
from moe_tp.checkpoint.files import FilePlan, Slab, parse_size, plain_tensor, plan_files
from moe_tp.checkpoint.rules import NameRules
from moe_tp.checkpoint.storage import local_path
from moe_tp.checkpoint.supply import OwnSupply
from moe_tp.checkpoint.writer import SaveReport, write_folder, written_config
from moe_tp.errors import CheckpointError, ConfigError
from moe_tp.models.config import ModelConfig
from moe_tp.models.dense import DenseModel, open_dense
from moe_tp.models.families import family, rules_for
from moe_tp.models.hub import HubFields, read_rope, write_rope
from moe_tp.parallel.mesh import Mesh
from moe_tp.parallel.random import fill_normal, key_of

_TARGET = {
    "llama": "mixtral",
    "mistral": "mixtral",
    "qwen2": "qwen2_moe",
    "qwen3": "qwen3_moe",
}
_IGNORED = (r".*\.rotary_emb\.inv_freq", r"lm_head\.weight")
_BLOCK = 1 << 22  # elements read at once to measure a matrix


@dataclass(frozen=True, slots=True, kw_only=True)
class UpcycleConfig:
    """What becomes of each dense MLP.

    Args:
        num_experts: E.
        top_k: K.
        kind: see the head of this file.
        noise: standard deviation of the noise as a part of a matrix's rms, for `noise`.
        parts: G, for `split`.
        balance_coef: of the load-balance loss that the new model asks for.
        seed: of the router and of the noise.

    Raises:
        ConfigError: values that do not fit each other.
    """

    num_experts: int
    top_k: int = 2
    kind: Literal["copy", "noise", "split"] = "copy"
    noise: float = 0.01
    parts: int = 1
    balance_coef: float = 0.01
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in ("copy", "noise", "split"):
            raise ConfigError(f"kind={self.kind!r} is unknown; choose copy, noise or split")
        if not 2 <= self.top_k <= self.num_experts:
            raise ConfigError(
                f"top_k={self.top_k} of num_experts={self.num_experts}: choose from 2 (the weight "
                "of a single choice would always be 1, and the router never learn) up to all"
            )
        if (self.kind == "split") != (self.parts > 1):
            raise ConfigError(
                f"parts={self.parts} with kind={self.kind!r}: 'split' wants 2 parts or more, the "
                "other kinds have one"
            )
        if self.num_experts % self.parts or self.top_k % self.parts:
            raise ConfigError(
                f"num_experts={self.num_experts} and top_k={self.top_k} must be multiples of "
                f"parts={self.parts}, so that whole copies of the dense MLP are there and chosen"
            )
        if self.kind == "noise" and not (math.isfinite(self.noise) and self.noise > 0):
            raise ConfigError(f"noise={self.noise} must be above 0; kind='copy' adds none")


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What a tensor of the MoE is made of.

    Args:
        source: the dense tensor; None: normal numbers of `std`, or zeros where that is 0.
        start: first element along each dimension of the source.
        factor: the source is multiplied by it.
        noise: standard deviation of what is added, as a part of the source's rms.
        std: of a tensor without a source.
        together: rows of it that are alike, one run after the other.
    """

    source: str | None = None
    start: tuple[int, ...] = ()
    factor: float = 1.0
    noise: float = 0.0
    std: float = 0.0
    together: int = 1


def upcycle(
    dense: str | os.PathLike[str],
    out: str | os.PathLike[str],
    config: UpcycleConfig,
    *,
    mesh: Mesh | None = None,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    tokenizer: str | os.PathLike[str] | None = None,
) -> tuple[ModelConfig, SaveReport]:
    """Return the MoE's configuration and what was written to make `out` its hub folder.

    A window of a file at a time is read, made and written: no rank ever holds the model. The bytes
    are the same whatever the number of ranks.

    Args:
        dense: hub folder or GGUF file of a llama, mistral, qwen2 or qwen3 model.
        out: folder to write.
        config: what becomes of each MLP.
        mesh: the ranks that share the work; one process by default.
        dtype: of the weights; None: as they are (bf16 for quantised formats).
        max_shard_size: bytes a file.
        tokenizer: folder whose tokenizer files come along; None: the model's own.

    Raises:
        ConfigError: a model that cannot be upcycled, or settings that do not fit it.
        CheckpointError: on every rank; a tensor is missing or misshapen, or nothing can be written.

    Collectives: agreements over the world of `mesh`.
    """
    mesh = Mesh.single() if mesh is None else mesh
    world, device = mesh.group("world"), mesh.device
    limit = parse_size(max_shard_size)

    def plan() -> tuple[DenseModel, ModelConfig, list[FilePlan], UpcycleSupply]:
        model = open_dense(dense, tokenizer)
        target = moe_config(model.config, config)
        rules = rules_for(target)
        origins = find_origins(target, rules, config)
        check_source(model, rules, origins)
        kinds = {
            name: torch.float32 if rules.matches("fp32_names", name) else dtype or model.dtype
            for name in rules.hub_shapes()
        }
        tensors = [plain_tensor(n, kinds[n], shape) for n, shape in rules.hub_shapes().items()]
        supply = UpcycleSupply(model, origins, config.seed)
        return model, target, plan_files(tensors, limit), supply

    model, target, plans, supply = together(plan, world, device)
    written = written_config(family(target.model_type).to_hub(target), plans, None)
    try:
        report = write_folder(
            local_path(out), plans, supply, written, world, device, carry_from=model
        )
    finally:
        model.storage.close()
    return target, report


def moe_config(dense: Mapping[str, Any], config: UpcycleConfig) -> ModelConfig:
    """Return the configuration of the MoE that a dense one becomes.

    Args:
        dense: hub config.json of the dense model.
        config: what becomes of each MLP.

    Raises:
        ConfigError: the dense model has what the MoE family does not, or F does not split.
    """
    fields = HubFields(dense)
    kind = fields.model_type
    fields.must_be("mlp_bias", (False,), False)
    if kind != "qwen3":
        fields.must_be("attention_bias", (False,), False)
    if kind in ("qwen2", "qwen3"):
        fields.must_be("use_sliding_window", (False,), False)
    hidden = fields.integer("intermediate_size")
    if hidden % config.parts:
        raise ConfigError(
            f"intermediate_size={hidden} does not split into parts={config.parts}; choose a "
            "divisor of it"
        )
    part = hidden // config.parts
    hub = _kept_fields(fields) | {
        "num_experts_per_tok": config.top_k,
        "router_aux_loss_coef": config.balance_coef,
    }
    if _TARGET[kind] == "mixtral":
        # a window that is not named is transformers' default in mistral, and null is none
        window = dense.get("sliding_window", 4096 if kind == "mistral" else None)
        hub |= {"num_local_experts": config.num_experts, "intermediate_size": part}
        hub |= {"sliding_window": window}
    else:
        hub |= {"num_experts": config.num_experts, "moe_intermediate_size": part}
        hub |= {"intermediate_size": hidden, "norm_topk_prob": True}
    if kind == "qwen2":
        hub["shared_expert_intermediate_size"] = hidden
    if kind == "qwen3":
        hub["attention_bias"] = fields.flag("attention_bias", False)
    return ModelConfig.from_hub(hub)


def _kept_fields(fields: HubFields) -> dict[str, Any]:
    """Return the hub fields that the MoE has from the dense model, defaults spelt out."""
    dense, kind = fields.config, fields.model_type
    heads = fields.integer("num_attention_heads")
    of_kind = {"qwen2": 32, "qwen3": 32, "mistral": 8}.get(kind, heads)
    kv_heads = heads if "num_key_value_heads" in dense else of_kind
    positions = {"llama": 2048, "mistral": 131072}.get(kind, 32768)
    return {
        "model_type": _TARGET[kind],
        "hidden_act": fields.text("hidden_act", "silu"),
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": fields.integer("hidden_size"),
        "num_hidden_layers": fields.integer("num_hidden_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.integer("num_key_value_heads", kv_heads),
        "head_dim": fields.integer("head_dim", 128) if kind == "qwen3" else fields.head_dim(),
        "rms_norm_eps": fields.number("rms_norm_eps", 1e-6),
        "initializer_range": fields.number("initializer_range", 0.02),
        "max_position_embeddings": fields.integer("max_position_embeddings", positions),
        "attention_dropout": fields.number("attention_dropout", 0.0),
        "tie_word_embeddings": fields.flag("tie_word_embeddings", False),
        "torch_dtype": fields.dtype(),
        **write_rope(read_rope(fields)),
        **{n: dense[n] for n in ("bos_token_id", "eos_token_id", "pad_token_id") if n in dense},
    }


def find_origins(target: ModelConfig, rules: NameRules, config: UpcycleConfig) -> dict[str, Origin]:
    """Return what every tensor of the MoE is made of, by its hub name."""
    hidden = target.moe.expert_dim
    half = 0.5 if target.moe.shared_dim else 1.0
    noise = config.noise if config.kind == "noise" else 0.0
    origins: dict[str, Origin] = {}
    for fqn, pieces in rules.pieces.items():
        part = re.fullmatch(r"layers\.(\d+)\.moe\.(.+)", fqn)
        for piece in pieces:
            name = piece.hub_name
            if part is None:
                origins[name] = Origin(source=name)
                continue
            mlp = f"model.layers.{part[1]}.mlp."
            at = [int(place) for place in piece.param_index if isinstance(place, int)]
            first = at[0] % config.parts * hidden if at else 0
            match part[2]:
                case "router.weight":
                    origin = Origin(std=target.init_std, together=config.parts)
                case "experts.gate_up":
                    source = mlp + ("gate_proj.weight", "up_proj.weight")[at[1]]
                    origin = Origin(source=source, start=(first, 0), noise=noise)
                case "experts.down":
                    origin = Origin(
                        source=f"{mlp}down_proj.weight",
                        start=(0, first),
                        factor=half * config.parts,
                        noise=noise,
                    )
                case "shared_gate.weight":
                    origin = Origin()
                case shared:
                    matrix = shared.removeprefix("shared.").replace(".weight", "_proj.weight")
                    origin = Origin(source=mlp + matrix)
            origins[name] = origin
    return origins


def check_source(model: DenseModel, rules: NameRules, origins: Mapping[str, Origin]) -> None:
    """Check that the dense model has every tensor that is asked of it, whole, and no other.

    Raises:
        CheckpointError: names the tensor, what was expected and what was found.
    """
    wanted: dict[str, list[int]] = {}
    for name, shape in rules.hub_shapes().items():
        origin = origins[name]
        if origin.source is not None:
            ends = [s + n for s, n in zip(origin.start or (0,) * len(shape), shape, strict=True)]
            before = wanted.get(origin.source, ends)
            wanted[origin.source] = [max(pair) for pair in zip(before, ends, strict=True)]
    for name, size in wanted.items():
        found = model.shapes.get(name)
        if found is None or list(found) != size:
            raise CheckpointError(
                f"{model.where}: tensor {name!r}: expected shape {size}, found "
                f"{'none' if found is None else list(found)}"
            )
    for name in model.shapes:
        if name not in wanted and not any(re.fullmatch(p, name) for p in _IGNORED):
            raise CheckpointError(
                f"{model.where}: tensor {name!r}: expected no such tensor in a "
                f"{model.config['model_type']} model, found one of shape "
                f"{list(model.shapes[name])}, which would be lost"
            )


class UpcycleSupply(OwnSupply):
    """The values of the MoE's tensors, made of slices of the dense model as they are written.

    Args:
        model: the dense model.
        origins: what every tensor is made of.
        seed: of random numbers, which depend on it, the tensor's name and the element only.
    """

    def __init__(self, model: DenseModel, origins: Mapping[str, Origin], seed: int) -> None:
        self.model, self.origins, self.seed = model, origins, seed
        self._rms: dict[str, float] = {}

    def values(self, slab: Slab) -> torch.Tensor:
        """Return the values of a slab in its dtype."""
        tensor, ranges = slab.tensor, slab.logical
        origin = self.origins[tensor.name]
        if origin.source is None:
            return self._normal(tensor.name, slab, origin).to(tensor.values)
        start = origin.start or (0,) * len(ranges)
        wanted = [range(r.start + s, r.stop + s) for r, s in zip(ranges, start, strict=True)]
        block = self.model.read(origin.source, wanted)
        if origin.factor == 1.0 and not origin.noise:
            return block.to(tensor.values)
        block = block.to(torch.float32) * origin.factor
        if origin.noise:
            std = origin.noise * origin.factor * self._rms_of(origin.source)
            block += self._normal(tensor.name, slab, Origin(std=std))
        return block.to(tensor.values)

    def _normal(self, name: str, slab: Slab, origin: Origin) -> torch.Tensor:
        """Return fp32 normal numbers by (seed, name, element), or zeros."""
        out = torch.zeros([len(r) for r in slab.logical])
        if origin.std:
            rows, *rest = (torch.arange(r.start, r.stop) for r in slab.logical)
            index = (rows // origin.together, *rest)
            key = key_of(self.seed, "upcycle", name)
            fill_normal(out, key, index, slab.tensor.logical_shape, origin.std)
        return out

    def _rms_of(self, name: str) -> float:
        """Return the root mean square of a dense tensor, read a block of rows at a time."""
        if name not in self._rms:
            rows, width = self.model.shapes[name]
            step, total = max(1, _BLOCK // width), 0.0
            for first in range(0, rows, step):
                block = [range(first, min(rows, first + step)), range(width)]
                total += float(self.model.read(name, block).double().square().sum())
            self._rms[name] = math.sqrt(total / (rows * width))
        return self._rms[name]
