"""Conversations as the model's own template writes them, and which characters are answers."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moe_tp.errors import DataError

Span = tuple[int, int]
Message = Mapping[str, Any]

# Unicode noncharacters: no text holds them, no filter of a template touches them.
_OPEN, _CLOSE, _HERE = "\ufdd0", "\ufdd1", "\ufdd2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """A conversation as text.

    Args:
        text: what the model reads.
        answers: first and one past the last character of each assistant turn.
    """

    text: str
    answers: list[Span]


class ChatTemplate:
    """A jinja template of a model folder.

    Where the template marks answers by `{% generation %}`, those marks count. Where it does not,
    an answer is what the template adds for an assistant turn to the turns before it with the
    prompt for an answer, or after the turn's header where there is no such prompt; of templates
    that rewrite earlier turns it is the turn's content.

    Args:
        source: jinja text.
        special: special tokens by role, which templates use by name.

    Raises:
        DataError: the template is no jinja.
    """

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        from jinja2 import TemplateError

        self.marks = "generation" in source and "endgeneration" in source
        self.special = dict(special)
        try:
            self.template = _environment().from_string(source)
        except TemplateError as error:
            raise DataError(f"the chat template cannot be used: {error}") from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        answers: Sequence[int] | None = None,
        tools: Sequence[Any] | None = None,
    ) -> Rendered:
        """Return a conversation as text with the places of its answers.

        Args:
            messages: turns.
            answers: indices of the turns that count; None: each assistant turn.
            tools: descriptions of tools, for templates that list them.

        Raises:
            DataError: the template refuses the conversation, or an answer is not to be found.
        """
        text, marked = self._run(messages, tools, prompt=False)
        turns = [i for i, m in enumerate(messages) if m.get("role") == "assistant"]
        if self.marks and answers is None:
            return Rendered(text=text, answers=marked)
        wanted = turns if answers is None else list(answers)
        if self.marks and len(marked) == len(turns):
            spans = [span for i, span in zip(turns, marked, strict=True) if i in wanted]
            return Rendered(text=text, answers=spans)
        spans, cursor = [], 0
        for i in wanted:
            span = self._place(messages, i, text, cursor, tools)
            spans.append(span)
            cursor = span[1]
        return Rendered(text=text, answers=spans)

    def prompt(self, messages: Sequence[Message]) -> str:
        """Return a conversation as text that ends where the assistant begins to answer.

        Raises:
            DataError: the template refuses the conversation.
        """
        return self._run(messages, None, prompt=True)[0]

    def leaves_out(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> set[str]:
        """Return which of `tool_calls` and `tools` a conversation has and the template ignores.

        Args:
            messages: turns.
            tools: descriptions of tools.

        Raises:
            DataError: the template refuses the conversation.
        """
        others: dict[str, tuple[Sequence[Message], Sequence[Any] | None]] = {}
        if any(message.get("tool_calls") for message in messages):
            bare = [{k: v for k, v in m.items() if k != "tool_calls"} for m in messages]
            others["tool_calls"] = (bare, tools)
        if tools:
            others["tools"] = (messages, None)
        if not others:
            return set()
        text = self._run(messages, tools, prompt=False)[0]
        return {name for name, other in others.items() if self._writes(*other) == text}

    def _writes(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> str | None:
        try:
            return self._run(messages, tools, prompt=False)[0]
        except DataError:
            return None

    def _place(
        self, messages: Sequence[Message], i: int, text: str, cursor: int, tools: Any
    ) -> Span:
        before = self._run(messages[:i], tools, prompt=True)[0] if i else ""
        asked = self._run(messages[:i], tools, prompt=False)[0] if i else ""
        after = self._run(messages[: i + 1], tools, prompt=False)[0]
        if text.startswith(after) and after.startswith(before) and len(before) >= cursor:
            start = len(before)
            if before == asked:  # no prompt for an answer: the turn's header is ours
                found = self._content(messages[: i + 1], i, after, start, tools)
                start = start if found is None else found[0]
            return start, len(after)
        found = self._content(messages, i, text, cursor, tools)
        if found is None:
            raise DataError(
                f"turn {i} cannot be found in what the chat template makes of it; use a template "
                f"with {{% generation %}} marks, or data.loss=all"
            )
        return found

    def _content(
        self, messages: Sequence[Message], i: int, text: str, cursor: int, tools: Any
    ) -> Span | None:
        """Return where the content of a turn stands in a text, from `cursor` on; None: nowhere.

        It is what changes when a mark takes its place; searching for it might find the same word
        in a header or an earlier turn. Templates that look into the content are searched.
        """
        turn = {**messages[i], "content": _HERE}
        try:
            marked = self._run([*messages[:i], turn, *messages[i + 1 :]], tools, prompt=False)[0]
        except DataError:  # the template asks something of the content
            marked = ""
        head, found, tail = marked.partition(_HERE)
        start, stop = len(head), len(text) - len(tail)
        if found and cursor <= start <= stop and text.startswith(head) and text.endswith(tail):
            return start, stop
        content = messages[i].get("content")
        if not isinstance(content, str):
            return None
        at = text.find(content.strip(), cursor)
        return None if at < 0 else (at, at + len(content.strip()))

    def _run(
        self, messages: Sequence[Message], tools: Any, *, prompt: bool
    ) -> tuple[str, list[Span]]:
        try:
            marked = self.template.render(
                messages=list(messages),
                tools=tools,
                add_generation_prompt=prompt,
                **self.special,
            )
        except Exception as error:  # what a template computes may raise anything
            raise DataError(f"the chat template refuses the conversation: {error}") from error
        return _unmark(marked)


def _unmark(marked: str) -> tuple[str, list[Span]]:
    """Return the text without marks, and the places they enclosed."""
    parts: list[str] = []
    spans: list[Span] = []
    length = start = 0
    for piece in marked.replace(_CLOSE, _OPEN + _CLOSE).split(_OPEN):
        if piece.startswith(_CLOSE):
            spans.append((start, length))
            piece = piece[1:]
        start = length
        parts.append(piece)
        length += len(piece)
    return "".join(parts), spans


def _environment() -> Any:
    """Return a sandboxed environment with what templates of model folders rely on."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012 - jinja declares it so

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

        def _mark(self, caller: Any) -> str:
            return f"{_OPEN}{caller()}{_CLOSE}"

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment
