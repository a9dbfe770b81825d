"""What the benchmarks share: peers' layers, tables and the dated file."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import transformers
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

from moe_tp import MoE
from moe_tp.bench.floor import LayerShape

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Layer = Callable[[torch.Tensor], torch.Tensor]


def their_layer(ours: MoE, shape: LayerShape, how: str) -> MixtralSparseMoeBlock:
    """Return transformers' layer with our weights and its experts computed in this way."""
    config = MixtralConfig(
        hidden_size=shape.dim,
        intermediate_size=shape.expert_dim,
        num_local_experts=shape.experts,
        num_experts_per_tok=shape.top_k,
    )
    config._experts_implementation = how
    gate_up = ours.experts.get_parameter("gate_up").to_local()
    theirs = MixtralSparseMoeBlock(config).to(gate_up.device, gate_up.dtype)
    with torch.no_grad():
        theirs.gate.weight.copy_(ours.router.get_parameter("weight").to_local())
        theirs.experts.gate_up_proj.copy_(gate_up.flatten(1, 2))
        theirs.experts.down_proj.copy_(ours.experts.get_parameter("down").to_local())
    return theirs


def check_equal(layers: dict[str, Layer], x_TD: torch.Tensor) -> None:
    """Raise unless all layers compute the same as the first."""
    expected: torch.Tensor | None = None
    for name, layer in layers.items():
        y_TD = layer(x_TD).detach().double()
        expected = y_TD if expected is None else expected
        error = ((y_TD - expected).norm() / expected.norm()).item()
        if error > 1e-5:
            raise SystemExit(f"{name} differs by {error:.1e}")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


def today() -> str:
    """Return the date of the machine's clock, UTC."""
    return datetime.datetime.now(datetime.timezone.utc).date().isoformat()


def versions() -> str:
    """Return what a table says about software and processor."""
    return (
        f"torch {torch.__version__}, transformers {transformers.__version__}, Python "
        f"{platform.python_version()}, {platform.machine()}"
    )


def publish(name: str, lines: Sequence[str], *, write: bool) -> None:
    """Print the lines; with `write` keep them as `benchmarks/NAME-DATE.md`."""
    text = "\n".join(lines)
    print(text, flush=True)
    if write:
        path = Path(__file__).parent / f"{name}-{today()}.md"
        path.write_text(text + "\n", encoding="utf-8")
