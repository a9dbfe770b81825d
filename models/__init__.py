"""`moe_tp.models`."""

if __name__ != "moe_tp.models":
    raise ImportError(
        f"this folder is the package moe_tp.models and was imported as {__name__!r}, which would make a second "
        "copy of every class; write 'import moe_tp.models'"
    )
