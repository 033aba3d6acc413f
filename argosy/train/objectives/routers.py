"""Adds the parts of mixtures of experts to an objective: aux losses, metrics of expert load, and updates of router biases by load.

Rows have the same weights in aux losses as in the loss. So accumulation, packing and the number of devices do not change aux losses,
except with `balance_over: batch`, which multiplies means over the rows that are computed together.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from argosy.models.parts.stack import Aux
from argosy.models.parts.weight import Moved, variables
from argosy.train.objectives.loss import Loss, RuleUpdate, WeightedMean


@dataclass(frozen=True)
class ByLoad:
    """A rule that moves the biases of a router by `rate`: up for experts with less than an even load, down for those with more
    (arXiv:2408.15664, algorithm 1)."""

    rate: float

    def __call__(self, bias: Float[Array, "*L E"], load: Float[Array, "*L E"]) -> Float[Array, "*L E"]:
        return bias + self.rate * jnp.sign(jnp.mean(load, -1, keepdims=True) - load)


def with_routers(loss: Loss, model: Any, aux: Aux, rows: Float[Array, "B"]) -> Loss:
    """Adds the routers' aux losses, metrics and updates to a loss, as means over layers.

    Args:
        aux: the aux outputs of the layers.
        rows: the weight of each row of the batch.

    Raises:
        ValueError: the config has experts, but no layer returned aux outputs of experts.
    """
    experts = getattr(model.config, "experts", None)
    if experts is None:
        return loss
    layers = [layer for layer in aux.values() if "load" in layer]
    if not layers:
        raise ValueError(f"{type(model.config).__name__} has experts, and none of its layers has their aux outputs")
    load = jnp.concatenate([layer["load"] for layer in layers])  # [L E]
    share = load * experts.count / jnp.maximum(jnp.sum(load, -1, keepdims=True), 1.0)  # 1: an even load
    weight = jnp.sum(rows)
    names = {"balance": "router_balance", "router_z": "router_z", "dropped": "experts_dropped"}
    metrics = {
        metric: WeightedMean(jnp.sum(jnp.mean(jnp.concatenate([layer[name] for layer in layers]), 0) * rows), weight)
        for name, metric in names.items()
        if all(name in layer for layer in layers)
    }
    total = loss.loss.total + experts.balance * metrics["router_balance"].total + experts.z_loss * metrics["router_z"].total
    metrics |= {
        "expert_load_max": WeightedMean(jnp.max(share) * weight, weight),
        "experts_idle": WeightedMean(jnp.mean(load == 0) * weight, weight),
    }
    rule = ByLoad(experts.bias_rate)
    updates = {a: RuleUpdate(layer_load, rule) for a, layer_load in _by_address(model, aux).items()} if experts.bias else {}
    return Loss(WeightedMean(total, loss.loss.weight), loss.metrics | metrics, loss.updates | updates)


def _by_address(model: Any, aux: Aux) -> dict[str, Array]:
    """Returns the load of the experts of each layer by the parameter name of the router's biases. Loads are stacked over layers where
    the biases are."""
    stack = model.layers
    places = {i: (kind, n) for kind, indexes in stack.indexes().items() for n, i in enumerate(indexes)}
    stored = stack.stored() if stack.run.stacked else {}
    out = {}
    for address in [address for address, v in variables(model).items() if isinstance(v, Moved)]:
        root, name = address.split(".")[:2]
        # Modules outside the layers have aux outputs under their own name, one row each, if they ran.
        if root != "layers":
            out |= {address: aux[root]["load"][int(name)]} if root in aux else {}
        elif name in stored:
            kind, indexes = stored[name]
            out[address] = aux[kind]["load"][jnp.asarray([places[i][1] for i in indexes])]
        else:
            kind, n = places[int(name)]
            out[address] = aux[kind]["load"][n]
    return out
