"""Fills a model with stored weights, one stored array at a time, and reads a model's weights back by per-layer name."""

from collections.abc import Callable, Collection, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from argosy.core.counts import plural
from argosy.core.errors import BadInput
from argosy.core.formats import Arrays, TensorReader
from argosy.models.parts.stack.addresses import layer_addresses, stored_addresses, to_layers
from argosy.models.parts.weight import put, split, storage_dtype, variables
from argosy.parallel.place import on_devices


def read_into(
    model: Any, weights: TensorReader, *, dtype: Any = None, place: Callable[[str], Any] | None = None, but: Collection[str] = ()
) -> None:
    """Fills a model in any layout from per-layer weights, one stored array at a time.

    Args:
        dtype: the type that the model keeps the weights in. The default is float32.
        place: maps the name of a parameter to its sharding. By default arrays lie on the default device.
        but: the names of parameters that are left as they are, whether or not they are stored.

    Raises:
        BadInput: weights are missing, unexpected or of the wrong shape, all listed.
    """
    for address, array in stored_arrays(model, weights, dtype=dtype, but=but):
        put(model, {address: on_devices(array, place(address) if place else None)})


def stored_arrays(
    model: Any, weights: TensorReader, *, dtype: Any = None, but: Collection[str] = (), without: Collection[str] = ()
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (parameter name, array) for the weights of a model in its layout, one stored array at a time. Other arguments and errors
    are those of `read_into`.

    Args:
        without: the names of parameters that are not read. Unlike those in `but`, they must be stored.
    """
    names, model_weights = layer_addresses(model), variables(model)
    check_fit(model, weights, but)
    # In the order in which they are stored, so that a stack of layers is read once.
    order = {name: i for i, name in enumerate(weights.names)}
    model_weights = {address: v for address, v in model_weights.items() if address not in but and address not in without}
    for address, v in sorted(model_weights.items(), key=lambda item: order[names(item[0])[0]]):
        stacked = len(v.shape) > len(v.get_metadata()["meaning"].letters)
        target = np.dtype(storage_dtype(v, dtype or jnp.float32))
        if stacked:
            whole = np.empty(v.shape, target)
            for i, name in enumerate(names(address)):
                whole[i] = weights.read(name)
        else:
            whole = np.asarray(weights.read(names(address)[0]).astype(target, copy=False), order="C")
        yield address, whole


def check_fit(model: Any, weights: TensorReader, but: Collection[str] = ()) -> None:
    """Checks that stored weights have the names and shapes of a model's parameters.

    Args:
        but: the names of parameters that are not compared.

    Raises:
        BadInput: there are differences. The message lists the first eight.
    """
    model_weights = variables(model)
    expected = {}
    for name, (address, i) in stored_addresses(model).items():
        expected[name] = tuple(model_weights[address].shape if i is None else model_weights[address].shape[1:])
    for name in but:
        expected.pop(name, None)
    here = set(weights.names)
    problems = [f"missing {n}" for n in expected if n not in here]
    problems += [f"unexpected {n}" for n in weights.names if n not in expected and n not in but]
    problems += [
        f"{n} is {weights.shape(n)}, not {shape}"
        for n, shape in expected.items()
        if n in here and weights.shape(n) != shape
    ]
    if problems:
        more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise BadInput(
            f"{plural(len(problems), 'weight', 'does', 'do')} not fit the model: {'; '.join(problems[:8])}{more}",
            hint="do the model's settings belong to these weights?",
        )


def model_weights(model: Any) -> Arrays:
    """Returns a reader of a model's weights by per-layer name. A layer of stacked weights is sliced when it is read."""
    return Arrays(to_layers(model, split(model)[1]))
