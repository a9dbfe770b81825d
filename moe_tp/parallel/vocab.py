"""The two layers that touch the vocabulary, split over tp by rows: embedding and head.

The loss is taken in chunks of tokens. Each chunk's logits exist once, in fp32, for this rank's part
of the vocabulary, and are turned into gradients at once; full-vocabulary logits never exist.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd import Function

from moe_tp.errors import DataError
from moe_tp.parallel.collectives import (
    Group,
    accumulate_dtype,
    all_gather,
    raw_all_gather,
    raw_all_reduce,
    raw_reduce_scatter_rows,
    reduce_scatter,
)
from moe_tp.parallel.functions import apply_function
from moe_tp.parallel.mesh import Mesh
from moe_tp.parallel.parameter import ParallelModule
from moe_tp.parallel.product import add_product, linear, product
from moe_tp.parallel.spec import Init, ParamSpec
from moe_tp.parallel.whole import sum_whole

IGNORE = -100


def _check_ids(ids_N: torch.Tensor, vocab_size: int, what: str) -> None:
    """Refuse ids that no rank holds: over tp they would count as zeros, not as an error."""
    bad_N = ((ids_N < 0) | (ids_N >= vocab_size)) & (ids_N != IGNORE if what == "target" else True)
    if ids_N.is_cuda:
        # Stops the device at the next synchronisation; asking here would stall every step.
        torch.ops.aten._assert_async.msg(~bad_N.any(), f"{what} outside the vocabulary")
    elif ids_N.device.type == "cpu" and bool(bad_N.any()):
        raise DataError(
            f"{what} {int(ids_N[bad_N][0])} is outside the vocabulary of {vocab_size}; "
            f"tokenise with the model's own tokenizer"
        )


class VocabParallelEmbedding(ParallelModule):
    """Token embedding whose rows are split over tp; padded rows are zero and never read.

    Args:
        vocab_size: number of tokens; need not divide by tp.
        dim: width.
        mesh: the mesh.
        dtype: parameter dtype.
        init: first values.
        copies: pipeline ranks that hold it.
    """

    def __init__(
        self,
        vocab_size: int,
        dim: int,
        mesh: Mesh,
        *,
        dtype: torch.dtype = torch.float32,
        init: Init | None = None,
        copies: int = 1,
    ) -> None:
        super().__init__(mesh)
        self.vocab_size = vocab_size
        spec = ParamSpec(
            shape=(vocab_size, dim),
            shards={"tp": 0},
            pad=True,
            init=init or Init(),
            role="embedding",
            copies=copies,
        )
        self.add_parameter("weight", spec, dtype)

    def forward(self, ids_N: torch.Tensor, *, whole: bool = False) -> torch.Tensor:
        """Return the embeddings `[N / tp, D]` of the tokens this rank owns.

        Args:
            ids_N: ids of all tokens of the tp group, equal on its ranks; tp divides N.
            whole: return `[N, D]` on every rank, for any N; without gradient.

        Collectives: reduce-scatter over tp; backward all-gather; with `whole` as `sum_whole`.
        """
        group = self.mesh.group("tp")
        _check_ids(ids_N, self.vocab_size, "token")
        weight = self.local("weight")
        if group.size == 1:
            return F.embedding(ids_N, weight)
        rows = weight.shape[0]
        local_N = ids_N - group.rank * rows
        here_N = (local_N >= 0) & (local_N < rows)
        x_ND = F.embedding(torch.where(here_N, local_N, 0), weight)
        # where(), not a product: an inf in row 0 must not turn the others' rows into NaN.
        x_ND = torch.where(here_N[:, None], x_ND, x_ND.new_zeros(()))
        return sum_whole(x_ND, group) if whole else reduce_scatter(x_ND, group)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Head:
    """What the loss needs besides tensors."""

    group: Group
    vocab_size: int
    chunk: int
    scale: float

    def real_rows(self, rows: int) -> int:
        """Return how many of this rank's `rows` are words rather than padding."""
        return max(0, min(rows, self.vocab_size - self.group.rank * rows))


LOSS_PIECE = 128  # tokens whose logits exist a second time, in the model's dtype


