"""The tokenizer inside a GGUF file as the files that a hub folder has.

A byte-level BPE (GPT-2's) is there as a list of tokens, a list of merges and the name of the rule
that cuts text into words. That rule is not in the file, so only rules that are known here are
taken: another one would give other ids without a word.
"""

from __future__ import annotations

import json
from typing import Any

from moe_tp.checkpoint.gguf import GgufFile
from moe_tp.errors import CheckpointError

_CONTROL, _USER = 3, 4  # llama.cpp's kinds of token
_WORDS = (  # how Qwen2 and Llama-3 cut text; they differ in how many digits stay together
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_DIGITS = {"type": "Digits", "individual_digits": True}


def _split(digits: str) -> list[dict[str, Any]]:
    pattern = {"Regex": _WORDS % digits}
    cut = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    return [cut, _BYTES | {"use_regex": False}]


_RULES: dict[str, list[dict[str, Any]]] = {
    "gpt-2": [_BYTES],
    "smollm": [_DIGITS, _BYTES],
    "qwen2": _split(""),
    "llama-bpe": _split("{1,3}"),
}


def tokenizer_files(file: GgufFile) -> dict[str, bytes]:
    """Return `tokenizer.json` and what stands beside it in a hub folder, by name.

    Args:
        file: with a byte-level BPE.

    Raises:
        CheckpointError: it holds another kind of tokenizer.
    """
    kind, rule = file.need("tokenizer.ggml.model"), file.field("tokenizer.ggml.pre", "")
    if kind != "gpt2" or rule not in _RULES:
        raise CheckpointError(
            f"{file.where}: expected a tokenizer of kind gpt2 with a rule among "
            f"{', '.join(_RULES)}, found kind {kind!r} with rule {rule!r}; name a folder with the "
            "model's tokenizer.json (--tokenizer)"
        )
    tokens: list[str] = file.need("tokenizer.ggml.tokens")
    kinds: list[int] = file.field("tokenizer.ggml.token_type") or [1] * len(tokens)
    added = [
        {
            "id": place,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": of == _CONTROL,
        }
        for place, (token, of) in enumerate(zip(tokens, kinds, strict=True))
        if of in (_CONTROL, _USER)
    ]
    special = {
        f"{name}_token": tokens[number]
        for name in ("bos", "eos", "unknown", "padding")
        if (number := file.field(f"tokenizer.ggml.{name}_token_id")) is not None
    }
    for short, long in (("unk_token", "unknown_token"), ("pad_token", "padding_token")):
        if long in special:
            special[short] = special.pop(long)
    bos = [special["bos_token"]] if file.field("tokenizer.ggml.add_bos_token", False) else []
    merges = [merge.split(" ") for merge in file.need("tokenizer.ggml.merges")]
    whole = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "NFC"} if rule == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": _RULES[rule]},
        "post_processor": _processor(bos, tokens),
        "decoder": _BYTES,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": rule == "llama-bpe",
            "vocab": {token: place for place, token in enumerate(tokens)},
            "merges": merges,
        },
    }
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    files = {"tokenizer.json": _json(whole), "tokenizer_config.json": _json(settings)}
    template = file.field("tokenizer.chat_template")
    if template:
        files["chat_template.jinja"] = template.encode()
    return files


def _processor(first: list[str], tokens: list[str]) -> dict[str, Any] | None:
    """Return the step that puts a token in front of a text, or None for none."""
    if not first:
        return None
    name = first[0]
    one = [{"SpecialToken": {"id": name, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    pair = [{"SpecialToken": {"id": name, "type_id": 1}}, {"Sequence": {"id": "B", "type_id": 1}}]
    return {
        "type": "TemplateProcessing",
        "single": one,
        "pair": one + pair,
        "special_tokens": {
            name: {"id": name, "ids": [tokens.index(name)], "tokens": [name]},
        },
    }


def _json(value: Any) -> bytes:
    return (json.dumps(value, ensure_ascii=False, indent=1) + "\n").encode()
