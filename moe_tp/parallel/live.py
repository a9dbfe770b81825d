"""Counting the bytes of tensors that are alive, on any device, CPUs included.

Allocators of CPUs keep no peak, and resident memory also holds what they have not given back. Here
each storage that an operator brings to light is held weakly, and all of them are measured again
after every operator, so that what is freed by `resize_(0)` (as `fully_shard` does) counts no more.
Scratch inside an operator is not seen, nor are buffers of the communication back ends.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Context that knows the bytes of the storages alive, and their peak.

    Attributes:
        peak: most bytes after any operator so far; set it to `now()` to begin anew.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors that were there before, such as a model's parameters."""
        for tensor in tensors:
            local = tensor.detach()
            local = local.to_local() if isinstance(local, DTensor) else local
            storage = local.untyped_storage()
            key = storage._cdata
            held = self._storages.get(key)
            if held is None or held() is None:
                self._storages[key] = weakref.ref(storage)

    def now(self) -> int:
        """Return the bytes alive."""
        total = 0
        for key, held in list(self._storages.items()):
            storage = held()
            if storage is None:
                del self._storages[key]
            else:
                total += storage.nbytes()
        return total

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Return what the operator returns."""
        out = func(*args, **(kwargs or {}))
        self.add(
            leaf
            for leaf in tree_leaves(out)
            if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta"
        )
        self.peak = max(self.peak, self.now())
        return out


def tensors_of(model: nn.Module) -> list[torch.Tensor]:
    """Return parameters, their gradients and buffers of a model."""
    found = [*model.parameters(), *model.buffers()]
    return found + [p.grad for p in model.parameters() if p.grad is not None]
