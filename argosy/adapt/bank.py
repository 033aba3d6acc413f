"""Multi-LoRA serving: several low-rank adapters on one weight, of which each token uses one or none.

The factors of all adapters are concatenated, A [D adapters rank] and B [adapters rank N H], so both products are plain matrix products,
as for one adapter of rank `adapters * rank`. Between them, each token keeps the columns of its own adapter and gets zeros elsewhere. A
token without an adapter therefore adds exact zeros. The adapter of a token is an input of the program, so changing it compiles nothing.
Punica (arXiv:2310.18547) and S-LoRA (arXiv:2311.03285) gather the factors of each token instead. That reads fewer factors, but moves
more bytes when several tokens have the same adapter.
"""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from argosy.models.parts.einsum import Contraction, ContractionWrapper, Route, contract
from argosy.models.parts.weight import Draw, Frozen, Meaning, weight


class AdapterIds(nnx.Variable):
    """The index of the adapter of each token of a step, [1 tokens]; -1 for none."""


class Bank(ContractionWrapper):
    """A contraction with the factors of several adapters.

    Args:
        of: the contraction that the bank replaces.
        adapters: the number of adapters.
        rank: the largest rank of an adapter.
        ids: the index of the adapter of each token. All contractions that read the same tokens share this variable.
    """

    def __init__(self, of: Contraction, adapters: int, rank: int, ids: AdapterIds):
        self.eq, self.legend, self.of, self.chosen = of.eq, of.legend, of, ids
        self.adapters, self.rank = adapters, rank
        lead, sizes = of.shape[: of.stacked], of.sizes
        inner, outer = of.group + of.inner, "".join(letter for letter in of.spec if letter in of.out)
        between = "".join(letter for letter in of.x if letter not in of.inner) + "r"
        self.down, self.up = f"{of.x},{inner}r->{between}", f"{between},{of.group}r{outer}->{of.out}"
        ends, starts, outer_sizes = ([sizes[letter] for letter in letters] for letters in (inner, of.group, outer))
        zeros = Draw("constant", 0.0)
        self.a = weight((*lead, *ends, adapters, rank), Meaning(inner + "nr", legend=of.legend), zeros, Frozen)
        meaning = Meaning(of.group + "nr" + outer, legend=of.legend)
        self.b = weight((*lead, *starts, adapters, rank, *outer_sizes), meaning, zeros, Frozen)

    def product(self, x: Float[Array, "..."], route: Route | None = None, *, dtype: object = None) -> Float[Array, "..."]:
        ids = self.chosen[...]
        if route is not None:
            if route.token is None:
                raise ValueError(f"{self.eq}: the tokens of these rows are not known")
            ids = ids.reshape(-1)[route.token]
        whole = self.of.product(x, route, dtype=dtype)
        low = self._mask_others(contract(self.down, x, self._side_by_side(self.a[...], len(self.of.group + self.of.inner)), route), ids)
        return whole + contract(self.up, low, self._side_by_side(self.b[...], len(self.of.group)), route, dtype=dtype)

    def via(self, eq: str, x: Float[Array, "..."], *, dtype: object = None) -> Float[Array, "..."]:
        raise ValueError(f"{eq}: adapters of single tokens are on {self.eq} only")

    def take(self, ids: Int[Array, "..."]) -> Float[Array, "... D"]:
        low = self._mask_others(self._side_by_side(self.a[...], 1)[ids], self.chosen[...])
        return self.of.take(ids) + low @ self._side_by_side(self.b[...], 0)

    def _side_by_side(self, factor: Array, at: int) -> Array:
        """Returns a factor with the columns of all adapters as a single axis, at index `at`."""
        return factor.reshape(*factor.shape[:at], self.adapters * self.rank, *factor.shape[at + 2 :])

    def _mask_others(self, low: Float[Array, "... r"], ids: Int[Array, "..."]) -> Float[Array, "... r"]:
        """Sets the columns of other adapters to zero. They are selected and not multiplied with zero, because padding may be NaN."""
        mine = ids[..., None] == jnp.arange(self.adapters)
        columns = low.reshape(*low.shape[:-1], self.adapters, self.rank)
        return jnp.where(mine[..., None], columns, 0).reshape(low.shape)


def bank_refusal(name: str, of: Contraction, tied: bool) -> str | None:
    """Returns the reason why a contraction of the serving model cannot have a bank; None if it can.

    Args:
        name: the dotted name of the contraction.
        of: the contraction.
        tied: whether the head is tied to the embedding.
    """
    if of.chooses:
        return "its output only selects something"
    if "latent" in of.summed_axes:
        return "it reads the cache, where tokens of several steps are together"
    if name == "embed" and tied:
        return "the head is tied to it"
    if not name.startswith("layers.") and name not in ("embed", "positions", "head"):
        return "it is outside the layers"
    if not of.group and of.x.removesuffix(of.inner) != "BT":
        return f"its input has other axes: {of.x}"
    return None
