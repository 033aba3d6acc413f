"""Imports the packages of trackers, which are optional extras."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from argosy.core.command import install_extra
from argosy.core.errors import BadInput


def check_package(package: str, tracker: str) -> None:
    """Checks that a tracker's package is installed, without importing it.

    Raises:
        BadInput: the package is not installed.
    """
    if find_spec(package) is None:
        problem = f"the package {package} is not installed"
        raise BadInput(problem, where=f"set by track={tracker}", hint=install_extra(tracker))


def tracker_package(package: str, tracker: str) -> Any:
    """Imports and returns a tracker's package.

    Raises:
        BadInput: the package is not installed.
    """
    check_package(package, tracker)
    return import_module(package)
