"""Argosy: one house for a foundation model's whole life on the JAX stack.

lm = argosy.load("path/to/model")
lm.generate(["Once upon"], max_tokens=64)
argosy.fit("tiny", "steps=100")
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from argosy.export.function import export_function as export
    from argosy.infer.completions import Completion
    from argosy.infer.lm import LM
    from argosy.jobs.api import fit, load
    from argosy.run.outcome import Outcome

# Public names, and the module each is imported from when it is first asked for: `import argosy` imports nothing else.
_NAMES = {
    "LM": "argosy.infer.lm",
    "Completion": "argosy.infer.completions",
    "Outcome": "argosy.run.outcome",
    "fit": "argosy.jobs.api",
    "load": "argosy.jobs.api",
}

# A room that can be called: `argosy.export(fn, args, OUT)`.
_CALLABLE = "export"

__all__ = ["LM", "Completion", "Outcome", "export", "fit", "load"]


def __getattr__(name: str) -> Any:
    if name not in (*_NAMES, _CALLABLE):
        raise AttributeError(f"module 'argosy' has no attribute {name!r}")
    from importlib import import_module

    if name == _CALLABLE:
        import argosy.export

        return argosy.export
    return getattr(import_module(_NAMES[name]), name)


def __dir__() -> list[str]:
    return __all__
