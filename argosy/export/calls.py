"""Prepares a call of a signature, in numpy: checks the inputs, chooses a program by their sizes, and pads them to the sizes of the
program.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from argosy.core.errors import BadInput, nearest
from argosy.export.manifest import BundleProgram, BundleSignature, TensorSignature, dtype_of_name


def checked_inputs(signature: BundleSignature, inputs: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Converts every input of a signature to an array of its type. Missing optional inputs get their default.

    Raises:
        BadInput: an input is unknown, missing, or has another type or number of axes.
    """
    specs = {spec.name: spec for spec in signature.inputs}
    texts = [name for step in signature.preprocess for name in step.texts]
    for name in inputs:
        if name not in specs:
            raise BadInput(f"no input `{name}`", hint=nearest(name, [*texts, *specs]))
    arrays = {name: _as_array(specs[name], value) for name, value in inputs.items()}
    if missing := [spec.name for spec in signature.inputs if spec.name not in arrays and spec.default is None]:
        maker = next((step.input for step in signature.preprocess if missing[0] in step.results), None)
        other = "" if maker is None else f"; or `{maker}`"
        raise BadInput(f"input `{missing[0]}` is missing", hint=f"it takes {', '.join(specs)}{other}")
    sizes = named_sizes(signature, arrays)
    for spec in signature.inputs:
        if spec.name in arrays:
            _check_range(spec, arrays[spec.name])
        else:
            shape = [sizes[size] if isinstance(size, str) else size for size in spec.shape]
            arrays[spec.name] = np.full(shape, spec.default, dtype_of_name(spec.dtype))
    return {spec.name: arrays[spec.name] for spec in signature.inputs}


def _as_array(spec: TensorSignature, value: Any) -> np.ndarray:
    dtype = dtype_of_name(spec.dtype)
    if isinstance(value, np.ndarray | np.generic) or hasattr(value, "__array__"):
        array = np.asarray(value)
        if array.dtype != dtype:
            raise BadInput(f"input `{spec.name}` is {array.dtype}, and this signature takes {spec.dtype}")
    else:
        array = _of_list(spec, value, dtype)
    if array.ndim != len(spec.shape):
        raise BadInput(f"input `{spec.name}` has shape {list(array.shape)}, and this signature takes {shape_text(spec)}")
    return array


def _check_range(spec: TensorSignature, array: np.ndarray) -> None:
    """Checks the range of an input.

    Raises:
        BadInput: a number is outside of the range, or NaN.
    """
    fits = np.ones(array.shape, bool)
    if spec.minimum is not None:
        fits &= array >= spec.minimum
    if spec.maximum is not None:
        fits &= array <= np.asarray(spec.maximum)
    if not fits.all():
        takes = f"{spec.minimum} and more" if spec.maximum is None else f"{spec.maximum} at most"
        if spec.minimum is not None and spec.maximum is not None:
            takes = f"{spec.minimum} to {spec.maximum}"
        raise BadInput(f"input `{spec.name}` has {array[~fits][0]}, and this signature takes {takes}")


def _of_list(spec: TensorSignature, value: Any, dtype: np.dtype) -> np.ndarray:
    """Converts nested lists of JSON to an array. Numbers that would be rounded to integers or overflow are errors."""
    try:
        plain = np.asarray(value)
    except ValueError:
        problem = f"input `{spec.name}` has rows of different lengths"
        raise BadInput(problem, hint="fill them up, with mask 0 where there is one") from None
    if plain.size == 0:
        plain = plain.astype(dtype)
    kinds = {"b": "b", "i": "iu", "u": "iu"}.get(dtype.kind, "iuf")
    if plain.dtype.kind not in kinds:
        raise BadInput(f"input `{spec.name}` is {plain.dtype}, and this signature takes {spec.dtype}")
    if dtype.kind in "iu" and plain.size:
        limits = np.iinfo(dtype)
        if int(plain.min()) < limits.min or int(plain.max()) > limits.max:
            raise BadInput(f"input `{spec.name}` has numbers outside {spec.dtype}")
    with np.errstate(over="ignore"):
        array = plain.astype(dtype)
    if dtype.kind not in "biuc" and (np.isfinite(plain) & ~np.isfinite(array.astype(np.float64))).any():
        raise BadInput(f"input `{spec.name}` has numbers outside {spec.dtype}")
    return array


