"""Check the import directions of pyproject.toml, and that the check saw all three folders.

Where a checkout has no symlinks, moe_tp.routing and moe_tp.models are not found below moe_tp/, and
the contracts would hold for want of anything to break them.
"""

from __future__ import annotations

import sys

import grimp
from importlinter.cli import lint_imports


def main() -> int:
    """Return the exit status: 0 when every contract holds and every folder was seen."""
    modules = grimp.build_graph("moe_tp", cache_dir=None).modules
    for package in ("moe_tp.routing", "moe_tp.models"):
        if not any(name.startswith(package + ".") for name in modules):
            print(f"the import check saw no module of {package}: are the symlinks in place?")
            return 1
    return lint_imports(cache_dir=None)


if __name__ == "__main__":
    sys.exit(main())
