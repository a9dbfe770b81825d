"""Text in, text out: what the command and a training run show to people."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from moe_tp.infer.generate import OnToken, generate
from moe_tp.models.decoder import Decoder


class _Decodes(Protocol):
    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of these ids, without special tokens."""


class TextTokenizer(Protocol):
    """What generation asks of a tokenizer; `moe_tp.train.tokenizer.Tokenizer` offers it."""

    @property
    def backend(self) -> _Decodes:
        """What turns ids into text."""

    def document(self, text: str, *, end: bool = True) -> list[int]:
        """Return the ids of a text, with what begins it and, by `end`, the end token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One prompt and what the model made of it.

    Args:
        prompt: as given.
        text: what came after it, without special tokens.
        tokens: the new ids, a stop token included.
        reason: why it ended: `stop`, `length` or `positions`.
    """

    prompt: str
    text: str
    tokens: list[int]
    reason: str


def sample_text(
    model: Decoder,
    tokenizer: TextTokenizer,
    prompts: Sequence[str],
    *,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    stop_ids: Collection[int] | None = None,
    prompt_ids: Sequence[Sequence[int]] | None = None,
    on_token: OnToken | None = None,
) -> list[Sample]:
    """Return a sample for each prompt, on every rank; collective, also in the midst of training.

    Args:
        model: in any layout with cp = 1, in training or evaluation mode, which it keeps.
        tokenizer: the model's.
        prompts: the same on all ranks; dp ranks take a part each.
        max_new_tokens, temperature, top_k, top_p, seed, stop_ids, on_token: as in `generate`.
        prompt_ids: the prompts' ids where they are there already (a chat template's).

    Raises:
        DataError: a prompt has no token or too many; on every rank.

    Collectives: those of `generate`.
    """
    ids = prompt_ids
    if ids is None:
        ids = [without_end(tokenizer, text) for text in prompts]
    made = generate(
        model,
        ids,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop_ids=stop_ids,
        split_rows=True,
        on_token=on_token,
    )
    return [
        Sample(
            prompt=prompt,
            text=tokenizer.backend.decode(tokens),
            tokens=tokens,
            reason=reason,
        )
        for prompt, tokens, reason in zip(prompts, made.tokens, made.reasons, strict=True)
    ]


def without_end(tokenizer: TextTokenizer, text: str) -> list[int]:
    """Return the ids of a text that is to go on: what begins it, but not what ends it."""
    ids = tokenizer.document(text, end=False)
    after = getattr(tokenizer, "after", ())
    if after and tuple(ids[-len(after) :]) == tuple(after):
        ids = ids[: -len(after)]
    return ids
