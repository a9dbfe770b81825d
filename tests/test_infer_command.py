"""`moe-tp generate`: text in, text out, in one process and on ranks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from moe_tp.cli.main import main
from moe_tp.infer import sample_text
from moe_tp.models import from_pretrained
from moe_tp.parallel.mesh import Mesh
from moe_tp.train.tokenizer import load_tokenizer

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random Mixtral with a byte-level tokenizer and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    out = tmp_path_factory.mktemp("hub") / "model"
    words = ["init", "mixtral", str(out), "--set", "vocab_size=300", "--set", "hidden_size=32"]
    assert main([*words, "--dtype", "float32"]) == 0
    special = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*special, *alphabet])}
    builder = Tokenizer(models.BPE(vocabulary, []))
    builder.add_special_tokens(special)
    builder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    builder.decoder = decoders.ByteLevel()
    builder.save(str(out / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "add_eos_token": True}
    (out / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    return out


def test_one_process_ranks_and_the_function_say_the_same(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The prompt begins with the tokenizer's first token and ends open; text streams to stdout."""
    words = ["generate", str(folder), "--prompt", "To be", "--max-new-tokens", "6"]
    out = tmp_path / "out.json"
    assert main([*words, "--json", str(out)]) == 0
    result = json.loads(out.read_text())["samples"][0]
    assert capfd.readouterr().out == result["text"] + "\n"
    model, tokenizer = from_pretrained(folder, Mesh.single()), load_tokenizer(folder)
    (sample,) = sample_text(model, tokenizer, ["To be"], max_new_tokens=6)
    assert sample.tokens == result["tokens"]
    assert sample.text == result["text"]
    assert main([*words, "--nproc", "2", "--tp", "2", "--ep", "2"]) == 0
    assert capfd.readouterr().out == result["text"] + "\n"


def test_many_prompts_chat_and_draws(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "question.txt").write_text("What?")
    words = [
        "generate",
        str(folder),
        "--prompt",
        "a",
        "--prompt-file",
        str(folder / "question.txt"),
    ]
    assert main([*words, "--chat", "--top-p", "0.9", "--max-new-tokens", "3", "--json", "-"]) == 0
    result = json.loads(capfd.readouterr().out)
    assert [sample["prompt"] for sample in result["samples"]] == ["a", "What?"]
    assert main([*words, "--max-new-tokens", "3"]) == 0
    assert "> What?\n" in capfd.readouterr().out


def test_what_is_refused(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """One sentence and exit code 2 for input that cannot be used."""
    bare = tmp_path / "bare"
    assert main(["init", "mixtral", str(bare), "--set", "vocab_size=64"]) == 0
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    output = tmp_path / "output"
    shutil.copytree(bare, output / "final")
    cases = [
        ([str(adapter), "--prompt", "a"], "is an adapter and no model"),
        ([str(bare), "--prompt", "a"], "--tokenizer"),
        ([str(folder)], "there is no prompt"),
        ([str(bare), "--prompt", "a"], "neither tokenizer.json nor tokenizer.model"),
        ([str(bare), "--prompt", "a", "--tokenizer", str(folder)], "outside the vocabulary of 64"),
        ([str(folder), "--prompt", "a" * 5000], "positions; shorten it"),
        ([str(folder), "--prompt", "a", "--prompt", "b\udce9"], "prompt 1 is not UTF-8 text"),
        ([str(folder), "--prompt", "a", "--temperature", "0", "--top-k", "3"], "do nothing"),
        ([str(tmp_path / "none"), "--prompt", "a"], "no folder of this machine"),
        ([str(output), "--prompt", "a"], f"is the output of a run; its model is {output}/final"),
    ]
    capfd.readouterr()
    for words, said in cases:
        assert main(["generate", *words]) == 2
        assert said in capfd.readouterr().err
