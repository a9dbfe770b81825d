"""Documents from every format: which tokens are learned, and what is refused."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from moe_tp.errors import DataError
from moe_tp.models.tokens import IGNORE
from moe_tp.train.config import COLUMNS, DataConfig
from moe_tp.train.data import read_documents
from moe_tp.train.documents import _KEYS, Document

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}A:{% generation %}{{ m.content }}."
    "{% endgeneration %}{% else %}{{ m.role }}:{{ m.content }};{% endif %}{% endfor %}"
)
# The last turn looks otherwise than the same turn does when more follow.
REWRITING = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% if loop.last %}!{% endif %}{% endfor %}"
)
TURNS = [
    {"role": "user", "content": "who is there"},
    {"role": "assistant", "content": "a ghost"},
    {"role": "user", "content": "which ghost"},
    {"role": "assistant", "content": "your father"},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder whose tokens are characters: id = code point; 0 ends a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocab = {chr(i): i for i in range(1, 127)} | {"<end>": 0}
    reader = Tokenizer(models.WordLevel(vocab, unk_token="~"))
    reader.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    model = tmp_path / "model"
    model.mkdir()
    reader.save(str(model / "tokenizer.json"))
    (model / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    return model


def documents(
    folder: Path, name: str, content: str, vocab_size: int = 128, **config: Any
) -> list[Document]:
    path = folder.parent / name
    path.write_text(content, encoding="utf-8")
    settings = DataConfig(train=(str(path),), **config)
    return list(read_documents(settings, settings.train, str(folder), vocab_size))


def show(document: Document) -> tuple[str, str]:
    """The text, and the learned part of it with ` elsewhere."""
    text = "".join(chr(i) if i else "$" for i in document.ids)
    pairs = zip(text, document.labels, strict=True)
    return text, "".join("`" if label == IGNORE else char for char, label in pairs)


def test_text_files_and_lines(folder: Path) -> None:
    (whole,) = documents(folder, "a.txt", "to be\nor not\n")
    assert show(whole) == ("to be\nor not\n$", "to be\nor not\n$")
    assert whole.splits
    lines = documents(folder, "a.jsonl", '{"text": "to be"}\n\n{"text": "or"}\n')
    assert [show(d)[0] for d in lines] == ["to be$", "or$"]
    (bare,) = documents(folder, "b.jsonl", '{"text": "to be"}\n', add_eos=False)
    assert show(bare)[0] == "to be"
    (renamed,) = documents(folder, "c.jsonl", '{"body": "x"}\n', columns={"text": "body"})
    assert show(renamed)[0] == "x$"


def test_json_csv_parquet_and_datasets_hold_the_same(folder: Path) -> None:
    records = [{"prompt": "2+2=", "completion": "4"}, {"prompt": "a, b\nc", "completion": '"d"'}]
    found = {
        "json": documents(folder, "a.json", json.dumps(records)),
        "csv": documents(folder, "a.csv", 'prompt,completion\n2+2=,4\n"a, b\nc","""d"""\n'),
    }
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(records), folder.parent / "a.parquet")
    config = DataConfig(train=(str(folder.parent / "a.parquet"),))
    found["parquet"] = list(read_documents(config, config.train, str(folder), 128))
    saved = folder.parent / "saved"  # as `datasets` saves a dictionary of one split
    (saved / "train").mkdir(parents=True)
    (saved / "dataset_dict.json").write_text('{"splits": ["train"]}')
    for name in ("state.json", "dataset_info.json"):
        (saved / "train" / name).write_text("{}")
    rows = pyarrow.Table.from_pylist(records)
    file = str(saved / "train" / "data-00000-of-00001.arrow")
    with pyarrow.OSFile(file, "wb") as sink, pyarrow.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_table(rows)
    config = DataConfig(train=(str(saved),))
    found["datasets"] = list(read_documents(config, config.train, str(folder), 128))
    for kind, made in found.items():
        assert [show(d) for d in made] == [
            ("2+2=4$", "````4$"),
            ('a, b\nc"d"$', '``````"d"$'),
        ], kind


