"""Sampled generations in the midst of a run: they change nothing, and are kept by step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from moe_tp.errors import ConfigError
from moe_tp.models import ModelConfig, build, save_pretrained
from moe_tp.parallel.mesh import Mesh
from moe_tp.testing import run_ranks
from moe_tp.train.config import FinetuneConfig
from moe_tp.train.loop import finetune
from moe_tp.train.settings import from_mapping

WORDS = ["<eos>", *"abcdefghij"]
HUB: dict[str, Any] = {
    "model_type": "mixtral",
    "vocab_size": len(WORDS),
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of eleven words, and a text of ten in a circle."""
    root = tmp_path_factory.mktemp("samples")
    save_pretrained(build(ModelConfig.from_hub(HUB), Mesh.single(), seed=1), root / "model")
    tokenizer = Tokenizer(models.WordLevel({w: n for n, w in enumerate(WORDS)}, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(root / "model" / "tokenizer.json"))
    (root / "model" / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
    circle = " ".join("abcdefghij" * 4)
    lines = [json.dumps({"text": circle[2 * n :]}) for n in range(10)]
    (root / "train.jsonl").write_text("\n".join(lines))
    return root


def run(root: Path, output: str, parallel: dict[str, int], **train: Any) -> list[dict[str, Any]]:
    tree = {
        "model": str(root / "model"),
        "output": str(root / output),
        "parallel": parallel,
        "data": {"train": str(root / "train.jsonl"), "seq_len": 24},
        "train": {
            "steps": 30,
            "global_batch": 8,
            "micro_batch": 4,
            "lr": 3e-2,
            "schedule": "constant",
            **train,
        },
    }
    config = from_mapping(FinetuneConfig, tree, "test")
    split = torch.distributed.is_initialized()
    mesh = Mesh(config.parallel) if split else Mesh.single()
    finetune(config, mesh, quiet=True)
    text = (root / output / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in text]


def samples_of(root: Path, output: str) -> list[dict[str, Any]]:
    text = (root / output / "samples.jsonl").read_text().splitlines()
    return [json.loads(line) for line in text]


ASKED = {"sample_prompts": ["a b c", "h"], "sample_every": 20, "sample_tokens": 6}


def test_samples_show_what_is_learned_and_change_nothing(root: Path) -> None:
    """At steps 20 and 30; the losses are bit for bit those of a run without."""
    asked, without = run(root, "asked", {}, **ASKED), run(root, "without", {})
    assert [line["loss"] for line in asked] == [line["loss"] for line in without]
    found = samples_of(root, "asked")
    assert [(s["step"], s["prompt"]) for s in found] == [
        (20, "a b c"),
        (20, "h"),
        (30, "a b c"),
        (30, "h"),
    ]
    assert found[2]["text"].split() == list("defghi")
    assert found[3]["text"].split() == list("ijabcd")


def test_every_layout_gives_the_samples(root: Path) -> None:
    """Also with ZeRO, whose weights are gathered for them."""
    run(root, "one", {}, **ASKED)
    layout = {"dp": 2, "ep": 2, "zero": 3}
    run_ranks(run_asked, 2, root, "two", layout)
    assert samples_of(root, "two")[2:] == samples_of(root, "one")[2:]


def run_asked(root: Path, output: str, layout: dict[str, int]) -> None:
    run(root, output, layout, **ASKED)


def refused(root: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.sample_prompts needs cp=1"):
        run(root, "refused", {"cp": 2}, **ASKED)


def test_context_parallel_runs_refuse_samples(root: Path) -> None:
    """F3: before anything is loaded."""
    run_ranks(refused, 2, root)
    assert not (root / "refused").exists()
