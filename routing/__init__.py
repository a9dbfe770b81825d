"""`moe_tp.routing`."""

if __name__ != "moe_tp.routing":
    raise ImportError(
        f"this folder is the package moe_tp.routing and was imported as {__name__!r}, which would make a second "
        "copy of every class; write 'import moe_tp.routing'"
    )
