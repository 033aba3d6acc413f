"""Everything a step reads and writes. A checkpoint holds it, together with the position in the data."""

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

    step: number of updates so far.
    params: trained weights.
    rest: frozen weights.
    optimizer: the optimizer's state.
    key: random key, to be folded with the step.
    guard: the state of `train.guard`; None without one.
    ema: the average of the trained weights (`train.ema`); None without one, or if the optimizer's state holds it.
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
        """The trained weights that evaluations, samples and readers of a checkpoint use: their average, if there is one."""
        if self.ema is not None:
            return self.ema
        average = average_of(self.optimizer, self.params)
        return self.params if average is None else average

    @property
    def is_averaged(self) -> bool:
        """Whether evaluations use other weights than the trained ones."""
        return self.inference_params is not self.params


def split_trained(model: nnx.Module) -> tuple[Any, Leaves, Leaves]:
    """The graph of a model, its trained weights, and the rest."""
    return split(model, nnx.Param)


def training_graph(model: nnx.Module) -> Any:
    """The graph of the training step: as `split_trained`, with the capacity of experts in effect."""
    return split_trained(with_capacity(merge(*split_trained(model))))[0]


def meanings_of(model: nnx.Module) -> Meanings:
    """The meaning and the number of stored axes of every trained weight."""
    by_address = variables(model)
    return {a: (v.get_metadata()["meaning"], len(v.shape)) for a, v in by_address.items() if isinstance(v, nnx.Param)}


def flatten_state(tree: Any) -> dict[str, Any]:
    """The leaves of an optimizer state (or any pytree) by dotted name, as checkpoints hold them."""
    return {_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def unflatten_state(like: Any, leaves: dict[str, Any]) -> Any:
    """The tree of the form of `like` from such leaves.

    Raises:
        KeyError: a leaf is missing.
    """
    return jax.tree_util.tree_map_with_path(lambda path, _: leaves[_name(path)], like)


def _name(path: Any) -> str:
    return ".".join(str(getattr(k, "key", getattr(k, "idx", getattr(k, "name", k)))) for k in path)
