"""Memory of a training step beside transformers', and what is kept of each layer.

    python benchmarks/activation_memory.py [--tokens 2048 4096] [--write]

One process, the same Mixtral and Qwen3-MoE on both sides, fp32 weights from one folder, one
sequence. Peak memory is what tensors hold: the bytes of all storages alive after every operator of
forward and backward, the parameters among them (`moe_tp.parallel.live`); scratch inside operators
is not seen, and the buffers that the experts' kernels use again on CPUs are off, as on a GPU (up to
512 MB of memory that no tensor needs). Parameters and their gradients are in both sides' peaks, so
sequences are long enough for activations to count. transformers runs its `grouped_mm` experts and
`sdpa` attention.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from side_by_side import publish, table, today, versions

from moe_tp import Mesh, Runtime, forward_backward
from moe_tp.experts import workspace
from moe_tp.models import build, from_pretrained, save_pretrained
from moe_tp.models.families import preset
from moe_tp.parallel.live import LiveBytes, tensors_of

MIB = 1 << 20
WARM = 64  # tokens of the step before the measured one
SIZES: dict[str, dict[str, Any]] = {
    "mixtral": {"intermediate_size": 1792, "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": {"moe_intermediate_size": 256, "num_experts": 64, "num_experts_per_tok": 8},
}
COMMON: dict[str, Any] = {
    "vocab_size": 16000,
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "tie_word_embeddings": False,
}


def peak(model: torch.nn.Module, step: Callable[[torch.Tensor], object], ids: torch.Tensor) -> int:
    """Return the most bytes that tensors held during a step, after a short first one."""
    step(ids[:, :WARM])
    model.zero_grad()
    with LiveBytes() as live:
        live.add(tensors_of(model))
        step(ids)
    return live.peak


def ours(folder: str, ids: torch.Tensor, recompute: str) -> tuple[int, int]:
    """Return bytes of the parameters and of the peak."""
    mesh = Mesh.single(Runtime(recompute=recompute, loss_chunk=128))
    model = from_pretrained(folder, mesh, dtype=torch.float32)
    weights = sum(param.nbytes for param in model.parameters())

    def step(ids: torch.Tensor) -> object:
        return forward_backward(model, [{"input_ids": ids, "labels": ids}])

    return weights, peak(model, step, ids)


def theirs(folder: str, ids: torch.Tensor, checkpointing: bool) -> tuple[int, int]:
    """Return bytes of the parameters and of the peak."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, experts_implementation="grouped_mm", use_cache=False
    )
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    weights = sum(param.nbytes for param in model.parameters())
    return weights, peak(model, lambda ids: model(ids, labels=ids).loss.backward(), ids)


def main() -> None:
    """Print, and with --write keep, a table of peaks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 4096])
    parser.add_argument("--write", action="store_true", help="keep benchmarks/NAME-DATE.md")
    options = parser.parse_args()
    workspace.SMALLEST = 1 << 62
    rows: list[list[str]] = []
    for family, sizes in SIZES.items():
        model = build(preset(family, **COMMON, **sizes), Mesh.single(), seed=0)
        with tempfile.TemporaryDirectory() as folder:
            save_pretrained(model, folder)
            del model
            for tokens in options.tokens:
                torch.manual_seed(0)
                ids = torch.randint(COMMON["vocab_size"], (1, tokens))
                peer = {way: theirs(folder, ids, way == "full") for way in ("none", "full")}
                for recompute in ("none", "selective", "full"):
                    weights, top = ours(folder, ids, recompute)
                    row = [family, str(tokens), recompute]
                    row += [f"{size / MIB:.0f}" for size in (2 * weights, top)]
                    for _, other in peer.values():
                        row += [f"{other / MIB:.0f}", f"{top / other:.2f}"]
                    rows.append(row)
                    print(*rows[-1], flush=True)
    head = ["model", "tokens", "recompute", "weights and gradients MiB", "peak MiB"]
    head += ["transformers MiB", "ratio", "transformers, checkpointing, MiB", "ratio"]
    lines = [
        f"# Peak memory of a training step, {today()}",
        "",
        f"`python benchmarks/activation_memory.py`: forward and backward of one sequence, fp32, "
        f"{COMMON['num_hidden_layers']} layers, width {COMMON['hidden_size']}, vocabulary "
        f"{COMMON['vocab_size']}, experts as in shapes A (mixtral) and B (qwen3_moe) of moe_layer, "
        f"loss in chunks of 128 tokens; {versions()}. Weights and gradients are in every "
        "peak: no ratio can be below their part of transformers' peak.",
        "",
        *table(head, rows),
    ]
    publish("activation_memory", lines, write=options.write)


if __name__ == "__main__":
    main()
