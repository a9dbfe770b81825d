"""`moe-tp COMMAND`: the command's module, its ranks, and its errors as one sentence.

A command is a module with `SUMMARY`, `add_arguments(parser)` and `run(options) -> int`; one that
computes also takes the layout options, and then `run` is called on every rank.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from moe_tp import __version__
from moe_tp.cli import launcher
from moe_tp.cli.environment import Place, find_place
from moe_tp.cli.failures import exit_code
from moe_tp.cli.notices import shown
from moe_tp.cli.start import entry, loaded
from moe_tp.errors import ConfigError, MoeTpError

__all__ = ["entry", "main"]  # the first for scripts of an install from before it had moved

# One file a command; the summary stands here too, so that `moe-tp --help` loads none of them.
COMMANDS = {
    "init": "write a random model as a hub-format folder",
    "inspect": "say what a folder holds, without loading it",
    "verify": "compare a layout with one process: loss, logits, gradients, steps",
    "finetune": "train a hub folder on your text, and export it",
    "upcycle": "make an MoE hub folder of a dense model, equal to it at the start",
    "generate": "write on after a prompt, in any layout",
    "export": "write a training checkpoint or hub folder as a hub folder",
    "plan": "say which layouts of N GPUs fit a model, before any download",
    "bench": "measure a layer, its rows on the wire, loading, a training step; write a profile",
}
EPILOG = "\n".join(f"  {name:10}{summary}" for name, summary in COMMANDS.items())


class Command(Protocol):
    """What a command's module offers."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's arguments."""

    def run(self, options: argparse.Namespace) -> int:
        """Return the exit code, having done the work."""


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code: 0 done, 1 a check or run failed, 2 bad arguments or input.

    Args:
        argv: the words after the program's name; None takes the process's own.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    options = _parse(words)
    loaded()
    place = None
    try:
        if not hasattr(options, "tp"):  # a command without ranks
            check_results(options)
            with shown(None):
                return _run(options)
        place = find_place(options.nproc)
        if place is None:
            check_results(options)
        if place is None and options.nproc > 1:
            return launcher.launch(words, options.nproc, debug=options.debug, grace=options.grace)
        with shown(place):
            return _run_on_ranks(options, place)
    except Exception as error:  # noqa: BLE001 - the outermost frame, which shows every error
        _show(error, place, debug=options.debug)
        return exit_code(error)


def check_results(options: argparse.Namespace) -> None:
    """Refuse a file for results that cannot be written, before the work whose results it takes.

    Raises:
        ConfigError: --json or --profile names a folder, or a file that cannot be made.
    """
    for name in ("json", "profile"):
        file = getattr(options, name, None)
        if file is None or (name == "json" and file == "-"):
            continue
        path = Path(file)
        if path.is_dir():
            raise ConfigError(f"--{name} {file} is a folder; name a file")
        there = path
        while not there.exists():  # missing folders are made when the file is written
            there = there.parent
        if there != path and not there.is_dir():
            raise ConfigError(f"--{name} {file}: {there} is no folder; choose another place")
        if not os.access(there, os.W_OK):
            raise ConfigError(f"--{name} {file} cannot be written; choose another place")


class _WithDefaults(argparse.HelpFormatter):
    """Help that ends with an option's default, where it has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text, default = action.help, action.default
        plain = isinstance(default, (str, int, float)) and not isinstance(default, bool)
        if text is None or default == argparse.SUPPRESS or not plain or "default" in text:
            return text
        return f"{text} (default: %(default)s)"


def _parse(words: list[str]) -> argparse.Namespace:
    top = argparse.ArgumentParser(
        prog="moe-tp",
        description="Mixture-of-Experts models across processes, hub folder in, hub folder out.",
        epilog=f"commands:\n{EPILOG}\n\nmoe-tp COMMAND --help shows a command's arguments.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=__version__)
    top.add_argument("command", choices=COMMANDS, metavar="COMMAND")
    name = top.parse_args(words[:1]).command
    parser = argparse.ArgumentParser(
        prog=f"moe-tp {name}", description=COMMANDS[name] + ".", formatter_class=_WithDefaults
    )
    module: Command = importlib.import_module(f"moe_tp.cli.{name}")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    module.add_arguments(parser)
    parser.set_defaults(run=module.run)
    return parser.parse_intermixed_args(words[1:])


def _run(options: argparse.Namespace) -> int:
    code: int = options.run(options)
    return code


def _run_on_ranks(options: argparse.Namespace, place: Place | None) -> int:
    from moe_tp.cli import ranks  # needs torch, which the launching process does without

    with ranks.joined(place, options):
        if place is not None and place.rank == 0:  # of torchrun or Slurm; all ranks hear of it
            check_results(options)
        return _run(options)


def _show(error: Exception, place: Place | None, *, debug: bool) -> None:
    """Print one sentence on stderr, unless the launcher that started this rank will."""
    if debug:
        traceback.print_exception(error)
    if place is not None and place.run_folder is not None:
        return
    print(sentence(error, place.rank if place else None), file=sys.stderr)


def sentence(error: Exception, rank: int | None = None) -> str:
    """Return what stderr shows of an error: who, what, and for a bug its type."""
    who = "moe-tp: " if rank is None else f"moe-tp: rank {rank}: "
    text = " ".join(str(error).split()) or "no message"
    if isinstance(error, (MoeTpError, OSError)):
        return f"{who}error: {text}"
    return f"{who}error: {type(error).__name__}: {text} (--debug shows where)"
