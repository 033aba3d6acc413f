"""Freezes the base model under adapters, and fills it with the weights of the plain model.

A base is never trained, never donated to a step and never saved with a run. It is read again from its source and identified by its
content. The weight "layers.3.attn.q.w" of the source fills "layers.3.attn.q.of.w" under an adapter, or the codes and scales of that
weight.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from argosy.adapt.lora import Fixed, LoRA
from argosy.adapt.quant import PARTS, QuantizedEinsum
from argosy.adapt.surgery import at, find, inside, put_at
from argosy.core.errors import BadInput
from argosy.models.parts.stack.addresses import layer_addresses
from argosy.models.parts.weight import Frozen, Moved, put, storage_dtype, variables
from argosy.parallel.place import on_devices

# The variables of LoRA and DoRA apart from those of the contraction under the adapter.
FACTORS = ("a", "b", "a0", "b0", "m")


class Still(Frozen):
    """The bias of a router in a frozen model, which is not updated. It stays float32, as in a trained model."""

    exact = True


class Retrained(nnx.Param):
    """A weight that is trained in full while adapters are trained, and saved with them."""


def frozen(model: nnx.Module, dtype: Any = None, but: Sequence[str] = ()) -> None:
    """Freezes every weight of a model in place, including weights that training updates by a rule and not by gradients.

    Args:
        dtype: the new type of weights that are still descriptions, except those that are always float32.
        but: the names of modules whose weights become `Retrained` instead. They keep their type.
    """
    for address, v in variables(model).items():
        metadata = {key: v.get_metadata()[key] for key in ("meaning", "draw")}
        if isinstance(v, nnx.Param) and any(inside(address, name) for name in but):
            put_at(model, address, Retrained(v.get_value(), **metadata))
            continue
        kind = Still if isinstance(v, Moved) else Frozen if isinstance(v, nnx.Param) else type(v)
        value = v.get_value()
        if dtype is not None and isinstance(value, jax.ShapeDtypeStruct):
            value = jax.ShapeDtypeStruct(value.shape, storage_dtype(kind(value, **metadata), dtype))
        put_at(model, address, kind(value, **metadata))


def retrained_addresses(model: nnx.Module) -> set[str]:
    """Returns the names of the parameters that are trained in full while adapters are trained."""
    return {address for address, v in variables(model).items() if isinstance(v, Retrained)}


def base_addresses(model: nnx.Module) -> set[str]:
    """Returns the names of the base's parameters: all that are neither factors of a trained adapter nor trained in full."""
    names = {".".join(map(str, path)) for path, module in nnx.iter_modules(model) if _is_trained(module)}
    factors = {f"{name}.{factor}" for name in names for factor in FACTORS}
    return set(variables(model)) - factors - retrained_addresses(model)


def _is_trained(module: Any) -> bool:
    return isinstance(module, LoRA) and not isinstance(module, Fixed)


def lay(model: nnx.Module, adapters: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Adds frozen adapters to the contractions of a model, in place, under adapters that are trained. Returns the factors by parameter
    name.

    Scanned layers share one rank: narrower factors are padded with zeros, and layers without an adapter have zeros.

    Args:
        model: a model with unrolled or scanned layers.
        adapters: the adapter of each contraction (factors `a` and `b`, and a `gain`), by per-layer name.

    Raises:
        BadInput: an adapter is on a weight that is trained in full.
    """
    names, leaves = layer_addresses(model), dict[str, np.ndarray]()
    for name, of in find(model, ".*").items():
        layer_adapters = [adapters.get(address.removesuffix(".w")) for address in names(f"{name}.w")]
        if all(adapter is None for adapter in layer_adapters):
            continue
        if any(isinstance(v, Retrained) for v in variables(of).values()):
            problem = f"adapter.train matches {name}, which has an adapter of the base"
            raise BadInput(problem, hint="adapter.onto=merge, or leave it out of adapter.train")
        rank = max(adapter.a.shape[-1] for adapter in layer_adapters if adapter is not None)
        put_at(model, name, fixed := Fixed(of, rank))
        a, b = (np.zeros(v.shape, np.float32) for v in (fixed.a, fixed.b))
        for layer, adapter in enumerate(layer_adapters):
            if adapter is None:
                continue
            index = (layer,) * of.stacked
            width = adapter.a.shape[-1]
            a[index][..., :width] = adapter.a
            lead = (slice(None),) * len(of.group)
            b[index][(*lead, slice(0, width))] = adapter.gain * adapter.b
        leaves |= {f"{name}.a": a, f"{name}.b": b}
    return leaves


def fill_base(
    model: nnx.Module,
    weights: Iterable[tuple[str, np.ndarray]],
    *,
    dtype: Any = None,
    place: Callable[[str], Any] | None = None,
    fresh: bool = False,
    iterations: int | None = None,
) -> None:
    """Fills the base of a model with adapters, or a quantized model, one weight at a time.

    Args:
        weights: (parameter name, array) for the weights of the plain model in the same layout.
        dtype: the type in which float weights are kept. The default is the type of their descriptions.
        place: maps the name of a parameter to its sharding.
        fresh: whether to fill also the factors that are initialized from the weights (those of PiSSA and DoRA).
        iterations: the number of iterations of PiSSA's randomized SVD. None computes the exact SVD.
    """
    by_address = variables(model)

    def keep(address: str, value: Any) -> None:
        put(model, {address: on_devices(value, place(address) if place else None)})

    for address, array in weights:
        name, _, leaf = address.rpartition(".")
        module: Any = at(model, name) if name else model
        adapted = module if _is_trained(module) else None
        of, below = module, name
        while isinstance(of, LoRA):
            of, below = of.of, f"{below}.of"
        if isinstance(of, QuantizedEinsum) and leaf == "w":
            codes = of.codes(array)
            for part in PARTS:
                if (value := getattr(codes, part)) is not None:
                    keep(f"{below}.{part}", value)
            array = np.asarray(codes.dequantized()) if adapted and fresh else array
        else:
            target = f"{below}.{leaf}" if below else leaf
            kind = by_address[target].dtype if dtype is None else storage_dtype(by_address[target], dtype)
            keep(target, np.asarray(array.astype(kind, copy=False), order="C"))
        if adapted is not None and fresh and leaf == "w":
            started = adapted.start_from(array.astype(np.float32, copy=False), iterations)
            for factor, value in started.items():
                keep(f"{name}.{factor}", jnp.asarray(value))
