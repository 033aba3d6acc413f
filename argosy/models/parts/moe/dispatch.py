"""Strategies that bring the rows of tokens to their experts (`parts.moe`).

    Sorted      dropless: rows are sorted by expert and multiplied in grouped matrix products (`ops.grouped`; Gale et al.
                2022, arXiv:2211.15841)
    Capacity    an expert processes at most a fixed number of tokens of each sequence, and further tokens skip the expert; first
                choices are served before second ones (Lepikhin et al. 2020, arXiv:2006.16668). For training only: in inference, a
                token's output must not depend on later tokens

If a mesh axis splits the experts, rows are sent to the devices of their experts and back (`parts.moe.exchange`). If the rows do not
divide over that axis, its devices all have the same rows. Each device then applies its own experts, and the outputs are summed.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from argosy.models.parts.einsum import Contraction, Route
from argosy.models.parts.moe.exchange import exchange_rows, exchanged_in_rounds
from argosy.models.parts.moe.sorting import inverse, sorted_by, weighted_rows
from argosy.models.settings import Experts
from argosy.ops.hadamard import hadamard_transform

Act = Callable[[Array, Array], Array]


class LocalExperts(NamedTuple):
    """The experts of one device.

    acted: the function of gate and up whose result `down` reads.
    features: the mesh axis that splits the experts' features M. The output must be summed over that axis, and only its first device
        adds biases.
    axis: the mesh axis that splits the experts. Each of its devices has the same number of consecutive experts.
    together: whether the devices along `axis` have the same rows.
    rotates: whether the input of `down` is rotated (`parts.rotations`).
    """

    gate: Contraction
    up: Contraction
    down: Contraction
    settings: Experts
    acted: Act
    features: str | None = None
    axis: str | None = None
    together: bool = False
    rotates: bool = False

    def __call__(self, rows: Float[Array, "A D"], route: Route) -> Float[Array, "A D"]:
        gate, up = (checkpoint_name(project(rows, route), "experts") for project in (self.gate, self.up))
        h = self.acted(gate, up)
        y = self.down.product(self._rotated(h) if self.rotates else h, route)
        if self.features is None or self.down.bias is None:
            return self.down.biased(y, route)
        return jnp.where(jax.lax.axis_index(self.features) == 0, self.down.biased(y, route), y)

    def _rotated(self, h: Float[Array, "A M"]) -> Float[Array, "A M"]:
        """Rotates across all features, and returns those of this device."""
        if self.features is None:
            return hadamard_transform(h)
        # Each rotated feature is a sum over the features of all devices.
        whole = hadamard_transform(jax.lax.all_gather(h, self.features, axis=1, tiled=True))
        return jax.lax.dynamic_slice_in_dim(whole, jax.lax.axis_index(self.features) * h.shape[1], h.shape[1], 1)

    @property
    def shares(self) -> int:
        """The number of devices that the experts are split over."""
        return 1 if self.axis is None else jax.lax.axis_size(self.axis)

    @property
    def local_experts(self) -> int:
        """The number of experts on this device."""
        return self.settings.count // self.shares

    @property
    def first(self) -> Any:
        """The index of the first expert on this device."""
        return 0 if self.axis is None else jax.lax.axis_index(self.axis) * self.local_experts


class Dispatch(Protocol):
    """The interface of dispatch strategies, which are frozen dataclasses.

    A call returns the weighted sum over each token's experts, and aux outputs [B]. `indexes` is E where a token goes to no expert.

    whole: whether the strategy needs whole sequences on one device.
    """

    @property
    def whole(self) -> bool: ...

    def __call__(
        self,
        experts: LocalExperts,
        x: Float[Array, "B T D"],
        weights: Float[Array, "B T k"],
        indexes: Int[Array, "B T k"],
    ) -> tuple[Float[Array, "B T D"], dict[str, Float[Array, "B"]]]: ...


@dataclass(frozen=True)
class Sorted:
    """Sorts rows by expert and drops none."""

    whole = False

    def __call__(
        self, experts: LocalExperts, x: Float[Array, "B T D"], weights: Float[Array, "B T k"], indexes: Int[Array, "B T k"]
    ) -> tuple[Float[Array, "B T D"], dict[str, Float[Array, "B"]]]:
        k, D = indexes.shape[-1], x.shape[-1]
        apart = experts.axis is not None and not experts.together
        E = experts.settings.count if apart else experts.local_experts
        if experts.together:
            is_local = (indexes >= experts.first) & (indexes < experts.first + E)
            indexes = jnp.where(is_local, indexes - experts.first, E)
        flat, weights = indexes.reshape(-1), weights.reshape(-1, k)
        order = sorted_by(flat, E)
        sizes = jnp.bincount(flat, length=E).astype(jnp.int32)
        scales = weights.reshape(-1) if experts.settings.weigh == "input" else None
        if scales is not None:
            weights = jnp.ones_like(weights)
        if apart:
            y = exchanged_in_rounds(experts, x.reshape(-1, D), scales, flat, order, sizes)
        else:
            token = order // k
            rows = x.reshape(-1, D)[token]
            if scales is not None:
                rows = rows * scales[order, None].astype(x.dtype)
            y = experts(rows, Route(sizes, jnp.minimum(flat[order], E - 1), token=token))
        weights = jnp.where(indexes.reshape(-1, k) < E, weights, 0.0)
        y = weighted_rows(y, weights.astype(y.dtype), order, inverse(order).reshape(-1, k)).reshape(x.shape)
        return (jax.lax.psum(y, experts.axis) if experts.together else y), {}


@dataclass(frozen=True)
class Capacity:
    """Limits the tokens of each sequence that an expert processes to `factor` times an even load. Further tokens are dropped."""

    factor: float
    whole = True

    def places(self, tokens: int, settings: Experts) -> int:
        """Returns the most tokens that an expert processes of a sequence with `tokens` tokens."""
        return min(tokens, math.ceil(self.factor * tokens * settings.active / settings.count))

    def __call__(
        self, experts: LocalExperts, x: Float[Array, "B T D"], weights: Float[Array, "B T k"], indexes: Int[Array, "B T k"]
    ) -> tuple[Float[Array, "B T D"], dict[str, Float[Array, "B"]]]:
        (B, T, k), E = indexes.shape, experts.settings.count
        places = self.places(T, experts.settings)
        # All first choices of a sequence come before all second choices.
        ranked = indexes.swapaxes(1, 2).reshape(B, k * T)
        order = jax.vmap(lambda row: sorted_by(row, E))(ranked)
        sizes = jnp.sum(ranked[:, :, None] == jnp.arange(E), 1)  # [B E]; XLA fuses the comparison into the sum
        starts = jnp.cumsum(sizes, 1) - sizes
        back = jax.vmap(inverse)(order)
        place = back - jnp.take_along_axis(starts, jnp.minimum(ranked, E - 1), 1)
        fits = (ranked < E) & (place < places)

        # Place p of expert e holds the p-th row that chose e.
        p = jnp.arange(places)
        filled = p < sizes[:, :, None]  # [B E places]
        source = jnp.take_along_axis(order, jnp.where(filled, starts[:, :, None] + p, 0).reshape(B, -1), 1)
        rows = jnp.take_along_axis(x, (source % T)[:, :, None], 1)
        if experts.settings.weigh == "input":
            scales = jnp.take_along_axis(weights.swapaxes(1, 2).reshape(B, k * T), source, 1)
            rows, weights = rows * scales[:, :, None].astype(x.dtype), jnp.ones_like(weights)
        rows = jnp.where(filled.reshape(B, -1, 1), rows, 0).reshape(B, E, places, -1).swapaxes(0, 1)
        y = exchange_rows(experts, rows.reshape(E, B * places, -1)).reshape(E, B, places, -1)

        at = jnp.where(fits, jnp.minimum(ranked, E - 1) * places + place, 0)
        picked = jnp.take_along_axis(y.swapaxes(0, 1).reshape(B, E * places, -1), at[:, :, None], 1)
        picked = jnp.where(fits[:, :, None], picked, 0).reshape(B, k, T, -1)
        assigned = jnp.sum(ranked < E, 1).astype(jnp.float32)
        dropped = 1 - jnp.sum(fits, 1).astype(jnp.float32) / jnp.maximum(assigned, 1.0)
        y = jnp.sum(picked * weights.swapaxes(1, 2)[..., None].astype(y.dtype), 1)
        y = jax.lax.psum(y, experts.axis) if experts.together else y
        return y, {"dropped": jnp.where(assigned > 0, dropped, 0.0)}
