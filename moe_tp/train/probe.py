"""Logits of a few tokens as the trained layout computes them, so that an export can be checked.

B batch · S sequence · V vocabulary
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from moe_tp.checkpoint.agree import together
from moe_tp.models.decoder import Decoder
from moe_tp.models.load import from_pretrained
from moe_tp.parallel.mesh import Mesh
from moe_tp.train.rows import Rows

PROBE = "probe.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeReport:
    """How a model's logits differ from those of a probe.

    Args:
        tokens: compared.
        relative_error: norm of the difference over norm of the probe's logits.
        same_best: part of the tokens with the same most likely next token.
    """

    tokens: int
    relative_error: float
    same_best: float


def write_probe(model: Decoder, rows: Rows, tokens: int, output: Path) -> None:
    """Write ids and logits of the first tokens of the first row; collective.

    Args:
        model: in evaluation mode.
        rows: where the tokens come from.
        tokens: at most as many.
        output: folder of the file.

    Collectives: those of a forward pass; an agreement over the world.
    """
    batch = {k: v[:, :tokens] for k, v in rows.batch([0]).items() if k != "labels"}
    with torch.no_grad():
        logits_BSV = model(**batch).logits

    def write() -> None:
        if model.mesh.rank == 0:
            kept = {"logits": logits_BSV.float().cpu().contiguous()}
            kept |= {name: value.contiguous() for name, value in batch.items()}
            save_file(kept, output / PROBE)

    together(write, model.mesh.group("world"), model.mesh.device)


def check_probe(folder: Path, probe: Path) -> ProbeReport:
    """Return how the model of a hub folder, in this one process, agrees with a probe.

    Args:
        folder: the hub folder.
        probe: file of `write_probe`.
    """
    kept = load_file(probe)
    model = from_pretrained(folder, Mesh.single(), dtype=torch.float32).eval()
    expected = kept.pop("logits").double()
    with torch.no_grad():
        found = model(**kept).logits.double()
    error = float((found - expected).norm() / expected.norm())
    same = (found.argmax(-1) == expected.argmax(-1)).double().mean()
    return ProbeReport(tokens=expected.shape[1], relative_error=error, same_best=float(same))
