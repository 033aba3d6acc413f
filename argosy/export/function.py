"""Exports any JAX function, or any `nnx.Module`, as a bundle: `argosy.export(fn, args, OUT)`.

Weights of modules among the arguments, and arrays that the function closes over, become tensors of the bundle, which the program takes
as arguments. Weights are never part of a program.
"""

import base64
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import export

from argosy.core.errors import BadInput, nearest
from argosy.core.formats.png import png_bytes
from argosy.export.calls import shape_text
from argosy.export.hoist import Hoisted
from argosy.export.lower import PLATFORMS, export_errors, export_program, portable, portable_implementations
from argosy.export.manifest import BundleManifest, BundleSignature, TensorSignature
from argosy.export.model import listed_sizes
from argosy.export.steps import DecodeImageStep, LabelsStep, NormalizeStep, ProbabilitiesStep
from argosy.export.write import BundleContents, tensor_entry, write_bundle
from argosy.models.parts.weight import merge, split

# The steps after the program that need no tokenizer.
OutputStep = NormalizeStep | ProbabilitiesStep | LabelsStep


def export_function(
    function: Any,
    args: Sequence[Any],
    target: str | Path,
    *,
    signature: str = "call",
    inputs: Sequence[str] | None = None,
    outputs: Sequence[str] | None = None,
    platforms: Sequence[str] = PLATFORMS,
    batch: int | Sequence[int] | str | None = None,
    preprocess: Sequence[DecodeImageStep] = (),
    postprocess: Sequence[OutputStep] = (),
    description: str = "",
    lineage: Mapping[str, Any] | None = None,
    **options: Any,
) -> BundleManifest:
    """Writes a function of arrays as a bundle with one signature, whose inputs have the names of its parameters.

    Args:
        function: a function, or an `nnx.Module` that is called.
        args: an example of each argument: an array, or a `jax.ShapeDtypeStruct`, which may leave sizes open. The weights of an
            `nnx.Module` become tensors of the bundle.
        target: the path of the bundle, a new folder.
        signature: the name of the signature.
        inputs: the names of the inputs, in order. The default is the names of the parameters.
        outputs: the names of the outputs, in order. The default is the keys of a mapping, or `output`, `output_1` ...
        platforms: the platforms that the programs run on: cpu, cuda, rocm, tpu.
        batch: the sizes of the first axis of every input and output. Each size gets a program, and smaller batches are padded with
            zeros. "symbolic" permits any size. None keeps the sizes in `args`.
        preprocess: the steps from image files to inputs of the function (`export.steps`).
        postprocess: the steps from outputs to vectors of length 1, probabilities and classes, in order.
        description: a sentence about what the function computes.
        lineage: the origin of the function, for the manifest.
        options: further arguments of `write_bundle`, such as `store` and `sign`.

    Raises:
        BadInput: arguments are not arrays, names or steps do not fit, or the target exists. Nothing is written.
        Unsupported: the function uses operations without a guarantee of compatibility, or branches on open sizes.
    """
    call, weights, values = _without_modules(function, args)
    specs = _named_arguments(function, args, values, inputs)
    arguments = {name: _abstract(name, value) for name, value in specs.items()}
    shapes: list[dict[str, int]] = [{}]
    if batch is not None:
        arguments = {
            name: jax.ShapeDtypeStruct(("batch", *value.shape[1:]), value.dtype) for name, value in _batched(arguments).items()
        }
        sizes = None if batch == "symbolic" else listed_sizes("batch", batch)  # type: ignore[arg-type]
        shapes = [{}] if sizes is None else [{"batch": size} for size in sizes]

    names: list[str] = []

    def program(weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        results = _named_outputs(call(weights, *(inputs[name] for name in specs)), outputs)
        names[:] = list(results)
        return results

    opened = [_opened(arguments, fixed) for fixed in shapes]
    constants = Hoisted()
    with portable(platforms), export_errors():
        hoisted = [constants.function(program, weights, some) for some in opened]
    weights |= constants.constants
    lowered = [
        export_program(computation, weights, some, platforms=platforms)
        for computation, some in zip(hoisted, opened, strict=True)
    ]
    programs = list(zip(shapes, lowered, strict=True))
    bundle_signature = BundleSignature(
        description=description,
        inputs=[_described(name, value, {}) for name, value in arguments.items()],
        outputs=_outputs_of(programs, names, batch is not None),
        programs=[],
        weights=sorted(weights),
        padding=["batch"] if batch is not None else [],
        preprocess=list(preprocess),
        postprocess=list(postprocess),
        example={step.input: [_white_file(step)] for step in preprocess},
    )
    _check_steps(bundle_signature, preprocess, postprocess)
    contents = BundleContents({signature: bundle_signature}, {signature: programs}, [tensor_entry(n, a) for n, a in weights.items()])
    contents.lineage = {"function": _name_of(function)} | dict(lineage or {})
    contents.implementations = portable_implementations(platforms)
    return write_bundle(target, contents, **options)


def _check_steps(of: BundleSignature, before: Sequence[DecodeImageStep], after: Sequence[OutputStep]) -> None:
    """Checks that the steps before the program make inputs of the program, and that the steps after it read outputs.

    Raises:
        BadInput: there is no such input or output, or images have another shape.
    """
    specs = {spec.name: spec for spec in of.inputs}
    for step in before:
        if step.image not in specs:
            raise BadInput(f"decode_image makes `{step.image}`, and there is no such input", hint=nearest(step.image, list(specs)))
        if step.input in specs:
            problem = f"decode_image reads `{step.input}`, which is an input of the function too"
            raise BadInput(problem, hint="give the step another `input`")
        shape = specs[step.image].shape
        if tuple(shape[1:]) != step.shape:
            problem = f"decode_image makes images of shape {list(step.shape)}, and `{step.image}` takes {shape_text(specs[step.image])}"
            raise BadInput(problem, hint="height, width, channels and layout of the step say the shape; the first axis is the batch")
    available = {spec.name for spec in of.outputs}
    for step in after:
        source = step.output if isinstance(step, NormalizeStep) else step.scores
        if source not in available:
            problem = f"the step `{step.step}` reads `{source}`, and there is no such output"
            raise BadInput(problem, hint=nearest(source, sorted(available)))
        available.add(step.output)


def _white_file(step: DecodeImageStep) -> str:
    """Returns a white image as a PNG file in base64."""
    return base64.b64encode(png_bytes(np.full((step.height, step.width, 3), 255, np.uint8))).decode()


def _name_of(function: Any) -> str:
    of = type(function) if isinstance(function, nnx.Module) else function
    return f"{getattr(of, '__module__', '')}.{getattr(of, '__qualname__', type(of).__name__)}"


# ---------------------------------------------------------------- inputs


def _without_modules(function: Any, args: Sequence[Any]) -> tuple[Callable[..., Any], dict[str, Any], list[Any]]:
    """Separates the weights of modules. Returns a function of (weights, other arguments), the weights of all modules, and the other
    arguments."""
    if not callable(function):
        raise BadInput(f"argosy.export takes a function or a module, not {type(function).__name__}")
    if isinstance(args, Mapping | str) or hasattr(args, "shape"):
        raise BadInput("the arguments are a tuple or list", hint="argosy.export(fn, (x, y), OUT)")
    everything = [function, *args]
    modules = {i: split(value) for i, value in enumerate(everything) if isinstance(value, nnx.Module)}
    prefix = {i: "" if len(modules) == 1 else f"{'module' if i == 0 else f'argument{i}'}." for i in modules}
    weights: dict[str, Any] = {}
    keys: set[str] = set()
    for i, (_, leaves) in modules.items():
        for address, value in leaves.items():
            name = prefix[i] + address
            if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
                keys.add(name)
                value = jax.random.key_data(value)
            weights[name] = value

    def call(weights: Mapping[str, Any], *values: Any) -> Any:
        rest = iter(values)
        operands = []
        for i in range(len(everything)):
            if i in modules:
                names = {address: prefix[i] + address for address in modules[i][1]}
                leaves = {a: jax.random.wrap_key_data(weights[n]) if n in keys else weights[n] for a, n in names.items()}
                operands.append(merge(modules[i][0], leaves))
            else:
                operands.append(function if i == 0 else next(rest))
        return operands[0](*operands[1:])

    return call, weights, [value for i, value in enumerate(args, 1) if i not in modules]


def _named_arguments(function: Any, args: Sequence[Any], values: Sequence[Any], names: Sequence[str] | None) -> dict[str, Any]:
    """Returns the arguments that are not modules, by `names`, or by default by the names of the parameters.

    Raises:
        BadInput: the number of names is wrong, or two names are equal.
    """
    if names is not None:
        if len(names) != len(values) or len(set(names)) != len(names):
            raise BadInput(f"inputs = {list(names)}, and the function takes {len(values)} arrays")
        return dict(zip(names, values))
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    plain = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    arrays = [i for i, value in enumerate(args) if not isinstance(value, nnx.Module)]
    parameter_names = [plain[i] if i < len(plain) else f"input_{i}" for i in arrays]
    return dict(zip(parameter_names, values, strict=True))


def _abstract(name: str, value: Any) -> Any:
    """Returns the shape and type of an argument.

    Raises:
        BadInput: the argument is not an array.
    """
    if isinstance(value, jax.ShapeDtypeStruct):
        return value
    try:
        array = jnp.asarray(value)
    except (TypeError, ValueError):
        problem = f"argument `{name}` is no array, but {type(value).__name__}"
        raise BadInput(problem, hint="a function of arrays: lambda x, y: fn({'x': x, 'y': y})") from None
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _batched(arguments: Mapping[str, Any]) -> dict[str, Any]:
    for name, value in arguments.items():
        if not value.shape:
            raise BadInput(f"batch: argument `{name}` has no axes", hint="leave out `batch`, and open sizes in `args`")
    return dict(arguments)


def _opened(arguments: Mapping[str, Any], fixed: Mapping[str, int]) -> dict[str, Any]:
    """Returns the inputs of one program, in whose shapes `batch` becomes its fixed size, or a symbolic size."""
    size = fixed.get("batch") or export.symbolic_shape("batch")[0]
    return {
        name: jax.ShapeDtypeStruct(tuple(size if n == "batch" else n for n in value.shape), value.dtype)
        if "batch" in [n for n in value.shape if isinstance(n, str)]
        else value
        for name, value in arguments.items()
    }


# ---------------------------------------------------------------- outputs


def _named_outputs(result: Any, names: Sequence[str] | None) -> dict[str, Any]:
    """Returns the arrays of a result by name.

    Raises:
        BadInput: the number of names is wrong, or two names are equal.
    """
    paths = jax.tree_util.tree_flatten_with_path(result)[0]
    if names is None:
        if isinstance(result, Mapping):
            names = [".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path) for path, _ in paths]
        else:
            names = ["output" if i == 0 else f"output_{i}" for i in range(len(paths))]
    if len(names) != len(paths) or len(set(names)) != len(names):
        raise BadInput(f"outputs = {list(names)}, and the function returns {len(paths)} arrays")
    return {name: jnp.asarray(value) for name, (_, value) in zip(names, paths)}


def _described(name: str, value: Any, symbols: Mapping[str, str]) -> TensorSignature:
    shape = [n if isinstance(n, int) else str(n) for n in value.shape]
    return TensorSignature(name=name, shape=[symbols.get(str(n), n) for n in shape], dtype=str(np.dtype(value.dtype)))


def _outputs_of(programs: Sequence[tuple[dict[str, int], Any]], names: Sequence[str], batched: bool) -> list[TensorSignature]:
    """Describes the outputs of all programs. A first axis that has the size of the batch in every program is named `batch`."""
    trees = [(fixed, jax.tree.unflatten(program.out_tree, program.out_avals)) for fixed, program in programs]
    specs = []
    for name in names:
        fixed, first = trees[0][0], trees[0][1][name]
        shape = [n if isinstance(n, int) else str(n) for n in first.shape]
        if batched and fixed:
            same = bool(shape) and all(tree[name].shape[:1] == (sizes["batch"],) for sizes, tree in trees)
            shape = ["batch", *shape[1:]] if same else shape
        specs.append(TensorSignature(name=name, shape=shape, dtype=str(np.dtype(first.dtype))))
    return specs
