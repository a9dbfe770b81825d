"""Documents from records: token ids, and which of them are learned."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_tp.errors import DataError
from moe_tp.log import warn_once
from moe_tp.models.tokens import IGNORE
from moe_tp.train.chat import ChatTemplate, Span
from moe_tp.train.config import DataConfig
from moe_tp.train.files import Record, decode_json
from moe_tp.train.tokenizer import Tokenizer, load_tokenizer


def _as_text(message: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return a message whose content is text where it was a list of parts, all of them text.

    Templates print what is no text as Python does: 'None', or a list with its brackets.

    Raises:
        DataError: a part is no text, or there is no content (fine beside calls of tools).
    """
    content = message.get("content")
    if content is None and not message.get("tool_calls"):
        raise DataError(f"{where}: a message of role {message['role']!r} has no content")
    if content is None or isinstance(content, str):
        return message
    if not isinstance(content, list):
        raise DataError(
            f"{where}: a message of role {message['role']!r} has {type(content).__name__} as its "
            f"content, where text must stand"
        )
    found = [part.get("text") if isinstance(part, Mapping) else part for part in content]
    parts = [part for part in found if isinstance(part, str)]
    if len(parts) < len(found):
        raise DataError(
            f"{where}: a message of role {message['role']!r} has parts that are no text, which "
            f"this library cannot learn from"
        )
    return {**message, "content": "".join(parts)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """Tokens that may attend to each other.

    Args:
        ids: token ids.
        labels: the same, -100 where a token is not learned.
        splits: a part of it makes sense alone, as of running text.
    """

    ids: list[int]
    labels: list[int]
    splits: bool


_KEYS: dict[str, tuple[str, ...]] = {
    "tokens": ("input_ids",),
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "prompt": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "text": ("text",),
}
_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "model": "assistant",
    "observation": "tool",
    "function_response": "tool",
    "function_call": "assistant",
}