@pytest.mark.parametrize(
    ("template", "learned"),
    [
        (CHATML, ["a ghost<|im_end|>\n", "your father<|im_end|>\n"]),
        (MARKED, ["a ghost.", "your father."]),
        (REWRITING, ["a ghost", "your father"]),
    ],
)
def test_answers_are_learned(folder: Path, template: str, learned: list[str]) -> None:
    (folder / "chat_template.jinja").write_text(template)
    (made,) = documents(folder, "a.jsonl", json.dumps({"messages": TURNS}))
    _, kept = show(made)
    assert [part for part in kept.split("`") if part] == learned
    assert not made.splits
    (everything,) = documents(folder, "b.jsonl", json.dumps({"messages": TURNS}), loss="all")
    assert everything.labels == everything.ids == made.ids


def test_other_conversation_formats_give_the_same(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(CHATML)
    names = {"user": "human", "assistant": "gpt"}
    shared = [{"from": names[m["role"]], "value": m["content"]} for m in TURNS]
    history = [[TURNS[0]["content"], TURNS[1]["content"]]]
    alpaca = {"instruction": "which", "input": "ghost", "output": "x", "history": history}
    split = {"prompt": TURNS[:3], "completion": TURNS[3:]}
    rows = [{"messages": TURNS}, {"conversations": shared}, split]
    made = [documents(folder, f"{i}.jsonl", json.dumps(r))[0] for i, r in enumerate(rows)]
    assert made[0] == made[1]
    assert made[2].ids == made[0].ids
    assert show(made[2])[1].strip("`") == "your father<|im_end|>\n"
    text, kept = show(documents(folder, "alpaca.jsonl", json.dumps(alpaca))[0])
    assert "user\nwhich\nghost<|im_end|>" in text
    assert [part for part in kept.split("`") if part] == ["a ghost<|im_end|>\n", "x<|im_end|>\n"]


def test_alpaca_without_a_template(folder: Path) -> None:
    record = {"instruction": "add", "input": "2 2", "output": "4"}
    (made,) = documents(folder, "a.jsonl", json.dumps(record))
    assert show(made) == ("add\n2 2\n\n4$", "`````````4$")


def test_records_of_conversations_that_are_none(folder: Path) -> None:
    """F3: the file, the line and what is wrong with it, whatever the template's own error is."""
    (folder / "chat_template.jinja").write_text(CHATML)
    broken = {"instruction": "a", "output": "b", "history": [["x"]]}
    with pytest.raises(DataError, match=r"a\.jsonl line 1: history must be a list of pairs"):
        documents(folder, "a.jsonl", json.dumps(broken))
    with pytest.raises(DataError, match=r"a\.jsonl line 1: 'tools' is text that is not JSON"):
        documents(folder, "a.jsonl", json.dumps({"messages": TURNS, "tools": "{"}))
    for source in (
        "{{ 1 // 0 }}",
        "{% for i in range(10 ** 9) %}x{% endfor %}",
        "{{ messages[9].x }}",
    ):
        (folder / "chat_template.jinja").write_text(source)
        with pytest.raises(DataError, match=r"a\.jsonl line 1: the chat template refuses"):
            documents(folder, "a.jsonl", json.dumps({"messages": TURNS}))


def test_token_ids(folder: Path) -> None:
    record = {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}
    (made,) = documents(folder, "a.jsonl", json.dumps(record))
    assert (made.ids, made.labels) == ([5, 6, 7], [-100, 6, 7])
    (plain,) = documents(folder, "b.jsonl", '{"input_ids": [5, 6]}')
    assert plain.labels == [5, 6]


def test_masked_tokens_are_left_out(folder: Path) -> None:
    """R6: padding of data that was tokenised elsewhere is neither read nor learned."""
    record = {"input_ids": [0, 5, 6, 7, 0], "attention_mask": [0, 1, 1, 1, 0]}
    (made,) = documents(folder, "a.jsonl", json.dumps(record))
    assert (made.ids, made.labels) == ([5, 6, 7], [5, 6, 7])
    record["labels"] = [-100, -100, 6, 7, -100]
    (made,) = documents(folder, "b.jsonl", json.dumps(record))
    assert (made.ids, made.labels) == ([5, 6, 7], [-100, 6, 7])


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"conversations": [{"from": ["x"], "value": "a"}]}, r"'from' of a turn .* \['x'\]"),
        ({"conversations": [{"from": "human", "value": 3}]}, "role 'user' has int as its content"),
        ({"messages": [{"role": "user", "content": {"a": 1}}]}, "'user' has dict as its content"),
        ({"messages": TURNS, "tools": 3}, "'tools' is int where a list must stand"),
        ({"instruction": "a", "output": "b", "history": 5}, "history must be a list of pairs"),
        ({"instruction": "a", "output": "b", "system": 4}, "'system' has int as its content"),
    ],
)
def test_values_that_a_template_would_print(
    folder: Path, record: dict[str, Any], said: str
) -> None:
    """F3: one sentence, where jinja would write a number or a mapping into the text."""
    (folder / "chat_template.jinja").write_text(CHATML)
    with pytest.raises(DataError, match=rf"a\.jsonl line 1: .*{said}"):
        documents(folder, "a.jsonl", json.dumps(record))


