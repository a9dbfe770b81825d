"""A program like `moe-tp`, one command, whose ranks fail as told; for test_cli_launcher.py."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path

import torch.distributed as dist

from moe_tp.cli import main as program
from moe_tp.cli.options import add_layout_arguments, make_mesh, say
from moe_tp.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("how")
    parser.add_argument("--on", type=int, default=0)
    parser.add_argument("--pids", type=Path)
    add_layout_arguments(parser)


def run(options: argparse.Namespace) -> int:
    if options.how == "save":
        signal.signal(signal.SIGTERM, lambda *_: _save(options))
    mesh = make_mesh(options)
    if options.pids is not None:
        (options.pids / str(mesh.rank)).write_text(str(os.getpid()))
    if mesh.rank == options.on:
        if options.how == "config":
            raise ConfigError("tp=3 does not divide heads=4; choose tp=2")
        if options.how == "bug":
            raise KeyError("lost")
        if options.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if options.how == "exit":
            print("the last words", file=sys.stderr, flush=True)
            os._exit(7)
        if options.how == "beside-sleepers":
            raise ConfigError("rank 0 gave up")
    if options.how in ("hang", "save", "beside-sleepers"):
        time.sleep(60)
    if dist.is_initialized():
        dist.barrier()
    say(options, f"rank {mesh.rank} of {mesh.world_size}, layout {mesh.layout}")
    return 1 if options.how == "unequal" else 0


def _save(options: argparse.Namespace) -> None:
    time.sleep(2.0)
    print("saved", flush=True)
    (options.pids / f"saved-{os.environ['RANK']}").touch()
    os._exit(0)


if __name__ == "__main__":
    sys.modules["moe_tp.cli.probe"] = sys.modules["__main__"]
    program.COMMANDS["probe"] = "fail as told"
    program.entry()
