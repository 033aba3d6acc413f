"""A tool that runs Python in the sandbox of `argosy.rl.sandbox`. The model reads what its code prints, and the exception if one ends
it."""

from collections.abc import Mapping
from typing import Any

from argosy.rl.environments.tools import Tools
from argosy.rl.sandbox import SandboxLimits, available, run_code

# Of a traceback, its end says most.
MOST_LINES = 12


class Python(Tools):
    """The tool `python` of one episode."""

    @classmethod
    def prepare(cls, functions: Any, **more: Any) -> None:
        super().prepare(functions, **more)
        # Tried once here, and not again in every process that is forked.
        if reasons := available():
            raise OSError(f"code cannot be run here: {'; '.join(reasons)}")


def python(code: str, limits: Mapping[str, Any]) -> str:
    """Runs a Python program and returns what it prints.

    Args:
        code: a whole program, with the standard library alone. Each call begins anew.
    """
    outcome = run_code(code, limits=SandboxLimits(**limits))
    parts = [outcome.stdout.rstrip("\n")] if outcome.stdout else []
    if outcome.timed_out:
        parts.append(f"error: it takes more than {limits['wall_s']:g} seconds")
    elif outcome.exit_code:
        # The file is `main.py` in a folder of its own, whose name says nothing.
        lines = outcome.stderr.rstrip().splitlines()
        cause = outcome.killed_by or outcome.exit_code
        parts.append("error: " + "\n".join(lines[-MOST_LINES:]) if lines else f"error: it ended by {cause}")
    return "\n".join(parts) or "it printed nothing"
