"""The command line: one file per command."""

RUN_FOLDER = "MOE_TP_RUN_FOLDER"  # set by the launcher: where ranks meet and leave their failures
