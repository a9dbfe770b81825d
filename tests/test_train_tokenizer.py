"""Token ids equal to those of the model's own tokenizer, by both file kinds."""

from __future__ import annotations

import importlib.util
import itertools
import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_tp.errors import DataError
from moe_tp.train.tokenizer import Tokenizer, load_tokenizer

TEXTS = [
    "To be, or not to be: that is the question.",
    "Hé llo  wörld\n\n\ttabs",
    " leading and trailing ",
    "emoji \U0001f600 and 漢字",
    "</s> is a token, <s> too",
    "",
]


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with Mixtral's own SentencePiece model."""
    spec = importlib.util.find_spec("mistral_common")
    assert spec is not None
    assert spec.submodule_search_locations
    folder = tmp_path_factory.mktemp("sentencepiece")
    source = Path(spec.submodule_search_locations[0]) / "data" / "tokenizer.model.v1"
    shutil.copy(source, folder / "tokenizer.model")
    return folder


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small byte-level tokenizer.json that begins texts with a token."""
    from tokenizers import Tokenizer as Builder
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers

    folder = tmp_path_factory.mktemp("fast")
    builder = Builder(models.BPE())
    builder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    builder.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    builder.train_from_iterator(TEXTS * 3, trainer)
    builder.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    builder.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "</s>", "special": True},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_sentencepiece_equals_the_models_own(mixtral: Path) -> None:
    from mistral_common.tokens.tokenizers.sentencepiece import SentencePieceTokenizer

    ours = load_tokenizer(mixtral)
    own = SentencePieceTokenizer(str(mixtral / "tokenizer.model"))
    for text in TEXTS:
        if "<s>" not in text:
            assert ours.document(text) == own.encode(text, bos=True, eos=True), text
    assert (ours.vocab_size, ours.bos, ours.eos) == (32000, 1, 2)
    assert ours.backend.decode([1, *ours.backend.encode("to be").ids, 2]) == "to be"


def test_sentencepiece_knows_its_special_tokens(mixtral: Path) -> None:
    found = load_tokenizer(mixtral).backend.encode("<s>hi</s>")
    assert (found.ids[0], found.ids[-1]) == (1, 2)
    assert (found.spans[0], found.spans[-1]) == ((0, 3), (5, 9))


def test_tokenizer_json_equals_transformers(fast: Path) -> None:
    from transformers import AutoTokenizer

    ours, own = load_tokenizer(fast), AutoTokenizer.from_pretrained(str(fast))
    for text in TEXTS:
        assert ours.document(text, end=False) == own(text)["input_ids"], text
        assert ours.backend.encode(text).ids == own(text, add_special_tokens=False)["input_ids"]
    assert (ours.bos, ours.eos, ours.before, ours.after) == (own.bos_token_id, 1, (0,), ())


def test_the_config_decides_what_begins_and_ends_a_text(fast: Path, tmp_path: Path) -> None:
    shutil.copy(fast / "tokenizer.json", tmp_path)
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": False}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours = load_tokenizer(tmp_path)
    assert ours.document("to be")[0] != 0
    assert ours.document("to be")[-1] == 1
    assert ours.document("to be</s>")[-2] != 1  # the end that the text brings is enough
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"add_eos_token": True}))
    assert load_tokenizer(tmp_path).document("to be", end=False)[-1] == 1


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=30))
def test_spans_lie_in_order_and_cover_the_text(both: list[Tokenizer], text: str) -> None:
    for tokenizer in both:
        spans = tokenizer.backend.encode(text).spans
        covered = {i for start, stop in spans for i in range(start, stop)}
        assert all(a[0] <= b[0] and a[1] <= b[1] for a, b in itertools.pairwise(spans))
        assert covered == set(range(len(text)))


@pytest.fixture(scope="module")
def both(mixtral: Path, fast: Path) -> list[Tokenizer]:
    return [load_tokenizer(mixtral), load_tokenizer(fast)]


def test_a_folder_without_a_tokenizer_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"neither tokenizer\.json nor tokenizer\.model"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match="cannot be read as a tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(DataError, match="cannot be read as JSON"):
        load_tokenizer(tmp_path)


def test_the_chat_template_is_found(fast: Path, tmp_path: Path) -> None:
    shutil.copy(fast / "tokenizer.json", tmp_path)
    named = [{"name": "tool_use", "template": "b"}, {"name": "default", "template": "a"}]
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": named}))
    assert load_tokenizer(tmp_path).chat_template == "a"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert load_tokenizer(tmp_path).chat_template == "file"
