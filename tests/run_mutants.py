"""Apply each deliberate fault of tests/mutants/*.toml to a copy of the tree; its test must fail.

A list is named after its room. An entry holds `rule` (what breaks, as in a test's docstring),
`file`, `find` (must occur exactly once), `replace`, and `test` (a pytest id, or a list of them).
Exit status 1 when a mutant survives, when an entry is stale, or when a test fails without any
mutant.
"""

from __future__ import annotations

import argparse
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import tomllib

ROOT = Path(__file__).resolve().parents[1]
LISTS = ROOT / "tests" / "mutants"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One fault and the tests that must notice it."""

    room: str
    rule: str
    file: str
    find: str
    replace: str
    test: tuple[str, ...]

    def problem(self) -> str | None:
        """Return why the entry does not fit the tree any more, or None."""
        source = ROOT / self.file
        if not source.is_file():
            return f"{self.file} does not exist"
        count = source.read_text().count(self.find)
        if count != 1:
            return f"`find` occurs {count} times in {self.file}"
        if self.find == self.replace:
            return "`find` and `replace` are the same"
        for test in self.test:
            file, *rest = test.split("::")
            name = rest[-1].split("[")[0] if rest else ""
            if not (ROOT / file).is_file() or f"{name}" not in (ROOT / file).read_text():
                return f"no test {test}"
        return None


def load(room: str | None = None, rule: str | None = None, match: str = "") -> list[Mutant]:
    """Return the listed mutants, those of one room, rule or with a text where given."""
    mutants = []
    for path in sorted(LISTS.glob("*.toml")):
        for entry in tomllib.loads(path.read_text()).get("mutant", []):
            test = entry.pop("test")
            tests = (test,) if isinstance(test, str) else tuple(test)
            mutants.append(Mutant(room=path.stem, test=tests, **entry))
    return [
        m
        for m in mutants
        if room in (None, m.room)
        and rule in (None, *m.rule.split())
        and any(match in text for text in (m.file, m.find, m.replace, *m.test))
    ]


def copy_tree(target: Path) -> None:
    """Copy what git tracks, or would, to `target`; links stay links."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    for name in filter(None, listed.split("\0")):
        source, copy = ROOT / name, target / name
        if source.exists() or source.is_symlink():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, copy, follow_symlinks=False)


def run_tests(tree: Path, tests: tuple[str, ...], timeout: float) -> tuple[int, str]:
    """Return pytest's exit status in this tree and the end of its output; 1 after `timeout` s."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    env = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, cwd=tree, env=env, timeout=timeout, capture_output=True, text=True, check=False
        )
    except subprocess.TimeoutExpired:
        return 1, f"no end within {timeout:.0f} s"
    return done.returncode, (done.stdout + done.stderr)[-2000:]


def try_mutant(mutant: Mutant, trees: queue.Queue[Path], timeout: float) -> str:
    """Return "killed", "SURVIVED" or "ERROR: ..."."""
    problem = mutant.problem()
    if problem:
        return f"ERROR: {problem}"
    tree = trees.get()
    target = tree / mutant.file
    original = target.read_text()
    try:
        target.write_text(original.replace(mutant.find, mutant.replace))
        status, output = run_tests(tree, mutant.test, timeout)
    finally:
        target.write_text(original)
        trees.put(tree)
    if status == 1:
        return "killed"
    return "SURVIVED" if status == 0 else f"ERROR: pytest exit {status}: {output}"


def main() -> int:
    """Return 0 when every mutant was killed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--room", help="only tests/mutants/ROOM.toml")
    parser.add_argument("--rule", help="only mutants of this rule, as R1")
    parser.add_argument("--match", default="", help="only with this text in file, change or test")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one mutant")
    options = parser.parse_args()
    mutants = load(options.room, options.rule, options.match)
    if not mutants:
        print("no mutant matches")
        return 1
    start, bad = time.monotonic(), 0
    with tempfile.TemporaryDirectory(prefix="moe_tp_mutants_") as folder:
        trees: queue.Queue[Path] = queue.Queue()
        for job in range(options.jobs):
            copy_tree(Path(folder, str(job)))
            trees.put(Path(folder, str(job)))
        tests = tuple(sorted({test for mutant in mutants for test in mutant.test}))
        status, output = run_tests(Path(folder, "0"), tests, 3600.0)
        if status:
            print(output, "the tests fail without any mutant", sep="\n")
            return 1
        with ThreadPoolExecutor(options.jobs) as pool:
            runs = {pool.submit(try_mutant, m, trees, options.timeout): m for m in mutants}
            for run in as_completed(runs):
                mutant, result = runs[run], run.result()
                bad += result != "killed"
                change = " ".join(mutant.find.split())[:40]
                print(
                    f"{mutant.room:12} {mutant.rule:8} {mutant.file:32} {change:40} {result}",
                    flush=True,
                )
    print(f"{len(mutants) - bad} killed, {bad} not, in {time.monotonic() - start:.0f} s")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
