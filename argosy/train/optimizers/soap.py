"""SOAP: Adam in the eigenbasis of Shampoo's preconditioners.

    L <- b L + (1 - b) G Gᵀ;   R <- b R + (1 - b) Gᵀ G;   Q_L, Q_R: their eigenvectors, refreshed every few steps by one power iteration
    M <- b1 M + (1 - b1) G;   V <- b2 V + (1 - b2) (Q_Lᵀ G Q_R)²
    W <- W - rate (Q_L ((Q_Lᵀ M̂ Q_R) / (sqrt(V̂) + eps)) Q_Rᵀ + decay W)

Vyas et al. 2024 (arXiv:2409.11321, algorithm 3). As in the authors' code, the first step only prepares the bases and changes no matrix,
a gradient is projected before the bases are updated with it, and V is permuted with the eigenvectors. Difference: embeddings, the head,
norms and biases use AdamW.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, NamedTuple

from pydantic import Field

from argosy.core.settings import Also
from argosy.train.optimizers.base import Meanings, Transformation, add_decay, by_label
from argosy.train.optimizers.matrices import MatrixView, views_of
from argosy.train.optimizers.muon import MatrixOptimizer
from argosy.train.schedule import Factor

SIDES = ("left", "right")


class SoapState(NamedTuple):
    """The state of SOAP.

    count: the number of updates.
    mu: the mean of gradients.
    nu: the mean of squared gradients in the eigenbases.
    left, right: the preconditioners.
    left_basis, right_basis: the eigenvectors of the preconditioners.
    """

    count: Any
    mu: Any
    nu: Any
    left: Any
    right: Any
    left_basis: Any
    right_basis: Any


class SOAP(MatrixOptimizer):
    """Adam in the eigenbasis of Shampoo's preconditioners. Vyas et al. 2024 (arXiv:2409.11321). A matrix [m, n] keeps
    2 m n + 2 m² + 2 n² numbers."""

    learning_rate: Annotated[float, Also("lr", "max_lr", "peak_lr")] = Field(3e-3, gt=0)
    """Peak learning rate."""
    b1: Annotated[float, Also("beta1")] = Field(0.95, ge=0, lt=1)
    """Decay rate of the mean of gradients."""
    b2: Annotated[float, Also("beta2")] = Field(0.95, ge=0, lt=1)
    """Decay rate of the mean of squares."""
    eps: float = Field(1e-8, gt=0)
    """Added to the root of the mean of squares."""
    preconditioner_decay: Annotated[float | None, Also("shampoo_beta")] = Field(None, ge=0, lt=1)
    """Decay rate of the preconditioners. None: that of the mean of squares."""
    every: Annotated[int, Also("precondition_frequency")] = Field(10, gt=0)
    """Steps between two power iterations of the eigenbases."""
    largest: Annotated[int, Also("max_precond_dim")] = Field(10_000, gt=0)
    """A side of a matrix that is longer has no basis of its own."""

    exact: ClassVar[frozenset[str]] = frozenset(["left", "right", "left_basis", "right_basis"])

    def rule(self, rate: Factor, meanings: Meanings, decays: Mapping[str, Any]) -> Transformation:
        import optax

        views = views_of(meanings)
        rules = {"matrices": self._matrices(views), "rest": optax.scale_by_adam(self.b1, self.b2, self.eps)}
        labels = {a: "matrices" if a in views else "rest" for a in meanings}
        return optax.chain(by_label(rules, labels), add_decay(decays), optax.scale_by_learning_rate(rate))

    def _matrices(self, views: Mapping[str, MatrixView]) -> Transformation:
        import jax
        import jax.numpy as jnp
        import optax

        def sides(address: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
            """Returns the axes of the sides of a matrix that have a basis, by side."""
            view = views[address]
            sizes = dict(zip(SIDES, view.sizes(shape)))
            return {side: axes for side, axes in zip(SIDES, (view.rows, view.columns)) if sizes[side] <= self.largest}

        def init(params: Any) -> SoapState:
            def empty(side: str) -> dict[str, Any]:
                out = {}
                for a, w in params.items():
                    if axes := sides(a, w.shape).get(side):
                        shape = [n if i in views[a].lead + axes else 1 for i, n in enumerate(w.shape)]
                        out[a] = jnp.zeros([*shape, views[a].sizes(w.shape)[SIDES.index(side)]], w.dtype)
                return out

            factors = [empty(side) for side in (*SIDES, *SIDES)]
            zeros = [{a: jnp.zeros_like(w) for a, w in params.items()} for _ in range(2)]
            return SoapState(jnp.zeros((), jnp.int32), *zeros, *factors)

        def matrix_update(address: str, g: Any, state: SoapState) -> tuple[Any, dict[str, Any]]:
            """Computes the update of a weight, and its new state by field."""
            view, count, shape = views[address], state.count, g.shape
            axes = sides(address, shape)
            bases = {side: view.collected(getattr(state, f"{side}_basis")[address]) for side in axes}
            grad = view.matrices(g)
            first = count == 0
            t = jnp.maximum(count, 1).astype(g.dtype)
            mu = jnp.where(first, 0, self.b1 * state.mu[address] + (1 - self.b1) * g)
            nu = view.matrices(state.nu[address])
            nu = jnp.where(first, 0, self.b2 * nu + (1 - self.b2) * jnp.square(project(grad, bases)))
            scale = jnp.sqrt(1 - self.b2**t) / (1 - self.b1**t)
            # Before the first step nothing is known, and the update is 0.
            rotated = jnp.where(first, 0, project(view.matrices(mu), bases) / (jnp.sqrt(nu) + self.eps))
            move = scale * project(rotated, {side: basis.mT for side, basis in bases.items()})
            share = self.b2 if self.preconditioner_decay is None else self.preconditioner_decay
            outer = {"left": grad @ grad.mT, "right": grad.mT @ grad}
            factors = {
                side: share * view.collected(getattr(state, side)[address]) + (1 - share) * outer[side] for side in axes
            }
            due = (count % self.every == 0) & ~first
            bases, nu = jax.lax.cond(
                first,
                lambda: ({side: eigenvectors(factor) for side, factor in factors.items()}, nu),
                lambda: jax.lax.cond(due, lambda: power_iteration(factors, bases, nu), lambda: (bases, nu)),
            )
            new = {"mu": mu, "nu": view.stored(nu, shape)}
            for side in axes:
                new[side] = view.spread(factors[side], shape, axes[side])
                new[f"{side}_basis"] = view.spread(bases[side], shape, axes[side])
            return view.stored(move, shape), new

        def update(updates: Any, state: Any, params: Any = None) -> Any:
            results = {a: matrix_update(a, g, state) for a, g in updates.items()}
            fields = {f: {a: new[f] for a, (_, new) in results.items() if f in new} for f in SoapState._fields[1:]}
            return {a: move for a, (move, _) in results.items()}, SoapState(state.count + 1, **fields)

        return optax.GradientTransformation(init, update)


def project(matrices: Any, bases: Mapping[str, Any]) -> Any:
    """Projects matrices onto the bases: Q_Lᵀ X Q_R. A side without a basis is left out."""
    if "left" in bases:
        matrices = bases["left"].mT @ matrices
    return matrices @ bases["right"] if "right" in bases else matrices


def eigenvectors(factor: Any) -> Any:
    """Computes the eigenvectors of a symmetric matrix, as columns in descending order of eigenvalues."""
    import jax.numpy as jnp

    return jnp.linalg.eigh(factor + 1e-30 * jnp.eye(factor.shape[-1], dtype=factor.dtype))[1][..., ::-1]


def power_iteration(factors: Mapping[str, Any], bases: Mapping[str, Any], nu: Any) -> tuple[dict[str, Any], Any]:
    """Refreshes the bases by one power iteration. Returns the bases with columns in descending order of eigenvalues, and the mean of
    squares, permuted in the same way.

    Args:
        factors: the preconditioners, by side.
        bases: the eigenvectors, by side.
        nu: the mean of squared gradients in these bases.
    """
    import jax.numpy as jnp

    out = {}
    for side, basis in bases.items():
        # diag(Qᵀ F Q)
        values = jnp.sum(basis * (factors[side] @ basis), -2)
        order = jnp.argsort(-values, -1)
        nu = jnp.take_along_axis(nu, order[..., :, None] if side == "left" else order[..., None, :], -2 if side == "left" else -1)
        sorted_basis = jnp.take_along_axis(basis, order[..., None, :], -1)
        out[side] = jnp.linalg.qr(factors[side] @ sorted_basis)[0]
    return out, nu
