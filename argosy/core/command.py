"""How the user runs Argosy, for hints, next steps and reports."""

import os

# What the user types instead of `argosy`; set by `./run`.
COMMAND = "ARGOSY_COMMAND"


def command_name() -> str:
    """The command that runs Argosy: `argosy`, or `./run` in a checkout."""
    return os.environ.get(COMMAND) or "argosy"