def shape_text(spec: TensorSignature) -> str:
    """Formats a shape for people, such as [batch, 16]."""
    return f"[{', '.join(map(str, spec.shape))}]"


def named_sizes(signature: BundleSignature, arrays: Mapping[str, np.ndarray]) -> dict[str, int]:
    """Returns the size of each named axis.

    Raises:
        BadInput: an axis has a wrong size, two axes of the same name differ, or a size exceeds its limit.
    """
    sizes: dict[str, int] = {}
    first: dict[str, str] = {}
    for spec in signature.inputs:
        if spec.name not in arrays:
            continue
        shape = arrays[spec.name].shape
        for size, expected in zip(shape, spec.shape, strict=True):
            if isinstance(expected, int):
                if size != expected:
                    raise BadInput(f"input `{spec.name}` has shape {list(shape)}, and this signature takes {shape_text(spec)}")
                continue
            if sizes.setdefault(expected, size) != size:
                problem = f"`{expected}` is {sizes[expected]} in input `{first[expected]}` and {size} in input `{spec.name}`"
                raise BadInput(problem, hint=f"`{spec.name}` has shape {shape_text(spec)}")
            first.setdefault(expected, spec.name)
            if size == 0:
                raise BadInput(f"input `{spec.name}` has shape {list(shape)}: `{expected}` is 0")
            if size > signature.limits.get(expected, size):
                raise BadInput(f"`{expected}` is {size} in input `{spec.name}`, and at most {signature.limits[expected]}")
    return sizes


def select_program(signature: BundleSignature, platform: str, sizes: Mapping[str, int]) -> BundleProgram:
    """Returns the program of exactly these sizes, or the smallest one to whose sizes the inputs can be padded.

    Raises:
        BadInput: there is no such program.
    """
    mine = [program for program in signature.programs if platform in program.platforms]
    fitting = [program for program in mine if all(_fits(signature, name, sizes, size) for name, size in program.shapes.items())]
    if not fitting:
        requested = ", ".join(f"{name} {size}" for name, size in sizes.items())
        there = "; ".join(", ".join(f"{name} {size}" for name, size in program.shapes.items()) for program in mine)
        raise BadInput(f"no program for {requested}", hint=f"there are programs for {there}")
    return min(fitting, key=lambda program: [program.shapes[name] for name in sorted(program.shapes)])


def _fits(signature: BundleSignature, name: str, sizes: Mapping[str, int], size: int) -> bool:
    return sizes.get(name, size) == size or (name in signature.padding and sizes[name] < size)


def filled_inputs(signature: BundleSignature, sizes: Mapping[str, int]) -> dict[str, np.ndarray]:
    """Returns placeholder inputs of these sizes. Named axes without a size get size 1."""
    arrays = {}
    for spec in signature.inputs:
        shape = [sizes.get(size, 1) if isinstance(size, str) else size for size in spec.shape]
        arrays[spec.name] = np.full(shape, spec.pad if spec.default is None else spec.default, dtype_of_name(spec.dtype))
    return arrays


def padded_inputs(
    signature: BundleSignature, arrays: Mapping[str, np.ndarray], program: BundleProgram
) -> dict[str, np.ndarray]:
    """Pads the inputs to the sizes of a program."""
    return {spec.name: _padded(arrays[spec.name], spec, program.shapes) for spec in signature.inputs}


def _padded(array: np.ndarray, spec: TensorSignature, sizes: Mapping[str, int]) -> np.ndarray:
    more = [sizes.get(str(name), size) - size for name, size in zip(spec.shape, array.shape, strict=True)]
    if not any(more):
        return array
    return np.pad(array, [(0, extra) for extra in more], constant_values=np.asarray(spec.pad, array.dtype))


def unpadded_outputs(
    signature: BundleSignature, outputs: Mapping[str, np.ndarray], sizes: Mapping[str, int]
) -> dict[str, np.ndarray]:
    """Removes the padding from outputs. Returns them in the order of the signature.

    Args:
        sizes: the sizes of named axes before padding.
    """
    unpadded = {}
    for spec in signature.outputs:
        array = outputs[spec.name]
        part = array[tuple(slice(sizes.get(str(name), size)) for name, size in zip(spec.shape, array.shape))]
        # For an array without axes, numpy returns a number and not an array.
        unpadded[spec.name] = np.asarray(part)
    return unpadded
