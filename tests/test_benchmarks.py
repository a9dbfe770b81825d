"""The check that people with GPUs run, rehearsed on the CPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
def test_the_gpu_check_prints_its_table() -> None:
    words = ["benchmarks/gpu_check.py", "--device", "cpu", "--nproc", "2", "--quick"]
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| verify 8 experts: 2 ranks --ep 2 | passed |" in done.stdout
    assert "| dense, same FLOPs |" in done.stdout
