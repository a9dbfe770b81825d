"""Settings from YAML and words: types, unknown keys, what is saved with a run."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
import torch
import yaml
from settings_table import PAGE, SECTIONS, documented, written

from moe_tp.errors import ConfigError
from moe_tp.train.checks import warn_of_few, warn_of_files
from moe_tp.train.config import DataConfig, FinetuneConfig, TrainConfig
from moe_tp.train.documents import Document
from moe_tp.train.files import list_files
from moe_tp.train.rows import make_rows
from moe_tp.train.settings import from_mapping, load_config, to_yaml

SMALL = "model: m\noutput: o\ndata: {train: a.txt}\ntrain: {steps: 3}\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "run.yaml"
    file.write_text(SMALL)
    return file


def test_words_take_their_fields_types(path: Path) -> None:
    words = [
        "train.lr=1e-4",  # text to YAML 1.1, which wants 1.0e-4
        "train.steps=1e3",
        "train.betas=[0.8, 0.9]",
        "train.save_dtype=bf16",
        "data.train=[b.txt, c.jsonl]",
        "data.columns.text=body",
        "data.packing=false",
        "parallel.tp=2",
        "runtime.compute_dtype=bfloat16",
        "runtime.stage_layers=[1, 2]",
        "train.residual_dropout=0.1",
        "output=7",
    ]
    config = load_config(path, words)
    assert (config.train.lr, config.train.steps) == (1e-4, 1000)
    assert type(config.train.steps) is int
    assert config.train.betas == (0.8, 0.9)
    assert config.train.save_dtype is torch.bfloat16
    assert config.data.train == ("b.txt", "c.jsonl")
    assert config.data.columns == {"text": "body"}
    assert config.data.packing is False
    assert config.parallel.tp == 2
    assert config.runtime.compute_dtype is torch.bfloat16
    assert config.runtime.stage_layers == (1, 2)
    assert config.train.residual_dropout == 0.1
    assert config.output == "7"


def test_home_in_paths(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No shell reads a settings file, so `~` is read here; URLs and hub ids stay."""
    monkeypatch.setenv("HOME", "/home/me")
    words = ["model=~/m", "output=~/o", "data.train=[~/a.txt, b.txt]", "data.tokenizer=~/t"]
    config = load_config(path, words)
    assert (config.model, config.output) == ("/home/me/m", "/home/me/o")
    assert config.data.train == ("/home/me/a.txt", "b.txt")
    assert (config.data.tokenizer, config.data.chat_template) == ("/home/me/t", None)
    assert load_config(path, ["model=s3://b/~x"]).model == "s3://b/~x"


def test_none_stands_for_none(path: Path) -> None:
    config = load_config(path, ["train.steps=null", "train.epochs=2", "parallel.dp=none"])
    assert (config.train.steps, config.train.epochs, config.parallel.dp) == (None, 2.0, None)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("train.lrr=1", "train.lrr is unknown; did you mean lr?"),
        ("trian.lr=1", "trian is unknown; did you mean train?"),
        ("runtime.recompte=full", "did you mean recompute?"),
        ("data.seqlen=8", "did you mean seq_len?"),
        ("train.lr=fast", "train.lr='fast' must be a number"),
        ("train.steps=2.5", "train.steps=2.5 must be a whole number"),
        ("train.steps=true", "train.steps=True must be a whole number"),
        ("train.save_dtype=int3", "must be a dtype such as bfloat16"),
        ("train.schedule=cosin", "is not one of constant, linear, cosine, wsd"),
        ("train.betas=0.9", "must hold 2 values"),
        ("data=3", "data=3 must hold keys of its own"),
        ("data.train.x=3", "holds no keys"),
        ("train.micro_batch=0", "train.micro_batch=0 must be at least 1"),
        ("train.epochs=1", "give exactly one of them"),
        ("train.weight_decay=-0.1", "train.weight_decay=-0.1 must be a finite number"),
        ("train.lr=inf", "train.lr=inf must be a finite number"),
        ("train.max_grad_norm=-1", "train.max_grad_norm=-1.0"),
        ("train.balance_coef=-1", "train.balance_coef=-1.0"),
        ("train.betas=[0.9, 1.5]", "train.betas=(0.9, 1.5) must lie in [0, 1)"),
        ("train.momentum=1", "train.momentum=1.0 must lie in [0, 1)"),
        ("output=m", "output=m is the model's own folder"),
        ("output=''", "output is empty; name a folder"),
        ("parallel.tp=0", "tp=0 must be a whole number of at least 1"),
        ("data.train=[]", "data.train is empty"),
        ("data.columns={body: text}", "names 'body', which no format reads (did you mean text: b"),
        ("data.columns={txt: body}", "no format reads; write a name of text, messages,"),
        ("data.columns={text: a, prompt: a}", "gives one column two names"),
        ("train={epochs: .inf}", "train.epochs=inf must be a finite number above 0"),
        ("train.decay_steps=-3", "train.decay_steps=-3 must be at least 0"),
        ("train.eps=0", "train.eps=0.0 divides 0 by 0"),
        ("train.max_shard_size=big", "train.max_shard_size='big' is no size"),
        ("train={steps: 2, global_batch: 2, global_batch_tokens: 8192}", "give one of them"),
        ("seed=-1", "seed=-1 must lie in [0, 2**63)"),
        ("seed=18446744073709551616", "must lie in [0, 2**63)"),
        ("train.lr", "is no setting; write key.sub=value"),
        ("train.lr=[", "has no readable value"),
    ],
)
def test_what_is_wrong_is_named(path: Path, word: str, said: str) -> None:
    """F3."""
    with pytest.raises(ConfigError) as raised:
        load_config(path, [word])
    assert said in str(raised.value)
    assert len(str(raised.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        (["runtime.compute_dtype=fp16"], "compute_dtype"),
        (["runtime.master_dtype=fp16"], "master_dtype"),
        (["runtime.master_dtype=fp16", "runtime.compute_dtype=bf16"], "master_dtype"),
        (["lora={rank: 2, alpha: 2}", "runtime.compute_dtype=fp16"], "compute_dtype"),
        (["lora={rank: 2, alpha: 2}", "runtime.master_dtype=fp16"], "master_dtype"),
        (["lora={rank: 2, alpha: 2}", "runtime={master_dtype: fp16, compute_dtype: bf16}"], None),
        (["train.save_dtype=fp16", "runtime.wire_dtype=fp16"], None),
    ],
)
def test_gradients_in_fp16_are_refused(path: Path, words: list[str], refused: str | None) -> None:
    """F3: nothing scales the loss; frozen weights, sums on the wire and results may be in fp16."""
    if refused is None:
        assert load_config(path, words)
        return
    with pytest.raises(ConfigError, match=f"runtime.{refused}=float16 .* choose bfloat16"):
        load_config(path, words)