def test_roles_in_capitals_and_messages_as_conversations(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(CHATML)
    (plain,) = documents(folder, "a.jsonl", json.dumps({"messages": TURNS[:2]}))
    capitals = [
        {"from": name, "value": turn["content"]}
        for name, turn in zip(("Human", "GPT"), TURNS[:2], strict=True)
    ]
    for turns in (capitals, TURNS[:2]):
        assert documents(folder, "b.jsonl", json.dumps({"conversations": turns})) == [plain]


@pytest.mark.parametrize("order", [("body", "text"), ("text", "body")])
def test_a_renamed_column_goes_before_one_of_that_name(
    folder: Path, order: tuple[str, str]
) -> None:
    """In whatever order the file has them."""
    line = json.dumps({name: {"body": "wanted", "text": "other"}[name] for name in order})
    (made,) = documents(folder, "a.jsonl", line, columns={"text": "body"})
    assert show(made)[0] == "wanted$"
    (one,) = documents(folder, "a.json", '{"text": "a"}')
    assert show(one)[0] == "a$"


def test_a_column_that_no_record_has_is_named(folder: Path) -> None:
    with pytest.raises(DataError, match=r"line 1 has no 'bodie', which data\.columns names"):
        documents(folder, "a.jsonl", '{"body": "x"}\n', columns={"text": "bodie"})


def test_every_key_of_a_format_can_be_renamed() -> None:
    assert {key for keys in _KEYS.values() for key in keys} < set(COLUMNS)


def test_parts_of_a_message_are_joined(folder: Path) -> None:
    """A template would print a list with its brackets, and a missing answer as 'None'."""
    (folder / "chat_template.jinja").write_text(CHATML)
    plain = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}]
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    made = [
        documents(folder, name, json.dumps({"messages": [{**plain[0], "content": c}, plain[1]]}))
        for name, c in (("a.jsonl", "ab"), ("b.jsonl", parts))
    ]
    assert made[0] == made[1]
    picture = [{"type": "image_url", "image_url": "x"}]
    for name, content, said in (("c", None, "has no content"), ("d", picture, "no text")):
        turns = [plain[0], {"role": "assistant", "content": content}]
        with pytest.raises(DataError, match=said):
            documents(folder, f"{name}.jsonl", json.dumps({"messages": turns}))


