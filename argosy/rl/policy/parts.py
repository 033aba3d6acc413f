"""How the functions of algorithms are called: each is given what its parameters name, and no more."""

import inspect
from collections.abc import Callable
from typing import Any

from argosy.rl.algorithms import ADVANTAGES
from argosy.rl.policy.settings import Policy


def call_with(function: Callable[..., Any], **offers: Any) -> Any:
    """Calls a function with those of the offers that it has parameters for."""
    return function(**{name: offers[name] for name in parameters(function) if name in offers})


def parameters(function: Callable[..., Any]) -> set[str]:
    """The names of a function's parameters."""
    return set(inspect.signature(function).parameters)


def needs_greedy(policy: Policy) -> bool:
    """Whether rewards are compared with those of greedy completions, which have to be sampled."""
    return policy.critic is None and "greedy" in parameters(ADVANTAGES[policy.comparison])


def compares_groups(policy: Policy) -> bool:
    """Whether rewards are compared within their group, so that completions of equal rewards teach nothing."""
    takes = parameters(ADVANTAGES[policy.comparison])
    return policy.critic is None and not takes & {"greedy", "mask"}
