"""Building a model from a configuration or a hub folder, and writing it back."""

from __future__ import annotations

import os
from dataclasses import replace

import torch
from torch import nn

from moe_tp.checkpoint.agree import together
from moe_tp.checkpoint.dtypes import weight_dtype
from moe_tp.checkpoint.load import load_into
from moe_tp.checkpoint.progress import Progress
from moe_tp.checkpoint.reader import HubFolder
from moe_tp.checkpoint.writer import save_hub
from moe_tp.errors import ConfigError
from moe_tp.log import get_logger
from moe_tp.models.config import ModelConfig
from moe_tp.models.decoder import Decoder
from moe_tp.models.families import rules_for
from moe_tp.models.stages import own_stages
from moe_tp.parallel.collectives import raw_all_reduce
from moe_tp.parallel.mesh import Mesh
from moe_tp.parallel.parameter import initialise, materialise
from moe_tp.parallel.pipeline.stages import num_stages
from moe_tp.parallel.zero import WrapUnit, apply_zero

_log = get_logger(__name__)
_ROWS = 4096  # rows of the embedding compared at a time

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def build(
    config: ModelConfig, mesh: Mesh, *, seed: int = 0, dtype: torch.dtype | str = torch.float32
) -> Decoder:
    """Return a model with random weights, the same for every layout; collective.

    Args:
        config: the model.
        mesh: the mesh.
        seed: of the weights and of dropout.
        dtype: of the parameters, or its name; norms and routers are never below fp32.

    Raises:
        ConfigError: the dtype is none of weights, the layout does not fit the model, or its router
            would never learn (R5).
        RankMismatchError: ranks brought different configurations.

    Collectives: an exchange of the configuration through the store.
    """
    kind = weight_dtype(dtype)
    if config.moe.router.constant is not None and not config.moe.router.frozen:
        raise ConfigError(f"{config.moe.router.constant}; choose two experts a token or more")
    mesh.agree("the model's configuration", repr((config, seed, kind)))
    model = allocate(config, mesh, kind)
    model.seed = seed
    initialise(model, seed)
    return model


def allocate(config: ModelConfig, mesh: Mesh, dtype: torch.dtype) -> Decoder:
    """Return a model whose local shards are allocated but not filled; buffers are zero.

    Args:
        config: the model.
        mesh: the mesh.
        dtype: of the parameters, unless the runtime names a master dtype.
    """
    stages = own_stages(config, mesh)
    total = num_stages(mesh.layout, mesh.runtime)
    with torch.device("meta"):
        model = Decoder(
            config,
            mesh,
            dtype=mesh.runtime.master_dtype or dtype,
            layers=[layer for layers in stages.values() for layer in layers],
            with_embedding=0 in stages,
            with_head=total - 1 in stages,
        )
    apply_zero(model, mesh, wrap_units(model), roots=list(model.stages.values()) or [model])
    materialise(model, mesh.device)
    for buffer in model.buffers():
        buffer.zero_()
    return model


def wrap_units(model: Decoder) -> list[WrapUnit]:
    """Return what ZeRO gathers and frees together, inner units first.

    Embedding and head are units of their own unless they share a parameter.
    """
    units: list[WrapUnit] = []
    for block in model.blocks:
        if not block.config.is_dense(block.layer):
            units.append(WrapUnit(block.moe.experts, "expert"))
        units.append(WrapUnit(block, "dense"))
    ends: list[nn.Module | None] = [model.embed, model.head]
    if not model.config.tie_embeddings:
        units += [WrapUnit(end, "dense") for end in ends if end is not None]
    return units


