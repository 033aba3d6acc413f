"""Muon: orthogonalized momentum for matrices, and AdamW for everything else.

    m <- b m + (1 - b) g;   w <- w - rate (s O(b m̂ + (1 - b) ĝ) + decay w)        O: Newton-Schulz towards the nearest orthogonal matrix

s is sqrt(max(1, outputs / inputs)), or with `consistent_rms` the factor that gives the update this root mean square.
"""

import math
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from argosy.core.errors import BadInput
from argosy.core.settings import Also
from argosy.train.optimizers.base import Meanings, Optimizer, Transformation, add_decay, by_label
from argosy.train.optimizers.matrices import MatrixView
from argosy.train.schedule import Factor


class MatrixOptimizer(Optimizer):
    """An optimizer of matrices, with AdamW for embeddings, norms and biases."""

    def check(self, meanings: Meanings) -> None:
        if not any(m.is_matrix for m, _ in meanings.values()):
            problem = f"optimizer {type(self).__name__.lower()}: none of the trained weights is a matrix"
            raise BadInput(problem, hint="use optimizer=adamw")

    def apart(self, meanings: Meanings) -> frozenset[str]:
        return frozenset(a for a in super().apart(meanings) if not meanings[a][0].is_matrix)


class Muon(MatrixOptimizer):
    """Orthogonalized momentum for matrices, and AdamW for embeddings, norms and biases. Jordan et al. 2024
    (kellerjordan.github.io/posts/muon), Liu et al. 2025 (arXiv:2502.16982)."""

    learning_rate: Annotated[float, Also("lr", "max_lr", "matrix_lr", "muon_lr")] = Field(0.02, gt=0)
    """Peak learning rate of the matrices."""
    adam_learning_rate: Annotated[float, Also("embedding_lr", "adam_lr", "scalar_lr")] = Field(3e-3, gt=0)
    """Peak learning rate of everything else."""
    adam_b1: Annotated[float, Also("adam_beta1", "adamw_b1")] = Field(0.9, ge=0, lt=1)
    """Decay rate of AdamW's mean of gradients, for everything else."""
    adam_b2: Annotated[float, Also("adam_beta2", "adamw_b2")] = Field(0.95, ge=0, lt=1)
    """Decay rate of AdamW's mean of squared gradients, for everything else."""
    adam_eps: Annotated[float, Also("adam_epsilon", "adamw_eps")] = Field(1e-8, gt=0)
    """Added to the root of AdamW's mean of squared gradients."""
    momentum: Annotated[float, Also("muon_momentum", "muon_beta")] = Field(0.95, ge=0, lt=1)
    """Decay rate of the mean of gradients."""
    nesterov: bool = True
    """Whether the mean looks one step ahead."""
    ns_steps: Annotated[int, Also("newton_schulz_steps")] = Field(5, gt=0)
    """Number of Newton-Schulz iterations."""
    consistent_rms: float | None = Field(None, gt=0)
    """Scales each update to this root mean square, so that Adam's learning rates fit (0.2; arXiv:2502.16982). None: scales it by
    sqrt(max(1, outputs / inputs))."""

    def rule(self, rate: Factor, meanings: Meanings, decays: Mapping[str, Any]) -> Transformation:
        import optax

        dimensions = {a: d for a, (m, stored) in meanings.items() if (d := muon_dimensions(m, stored)) is not None}
        rest = {a: m for a, m in meanings.items() if a not in dimensions}
        ratio = self.adam_learning_rate / self.learning_rate
        matrices = optax.chain(
            optax.contrib.scale_by_muon(
                ns_steps=self.ns_steps, beta=self.momentum, nesterov=self.nesterov, weight_dimension_numbers=dimensions
            ),
            optax.stateless(lambda updates, _: self._sized(updates, dimensions)),
            add_decay({a: decays[a] for a in dimensions}),
            optax.scale_by_learning_rate(rate),
        )
        words = optax.chain(
            optax.scale_by_adam(self.adam_b1, self.adam_b2, self.adam_eps),
            add_decay({a: decays[a] for a in rest}),
            optax.scale_by_learning_rate(lambda step: ratio * rate(step)),
        )
        labels = {a: "matrices" if a in dimensions else "rest" for a in meanings}
        return by_label({"matrices": matrices, "rest": words}, labels)

    def _sized(self, updates: Any, dimensions: Mapping[str, Any]) -> dict[str, Any]:
        """Scales orthogonal updates so that one learning rate fits matrices of any shape."""

        def size(shape: tuple[int, ...], axes: Any) -> float:
            inputs, outputs = (math.prod(shape[i] for i in side) for side in axes)
            if self.consistent_rms is not None:
                return self.consistent_rms * math.sqrt(max(inputs, outputs))
            return math.sqrt(max(1.0, outputs / inputs))

        return {a: u * size(u.shape, dimensions[a]) for a, u in updates.items()}


def muon_dimensions(meaning: Any, stored: int) -> Any:
    """Returns which axes of a weight Muon treats as rows and which as columns. Rows are the input axes, which the matmul sums over.
    Columns are the output axes. Each layer and each expert is a matrix of its own. Returns None if the weight is no matrix."""
    import optax

    view = MatrixView.of(meaning, stored)
    return None if view is None else optax.contrib.MuonDimensionNumbers(view.rows, view.columns)
