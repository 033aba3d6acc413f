"""Shampoo: the gradient of a matrix is multiplied from both sides by the inverse fourth roots of two preconditioners.

    L <- b2 L + (1 - b2) G Gᵀ;   R <- b2 R + (1 - b2) Gᵀ G;   M <- b1 M + (1 - b1) G
    P = L̂^-1/4 M̂ R̂^-1/4;   W <- W - rate (s P + decay W)

Gupta et al. 2018 (arXiv:1802.09568). Averages, grafting, and refreshing the roots every few steps are from Shi et al. 2023
(arXiv:2309.06497). s gives P the norm that AdamW's update of the matrix would have (grafting). With b2 = 1 the preconditioners are
sums, and with graft=none s is 1, as in the first paper. Differences from both papers: matrices are not split into blocks; a side longer
than `largest` has no preconditioner; embeddings, the head, norms and biases use AdamW.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Field

from argosy.core.settings import Also
from argosy.train.optimizers.base import Meanings, Transformation, add_decay, by_label
from argosy.train.optimizers.matrices import MatrixView, views_of
from argosy.train.optimizers.muon import MatrixOptimizer
from argosy.train.optimizers.soap import SIDES
from argosy.train.schedule import Factor


class ShampooState(NamedTuple):
    """The state of Shampoo.

    count: the number of updates.
    mu: the mean of gradients.
    nu: the mean of squared gradients, for grafting.
    left, right: the preconditioners.
    left_root, right_root: the inverse roots of the preconditioners.
    """

    count: Any
    mu: Any
    nu: Any
    left: Any
    right: Any
    left_root: Any
    right_root: Any


class Shampoo(MatrixOptimizer):
    """The gradient between inverse roots of its two preconditioners. Gupta et al. 2018 (arXiv:1802.09568), Shi et al. 2023
    (arXiv:2309.06497). A matrix [m, n] keeps 2 m n + 2 m² + 2 n² numbers."""

    learning_rate: Annotated[float, Also("lr", "max_lr", "peak_lr")] = Field(1e-3, gt=0)
    """Peak learning rate; with `graft=adam`, as AdamW's."""
    b1: Annotated[float, Also("beta1")] = Field(0.9, ge=0, lt=1)
    """Decay rate of the mean of gradients."""
    b2: Annotated[float, Also("beta2")] = Field(0.99, ge=0, le=1)
    """Decay rate of preconditioners and mean squares; 1 makes preconditioners sums."""
    eps: Annotated[float, Also("shampoo_epsilon")] = Field(1e-6, gt=0)
    """Added to the eigenvalues of the preconditioners before the root, as a share of the largest one: float32 computes them to about
    1e-7 of it."""
    graft: Annotated[Literal["adam", "none"], Also("grafting_type", "grafting_config")] = "adam"
    """The rule whose update gives each matrix the norm of its update. adam: AdamW; none: the update keeps its norm."""
    adam_eps: float = Field(1e-8, gt=0)
    """Added to the root of AdamW's mean of squares."""
    every: Annotated[int, Also("precondition_frequency", "preconditioning_compute_steps")] = Field(10, gt=0)
    """Steps between two computations of the roots."""
    largest: Annotated[int, Also("max_preconditioner_dim", "block_size")] = Field(8192, gt=0)
    """A side of a matrix that is longer has no preconditioner."""

    exact: ClassVar[frozenset[str]] = frozenset(["left", "right", "left_root", "right_root"])

    def rule(self, rate: Factor, meanings: Meanings, decays: Mapping[str, Any]) -> Transformation:
        import optax

        views = views_of(meanings)
        rules = {
            "matrices": self._matrices(views),
            "rest": optax.scale_by_adam(self.b1, min(self.b2, 0.999), self.adam_eps),
        }
        labels = {a: "matrices" if a in views else "rest" for a in meanings}
        return optax.chain(by_label(rules, labels), add_decay(decays), optax.scale_by_learning_rate(rate))

    def _matrices(self, views: Mapping[str, MatrixView]) -> Transformation:
        import jax
        import jax.numpy as jnp
        import optax

        grafts, sums = self.graft == "adam", self.b2 == 1

        def sides(address: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
            view = views[address]
            sizes = dict(zip(SIDES, view.sizes(shape)))
            return {side: axes for side, axes in zip(SIDES, (view.rows, view.columns)) if sizes[side] <= self.largest}

        def init(params: Any) -> ShampooState:
            def empty(side: str) -> dict[str, Any]:
                out = {}
                for a, w in params.items():
                    if axes := sides(a, w.shape).get(side):
                        shape = [n if i in views[a].lead + axes else 1 for i, n in enumerate(w.shape)]
                        out[a] = jnp.zeros([*shape, views[a].sizes(w.shape)[SIDES.index(side)]], w.dtype)
                return out

            factors = [empty(side) for side in (*SIDES, *SIDES)]
            mu = {a: jnp.zeros_like(w) for a, w in params.items()}
            nu = {a: jnp.zeros_like(w) for a, w in params.items()} if grafts else {}
            return ShampooState(jnp.zeros((), jnp.int32), mu, nu, *factors)

        def matrix_update(address: str, g: Any, state: ShampooState) -> tuple[Any, dict[str, Any]]:
            view, shape, axes = views[address], g.shape, sides(address, g.shape)
            t = (state.count + 1).astype(g.dtype)
            grad = view.matrices(g)
            mu = self.b1 * state.mu[address] + (1 - self.b1) * g
            mean = view.matrices(mu) / (1 - self.b1**t)
            new: dict[str, Any] = {"mu": mu}
            outer = {"left": grad @ grad.mT, "right": grad.mT @ grad}
            share, correction = (1.0, 1.0) if sums else (1 - self.b2, 1 - self.b2**t)
            factors = {side: self.b2 * view.collected(getattr(state, side)[address]) + share * outer[side] for side in axes}
            old = {side: view.collected(getattr(state, f"{side}_root")[address]) for side in axes}
            power = -1 / (2 * len(axes)) if axes else 0.0
            roots = jax.lax.cond(
                state.count % self.every == 0,
                lambda: {side: matrix_power(factor / correction, power, self.eps) for side, factor in factors.items()},
                lambda: old,
            )
            move = mean
            if "left" in axes:
                move = roots["left"] @ move
            if "right" in axes:
                move = move @ roots["right"]
            if grafts:
                square_share, square_correction = (0.001, 1 - 0.999**t) if sums else (share, correction)
                new["nu"] = (1 - square_share) * state.nu[address] + square_share * jnp.square(g)
                usual = mean / (jnp.sqrt(view.matrices(new["nu"]) / square_correction) + self.adam_eps)
                move = move * norm(usual) / jnp.maximum(norm(move), 1e-30)
            for side in axes:
                new[side] = view.spread(factors[side], shape, axes[side])
                new[f"{side}_root"] = view.spread(roots[side], shape, axes[side])
            return view.stored(move, shape), new

        def update(updates: Any, state: Any, params: Any = None) -> Any:
            results = {a: matrix_update(a, g, state) for a, g in updates.items()}
            fields = {f: {a: new[f] for a, (_, new) in results.items() if f in new} for f in ShampooState._fields[1:]}
            return {a: move for a, (move, _) in results.items()}, ShampooState(state.count + 1, **fields)

        return optax.GradientTransformation(init, update)


def norm(matrices: Any) -> Any:
    """Computes the Frobenius norm of each matrix, [..., 1, 1]."""
    import jax.numpy as jnp

    return jnp.sqrt(jnp.sum(jnp.square(matrices), (-2, -1), keepdims=True))


def matrix_power(factor: Any, power: float, eps: float) -> Any:
    """Computes a power of a symmetric matrix without negative eigenvalues.

    Args:
        eps: the number that is added to the eigenvalues, as a share of the largest.
    """
    import jax.numpy as jnp

    values, vectors = jnp.linalg.eigh(factor)
    top = jnp.maximum(jnp.max(values, -1, keepdims=True), 1e-20)
    values = jnp.maximum(values, 0) + eps * top
    return (vectors * (values**power)[..., None, :]) @ vectors.mT