def test_an_output_in_a_data_folder(path: Path) -> None:
    """K4: the next start would read what the first has written, as data."""
    data = path.parent / "data"
    (data / "inner").mkdir(parents=True)
    for train, held_out, output in (
        (data, "a.txt", data),
        (data / "inner", data, data / "run"),
        (data / "inner", "b.txt", data / "other" / ".." / "inner" / "run"),
    ):
        words = [f"data.train={train}", f"data.eval={held_out}"]
        with pytest.raises(ConfigError, match=r"lies in the data folder .* choose another"):
            load_config(path, [*words, f"output={output}"])
        assert load_config(path, [*words, f"output={path.parent / 'run'}"])


def test_a_missing_key_is_explained(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("output: o\ndata: {train: a.txt}\ntrain: {steps: 3}\n")
    with pytest.raises(ConfigError, match="model is missing; it is: hub-format folder"):
        load_config(file)
    file.write_text("model: m\noutput: o\ntrain: {steps: 3}\n")
    with pytest.raises(ConfigError, match=r"data\.train is missing"):
        load_config(file)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [", "is not YAML"),
        ("- 1\n", "holds list where keys"),
        (SMALL + "seed: 1\nseed: 2\n", "stands there twice"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=said):
        load_config(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "none.yaml")


def test_what_is_saved_reads_back(path: Path) -> None:
    words = ["train.save_dtype=bf16", "data.columns.text=body", "runtime.stage_layers=[1, 2]"]
    config = load_config(path, words)
    assert from_mapping(FinetuneConfig, yaml.safe_load(to_yaml(config)), "saved") == config


def test_every_field_is_in_the_docs() -> None:
    """After a change of settings: `python tests/settings_table.py`."""
    assert PAGE.read_text(encoding="utf-8") == written()
    for name, kind in SECTIONS:
        assert set(documented(kind)) >= {f.name for f in fields(kind) if f.init}, name


def test_every_field_is_documented() -> None:
    for kind in (DataConfig, TrainConfig, FinetuneConfig):
        text = kind.__doc__ or ""
        for name in kind.__dataclass_fields__:
            assert f"        {name}: " in text, name


def test_a_global_batch_must_be_filled() -> None:
    config = TrainConfig(steps=1, micro_batch=2, global_batch=12)
    assert (config.accumulation(1), config.accumulation(3)) == (6, 2)
    with pytest.raises(ConfigError, match="choose a multiple of 8"):
        config.accumulation(4)


def test_held_out_data_that_is_learned_from(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By whatever names the two settings give the file."""
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("x")
    for held_out, said in (("b.txt", False), ("a.txt", True)):
        other = f"{tmp_path}/../{tmp_path.name}/{held_out}"
        warn_of_files(list_files([f"{tmp_path}/a*"]), list_files([other]))
        assert (f"{held_out} is in data.train too" in caplog.text) == said
        assert "more than once" not in caplog.text


def test_a_file_that_is_named_twice(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Once by its name, once by a glob: read twice, as it says."""
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("x")
    warn_of_files(list_files([f"{tmp_path}/*.txt", f"{tmp_path}/b.txt"]), [])
    assert caplog.text.count(f"data.train names {tmp_path / 'b.txt'} more than once") == 1


@pytest.mark.parametrize(
    "word", ["train.lr=", "model=", "parallel.tp=", "train=", "train.schedule=", "data.eval="]
)
def test_a_word_without_a_value(path: Path, word: str) -> None:
    """It is said so, and what stands for none in a list; where none is a value it is taken."""
    none = r"or \[\] for none, " if word == "data.eval=" else ""
    fix = f"has no value; give it one, {none}or leave it out"
    with pytest.raises(ConfigError, match=f"{word[:-1]} {fix}"):
        load_config(path, [word])
    assert load_config(path, ["data.tokenizer=", "data.eval=[]"]).data.tokenizer is None


def test_fewer_rows_than_a_step_takes(caplog: pytest.LogCaptureFixture) -> None:
    documents = [Document(ids=[1, 2, 3], labels=[1, 2, 3], splits=True)] * 3
    rows = make_rows(documents, 4)
    for batch, said in ((3, 0), (4, 1)):
        warn_of_few(rows, TrainConfig(steps=1, global_batch=batch))
        assert caplog.text.count("the data makes 3 rows of data.seq_len") == said
