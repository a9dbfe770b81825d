"""Memory of LoRA above the frozen base: this library beside PEFT, one process, CPU.

    python benchmarks/lora_memory.py [--tokens 512] [--rank 8] [--write]

Rows `int8` and `int4` keep the experts' frozen weights so (`LoRAConfig.base`).

A random Mixtral (about 440 MB in fp32) is written to a temporary folder. Each of the two loads it
in a process of its own, puts adapters on attention and experts and does three optimiser steps on
the same tokens. "Above the base" is the most memory that the process held (VmHWM) during these
steps over what it held with the model loaded (VmRSS); adapters, gradients and optimiser states are
counted from the tensors, and the rest is activations and work space.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import gc
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

CONFIG: dict[str, Any] = {
    "model_type": "mixtral",
    "vocab_size": 2048,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 1024,
    "router_aux_loss_coef": 0.0,
}
STEPS = 3
LIBRARIES = ("moe_tp", "int8", "int4", "peft")
COLUMNS = ("base", "adapters", "gradients", "states", "above the base", "of it work space", "loss")


def resident(name: str = "VmRSS") -> int:
    """Return the bytes that this process holds, or with VmHWM held at most (Linux)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}")


def weights_of(model: torch.nn.Module) -> int:
    """Return the bytes of frozen parameters, and of weights that are none any more."""
    frozen = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    return frozen + sum(b.nbytes for n, b in model.named_buffers() if ".quantized." in n)


def measure(library: str, folder: str, tokens: int, rank: int) -> dict[str, Any]:
    """Return the bytes of one library's three steps."""
    torch.manual_seed(0)
    ids = torch.randint(0, CONFIG["vocab_size"], (tokens // 128, 128))
    if library != "peft":
        from moe_tp import Mesh, forward_backward, settle_gradients
        from moe_tp.models import from_pretrained
        from moe_tp.train import LoRAConfig, apply_lora

        model: Any = from_pretrained(folder, Mesh.single(), dtype=torch.float32)
        base = settle()
        kind = None if library == "moe_tp" else library
        apply_lora(model, LoRAConfig(rank=rank, alpha=16.0, base=kind))
        if kind is not None:  # what the weights left behind is given back first
            base = settle() - sum(p.nbytes for p in model.parameters() if p.requires_grad)

        def step() -> float:
            out = forward_backward(model, [{"input_ids": ids, "labels": ids}])
            settle_gradients(model)
            return float(out.loss)

    else:
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM

        hub = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        base = settle()
        settings = LoraConfig(
            r=rank,
            lora_alpha=16,
            target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
            target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        )
        model = get_peft_model(hub, settings).train()

        def step() -> float:
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            return float(loss)

    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, foreach=False)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = step()
        optimizer.step()
    states = [t for state in optimizer.state.values() for t in state.values()]
    found = {
        "base": weights_of(model),
        "adapters": sum(p.nbytes for p in trained),
        "gradients": sum(p.grad.nbytes for p in trained if p.grad is not None),
        "states": sum(t.nbytes for t in states if isinstance(t, torch.Tensor)),
        "above the base": resident("VmHWM") - base,
    }
    rest = found["above the base"] - found["adapters"] - found["gradients"] - found["states"]
    return {**found, "of it work space": rest, "loss": round(loss, 4)}


def settle() -> int:
    """Return the bytes held now, from where the most is counted anew."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return resident()


def write_base(folder: Path) -> int:
    """Return the bytes of the experts' weights, having written the random model."""
    from moe_tp import Mesh
    from moe_tp.models import ModelConfig, build, save_pretrained

    config = ModelConfig.from_hub(CONFIG)
    save_pretrained(build(config, Mesh.single(), seed=0), folder, dtype=torch.float32)
    shape = [CONFIG[n] for n in ("num_hidden_layers", "num_local_experts")]
    size = 3 * CONFIG["hidden_size"] * CONFIG["intermediate_size"] * 4
    return int(shape[0] * shape[1] * size)


def main() -> None:
    """Print the table, and write it beside this file if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--write", action="store_true", help="write the dated table")
    parser.add_argument("--only", choices=LIBRARIES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(2)
    if options.only:
        print(json.dumps(measure(options.only, options.folder, options.tokens, options.rank)))
        return
    words = ["--tokens", str(options.tokens), "--rank", str(options.rank)]
    with tempfile.TemporaryDirectory() as folder:
        experts = write_base(Path(folder))
        rows = {}
        for library in LIBRARIES:
            command = [sys.executable, __file__, "--only", library, "--folder", folder, *words]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            rows[library] = json.loads(done.stdout.splitlines()[-1])
    text = table(rows, experts, options)
    print(text)
    if options.write:
        date = datetime.date.today().isoformat()
        Path(__file__).with_name(f"lora_memory-{date}.md").write_text(text + "\n")


def table(rows: dict[str, dict[str, Any]], experts: int, options: argparse.Namespace) -> str:
    """Return the dated table."""
    import peft
    import transformers

    lines = [
        "# LoRA: memory above the frozen base",
        "",
        f"`python benchmarks/lora_memory.py --tokens {options.tokens} --rank {options.rank}`, "
        f"{datetime.date.today().isoformat()}",
        "",
        f"Mixtral {CONFIG['num_hidden_layers']} layers, width {CONFIG['hidden_size']}, "
        f"{CONFIG['num_local_experts']} experts of {CONFIG['intermediate_size']}, fp32; its "
        f"experts are {experts / 1e6:.0f} MB. Adapters on attention and experts, AdamW, "
        f"{STEPS} steps. torch {torch.__version__}, transformers {transformers.__version__}, peft "
        f"{peft.__version__}, {platform.machine()}, 2 threads of {os.cpu_count()} cores. MB:",
        "",
        "| | " + " | ".join(COLUMNS) + " |",
        "|---|" + "---|" * len(COLUMNS),
    ]
    for name, row in rows.items():
        cells = [f"{row[c]:.4f}" if c == "loss" else f"{row[c] / 1e6:.1f}" for c in COLUMNS]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
