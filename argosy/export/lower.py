"""Converts functions to portable StableHLO bytes, and back. Weights remain arguments.

The bytes stay readable for the time that `jax.export` guarantees: six months backward, three weeks forward. Programs use
implementations of ops that every XLA compiles. Triton kernels, cuDNN calls and the calls of `ops.native` have no such guarantee, and
`jax.export` refuses programs that contain them.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
from jax import export
from jax.errors import ConcretizationTypeError, InconclusiveDimensionOperation
from jax.sharding import NamedSharding, PartitionSpec

from argosy.core.errors import BadInput, Unsupported, complaint
from argosy.models.parts.weight import Leaves, abstract, merge, split
from argosy.ops.op import implementations
from argosy.parallel.scope import scope

PLATFORMS = ("cpu", "cuda", "tpu")
# The platforms that `jax.export` lowers for.
KNOWN_PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
# The implementations that every platform compiles, by op. In programs only for CPUs, blocked implementations in plain XLA are portable
# too.
PORTABLE = {"attention": "reference", "experts": "ragged_dot", "products": "xla", "video_convolution": "volumes"}
PORTABLE_ON_CPU = {"products": "xla"}

# (weights, inputs) -> outputs, each by name.
NamedFunction = Callable[[Mapping[str, Any], Mapping[str, Any]], Mapping[str, Any]]


def portable_implementations(platforms: Sequence[str]) -> dict[str, str]:
    """Returns the implementation of each op for a program for these platforms that is lowered on this machine."""
    return dict(PORTABLE_ON_CPU if list(platforms) == ["cpu"] and jax.default_backend() == "cpu" else PORTABLE)


@contextmanager
def portable(platforms: Sequence[str]) -> Iterator[None]:
    """Traces programs inside with implementations that are portable to these platforms, whatever platform this process runs on."""
    with implementations(**portable_implementations(platforms)):
        yield


def export_program(
    function: NamedFunction,
    weights: Leaves,
    inputs: Mapping[str, Any],
    *,
    platforms: Sequence[str] = PLATFORMS,
    places: Mapping[str, NamedSharding] | None = None,
) -> export.Exported:
    """Lowers a function of named weights and inputs.

    Args:
        weights, inputs: arrays, or shapes and types, which may leave sizes open.
        platforms: the platforms that the program runs on.
        places: the sharding of each weight over a mesh of several devices, over which inputs and outputs are replicated. None is for
            one device.

    Raises:
        BadInput: a platform is unknown, or weights or inputs do not fit the function.
        Unsupported: the function uses operations without a guarantee of compatibility, or branches on open sizes.
    """
    if unknown := [platform for platform in platforms if platform not in KNOWN_PLATFORMS]:
        raise BadInput(f"platform `{unknown[0]}`", hint=f"of {', '.join(KNOWN_PLATFORMS)}")
    like = {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in weights.items()}
    with portable(platforms), export_errors():
        if places is None:
            return export.export(jax.jit(function), platforms=list(platforms))(like, dict(inputs))
        mesh = next(iter(places.values())).mesh
        everywhere, weight_shardings = NamedSharding(mesh, PartitionSpec()), {name: places[name] for name in like}
        with scope(mesh):
            program = jax.jit(function, in_shardings=(weight_shardings, everywhere), out_shardings=everywhere)
            return export.export(program, platforms=list(platforms))(like, dict(inputs))


@contextmanager
def export_errors() -> Iterator[None]:
    """Converts jax's errors about a function to errors of this project.

    Raises:
        Unsupported: the function uses operations without a guarantee of compatibility, or branches on open sizes.
    """
    try:
        yield
    except (InconclusiveDimensionOperation, ConcretizationTypeError, TypeError) as error:
        if isinstance(error, TypeError) and "_DimExpr" not in str(error):
            raise
        if "as an integer" in str(error):
            problem = "the function makes a number of a size that is left open, as len(x) does"
            raise Unsupported(problem, hint="x.shape[0] in place of len(x); or fixed sizes, such as batch=[1, 8, 32]") from error
        problem = f"the function cannot be exported with open sizes: {complaint(error)}"
        raise Unsupported(problem, hint="list the sizes: batch=1,4,16 length=128") from None
    except ValueError as error:
        if "Cannot serialize code with custom calls" not in str(error):
            raise
        calls = sorted(set(re.findall(r'custom_call @([\w.$]+)|call_target_name = "([^"]+)"', str(error))))
        names = ", ".join("".join(groups) for groups in calls) or "kernels"
        problem = f"the program calls {names}, which newer versions of jax may not know"
        raise Unsupported(problem, hint="use an implementation of plain XLA while exporting") from None


def lower_program(
    model: Any, forward: Callable[..., Any], args: Sequence[Any], *, platforms: Sequence[str] = PLATFORMS
) -> bytes:
    """Exports `forward(model, *args)` as a program (weights, *args) -> outputs.

    Args:
        args: arrays, or shapes and types, which may leave sizes open.
    """
    graph, _ = split(model)

    def program(weights: Leaves, *args: Any) -> Any:
        return forward(merge(graph, weights), *args)

    # A program for several platforms, or with open sizes, needs the reference implementations, because kernels and blocks are specific
    # to one platform.
    exported = export.export(jax.jit(program), platforms=list(platforms))(abstract(model), *args)
    return bytes(exported.serialize())


def lower(model: Any, *, platforms: Sequence[str] = PLATFORMS) -> bytes:
    """Exports a model as a program (weights, tokens [B T], segments [B T]) -> logits [B T V], or for an encoder vectors [B T D].

    B and T are left open, so one program serves every shape.
    """
    B, T = export.symbolic_shape("B, T")
    ids = jax.ShapeDtypeStruct((B, T), jnp.int32)
    return lower_program(model, lambda m, tokens, segments: m(tokens, m.config.attend(segments))[0], (ids, ids), platforms=platforms)


def raise_again(program: bytes) -> Callable[..., Any]:
    """Returns the function that `lower` exported."""
    return jax.jit(export.deserialize(bytearray(program)).call)
