"""Which rank of how many this process is: from our launcher, torchrun or Slurm."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from moe_tp.cli import RUN_FOLDER
from moe_tp.errors import ConfigError

__all__ = ["Place", "find_place"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One rank of a run that has been started."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    run_folder: Path | None = None


def find_place(nproc: int | None) -> Place | None:
    """Return this process's place, or None where no launcher has started ranks.

    Under Slurm, MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE are set where they are missing, as
    torch's `env://` rendezvous reads them.

    Args:
        nproc: the value of --nproc; None or 1 where not given.

    Raises:
        ConfigError: --nproc inside torchrun, or a rank variable that is no number.
    """
    env = os.environ
    if RUN_FOLDER in env:
        return _from_variables(Path(env[RUN_FOLDER]))
    if "RANK" in env and "WORLD_SIZE" in env:
        if nproc is not None and nproc > 1 and _number("WORLD_SIZE") != nproc:
            raise ConfigError(
                f"--nproc {nproc} inside a run of WORLD_SIZE={env['WORLD_SIZE']} ranks would start "
                f"{nproc} more from each; leave --nproc out under torchrun"
            )
        return _from_variables(None)
    if (nproc is None or nproc == 1) and "SLURM_STEP_ID" in env and "SLURM_PROCID" in env:
        return _from_slurm()
    return None


def _from_variables(run_folder: Path | None) -> Place:
    return Place(
        rank=_number("RANK"),
        world_size=_number("WORLD_SIZE"),
        local_rank=_number("LOCAL_RANK", 0),
        local_world_size=_number("LOCAL_WORLD_SIZE", 1),
        run_folder=run_folder,
    )


def _from_slurm() -> Place | None:
    env = os.environ
    world_size = _number("SLURM_STEP_NUM_TASKS", 1)
    if world_size == 1:
        return None
    env.setdefault("RANK", env["SLURM_PROCID"])
    env.setdefault("WORLD_SIZE", str(world_size))
    env.setdefault("MASTER_ADDR", first_host(env.get("SLURM_STEP_NODELIST", "localhost")))
    # Every rank of a step computes the same port, and two jobs of one node rarely the same.
    port = 20000 + (_number("SLURM_JOB_ID", 0) * 7 + _number("SLURM_STEP_ID", 0)) % 20000
    env.setdefault("MASTER_PORT", str(port))
    tasks = re.match(r"\d+", env.get("SLURM_STEP_TASKS_PER_NODE", "1"))
    return Place(
        rank=_number("SLURM_PROCID"),
        world_size=world_size,
        local_rank=_number("SLURM_LOCALID", 0),
        local_world_size=int(tasks.group()) if tasks else 1,
    )


def first_host(nodes: str) -> str:
    """Return the first host of a Slurm node list, such as `gpu[03-05,9],login1`."""
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\])?([^,]*)", nodes)
    if match is None:
        raise ConfigError(f"SLURM_STEP_NODELIST={nodes!r} names no host; set MASTER_ADDR")
    return match.group(1) + (match.group(2) or "") + match.group(3)


def _number(name: str, default: int | None = None) -> int:
    text = os.environ.get(name, default)
    try:
        return int(str(text))
    except ValueError:
        raise ConfigError(
            f"{name}={text!r} in the environment is no number; start the ranks with --nproc, "
            "torchrun or srun, or unset it"
        ) from None
