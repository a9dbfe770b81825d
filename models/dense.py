"""Dense Llama-style models as a source of weights: a hub folder, or a GGUF file under hub names."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from moe_tp.checkpoint.gguf import GgufFile
from moe_tp.checkpoint.gguf_tokenizer import tokenizer_files
from moe_tp.checkpoint.reader import HubFolder
from moe_tp.checkpoint.storage import Storage
from moe_tp.checkpoint.writer import Carried
from moe_tp.errors import CheckpointError, ConfigError
from moe_tp.parallel.collectives import Group

DENSE = ("llama", "mistral", "qwen2", "qwen3")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
)


class DenseModel(Carried, Protocol):
    """A dense model, read slice by slice under hub names.

    Attributes:
        config: its hub config.json.
        shapes: of each tensor.
        dtype: of its weights; what an MoE made of it is written in.
    """

    config: dict[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    dtype: torch.dtype

    def read(self, name: str, ranges: Sequence[range]) -> torch.Tensor:
        """Return a dense block of a tensor, on the CPU; every step is 1."""
        ...


def open_dense(
    path: str | os.PathLike[str], tokenizer: str | os.PathLike[str] | None = None
) -> DenseModel:
    """Return the dense model in a hub folder (or a hub id), or in a GGUF file.

    Args:
        path: of either.
        tokenizer: folder whose tokenizer files come along; None: the model's own.

    Raises:
        CheckpointError: it cannot be read.
        ConfigError: it is no dense model that is known here.
    """
    files = None if tokenizer is None else MadeFiles.of_folder(Path(tokenizer), TOKENIZER_FILES)
    model: DenseModel
    if str(path).endswith(".gguf"):
        model = GgufModel(GgufFile(path), files)
    else:
        model = FolderModel(HubFolder(path), files)
    kind = model.config.get("model_type")
    if kind not in DENSE:
        raise ConfigError(
            f"{path}: model_type={kind!r} is no dense model that can be upcycled; supported: "
            f"{', '.join(DENSE)}"
        )
    return model


class FolderModel:
    """A dense hub folder, with its own files beside the weights or with others."""

    def __init__(self, folder: HubFolder, files: MadeFiles | None = None) -> None:
        self.folder = folder
        self.storage: Storage = files or folder.storage
        self.config = folder.config
        self.shapes: Mapping[str, tuple[int, ...]] = {
            name: tensor.shape for name, tensor in folder.logical.items()
        }
        self.dtype = folder.default_dtype

    @property
    def where(self) -> str:
        """The folder, for messages."""
        return self.folder.where

    def read(self, name: str, ranges: Sequence[range]) -> torch.Tensor:
        """Return a dense block of a tensor."""
        return self.folder.read(name, ranges)


_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_PARTS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GgufModel:
    """A GGUF file under hub names, with the files of a hub folder made from its fields.

    llama.cpp pairs the elements (2 i, 2 i + 1) of a head in its rotary embedding where the hub
    pairs (i, i + size / 2), and stores the rows of q and k of its `llama` kind in that order; they
    are read back in the hub's. Its other kinds keep the hub's order.

    Args:
        file: the file.
        files: tokenizer files to use; None makes them from the file's fields.

    Raises:
        CheckpointError: a field or tensor is missing or unknown.
        ConfigError: its architecture is not known here.
    """

    def __init__(self, file: GgufFile, files: MadeFiles | None = None) -> None:
        self.file, self.where = file, file.where
        self.dtype = torch.bfloat16  # as for other quantised formats
        self.names = {self._hub_name(name): name for name in file.shapes}
        self.shapes: Mapping[str, tuple[int, ...]] = {
            hub: file.shapes[name] for hub, name in self.names.items()
        }
        self.config = self._config()
        self.storage: Storage = files or MadeFiles(self.where, self._files())

    def read(self, name: str, ranges: Sequence[range]) -> torch.Tensor:
        """Return a dense block of a tensor, decoded to fp32."""
        rows = torch.arange(ranges[0].start, ranges[0].stop)
        part = re.search(r"\.self_attn\.([qk])_proj\.", name)
        if part is not None and self.config["model_type"] == "llama":
            heads = "num_attention_heads" if part[1] == "q" else "num_key_value_heads"
            size = self.shapes[name][0] // int(self.config[heads])
            head, half, pair = rows // size, rows % size // (size // 2), rows % (size // 2)
            rows = head * size + pair * 2 + half
        block = self.file.rows(self.names[name], rows)
        return block[:, ranges[1].start : ranges[1].stop] if len(ranges) > 1 else block

    def _hub_name(self, name: str) -> str:
        part, _, kind = name.rpartition(".")
        layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", part)
        if layer is None and part in _NAMES:
            return f"{_NAMES[part]}.{kind}"
        if layer is not None and layer[2] in _PARTS:
            return f"model.layers.{layer[1]}.{_PARTS[layer[2]]}.{kind}"
        raise CheckpointError(
            f"{self.where}: tensor {name!r}: expected a part of a dense Llama-style model, found "
            "one that this library does not compute"
        )

    def _config(self) -> dict[str, Any]:
        kind = self.file.need("general.architecture")
        if kind not in DENSE:
            raise ConfigError(
                f"{self.where}: architecture {kind!r} is no dense model that can be upcycled; "
                f"supported: {', '.join(DENSE)}"
            )

        def need(name: str) -> Any:
            return self.file.need(f"{kind}.{name}")

        scaling = self.file.field(f"{kind}.rope.scaling.type", "none")
        if scaling != "none":
            raise ConfigError(
                f"{self.where}: a rotary embedding scaled by {scaling!r} is not read from GGUF; "
                "start from the model's hub folder"
            )
        heads = int(need("attention.head_count"))
        ids = {
            f"{name}_token_id": self.file.field(f"tokenizer.ggml.{name}_token_id")
            for name in ("bos", "eos")
        }
        return {
            "model_type": kind,
            "vocab_size": self.shapes["model.embed_tokens.weight"][0],
            "hidden_size": int(need("embedding_length")),
            "intermediate_size": int(need("feed_forward_length")),
            "num_hidden_layers": int(need("block_count")),
            "num_attention_heads": heads,
            "num_key_value_heads": int(self.file.field(f"{kind}.attention.head_count_kv", heads)),
            "head_dim": self.shapes["model.layers.0.self_attn.q_proj.weight"][0] // heads,
            "max_position_embeddings": int(need("context_length")),
            # an fp32 number in the file: its shortest decimal form is what was written there
            "rms_norm_eps": float(str(np.float32(need("attention.layer_norm_rms_epsilon")))),
            "rope_theta": float(self.file.field(f"{kind}.rope.freq_base", 10000.0)),
            "tie_word_embeddings": "lm_head.weight" not in self.shapes,
            "sliding_window": None,
            **{name: value for name, value in ids.items() if value is not None},
        }

    def _files(self) -> dict[str, bytes]:
        """Return the files that a hub folder of this model has beside its weights."""
        ids = {k: v for k, v in self.config.items() if k.endswith("_token_id")}
        files = {"generation_config.json": (json.dumps(ids, indent=2) + "\n").encode()}
        return files | tokenizer_files(self.file)


class MadeFiles:
    """A `Storage` of files that are held in memory."""

    first_read = 8
    gap = 0

    def __init__(self, where: str, files: Mapping[str, bytes]) -> None:
        self.where, self.files = where, dict(files)

    @classmethod
    def of_folder(cls, folder: Path, names: Sequence[str]) -> MadeFiles:
        """Return the files of a folder that have one of these names."""
        found = {n: (folder / n).read_bytes() for n in names if (folder / n).is_file()}
        return cls(str(folder), found)

    def sizes(self) -> dict[str, int]:
        """Return every file's size in bytes by name."""
        return {name: len(data) for name, data in self.files.items()}

    def read(self, file: str, offset: int, length: int) -> bytes:
        """Return up to `length` bytes from `offset`."""
        return self.files[file][offset : offset + length]

    def read_into(self, file: str, offset: int, *out: memoryview) -> None:
        """Fill `out`, one after the other, from `offset` on."""
        for view in out:
            view[:] = self.files[file][offset : offset + len(view)]
            offset += len(view)

    def expect(self, file: str, offset: int, length: int) -> None:
        """Do nothing: all is here."""

    def prepare(self, files: list[str], group: Group, device: torch.device) -> None:
        """Do nothing: all is here."""

    def close(self) -> None:
        """Do nothing: no file is open."""
