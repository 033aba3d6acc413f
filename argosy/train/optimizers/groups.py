"""Groups of weights, which patterns over names choose. The weights of a group have another learning rate or weight decay, or are
frozen.

A pattern is a regular expression over the dotted name of a weight or of a module that contains it: `embed`, `.*norm`, `layers\\.0`.
Names are those of single layers, however layers are stacked in memory, so a group means the same in every layout. If the layers of a
stacked weight differ, its factors are an array [L, 1, ...]. A pattern that matches nothing is an error.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from argosy.core.dims import LOOKED_UP
from argosy.core.errors import BadInput, nearest
from argosy.core.settings import Settings

LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
NAMES = "names are regular expressions over weights and modules: `argosy models show MODEL`"


class OptimizerGroup(Settings):
    """Weights that are updated in a way of their own."""

    match: str
    """A regular expression that matches the whole name of a weight or of a module that contains it, such as `embed`, `.*norm` or
    `layers\\.[0-3]`. One that matches nothing is an error."""
    rate: float = Field(1.0, ge=0)
    """Factor on the learning rate."""
    weight_decay: float | None = Field(None, ge=0)
    """Weight decay, in place of `optimizer.weight_decay` and `optimizer.decay`. None: as all others."""
    freeze: bool = False
    """Whether the weights stay as they are. Where all layers of a stack are frozen, they have no gradient and no optimizer state."""


def matching_group(name: str, groups: Sequence[OptimizerGroup]) -> OptimizerGroup | None:
    """Returns the last group that matches the name of a weight or of a module that contains it; None if there is none."""
    return next((group for group in reversed(groups) if _matches(group.match, name)), None)


def _matches(pattern: str, name: str) -> bool:
    parts = name.split(".")
    try:
        rule = re.compile(pattern)
    except re.error as error:
        raise BadInput(f"`{pattern}` is not a regular expression: {error}", where="set by optimizer.groups") from None
    return any(rule.fullmatch(".".join(parts[:n])) for n in range(1, len(parts) + 1))


def check_groups_match(groups: Sequence[OptimizerGroup], names: Sequence[str]) -> None:
    """Checks that every group matches a weight.

    Raises:
        BadInput: a group matches no weight, or its pattern is not a regular expression.
    """
    for group in groups:
        if not any(_matches(group.match, name) for name in names):
            modules = {".".join(name.split(".")[:n]) for name in names for n in range(1, name.count(".") + 2)}
            problem = f"no trained weight matches `{group.match}`"
            raise BadInput(problem, where="set by optimizer.groups", hint=nearest(group.match, modules) or NAMES)


def freeze_groups(model: Any, groups: Sequence[OptimizerGroup]) -> list[str]:
    """Freezes, in place, the weights of a model that groups freeze in all of their layers. Returns the names of these weights.

    Raises:
        BadInput: a group matches no trained weight.
    """
    from flax import nnx

    from argosy.adapt.surgery import freeze
    from argosy.models.parts.stack.addresses import layer_addresses
    from argosy.models.parts.weight import variables

    if not groups:
        return []
    layers = layer_addresses(model)
    names = {address: layers(address) for address, v in variables(model).items() if isinstance(v, nnx.Param)}
    check_groups_match(groups, [name for layer_names in names.values() for name in layer_names])
    frozen = [
        a
        for a, layer_names in names.items()
        if all((group := matching_group(name, groups)) and group.freeze for name in layer_names)
    ]
    for address in frozen:
        freeze(model, re.escape(address))
    return frozen


@dataclass(frozen=True)
class GroupFactors:
    """The effect of groups on each weight, by parameter name. A value is a number, or an array with one number per layer that
    broadcasts to the weight.

    rates: the factors on the learning rate; weights without an entry have 1.
    decay_of: the weight decay of each layer, with the axes of the weight; weights without an entry have the optimizer's.
    partial: whether each layer is trained, for weights of which some layers are frozen.
    """

    rates: Mapping[str, Any]
    decay_of: Mapping[str, Any]
    partial: Mapping[str, Any]

    @classmethod
    def of(
        cls,
        groups: Sequence[OptimizerGroup],
        layer_decay: float | None,
        meanings: Mapping[str, tuple[Any, int]],
        layers: Callable[[str], list[str]],
    ) -> "GroupFactors":
        """Computes the factors of weights.

        Args:
            layer_decay: the factor on the learning rate for each layer of distance from the head; None: none.
            meanings: the meanings of the weights, by parameter name.
            layers: (parameter name) -> the names of the stored weight in each of its layers.
        """
        names = {address: layers(address) for address in meanings}
        # Groups that only freeze may have left nothing to train (`freeze_groups`), which checked them.
        check_groups_match([g for g in groups if not g.freeze], [name for layer_names in names.values() for name in layer_names])
        depth = 1 + max((int(m[1]) for layer_names in names.values() for name in layer_names if (m := LAYER.search(name))), default=-1)
        rates, decays, partial = dict[str, Any](), dict[str, Any](), dict[str, Any]()
        for address, (meaning, stored) in meanings.items():
            matching = [matching_group(name, groups) for name in names[address]]
            each = [1.0 if group is None else group.rate for group in matching]
            if layer_decay is not None:
                each = [rate * layer_decay ** _layers_above(name, meaning, depth) for rate, name in zip(each, names[address])]
            if any(rate != 1.0 for rate in each):
                rates[address] = _by_layer(each, stored, len(meaning.letters))
            if any(group is not None and group.weight_decay is not None for group in matching):
                decays[address] = [None if group is None else group.weight_decay for group in matching], stored, len(meaning.letters)
            if any(group is not None and group.freeze for group in matching):
                partial[address] = _by_layer([group is None or not group.freeze for group in matching], stored, len(meaning.letters))
        return cls(rates, decays, partial)

    def decay(self, address: str, usual: float) -> Any:
        """Returns the weight decay of a weight.

        Args:
            usual: the weight decay without groups.
        """
        if address not in self.decay_of:
            return usual
        each, stored, letters = self.decay_of[address]
        return _by_layer([usual if decay is None else decay for decay in each], stored, letters)

    @property
    def by_layer(self) -> bool:
        """Whether layers of one stack have different factors."""
        arrays = [*self.rates.values(), *self.partial.values(), *(self.decay(a, 0.0) for a in self.decay_of)]
        return any(not isinstance(factor, float | bool) for factor in arrays)

    def masked(self) -> Any:
        """Makes a transformation that sets the gradients of frozen layers to 0, so that they do not count in the clipped norm."""
        import jax.numpy as jnp
        import optax

        def update(updates: Any, params: Any) -> Any:
            return {a: jnp.where(self.partial[a], u, 0) if a in self.partial else u for a, u in updates.items()}

        return optax.stateless(update)


def _layers_above(name: str, meaning: Any, depth: int) -> int:
    """Returns the number of layers above a weight, towards the output. The head counts as a layer."""
    if match := LAYER.search(name):
        return depth - int(match[1])
    # Embeddings are looked up; a head's rows are too, but it sums over features.
    is_lookup = bool(LOOKED_UP & set(meaning.axes)) and name.split(".")[0] != "head"
    return depth + 1 if is_lookup else 0


def _by_layer(each: list[Any], stored: int, letters: int) -> Any:
    """Returns one number if it is the same for all layers, otherwise an array [L, 1, ...] of one number per layer."""
    if all(number == each[0] for number in each):
        return each[0]
    import numpy as np

    lead = stored - letters
    if lead != 1:
        raise BadInput("layers in several rounds of stages have no groups of their own", where="set by optimizer.groups")
    kind = bool if isinstance(each[0], bool) else np.float32
    return np.asarray(each, kind).reshape(len(each), *[1] * letters)


def in_groups(rule: Any, factors: GroupFactors) -> Any:
    """Multiplies the updates of a rule by these factors. The state stays that of the rule."""
    if not factors.rates and not factors.partial:
        return rule
    import jax.numpy as jnp
    import optax

    def update(updates: Any, state: Any, params: Any = None, **others: Any) -> Any:
        done: Any = optax.with_extra_args_support(rule).update(updates, state, params, **others)
        new_updates: dict[str, Any] = done[0]
        new_updates = {a: factors.rates[a] * u if a in factors.rates else u for a, u in new_updates.items()}
        return {a: jnp.where(factors.partial[a], u, 0) if a in factors.partial else u for a, u in new_updates.items()}, done[1]

    return optax.GradientTransformationExtraArgs(rule.init, update)
