"""The training state: everything that a step reads and writes. A checkpoint holds it, together with the position in the data."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from argosy.models.parts.moe import with_capacity
from argosy.models.parts.weight import Leaves, merge, split, variables
from argosy.train.optimizers.base import Meanings
from argosy.train.optimizers.schedule_free import average_of


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """The state of training.

    step: the number of updates so far.
    params: the trained weights, by parameter name.
    rest: all other weights, by parameter name.
    optimizer: the state of the optimizer.
    key: the random key of the run, which each step folds with its number.
    guard: the state of `train.guard`; None without a guard.
    ema: the average of the trained weights (`train.ema`); None without `ema.decay`, or if the optimizer keeps the average.
    """

    # Integer and key arrays; or, in a tree of the same structure, their shapes or shardings.
    step: Any
    params: Leaves
    rest: Leaves
    optimizer: Any
    key: Any
    guard: Any = None
    ema: Any = None

    @classmethod
    def start(
        cls, params: Leaves, rest: Leaves, optimizer: Any, seed: int, guard: Any = None, ema: Any = None
    ) -> "TrainState":
        return cls(jnp.zeros((), jnp.int32), params, rest, optimizer, jax.random.key(seed), guard, ema)

    @property
    def inference_params(self) -> Leaves:
        """The weights that evaluations, samples and readers of a checkpoint use: the average of the trained weights, if there is one,
        otherwise the trained weights."""
        if self.ema is not None:
            return self.ema
        average = average_of(self.optimizer, self.params)
        return self.params if average is None else average

    @property
    def is_averaged(self) -> bool:
        """Whether evaluations use other weights than the trained ones."""
        return self.inference_params is not self.params


def split_trained(model: nnx.Module) -> tuple[Any, Leaves, Leaves]:
    """Splits a model into its graph, its trained weights and all other weights, the latter two by parameter name."""
    return split(model, nnx.Param)


def training_graph(model: nnx.Module) -> Any:
    """Returns the graph of a model for training, in which the capacity of experts is in effect."""
    return split_trained(with_capacity(merge(*split_trained(model))))[0]


def meanings_of(model: nnx.Module) -> Meanings:
    """Returns the meaning and the number of stored axes of every trained weight, by parameter name."""
    by_address = variables(model)
    return {a: (v.get_metadata()["meaning"], len(v.shape)) for a, v in by_address.items() if isinstance(v, nnx.Param)}


def flatten_state(tree: Any) -> dict[str, Any]:
    """Returns the leaves of an optimizer state (or any pytree) by dotted name, as checkpoints store them."""
    return {_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def unflatten_state(like: Any, leaves: dict[str, Any]) -> Any:
    """Makes a pytree with the structure of `like` from the leaves of `flatten_state`.

    Raises:
        KeyError: a leaf is missing.
    """
    return jax.tree_util.tree_map_with_path(lambda path, _: leaves[_name(path)], like)


def _name(path: Any) -> str:
    return ".".join(str(getattr(k, "key", getattr(k, "idx", getattr(k, "name", k)))) for k in path)
