"""`python -m moe_tp COMMAND`, the same as `moe-tp COMMAND`."""

from __future__ import annotations

from moe_tp.cli.start import entry

if __name__ == "__main__":
    entry()