def test_what_a_template_does_not_write_is_told(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls of tools would be lost, and 'None' be learned as the answer; tools themselves warn."""
    called = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    asked = {"role": "user", "content": "a"}
    record = {"messages": [asked, called], "tools": [{"name": "f"}]}
    plain = {"messages": [asked, {**called, "content": "b", "tool_calls": []}]}
    template = folder / "chat_template.jinja"
    template.write_text(CHATML)
    with pytest.raises(DataError, match="line 1: the chat template does not write tool_calls"):
        documents(folder, "a.jsonl", json.dumps(record))
    template.write_text(CHATML.replace("m.content", "m.content or m.tool_calls | tojson"))
    for line, warned in ((plain, False), (record, True), ({**plain, "tools": [3]}, True)):
        caplog.clear()
        monkeypatch.setattr("moe_tp.log._warned", set())
        with caplog.at_level(logging.WARNING, logger="moe_tp"):
            (made,) = documents(folder, "a.jsonl", json.dumps(line))
        assert ("function" in show(made)[1]) == (line is record)
        assert ("describes tools, which the chat template does not" in caplog.text) == warned
    template.write_text("{{ tools }}" + template.read_text())
    caplog.clear()
    monkeypatch.setattr("moe_tp.log._warned", set())
    with caplog.at_level(logging.WARNING, logger="moe_tp"):
        assert documents(folder, "a.jsonl", json.dumps(record))
    assert not caplog.text


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.txt", " \n", "is empty"),
        ("a.jsonl", "", "is empty"),
        ("a.json", "", "is empty"),
        ("a.csv", "text\n", "is empty"),
        ("a.jsonl", '{"text": "a"}\n{"text"', "line 2 is not JSON"),
        ("a.jsonl", "[1]\n", "line 1 holds list where an object"),
        ("a.json", '"a"', "holds str where a list"),
        ("a.json", '{"data": [{"text": "a"}]}', "record 0 has the keys 'data', which no format"),
        ("a.csv", "text,text\na,b\n", "names column 'text' twice"),
        ("a.jsonl", '{"input_ids": [5], "attention_mask": ["0"]}', "one value for each input_id"),
        ("a.jsonl", '{"story": "a"}', "has the keys 'story', which no format has"),
        ("a.jsonl", '{"text": "a"}\n{"txt": "b"}', "line 2 has no 'text'"),
        ("a.jsonl", '{"text": 3}', "'text' is int where text must stand"),
        ("a.jsonl", '{"input_ids": [5, 200]}', "token id 200 lies outside the model's vocabulary"),
        ("a.jsonl", '{"input_ids": [5, -1]}', "token id -1 lies outside"),
        ("a.jsonl", '{"input_ids": [5], "labels": [1, 2]}', "2 labels for 1 input_ids"),
        ("a.jsonl", '{"input_ids": [5], "labels": [500]}', "label 500 is neither"),
        ("a.jsonl", '{"input_ids": [5], "attention_mask": []}', "one value for each input_id"),
        ("a.jsonl", '{"input_ids": ["a"]}', "must be a list of whole numbers"),
        ("a.jsonl", '{"messages": [{"role": "user"}]}', "has no chat template"),
        ("a.jsonl", '{"messages": []}', "at least one turn"),
        ("a.jsonl", '{"text": null}', "line 1: 'text' is null, and format text needs a value"),
        (
            "a.jsonl",
            '{"text": "a\\ud800b"}',
            "line 1: character 1 of a text is half of a surrogate",
        ),
        ("a.json", '{"text": "a"}\n{"text"', "line 2 is not JSON"),
        ("a.jsonl", "[" * 100_000, "line 1 is not JSON"),
        ("a.jsonl", '{"prompt": ["a"], "completion": ["b"]}', "an object with a 'role'"),
        ("a.csv", 'text\n"a" b\n', "is not CSV"),
        ("a.csv", "text\na,b\n", "another number of columns"),
    ],
)
def test_unusable_data_is_one_sentence(folder: Path, name: str, content: str, said: str) -> None:
    """F3, and of issue 2: an empty data file, a token id beyond the vocabulary."""
    with pytest.raises(DataError) as raised:
        documents(folder, name, content)
    assert said in str(raised.value)
    assert name in str(raised.value)
    assert len(str(raised.value).splitlines()) == 1


def test_a_later_record_with_null(folder: Path) -> None:
    with pytest.raises(DataError, match="line 2: 'text' is null, and format text needs a value"):
        documents(folder, "a.jsonl", '{"text": "a"}\n{"text": null}\n')


def test_a_record_without_a_key(folder: Path) -> None:
    for form in ("auto", "text"):
        with pytest.raises(DataError, match="line 1 is a record without a key; fill it or remove"):
            documents(folder, "a.jsonl", "{}\n", format=form)


def test_a_text_that_begins_twice(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Ids are those of the model's tokenizer, which adds a token to a text that has it."""
    config = {"bos_token": "^", "eos_token": "<end>", "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (once,) = documents(folder, "a.jsonl", '{"text": "ab"}')
    assert show(once)[0] == "^ab$"
    assert not caplog.records
    (twice,) = documents(folder, "a.jsonl", '{"text": "^ab"}')
    assert show(twice)[0] == "^^ab$"
    assert "begins with '^', and the model's tokenizer adds one" in caplog.text


def test_plain_text_has_no_answers(folder: Path) -> None:
    with pytest.raises(DataError, match="plain text without answers"):
        documents(folder, "a.txt", "to be", loss="answers")
