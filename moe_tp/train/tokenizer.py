"""A model folder's own tokenizer: the same ids as the model was trained with.

`tokenizer.json` is read by `tokenizers`, else `tokenizer.model` by `sentencepiece`; what begins and
ends a text follows `tokenizer_config.json`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from moe_tp.errors import DataError

Span = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoding:
    """Token ids of a text, and the characters that each stands for.

    Args:
        ids: token ids.
        spans: first and one past the last character; empty where a token adds none.
    """

    ids: list[int]
    spans: list[Span]


class Backend(Protocol):
    """What reads a vocabulary: plain text and special tokens to ids, and back."""

    def encode(self, text: str) -> Encoding:
        """Return the tokens of a text that may hold special tokens; none is added.

        Raises:
            UnicodeEncodeError: a character is half of a surrogate pair.
        """

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of these ids, without special tokens."""

    def token_id(self, token: str) -> int | None:
        """Return the id of a token by its name, or None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenizer:
    """A vocabulary and what the model's authors put around texts.

    Args:
        backend: the vocabulary.
        vocab_size: ids lie below.
        bos, eos: ids of the tokens that begin and end a text; None where there is none.
        before, after: ids that every text gets.
        special: special tokens by their role, as chat templates name them (bos_token, ...).
        chat_template: jinja source, or None.
    """

    backend: Backend
    vocab_size: int
    bos: int | None
    eos: int | None
    before: tuple[int, ...]
    after: tuple[int, ...]
    special: Mapping[str, str]
    chat_template: str | None

    def document(self, text: str, *, end: bool = True) -> list[int]:
        """Return the ids of a whole text, with what begins it and, by `end`, the end token."""
        ids = [*self.before, *self.backend.encode(text).ids, *self.after]
        if end and self.eos is not None and (not ids or ids[-1] != self.eos):
            ids.append(self.eos)
        return ids


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Return the tokenizer of a model folder.

    Raises:
        DataError: the folder has none, or it cannot be read.
    """
    folder = Path(folder)
    config = _read_json(folder / "tokenizer_config.json")
    path = folder / "tokenizer.json"
    make: Callable[[Path, dict[str, Any]], tuple[Backend, int]] = _from_json
    if not path.is_file():
        path, make = folder / "tokenizer.model", _from_sentencepiece
    if not path.is_file():
        raise DataError(
            f"{folder} has neither tokenizer.json nor tokenizer.model, so text cannot become "
            f"tokens; copy the model's tokenizer files there, or name their folder "
            f"(data.tokenizer of a run, --tokenizer)"
        )
    try:
        backend, size = make(path, config)
    except Exception as error:  # the libraries raise bare Exception for a file they cannot read
        raise DataError(f"{path} cannot be read as a tokenizer: {error}") from error
    special = _special_tokens(folder, config)
    ids = {role: backend.token_id(token) for role, token in special.items()}
    bos, eos = ids.get("bos_token"), ids.get("eos_token")
    if isinstance(backend, _SentencePiece):
        bos = backend.processor.bos_id() if bos is None else bos
        eos = backend.processor.eos_id() if eos is None else eos
        special.setdefault("bos_token", backend.processor.id_to_piece(bos))
        special.setdefault("eos_token", backend.processor.id_to_piece(eos))
        before: tuple[int, ...] = (bos,) if config.get("add_bos_token", True) else ()
        after: tuple[int, ...] = (eos,) if config.get("add_eos_token", False) else ()
    else:
        assert isinstance(backend, _Tokenizers)
        before, after = backend.surroundings(config, bos, eos)
    return Tokenizer(
        backend=backend,
        vocab_size=size,
        bos=bos,
        eos=eos,
        before=before,
        after=after,
        special=special,
        chat_template=_chat_template(folder, config),
    )


