"""Argosy: one house for a foundation model's whole life on the JAX stack.

lm = argosy.load("path/to/model")
lm.generate(["Once upon"], max_tokens=64)
argosy.fit("tiny", "steps=100")
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from argosy.infer.answers import Completion
    from argosy.infer.lm import LM
    from argosy.jobs.outcome import Outcome
    from argosy.jobs.public import fit, load

# Public names, and the module each is imported from when it is first asked for: `import argosy` imports nothing else.
_NAMES = {
    "LM": "argosy.infer.lm",
    "Completion": "argosy.infer.answers",
    "Outcome": "argosy.jobs.outcome",
    "fit": "argosy.jobs.public",
    "load": "argosy.jobs.public",
}

__all__ = ["LM", "Completion", "Outcome", "fit", "load"]


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'argosy' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_NAMES[name]), name)


def __dir__() -> list[str]:
    return __all__
