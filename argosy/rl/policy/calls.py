"""Calls the functions of algorithms: each receives only the arguments that its parameters name."""

import inspect
from collections.abc import Callable
from typing import Any


def call_with(function: Callable[..., Any], **offers: Any) -> Any:
    """Calls a function with the offered arguments that its parameters name. Other offers are ignored."""
    return function(**{name: offers[name] for name in parameter_names(function) if name in offers})


def parameter_names(function: Callable[..., Any]) -> set[str]:
    """Returns the names of a function's parameters."""
    return set(inspect.signature(function).parameters)
