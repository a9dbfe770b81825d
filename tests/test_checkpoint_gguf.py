"""GGUF: a dense model and its tokenizer read from llama.cpp's format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from moe_tp.checkpoint.gguf import GgufFile
from moe_tp.errors import CheckpointError, ConfigError
from moe_tp.models.dense import open_dense
from moe_tp.models.upcycle import UpcycleConfig, upcycle

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")

TEXT = "Once more unto the breach, dear friends, once more; 1599 and 12 men's\n\tlives — naïve!"
HEADS, KV_HEADS, SIZE = 4, 2, 16
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "embed_tokens": "token_embd",
    "norm": "output_norm",
}


def bpe() -> Tokenizer:
    """Return a byte-level BPE that cuts text as SmolLM does, learned from a few words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=288,
        special_tokens=["<|endoftext|>", "<|im_start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 4, trainer)
    return tokenizer


def dense_model(**changes: Any) -> Any:
    torch.manual_seed(4)
    config = transformers.LlamaConfig(
        **{
            "vocab_size": 288,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "max_position_embeddings": 64,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e4},
            "rms_norm_eps": 1e-5,
            "initializer_range": 0.2,
            "tie_word_embeddings": True,
            **changes,
        }
    )
    return transformers.LlamaForCausalLM(config).eval()


def write_gguf(path: Path, model: Any, *, rule: str = "smollm", torn: int = 0) -> None:
    """Write a model as llama.cpp's converter does: pairs of rows of q and k beside each other."""
    writer = gguf.GGUFWriter(path, "llama")
    config = model.config
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(5e4)
    writer.add_layer_norm_rms_eps(1e-5)
    saved = bpe()
    vocab = sorted(saved.get_vocab().items(), key=lambda pair: pair[1])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(rule)
    writer.add_token_list([token for token, _ in vocab])
    writer.add_token_types([3 if number < 2 else 1 for _, number in vocab])
    merges = json.loads(saved.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_chat_template("{{ messages }}")
    for name, value in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        layer, _, part = name.removeprefix("model.").removesuffix(".weight").rpartition("layers.")
        number, _, rest = part.partition(".")
        hub = rest if part and rest else part
        label = f"blk.{number}.{NAMES[hub]}" if rest else NAMES[part]
        assert not layer
        value = value.detach()
        if hub.endswith(("q_proj", "k_proj")):
            value = (
                value.view(-1, 2, SIZE // 2, value.shape[1]).transpose(1, 2).reshape(value.shape)
            )
        data = value.contiguous().numpy()
        if value.dim() > 1 and "ffn" in label:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(f"{label}.weight", gguf.quants.quantize(data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(f"{label}.weight", data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if torn:
        data = path.read_bytes()
        path.write_bytes(data[:-torn])


def ids() -> torch.Tensor:
    return torch.randint(0, 288, (2, 17), generator=torch.Generator().manual_seed(1))


def test_upcycled_from_gguf(tmp_path: Path) -> None:
    """The MoE's logits are those of transformers on the GGUF file; its tokenizer's ids too."""
    write_gguf(tmp_path / "dense.gguf", dense_model())
    dense = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="dense.gguf", dtype=torch.float32
    ).eval()
    config = UpcycleConfig(num_experts=3)
    upcycle(tmp_path / "dense.gguf", tmp_path / "moe", config, dtype=torch.float32)
    moe = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "moe").eval()
    with torch.no_grad():
        want, got = dense(ids()).logits, moe(ids()).logits
        exact = dense_model()(ids()).logits
    assert (got - want).norm() < 2e-6 * want.norm()
    assert 1e-4 < (got - exact).norm() / exact.norm() < 0.05  # the MLPs passed through 8 bits
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "moe")
    text = TEXT + "<|im_start|>"
    assert tokenizer(text).input_ids == bpe().encode(text).ids
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|endoftext|>")
    assert (tmp_path / "moe" / "chat_template.jinja").read_text() == "{{ messages }}"


def test_any_rows(tmp_path: Path) -> None:
    """A slice is what the whole tensor has there; q's rows are in the hub's order."""
    model = dense_model()
    write_gguf(tmp_path / "dense.gguf", model)
    dense = open_dense(tmp_path / "dense.gguf")
    for part in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
        name = f"model.layers.1.{part}.weight"
        got = dense.read(name, [range(5, 23), range(3, 9)])
        assert torch.equal(got, model.state_dict()[name][5:23, 3:9])
    assert dense.config["rms_norm_eps"] == 1e-5


def test_refusals(tmp_path: Path) -> None:
    """A torn file, an unknown rule of cutting text, and a tensor that would be lost."""
    with pytest.raises(CheckpointError, match="found nothing"):
        GgufFile(tmp_path / "no.gguf")
    write_gguf(tmp_path / "torn.gguf", dense_model(), torn=4000)
    with pytest.raises(CheckpointError, match=r"torn\.gguf: expected a whole GGUF file"):
        GgufFile(tmp_path / "torn.gguf")
    write_gguf(tmp_path / "odd.gguf", dense_model(), rule="deepseek-coder")
    with pytest.raises(CheckpointError, match=r"rule 'deepseek-coder'.*--tokenizer"):
        open_dense(tmp_path / "odd.gguf")
    (tmp_path / "tokenizer.json").write_text("{}")
    named = open_dense(tmp_path / "odd.gguf", tokenizer=tmp_path)
    assert named.storage.sizes() == {"tokenizer.json": 2}
    writer = gguf.GGUFWriter(tmp_path / "moe.gguf", "llama")
    writer.add_tensor("blk.0.ffn_gate_exps.weight", torch.ones(2, 32).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"ffn_gate_exps\.weight.*does not compute"):
        open_dense(tmp_path / "moe.gguf")
    writer = gguf.GGUFWriter(tmp_path / "phi.gguf", "phi3")
    writer.add_tensor("token_embd.weight", torch.ones(2, 32).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match="'phi3' is no dense model"):
        open_dense(tmp_path / "phi.gguf")
