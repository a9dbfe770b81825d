"""Two nodes, simulated: two torchrun agents on this machine, two ranks each."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

from moe_tp.cli.main import main


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def test_verify_over_two_agents(tmp_path: Path) -> None:
    """F2, G1: ep over the nodes; ranks of both find each other, and only rank 0 prints."""
    model = str(tmp_path / "model")
    words = ["--set", "vocab_size=96", "--set", "num_local_experts=6", "--set", "hidden_size=32"]
    assert main(["init", "mixtral", model, *words]) == 0
    agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
    agent += ["--nproc-per-node", "2", "--master-addr", "localhost"]
    agent += ["--master-port", str(_free_port())]
    command = ["-m", "moe_tp", "verify", model, "--tp", "2", "--ep", "4", "--steps", "1"]
    command += ["--tokens", "31", "--json", str(tmp_path / "report.json")]
    nodes = [
        subprocess.Popen(
            [*agent, "--node-rank", str(node), *command],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in (0, 1)
    ]
    said = [node.communicate(timeout=240) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["passed"]
    assert report["layout"] == "dp2 tp2 ep4"
    assert said[0][0].startswith("passed")
    assert said[1][0] == ""
