"""The commands by which the user runs Argosy and installs packages, for hints and reports."""

import os
from pathlib import Path

# What the user types instead of `argosy`; set by `./run`.
COMMAND = "ARGOSY_COMMAND"
ROOT = Path(__file__).parents[2]


def command_name() -> str:
    """The command that runs Argosy: `argosy`, or `./run` in a checkout."""
    return os.environ.get(COMMAND) or "argosy"


def install_package(name: str, options: str = "") -> str:
    """The command that installs a package into the environment of this process."""
    typed = os.environ.get(COMMAND)
    return f"{typed + ' python -m ' if typed else ''}pip install {options}'{name}'"


def install_extra(extra: str) -> str:
    """The command that installs an extra of Argosy into the environment of this process.

    A checkout is installed from its folder, because a package with this name in a registry would be another one.
    """
    if not (ROOT / "pyproject.toml").is_file():
        return install_package(f"argosy[{extra}]")
    return install_package(f"{'.' if Path.cwd() == ROOT else ROOT}[{extra}]", "-e ")