def from_pretrained(
    path: str | os.PathLike[str],
    mesh: Mesh,
    *,
    dtype: torch.dtype | str | None = None,
    progress: Progress | bool | None = None,
) -> Decoder:
    """Return the model of a hub folder, each rank with its own slices; collective.

    Args:
        path: a folder, a URL such as `s3://bucket/folder`, or a hub id (`owner/name`, with
            `@revision` where wanted).
        mesh: the mesh.
        dtype: of the parameters, or its name; None: as on disk, bf16 for quantised formats.
        progress: called with (bytes done, bytes in all) of this rank; or whether the first rank
            shows a bar on stderr (None: in a terminal).

    Raises:
        ConfigError: the family or the dtype is not supported, or the layout does not fit the model.
        CheckpointError: the folder is not complete; on every rank.

    Collectives: agreements over the world about the folder and the load.
    """
    kind = None if dtype is None else weight_dtype(dtype)
    world = mesh.group("world")
    folder = together(lambda: HubFolder(path), world, mesh.device)
    config = _with_honest_tie(ModelConfig.from_hub(folder.config), folder, mesh)
    mesh.agree("the model's configuration", repr((config, kind, sorted(folder.files.items()))))
    model = allocate(config, mesh, kind or folder.default_dtype)
    model.name_rules = rules_for(config, folder.logical.keys())
    model.source = folder.path or folder.where
    load_into(model, folder, model.name_rules, progress=progress)
    return model


def _with_honest_tie(config: ModelConfig, folder: HubFolder, mesh: Mesh) -> ModelConfig:
    """Return the configuration with its head untied where the folder holds a head of its own.

    The flag says what the author meant, the file what was trained; where they differ only the file
    is evidence.

    Collectives: all-reduce of one integer over the world, where both tensors are there.
    """
    if not config.tie_embeddings or HEAD not in folder.logical:
        return config
    world = mesh.group("world")
    shape = folder.find(HEAD).shape
    differs = shape != folder.find(EMBEDDING).shape

    def compare() -> bool:
        each = -(-shape[0] // world.size)
        stop = min(shape[0], (world.rank + 1) * each)
        for start in range(world.rank * each, stop, _ROWS):
            part = (slice(start, min(stop, start + _ROWS)),)
            head, embedding = (folder.read_slice(n, part) for n in (HEAD, EMBEDDING))
            if not torch.equal(head, embedding):
                return True
        return False

    if not differs:
        mine = together(compare, world, mesh.device)
        flag = torch.tensor([int(mine)], device=mesh.device)
        differs = bool(raw_all_reduce(flag, world, "max"))
    if not differs:
        return config
    _log.warning(
        "%s: tie_word_embeddings is true, but %s differs from %s; both are kept and the head is "
        "trained by itself",
        folder.where,
        HEAD,
        EMBEDDING,
    )
    return replace(config, tie_embeddings=False)


def save_pretrained(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str | None = None,
    max_shard_size: int | str = "5GB",
    progress: Progress | bool | None = None,
) -> None:
    """Write a hub folder from any layout; collective.

    Tokenizer files, generation config and tensors that the model does not use are carried over
    from the folder that it was read from.

    Args:
        model: from `build` or `from_pretrained`.
        path: the folder to write; it appears only when it is complete.
        dtype: on disk, or its name; None: as in the folder it was read from, or of the parameters.
        max_shard_size: bytes a weight file, or text such as `5GB`.
        progress: as for `from_pretrained`.

    Raises:
        ConfigError: the model is not this library's, or the dtype is none of weights.
        CheckpointError: it cannot be written; on every rank.
        RankMismatchError: ranks were given unlike folders, dtypes or sizes.

    Collectives: an exchange of the settings through the store, agreements over the world; each rank
        writes its own files.
    """
    if not isinstance(model, Decoder):
        raise ConfigError(
            f"save_pretrained writes models of build and from_pretrained, not "
            f"{type(model).__name__}"
        )
    if not isinstance(path, (str, os.PathLike)):
        raise ConfigError(f"save_pretrained writes into a folder, but path is {path!r}")
    said = f"path={os.fspath(path)!r} dtype={dtype} max_shard_size={max_shard_size}"
    model.mesh.agree("what save_pretrained writes", said)
    save_hub(
        model,
        path,
        model.name_rules,
        model.hub_config,
        dtype=None if dtype is None else weight_dtype(dtype),
        max_shard_size=max_shard_size,
        carry_from=model.source,
        progress=progress,
    )