class _Tokenizers:
    """A `tokenizer.json`."""

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer as Reader

        self.reader = Reader.from_file(str(path))
        self.reader.no_truncation()
        self.reader.no_padding()

    def encode(self, text: str) -> Encoding:
        try:
            found = self.reader.encode(text, add_special_tokens=False)
        except TypeError:
            text.encode("utf-8")  # names half a surrogate pair, which the library calls no string
            raise
        return Encoding(ids=found.ids, spans=found.offsets)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.reader.decode(list(ids)))

    def token_id(self, token: str) -> int | None:
        found: int | None = self.reader.token_to_id(token)
        return found

    def surroundings(
        self, config: Mapping[str, Any], bos: int | None, eos: int | None
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return what the file's post-processor puts before and after a text, or the config's word.

        `add_bos_token` and `add_eos_token` rebuild the post-processor in transformers, so that
        they win where they are given.
        """
        plain = self.reader.encode("a", add_special_tokens=False).ids
        whole = self.reader.encode("a", add_special_tokens=True).ids
        extra = len(whole) - len(plain)
        at = next((i for i in range(extra + 1) if whole[i : i + len(plain)] == plain), 0)
        before, after = tuple(whole[:at]), tuple(whole[at + len(plain) :])
        if config.get("add_bos_token") is not None and bos is not None:
            before = (bos,) if config["add_bos_token"] else ()
        if config.get("add_eos_token") is not None and eos is not None:
            after = (eos,) if config["add_eos_token"] else ()
        return before, after


class _SentencePiece:
    """A `tokenizer.model`: special tokens are cut out of the text, the rest goes to the library."""

    def __init__(self, path: Path, added: Mapping[str, int]) -> None:
        from sentencepiece import SentencePieceProcessor

        self.processor = SentencePieceProcessor(model_file=str(path))
        control = {
            self.processor.id_to_piece(i): i
            for i in range(self.processor.get_piece_size())
            if self.processor.is_control(i)
        }
        self.special: dict[str, int] = {**control, **added}
        longest_first = sorted(self.special, key=len, reverse=True)
        self.cut = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def encode(self, text: str) -> Encoding:
        ids: list[int] = []
        spans: list[Span] = []
        at = 0
        for match in self.cut.finditer(text):
            self._plain(text, at, match.start(), ids, spans)
            ids.append(self.special[match.group()])
            spans.append(match.span())
            at = match.end()
        self._plain(text, at, len(text), ids, spans)
        return Encoding(ids=ids, spans=spans)

    def decode(self, ids: Sequence[int]) -> str:
        special = set(self.special.values())
        return str(self.processor.decode([i for i in ids if i not in special]))

    def token_id(self, token: str) -> int | None:
        if token in self.special:
            return self.special[token]
        found = int(self.processor.piece_to_id(token))
        return None if found == self.processor.unk_id() else found

    def _plain(self, text: str, start: int, end: int, ids: list[int], spans: list[Span]) -> None:
        if start == end:
            return
        part = text[start:end]
        try:
            found = self.processor.encode(part)
        except RuntimeError:
            part.encode("utf-8")  # names half a surrogate pair, which the library cannot take
            raise
        ids += found
        spans += [(start + a, start + b) for a, b in self._spans(part, found)]

    def _spans(self, part: str, found: Sequence[int]) -> list[Span]:
        """Return the characters of each piece by walking along the text in bytes.

        The library's own offsets need protobuf. A piece is as long as its bytes, but for the space
        that is put before the first word.
        """
        char_at = [i for i, char in enumerate(part) for _ in char.encode()]
        char_at.append(len(part))
        size, at, result = len(char_at) - 1, 0, []
        for n, token in enumerate(found):
            piece = self.processor.id_to_piece(token).replace("\u2581", " ")
            length = 1 if self.processor.is_byte(token) else len(piece.encode())
            if n == 0 and piece.startswith(" ") and not part.startswith(" "):
                length -= 1
            stop = min(at + length, size)
            last = char_at[stop - 1] + 1 if stop > at else char_at[at]
            result.append((char_at[at], last))
            at = stop
        return result


def _from_json(path: Path, config: dict[str, Any]) -> tuple[Backend, int]:
    backend = _Tokenizers(path)
    top = max(backend.reader.get_vocab(with_added_tokens=True).values(), default=-1)
    return backend, top + 1


def _from_sentencepiece(path: Path, config: dict[str, Any]) -> tuple[Backend, int]:
    listed = config.get("added_tokens_decoder") or {}
    added = {entry["content"]: int(index) for index, entry in listed.items()}
    backend = _SentencePiece(path, added)
    return backend, max([backend.processor.get_piece_size() - 1, *added.values()]) + 1


def _special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return special tokens by role; a token stands there as text or with its properties."""
    found: dict[str, str] = {}
    for source in (_read_json(folder / "special_tokens_map.json"), config):
        for role, value in source.items():
            text = value.get("content") if isinstance(value, dict) else value
            if role.endswith("_token") and isinstance(text, str):
                found[role] = text
    return found


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Return the template of a folder: its own file first, then the configuration's."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    value = config.get("chat_template")
    if isinstance(value, list):
        named = {entry["name"]: entry["template"] for entry in value}
        value = named.get("default")
    return value if isinstance(value, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} holds no JSON object")
    return content
