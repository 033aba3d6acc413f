"""Exports a model, or any JAX function, as a bundle: a folder of programs, weights and a manifest that runs without their source code.

    argosy.export(fn, (x,), "fn.bundle")            # this package can be called
    Bundle.open("fn.bundle").run({"x": x})

`bundle`, `manifest`, `verify`, `calls`, `steps` and `seal` run bundles, and import neither flax nor models. `model`, `function`,
`signatures`, `generate`, `lower`, `hoist` and `write` write them.
"""

import sys
from types import ModuleType
from typing import Any


class _CallableRoom(ModuleType):
    """Makes the package `argosy.export` callable as its main function."""

    def __call__(self, function: Any, args: Any, target: Any, **options: Any) -> Any:
        """Writes a function of arrays, or an `nnx.Module`, as a bundle. Arguments and errors are those of
        `argosy.export.function.export_function`."""
        from argosy.export.function import export_function

        return export_function(function, args, target, **options)


sys.modules[__name__].__class__ = _CallableRoom