def _wide_logits(x_CD: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the logits in fp32 or more."""
    wide = accumulate_dtype(x_CD.dtype)
    if x_CD.dtype == wide:
        return linear(x_CD, weight, None)
    logits = x_CD.new_empty((x_CD.shape[0], weight.shape[0]), dtype=wide)
    for piece, x in zip(logits.split(LOSS_PIECE), x_CD.split(LOSS_PIECE), strict=True):
        piece.copy_(linear(x, weight, None))
    return logits


def _narrow(grad: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return `grad` in `dtype`, in its own memory: no row is overwritten before it was read."""
    if grad.dtype == dtype:
        return grad
    narrow = grad.view(-1).view(dtype)[: grad.numel()].view(grad.shape)
    for to, piece in zip(narrow.split(LOSS_PIECE), grad.split(LOSS_PIECE), strict=True):
        to.copy_(piece.to(dtype))
    return narrow


def _chunk_loss(
    x_CD: torch.Tensor, weight: torch.Tensor, targets_C: torch.Tensor, head: _Head
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each token's loss and the gradient of their sum by this rank's logits."""
    group, rows = head.group, weight.shape[0]
    logits = _wide_logits(x_CD, weight)
    if head.scale != 1.0:
        logits *= head.scale
    real = head.real_rows(rows)
    if real < rows:
        logits[:, real:] = -torch.inf
    top = raw_all_reduce(logits.amax(-1), group, "max")
    logits -= top[:, None]
    local_C = targets_C - group.rank * rows
    here_C = (local_C >= 0) & (local_C < rows)
    place_C = torch.where(here_C, local_C, 0)
    picked = torch.where(here_C, logits.gather(1, place_C[:, None])[:, 0], 0.0)
    logits.exp_()
    sums = raw_all_reduce(torch.stack([logits.sum(-1), picked]), group)
    real_C = targets_C != IGNORE
    loss_C = torch.where(real_C, sums[0].log() - sums[1], 0.0)
    logits *= torch.where(real_C, head.scale / sums[0], 0.0)[:, None]
    # A product, not where(): between two Python numbers that would give fp32 for fp64 too.
    minus_C = (here_C & real_C).to(logits.dtype) * -head.scale
    logits.scatter_add_(1, place_C[:, None], minus_C[:, None])
    return loss_C, logits


class _VocabCrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any, x_TD: torch.Tensor, weight: torch.Tensor, targets_N: torch.Tensor, head: _Head
    ) -> torch.Tensor:
        group = head.group
        need_x, need_w = ctx.needs_input_grad[:2]
        x_ND = raw_all_gather(x_TD, group)
        wide = accumulate_dtype(x_TD.dtype)
        loss_N = torch.zeros(x_ND.shape[0], dtype=wide, device=x_ND.device)
        grad_x = torch.zeros_like(x_ND) if need_x else None
        grad_w = torch.zeros(weight.shape, dtype=wide, device=weight.device) if need_w else None
        for start in range(0, x_ND.shape[0], head.chunk):
            part = slice(start, start + head.chunk)
            loss_N[part], logits = _chunk_loss(x_ND[part], weight, targets_N[part], head)
            grad = _narrow(logits, x_ND.dtype)
            if grad_x is not None:
                product(grad, weight, grad_x[part])
            if grad_w is not None:
                if grad_w.dtype == grad.dtype:
                    add_product(grad_w, grad.t(), x_ND[part])
                else:
                    grad_w += product(grad.t(), x_ND[part])
            del logits, grad  # before the next chunk's are made
        owned = x_TD.shape[0]
        if grad_x is not None:
            grad_x = raw_reduce_scatter_rows(grad_x, [owned] * group.size, group)
        if grad_w is not None:
            grad_w = grad_w.to(weight.dtype)
        ctx.save_for_backward(grad_x, grad_w)
        return loss_N[group.rank * owned : (group.rank + 1) * owned].sum()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        grad_x, grad_w = ctx.saved_tensors
        scaled = [None if g is None else g * grads[0].to(g.dtype) for g in (grad_x, grad_w)]
        return scaled[0], scaled[1], None, None


def vocab_cross_entropy(
    x_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    targets_N: torch.Tensor,
    group: Group,
    *,
    vocab_size: int,
    chunk_tokens: int = 1024,
    logit_scale: float = 1.0,
) -> torch.Tensor:
    """Return the sum of -log p(target) over the targets among this rank's owned tokens.

    The gradients are computed in forward, chunk by chunk, and scaled in backward; every rank of
    the group must back-propagate the same factor, as it does when each adds its share to one loss.

    Args:
        x_TD: owned tokens after the final norm; each rank of the group brings the same number.
        weight_VD: this rank's rows of the head, padded at the end of the vocabulary.
        targets_N: targets of all tokens of the group, equal on its ranks; -100 is ignored.
        group: the tensor-parallel group.
        vocab_size: number of real words.
        chunk_tokens: tokens whose logits are held at a time.
        logit_scale: factor on the logits.

    Collectives: all-gather of x and reduce-scatter of its gradient over `group`, and per chunk two
    all-reduces of one and two numbers a token; backward none.
    """
    _check_ids(targets_N, vocab_size, "target")
    head = _Head(group=group, vocab_size=vocab_size, chunk=chunk_tokens, scale=logit_scale)
    result: torch.Tensor = apply_function(_VocabCrossEntropy, x_TD, weight_VD, targets_N, head)
    return result


class _GatherShards(Function):
    """All-gather whose result every rank uses alike: backward takes this rank's slice."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
        ctx.group, ctx.dim, ctx.width = group, dim, x.shape[dim]
        return raw_all_gather(x, group, dim)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        start = ctx.group.rank * ctx.width
        return grads[0].narrow(ctx.dim, start, ctx.width).contiguous(), None, None


def gather_shards(x: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    """Return the group's tensors joined along `dim`, for a loss that every rank computes alike.

    Collectives: all-gather over `group`; backward none (each rank keeps its slice).
    """
    if group.size == 1:
        return x
    result: torch.Tensor = apply_function(_GatherShards, x, group, dim)
    return result


def vocab_logits(
    x_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    group: Group,
    *,
    vocab_size: int,
    logit_scale: float = 1.0,
) -> torch.Tensor:
    """Return full logits `[N, V]` of all tokens of the group, on each of its ranks.

    A loss on them is one loss that every rank of the group computes alike.

    Args:
        x_TD: owned tokens after the final norm.
        weight_VD: this rank's rows of the head.
        group: the tensor-parallel group.
        vocab_size: number of real words; padding is cut off.
        logit_scale: factor on the logits.

    Collectives: all-gather of x and of the logits over `group`; backward one reduce-scatter.
    """
    logits_NV = all_gather(x_TD, group) @ weight_VD.t()
    logits_NV = gather_shards(logits_NV, group, 1)[:, :vocab_size]
    return logits_NV if logit_scale == 1.0 else logits_NV * logit_scale
