"""The state of quantized training: the histories of delayed scaling, and the random keys of stochastic rounding.

Histories are stored in the attribute `amax` of the model, so a checkpoint keeps them with the optimizer state, and loading the model
ignores them. In a pass, `with_scaling` gives each contraction its history. That also works for scanned layers, because the history of a
stack has all layers on its leading axis. The pass returns the magnitudes of its tensors as the "gradient" of the history
(`low_precision`), and the step stores them (`next_amax_history`).

    history [3, H]: activations, weight, gradient; newest first
"""

import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from argosy.adapt.settings import AMAX
from argosy.adapt.surgery import at
from argosy.models.parts.stack.addresses import layer_addresses
from argosy.models.parts.weight import Draw, Meaning

# Folded into the random key of a step, because other code draws from that key too.
FOLDED = 0x57


class AmaxHistory(nnx.Variable):
    """The largest magnitudes of a contraction's activations, weight and gradient in the last steps. Always float32."""

    exact = True


class AmaxHistories(nnx.Module):
    """The histories of a model. Each is an attribute with the name of its contraction, in which `-` replaces dots."""


class StepKey(nnx.Variable):
    """The data of a contraction's random key in one pass. Stacked layers have one key for each layer."""


class LargestMagnitude(NamedTuple):
    """The largest magnitudes in a pass. The sum of those of two micro-batches is their maximum."""

    value: Array

    def __add__(self, other: Any) -> "LargestMagnitude":
        return LargestMagnitude(jnp.maximum(self.value, other.value))


def attach_histories(model: Any, names: Sequence[str], length: int) -> None:
    """Adds a history to a model for each of these contractions, except those of experts, whose gradients are not rounded. The
    histories are shapes until they are initialized with zeros.

    Args:
        names: the names of the contractions in the model's layout.
        length: the number of steps in a history.
    """
    histories = AmaxHistories()
    for name in names:
        of = at(model, name)
        if of.group:
            continue
        shape = (*of.shape[: of.stacked], 3, length)
        # These letters have no logical axis, so that no axis is split over devices.
        meaning = Meaning("abc"[: len(shape)])
        value = jax.ShapeDtypeStruct(shape, jnp.float32)
        setattr(histories, name.replace(".", "-"), AmaxHistory(value, meaning=meaning, draw=Draw("constant", 0.0)))
    setattr(model, AMAX, histories)


def with_scaling(model: Any, key: Array | None = None) -> None:
    """Gives each contraction of a model its history, and a random key of its own if it rounds stochastically. A model without either
    does not change, and nothing is traced for it.

    Args:
        key: the random key of a training pass. None if gradients are not computed, or are rounded to nearest.
    """
    histories = getattr(model, AMAX, None)
    for name, variable in vars(histories).items() if histories is not None else ():
        if isinstance(variable, AmaxHistory):
            at(model, name.replace("-", ".")).history = AmaxHistory(variable[...], meaning=Meaning(""), draw=Draw())
    if key is None:
        return
    names = layer_addresses(model)
    modules: list[tuple[Any, Any]] = [*nnx.iter_modules(model)]
    for path, module in modules:
        if not getattr(module, "stochastic", False):
            continue
        layer_names = names(".".join([*map(str, path), "w"]))
        hashes = np.asarray([zlib.crc32(name.encode()) for name in layer_names], np.uint32)
        keys = jax.vmap(partial(jax.random.fold_in, jax.random.fold_in(key, FOLDED)))(hashes)
        data = jax.random.key_data(keys)
        module.key = StepKey(data if module.stacked else data[0], meaning=Meaning(""), draw=Draw())


def histories_of(weights: Mapping[str, Array]) -> dict[str, Array]:
    """Returns the histories among a model's variables, by name."""
    return {address: leaf for address, leaf in weights.items() if address.startswith(f"{AMAX}.")}


def next_amax_history(history: Array, seen: LargestMagnitude) -> Array:
    """Returns the next history: the magnitudes of this step, followed by the old ones without the oldest."""
    return jnp.concatenate([seen.value[..., :1], history[..., :-1]], -1)
