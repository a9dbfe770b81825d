"""Run the parity sweep and write its table: `python tests/parity.py [--set full|base]`.

The full set goes to docs/parity.md; the base set, a matter of minutes, to docs/parity-base.md.
Finished runs are kept in a state file, so that a sweep that was stopped goes on where it was, and
several processes can share one: `--share 1/2` and `--share 2/2` run a half each, and whoever runs
without it afterwards writes the table. Exit status 1 when a layout neither agrees with one process
nor is refused.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

import torch
from verify_sweep import SETS, cases, failed, load_state, sweep, table

ROOT = Path(__file__).resolve().parents[1]
KINDS = ("loss", "logits", "gradients", "grad_norm", "weights")


def main() -> int:
    """Return 0 when every run passed or was refused."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--set", choices=tuple(SETS), default="full", dest="which")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--steps", type=int, help="5 in the base set, 3 in the full one")
    parser.add_argument("--state", type=Path, default=ROOT / "build" / "parity.jsonl")
    parser.add_argument("--out", type=Path, help="another file for the table")
    parser.add_argument("--share", default="1/1", help="run the I-th of N parts, as I/N")
    parser.add_argument("--limit", type=int, help="stop after so many runs")
    parser.add_argument("--fresh", action="store_true", help="forget earlier runs")
    options = parser.parse_args()
    steps, name = {"base": (5, "parity-base.md"), "full": (3, "parity.md")}[options.which]
    options.steps = options.steps or steps
    options.out = options.out or ROOT / "docs" / name
    if options.fresh:
        options.state.unlink(missing_ok=True)
    options.state.parent.mkdir(parents=True, exist_ok=True)
    part, parts = map(int, options.share.split("/"))
    todo = cases(options.which, options.ranks)[part - 1 :: parts]
    done = load_state(options.state, options.steps)
    left = [case for case in todo if case.key not in done]
    print(f"{len(todo)} layouts, {len(todo) - len(left)} of them done before", flush=True)
    left = left[: options.limit]

    def keep(row: dict[str, Any]) -> None:
        with options.state.open("a") as file:
            file.write(json.dumps(row) + "\n")
        state = "passed" if row.get("passed") else "refused" if "refused" in row else "FAILED"
        print(f"{row['key']:70} {row['seconds']:6.1f} s  {state}", flush=True)

    with tempfile.TemporaryDirectory(prefix="moe_tp_parity_") as folder:
        sweep(Path(folder), left, steps=options.steps, done=done, keep=keep)
    rows = [done[case.key] for case in todo if case.key in done]
    bad = failed(rows)
    if parts > 1 or len(rows) < len(todo):
        print(f"{len(rows)} of {len(todo)} runs of this part are done; {len(bad)} failed")
        return 1 if bad else 0
    options.out.write_text(_document(options.which, options.steps, rows, bad))
    print(f"{len(rows) - len(bad)} of {len(rows)} right; the table is {options.out}")
    for key in bad:
        print("FAILED", key)
    return 1 if bad else 0


def _document(which: str, steps: int, rows: list[dict[str, Any]], bad: list[str]) -> str:
    passed = [row for row in rows if row.get("passed")]
    worst = {
        kind: max((float(row["max_relative_error"][kind] or 0.0) for row in passed), default=0.0)
        for kind in KINDS
    }
    figures = ", ".join(f"{kind} {error:.1e}" for kind, error in worst.items())
    refused = sum("refused" in row for row in rows)
    return f"""# Parity of layouts

Written by `tests/parity.py --set {which}` on {date.today()}, torch {torch.__version__},
{platform.machine()}, gloo. Every layout takes the same batches as one process on the reference path
(`moe_tp/verify`), fp32, {steps} AdamW steps with clipping, two micro-batches of uneven, padded and
packed rows, one data-parallel rank without a token from four ranks on. Errors are the largest of
their kind, a relative L2 norm a tensor.

{len(rows)} runs: {len(passed)} passed, {refused} refused, {len(bad)} failed.
Largest errors: {figures}.

{table(rows)}"""


if __name__ == "__main__":
    sys.exit(main())
