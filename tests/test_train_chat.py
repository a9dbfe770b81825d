"""Chat templates: what is an answer in the text that they make."""

from __future__ import annotations

import pytest
from test_train_documents import CHATML, REWRITING, TURNS

from moe_tp.errors import DataError
from moe_tp.train.chat import ChatTemplate

# No prompt for an answer, and the words of the turns stand in the headers and in the questions too.
HEADED = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.mark.parametrize(
    ("template", "roles", "learned"),
    [
        (HEADED, "aua", ["a\n", "user\n"]),
        (HEADED, "uaua", ["a\n", "user\n"]),
        (CHATML, "aua", ["a<|im_end|>\n", "user<|im_end|>\n"]),
        (REWRITING, "aua", ["a", "user"]),
        (REWRITING, "uaua", ["a", "user"]),
    ],
)
def test_headers_are_not_learned(template: str, roles: str, learned: list[str]) -> None:
    """Whoever begins, and whatever words the answers share with what stands before them."""
    said = {"a": iter(("a", "user")), "u": iter(("a user", "a user"))}
    names = {"a": "assistant", "u": "user"}
    turns = [{"role": names[r], "content": next(said[r])} for r in roles]
    made = ChatTemplate(template, {}).render(turns)
    assert [made.text[a:b] for a, b in made.answers] == learned
    heads = [made.text[:a] for a, _ in made.answers]
    assert all(head.endswith(("assistant: ", "assistant\n", "[assistant]")) for head in heads)


def test_a_call_of_a_tool_is_learned_without_its_header() -> None:
    """Where the template has no prompt for an answer, and the turn no content."""
    source = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}"
        "{% for c in m.tool_calls or [] %}[{{ c.name }}]{% endfor %};{% endfor %}"
    )
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [{"name": "f"}]}]
    found = ChatTemplate(source, {}).render(turns)
    assert [found.text[a:b] for a, b in found.answers] == ["[f];"]


def test_a_template_that_looks_into_the_content() -> None:
    """It refuses the mark that stands for the content, which is then searched for."""
    source = (
        "{% for m in messages %}{% if m.content not in 'bq' %}{{ raise_exception('') }}{% endif %}"
        "{{ m.role }}>{{ m.content }};{% endfor %}"
    )
    turns = [{"role": "assistant", "content": "b"}, {"role": "user", "content": "q"}]
    found = ChatTemplate(source, {}).render(turns)
    assert [found.text[a:b] for a, b in found.answers] == ["b;"]


def test_tools_reach_the_template() -> None:
    source = "{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% endfor %}"
    made = ChatTemplate(source, {}).render(TURNS, tools=[{"name": "é"}])
    assert made.text.startswith('[{"name": "é"}]')
    assert [made.text[a:b] for a, b in made.answers] == ["a ghost", "your father"]


def test_templates_run_in_a_sandbox() -> None:
    """K7: a template from a folder cannot reach into the process."""
    source = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(DataError, match="refuses the conversation"):
        ChatTemplate(source, {}).render(TURNS)
