"""A GGUF file (llama.cpp's format), opened for reading rows of its tensors.

Tensors lie there with their rows in blocks of a quantised format, so that any rows can be decoded
without the others. Decoding is that of the `gguf` package, which is imported only here.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from moe_tp.errors import CheckpointError, ConfigError


class GgufFile:
    """The fields and tensors of a GGUF file; it is mapped, not read.

    Args:
        path: the file.

    Attributes:
        where: the file, for messages.
        shapes: of each tensor by its name in the file, outputs first as in torch.

    Raises:
        CheckpointError: it is no GGUF file, or a torn one.
        ConfigError: the `gguf` package is not installed.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        try:
            import gguf
        except ImportError:
            raise ConfigError(
                "reading a GGUF file needs the package gguf; install it with pip install gguf"
            ) from None
        self.where = str(path)
        if not Path(path).is_file():
            raise CheckpointError(f"{self.where}: expected a GGUF file, found nothing")
        try:
            self._reader = gguf.GGUFReader(path)
        except (ValueError, IndexError, KeyError) as error:
            raise CheckpointError(
                f"{self.where}: expected a whole GGUF file, found one that cannot be read ({error})"
            ) from None
        self._decode = gguf.quants.dequantize
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self.shapes: dict[str, tuple[int, ...]] = {
            name: tuple(int(n) for n in reversed(tensor.shape))
            for name, tensor in self._tensors.items()
        }

    def field(self, name: str, default: Any = None) -> Any:
        """Return a field's value, `default` where the file has none of that name."""
        found = self._reader.get_field(name)
        return default if found is None else found.contents()

    def need(self, name: str) -> Any:
        """Return a field's value.

        Raises:
            CheckpointError: the file has none of that name.
        """
        value = self.field(name)
        if value is None:
            raise CheckpointError(f"{self.where}: field {name!r}: expected in the file, found none")
        return value

    def rows(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """Return rows (elements of a vector) of a tensor, decoded to fp32.

        Args:
            name: of the tensor in the file.
            rows: int64 numbers of the rows.
        """
        tensor = self._tensors[name]
        packed = tensor.data[rows.numpy()]
        return torch.from_numpy(self._decode(packed, tensor.tensor_type)).to(torch.float32)
