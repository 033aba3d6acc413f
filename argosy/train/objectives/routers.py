"""What mixtures of experts add to an objective: their auxiliary losses, how even their load is, and the biases that load moves.

A model whose config has experts must tell of them; one that does not is an error here, not a loss of zero.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from argosy.models.parts.stack import Told
from argosy.models.parts.weight import Leaves, Moved, variables
from argosy.train.objectives import Loss, Mean


def with_routers(loss: Loss, model: Any, told: Told, weight: Float[Array, ""]) -> Loss:
    """The same loss with what the routers add, a mean over layers.

    Args:
        told: what the layers told.
        weight: of the batch: the additions count as much as everything else in it.

    Raises:
        ValueError: the config has experts, and no layer told of them.
    """
    how = getattr(model.config, "experts", None)
    if how is None:
        return loss
    layers = [said for said in told.values() if "load" in said]
    if not layers:
        raise ValueError(f"{type(model.config).__name__} has experts, and none of its layers told of them")
    load, balance, z = (jnp.concatenate([said[name] for said in layers]) for name in ("load", "balance", "router_z"))
    share = load * how.count / jnp.maximum(jnp.sum(load, -1, keepdims=True), 1.0)  # 1: an even load
    metrics = {
        "router_balance": jnp.mean(balance),
        "router_z": jnp.mean(z),
        "expert_load_max": jnp.max(share),
        "experts_idle": jnp.mean(load == 0),
    }
    if all("dropped" in said for said in layers):
        metrics["experts_dropped"] = jnp.mean(jnp.concatenate([said["dropped"] for said in layers]))
    added = (how.balance * metrics["router_balance"] + how.z_loss * metrics["router_z"]) * weight
    told_of = {name: Mean(value * weight, weight) for name, value in metrics.items()}
    loads = _by_address(model, told) if how.bias else {}
    return Loss(Mean(loss.loss.total + added, loss.loss.weight), loss.metrics | told_of, loads)


def _by_address(model: Any, told: Told) -> dict[str, Array]:
    """The load of each layer, as the biases are stored: stacked, or a layer each."""
    moved = [address for address, v in variables(model).items() if isinstance(v, Moved)]
    kind_of = {
        str(i): (layer.kind, model.layers.indexes()[layer.kind].index(i)) for i, layer in enumerate(model.layers.plan)
    }
    out = {}
    for address in moved:
        root, name = address.split(".")[:2]
        if root != "layers":  # modules beside the layers tell under their own name, a row each, if they are run
            out |= {address: told[root]["load"][int(name)]} if root in told else {}
        elif name in kind_of:
            kind, i = kind_of[name]
            out[address] = told[kind]["load"][i]
        elif name in told:
            out[address] = told[name]["load"]
    return out


def moved(rest: Leaves, loads: dict[str, Array], rate: float) -> Leaves:
    """The biases a step further: up for experts with less than an even load, down for those with more
    (arXiv:2408.15664, algorithm 1)."""
    return rest | {a: rest[a] + rate * jnp.sign(jnp.mean(n, -1, keepdims=True) - n) for a, n in loads.items()}