class DocumentMaker:
    """Turns records of one model's data into documents.

    Args:
        config: format, columns, loss.
        model_folder: where tokenizer and chat template lie unless the settings say otherwise.
        vocab_size: of the model; ids must lie below.
    """

    def __init__(self, config: DataConfig, model_folder: str | Path, vocab_size: int) -> None:
        self.config, self.vocab_size = config, vocab_size
        self.folder = Path(config.tokenizer or model_folder)
        self._tokenizer: Tokenizer | None = None
        self._template: ChatTemplate | None = None
        self._columns = {theirs: ours for ours, theirs in config.columns.items()}
        self._makers: dict[str, Callable[[dict[str, Any], str], Document]] = {
            "tokens": self._tokens,
            "messages": self._messages,
            "sharegpt": self._sharegpt,
            "prompt": self._prompt,
            "alpaca": self._alpaca,
            "text": self._text,
        }

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, read when first needed: data of token ids needs none."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self.folder)
        return self._tokenizer

    def __call__(self, record: Record, kind: str) -> Document:
        """Return the document of a record.

        Args:
            record: with the files' own column names.
            kind: a format, from `kind_of`.

        Raises:
            DataError: a key is missing, a value is of a wrong kind, an id is beyond the vocabulary.
        """
        fields = self._renamed(record)
        missing = [key for key in _KEYS[kind] if fields.get(key) is None]
        if missing and missing[0] in fields:
            raise DataError(
                f"{record.where}: {missing[0]!r} is null, and format {kind} needs a value"
            )
        if missing:
            raise DataError(
                f"{record.where} has no {missing[0]!r}, which format {kind} needs; it has "
                f"{', '.join(map(repr, fields))} (data.columns renames)"
            )
        try:
            document = self._makers[kind](fields, record.where)
        except UnicodeEncodeError as error:
            raise DataError(
                f"{record.where}: character {error.start} of a text is half of a surrogate pair "
                f"(U+{ord(error.object[error.start]):04X}), which UTF-8 cannot hold; write the "
                f"file anew"
            ) from error
        bad = [i for i in document.ids if not 0 <= i < self.vocab_size]
        if bad:
            raise DataError(
                f"{record.where}: token id {bad[0]} lies outside the model's vocabulary of "
                f"{self.vocab_size}; use the tokenizer that belongs to the model"
            )
        return document

    def kind_of(self, record: Record) -> str:
        """Return the format of a record, by its keys unless the settings name it."""
        if record.whole_file:
            return "text"
        if self.config.format != "auto":
            return self.config.format
        fields = self._renamed(record)
        for kind, keys in _KEYS.items():
            if all(fields.get(key) is not None for key in keys):
                return kind
        for kind, keys in _KEYS.items():
            null = [key for key in keys if key in fields and fields[key] is None]
            if null and all(key in fields for key in keys):
                raise DataError(
                    f"{record.where}: {null[0]!r} is null, and format {kind} needs a value"
                )
        absent = [theirs for theirs in self._columns if theirs not in record.fields]
        if absent:
            raise DataError(
                f"{record.where} has no {absent[0]!r}, which data.columns names; it has "
                f"{', '.join(map(repr, record.fields))}"
            )
        raise DataError(
            f"{record.where} has the keys {', '.join(map(repr, fields))}, which no format has; "
            f"name columns in data.columns, for example text: {next(iter(fields))}"
        )

    def _renamed(self, record: Record) -> dict[str, Any]:
        """Return a record's values by our names; what data.columns names goes before others.

        Raises:
            DataError: it has none.
        """
        fields = record.fields
        if not fields:
            raise DataError(f"{record.where} is a record without a key; fill it or remove it")
        found = {self._columns[key]: value for key, value in fields.items() if key in self._columns}
        return found | {
            key: value
            for key, value in fields.items()
            if key not in self._columns and key not in found
        }

    def _text(self, fields: dict[str, Any], where: str) -> Document:
        if self.config.loss == "answers":
            raise DataError(f"{where} is plain text without answers; set data.loss to auto or all")
        ids = self.tokenizer.document(_string(fields, "text", where), end=self.config.add_eos)
        if len(ids) > 1 and ids[0] == self.tokenizer.bos == ids[1]:
            warn_once(
                f"{self.folder}: two tokens at the beginning",
                f"{where} begins with {self.tokenizer.special.get('bos_token')!r}, and the "
                f"model's tokenizer adds one: both are kept, as it does; leave it out of the text",
            )
        return Document(ids=ids, labels=list(ids), splits=True)

    def _tokens(self, fields: dict[str, Any], where: str) -> Document:
        ids, labels = fields["input_ids"], fields.get("labels")
        for name, value in (("input_ids", ids), ("labels", ids if labels is None else labels)):
            if not isinstance(value, list) or not all(type(i) is int for i in value):
                raise DataError(f"{where}: {name} must be a list of whole numbers")
        if labels is not None and len(labels) != len(ids):
            raise DataError(f"{where}: {len(labels)} labels for {len(ids)} input_ids")
        mask = fields.get("attention_mask")
        if mask is not None:
            known = isinstance(mask, list) and all(real in (0, 1) for real in mask)
            if not known or len(mask) != len(ids):
                raise DataError(
                    f"{where}: attention_mask must hold one value for each input_id, 0 or 1"
                )
            ids = [i for i, real in zip(ids, mask, strict=True) if real]
            if labels is not None:
                labels = [i for i, real in zip(labels, mask, strict=True) if real]
        if labels is None:
            return Document(ids=ids, labels=list(ids), splits=True)
        wrong = [v for v in labels if v != IGNORE and not 0 <= v < self.vocab_size]
        if wrong:
            raise DataError(
                f"{where}: label {wrong[0]} is neither {IGNORE} nor a token id below "
                f"{self.vocab_size}"
            )
        return Document(ids=ids, labels=labels, splits=False)

    def _prompt(self, fields: dict[str, Any], where: str) -> Document:
        prompt, completion = fields["prompt"], fields["completion"]
        if isinstance(prompt, list) and isinstance(completion, list):
            turns = [*prompt, *completion]
            _check_turns(turns, where)
            late = range(len(prompt), len(turns))
            answers = [i for i in late if turns[i]["role"] == "assistant"]
            return self._conversation(turns, fields, where, answers)
        start = _string(fields, "prompt", where)
        return self._completed(start, _string(fields, "completion", where))

    def _completed(self, prompt: str, completion: str) -> Document:
        tokenizer = self.tokenizer
        text = prompt + completion
        found = tokenizer.backend.encode(text)
        ids = [*tokenizer.before, *found.ids]
        spans: list[Span] = [(0, 0)] * len(tokenizer.before) + list(found.spans)
        for token in tokenizer.after or (() if tokenizer.eos is None else (tokenizer.eos,)):
            if self.config.add_eos or tokenizer.after:
                ids.append(token)
                spans.append((len(text), len(text) + 1))
        return self._document(ids, spans, [(len(prompt), len(text) + 1)])

    def _alpaca(self, fields: dict[str, Any], where: str) -> Document:
        asked = _string(fields, "instruction", where)
        if fields.get("input"):
            asked += "\n" + _string(fields, "input", where)
        answer = _string(fields, "output", where)
        if self._chat_source() is None:
            return self._completed(asked + "\n\n", answer)
        messages: list[dict[str, Any]] = []
        if fields.get("system"):
            messages.append({"role": "system", "content": fields["system"]})
        history = fields.get("history") or []
        for turn in history if isinstance(history, list) else [history]:
            if not isinstance(turn, list) or len(turn) != 2:
                raise DataError(f"{where}: history must be a list of pairs, question and answer")
            user, assistant = turn
            messages.append({"role": "user", "content": user})
            messages.append({"role": "assistant", "content": assistant})
        messages.append({"role": "user", "content": asked})
        messages.append({"role": "assistant", "content": answer})
        return self._conversation(messages, fields, where)

    def _sharegpt(self, fields: dict[str, Any], where: str) -> Document:
        messages: list[dict[str, Any]] = []
        if fields.get("system"):
            messages.append({"role": "system", "content": fields["system"]})
        for turn in _list(fields, "conversations", where):
            if isinstance(turn, dict) and "role" in turn and "content" in turn:
                messages.append(turn)  # messages under this name, as many data sets have them
                continue
            if not isinstance(turn, dict) or "value" not in turn:
                raise DataError(f"{where}: a turn of conversations must hold 'from' and 'value'")
            name = turn.get("from")
            if not isinstance(name, str):
                raise DataError(f"{where}: 'from' of a turn must be text, not {name!r}")
            role = _ROLES.get(name.lower(), name)
            messages.append({"role": role, "content": turn["value"]})
        return self._conversation(messages, fields, where)

    def _messages(self, fields: dict[str, Any], where: str) -> Document:
        return self._conversation(_list(fields, "messages", where), fields, where)

    def _conversation(
        self,
        messages: Sequence[Mapping[str, Any]],
        fields: Mapping[str, Any],
        where: str,
        answers: Sequence[int] | None = None,
    ) -> Document:
        _check_turns(messages, where)
        template = self._chat(where)
        messages = [_as_text(message, where) for message in messages]
        tools = fields.get("tools")
        if isinstance(tools, str):
            tools = decode_json(tools, f"{where}: 'tools' is text that") if tools.strip() else None
        if tools is not None and not isinstance(tools, list):
            raise DataError(f"{where}: 'tools' is {type(tools).__name__} where a list must stand")
        try:
            ignored = template.leaves_out(messages, tools)
            found = template.render(messages, answers=answers, tools=tools)
        except DataError as error:
            raise DataError(f"{where}: {error}") from error
        if "tool_calls" in ignored:
            raise DataError(
                f"{where}: the chat template does not write tool_calls, which would be lost; name "
                f"one that does as data.chat_template, or leave such conversations out"
            )
        if "tools" in ignored:
            warn_once(
                f"{self.folder}: tools",
                f"{where} describes tools, which the chat template does not write: they are left "
                f"out; name one that does as data.chat_template",
            )
        encoding = self.tokenizer.backend.encode(found.text)
        return self._document(encoding.ids, encoding.spans, found.answers)

    def _document(self, ids: list[int], spans: Sequence[Span], answers: Sequence[Span]) -> Document:
        if self.config.loss == "all":
            return Document(ids=ids, labels=list(ids), splits=False)
        labels = [IGNORE] * len(ids)
        at = 0
        for i, (start, stop) in enumerate(spans):
            while at < len(answers) and answers[at][1] <= start:
                at += 1
            if at < len(answers) and stop > answers[at][0] and stop > start:
                labels[i] = ids[i]
        return Document(ids=ids, labels=labels, splits=False)

    def _chat_source(self) -> str | None:
        if self.config.chat_template is None:
            return self.tokenizer.chat_template
        try:
            return Path(self.config.chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(
                f"data.chat_template={self.config.chat_template} cannot be read: {error}"
            ) from error

    def _chat(self, where: str) -> ChatTemplate:
        if self._template is None:
            source = self._chat_source()
            if source is None:
                raise DataError(
                    f"{where} is a conversation, but {self.folder} has no chat template; name a "
                    f"jinja file as data.chat_template"
                )
            self._template = ChatTemplate(source, self.tokenizer.special)
        return self._template


def _string(fields: Mapping[str, Any], key: str, where: str) -> str:
    value = fields[key]
    if not isinstance(value, str):
        raise DataError(f"{where}: {key!r} is {type(value).__name__} where text must stand")
    return value


def _check_turns(messages: Sequence[Any], where: str) -> None:
    if not all(isinstance(m, Mapping) and isinstance(m.get("role"), str) for m in messages):
        raise DataError(f"{where}: each message must be an object with a 'role'")


def _list(fields: Mapping[str, Any], key: str, where: str) -> list[Any]:
    value = fields[key]
    if isinstance(value, str):  # a column of a CSV file
        value = decode_json(value, f"{where}: {key!r} is text that")
    if not isinstance(value, list) or not value:
        raise DataError(f"{where}: {key!r} must be a list with at least one turn")
    return value
