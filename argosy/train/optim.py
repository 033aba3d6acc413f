"""Optimizers: settings that build an Optax transformation over flat `{address: array}` weights.

What each weight is comes from its meaning (`models.parts.weight`), not from its shape: decay leaves norms and biases alone,
and Muon sees the true matrix of each layer and expert. Its shape does not tell: a stacked norm [L D] looks like a matrix,
and a projection [D N H] like three axes of something.
"""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from argosy.core.errors import BadInput
from argosy.core.registry import Registry
from argosy.core.settings import Also, Settings
from argosy.train.schedule import Factor

# jax and optax are imported by what is built, not here: a mistake in the settings is answered without them.
Transformation = Any  # optax.GradientTransformation
Meanings = Mapping[str, tuple[Any, int]]  # {address: (`models.parts.weight.Meaning`, how many axes it is stored with)}


class Optimizer(Settings):
    """What every optimizer has."""

    learning_rate: Annotated[
        float, Also("lr", "max_lr", "peak_lr", "optimizer.lr", "base_lr", "peak_learning_rate")
    ] = Field(3e-4, gt=0)
    """At its peak; the schedule multiplies it."""
    weight_decay: Annotated[float, Also("wd", "adam_weight_decay")] = Field(0.1, ge=0)
    """Decoupled, times the learning rate (arXiv:1711.05101)."""
    decay: Literal["matrices", "all"] = "matrices"
    """What decays: matrices and the embedding but no norm and no bias; or everything."""
    clip: Annotated[
        float | None,
        Also(
            "max_grad_norm",
            "grad_clip",
            "gradient_clipping",
            "gradient_clipping_threshold",
            "training.max_norm",
            "max_norm",
            "clip_grad",
            "gradient_clip_val",
            "clip_grad_norm",
        ),
    ] = Field(1.0, gt=0)
    """The gradient's global norm at most; not clipped where none."""

    def build(self, factor: Factor, meanings: Meanings) -> Transformation:
        """The transformation, learning rate and clipping included."""
        import optax

        if not meanings:
            raise BadInput("nothing to train: every weight is frozen")
        clip = optax.identity() if self.clip is None else optax.clip_by_global_norm(self.clip)
        return _lenient(optax.chain(clip, self.rule(lambda step: self.learning_rate * factor(step), meanings)))

    def rule(self, rate: Factor, meanings: Meanings) -> Transformation:
        raise NotImplementedError

    def decays(self, meanings: Meanings) -> dict[str, bool]:
        return {a: self.decay == "all" or bool(m.inner) for a, (m, _) in meanings.items()}


def _lenient(transform: Transformation) -> Transformation:
    """Optax raises floats to integer powers; this project's own code runs under strict promotion."""
    import jax
    import optax

    def init(params: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            return transform.init(params)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            return transform.update(updates, state, params)

    return optax.GradientTransformation(init, update)


class AdamW(Optimizer):
    """Adam with decoupled decay. Loshchilov and Hutter 2017 (arXiv:1711.05101)."""

    b1: Annotated[float, Also("beta1", "adam_beta1", "adam_b1", "betas")] = Field(0.9, ge=0, lt=1)
    """Decay of the mean of gradients."""
    b2: Annotated[float, Also("beta2", "adam_beta2", "adam_b2")] = Field(0.95, ge=0, lt=1)
    """Decay of the mean of their squares."""
    eps: Annotated[float, Also("adam_epsilon", "adam_eps", "epsilon")] = Field(1e-8, gt=0)
    """Added to the root of the latter."""

    def rule(self, rate: Factor, meanings: Meanings) -> Transformation:
        import optax

        return optax.adamw(rate, self.b1, self.b2, self.eps, weight_decay=self.weight_decay, mask=self.decays(meanings))


class Lion(Optimizer):
    """The sign of a mix of gradient and momentum. Chen et al. 2023 (arXiv:2302.06675). A tenth of Adam's rate, ten times its
    decay."""

    b1: float = Field(0.9, ge=0, lt=1)
    """Share of the momentum in the update."""
    b2: float = Field(0.99, ge=0, lt=1)
    """Decay of the momentum."""

    def rule(self, rate: Factor, meanings: Meanings) -> Transformation:
        import optax

        return optax.lion(rate, self.b1, self.b2, weight_decay=self.weight_decay, mask=self.decays(meanings))


class SGD(Optimizer):
    """Gradient descent, with momentum where told."""

    momentum: float = Field(0.0, ge=0, lt=1)
    """Decay of the sum of gradients."""
    nesterov: bool = False
    """Look ahead along the momentum."""

    def rule(self, rate: Factor, meanings: Meanings) -> Transformation:
        import optax

        decay = optax.add_decayed_weights(self.weight_decay, mask=self.decays(meanings))
        trace = optax.trace(self.momentum, self.nesterov) if self.momentum else optax.identity()
        return optax.chain(trace, decay, optax.scale_by_learning_rate(rate))


class Muon(Optimizer):
    """Momentum made orthogonal, for matrices; AdamW for words, norms and biases. Jordan et al. 2024
    (kellerjordan.github.io/posts/muon), Liu et al. 2025 (arXiv:2502.16982)."""

    learning_rate: Annotated[float, Also("lr", "max_lr", "matrix_lr", "muon_lr")] = Field(0.02, gt=0)
    """Of the matrices, at its peak."""
    adam_learning_rate: Annotated[float, Also("embedding_lr", "adam_lr", "scalar_lr")] = Field(3e-3, gt=0)
    """Of everything else, at its peak."""
    momentum: Annotated[float, Also("muon_momentum", "muon_beta")] = Field(0.95, ge=0, lt=1)
    """Decay of the mean of gradients."""
    ns_steps: Annotated[int, Also("newton_schulz_steps")] = Field(5, gt=0)
    """Newton-Schulz iterations."""
    consistent_rms: float | None = Field(None, gt=0)
    """Scale each update to this root mean square, so that Adam's learning rates fit (0.2; arXiv:2502.16982); else by
    sqrt(max(1, outputs / inputs))."""

    def rule(self, rate: Factor, meanings: Meanings) -> Transformation:
        import optax

        dimensions = {a: d for a, (m, stored) in meanings.items() if (d := muon_dimensions(m, stored)) is not None}
        if not dimensions:
            raise BadInput("optimizer muon: no weight that is trained is a matrix", hint="use optimizer=adamw")
        rest = {a: m for a, m in meanings.items() if a not in dimensions}
        ratio = self.adam_learning_rate / self.learning_rate
        matrices = optax.chain(
            optax.contrib.scale_by_muon(
                ns_steps=self.ns_steps, beta=self.momentum, weight_dimension_numbers=dimensions
            ),
            optax.stateless(lambda updates, _: self._sized(updates, dimensions)),
            optax.add_decayed_weights(self.weight_decay),
            optax.scale_by_learning_rate(rate),
        )
        words = optax.adamw(
            lambda step: ratio * rate(step), b2=0.95, weight_decay=self.weight_decay, mask=self.decays(rest)
        )
        labels = {a: "matrices" if a in dimensions else "rest" for a in meanings}
        return _apart({"matrices": matrices, "rest": words}, labels)

    def _sized(self, updates: Any, dimensions: Mapping[str, Any]) -> dict[str, Any]:
        """Orthogonal updates, multiplied so that one learning rate fits matrices of any shape."""

        def size(shape: tuple[int, ...], axes: Any) -> float:
            inputs, outputs = (math.prod(shape[i] for i in side) for side in axes)
            if self.consistent_rms is not None:
                return self.consistent_rms * math.sqrt(max(inputs, outputs))
            return math.sqrt(max(1.0, outputs / inputs))

        return {a: u * size(u.shape, dimensions[a]) for a, u in updates.items()}


def _apart(rules: Mapping[str, Transformation], labels: Mapping[str, str]) -> Transformation:
    """Each rule on the weights of its label, as if there were no others. State: {label: the rule's own}."""
    import optax

    def part(leaves: Any, label: str) -> Any:
        return None if leaves is None else {a: leaf for a, leaf in leaves.items() if labels[a] == label}

    def init(params: Any) -> Any:
        return {label: rule.init(part(params, label)) for label, rule in rules.items()}

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        out: dict[str, Any] = {}
        new: dict[str, Any] = {}
        for label, rule in rules.items():
            moved: Any
            moved, new[label] = rule.update(part(updates, label), state[label], part(params, label))
            out |= moved
        return {a: out[a] for a in updates}, new

    return optax.GradientTransformation(init, update)


def muon_dimensions(meaning: Any, stored: int) -> Any:
    """Summed letters by kept letters; layers and experts are matrices of their own. None: not for Muon."""
    import optax

    if not meaning.is_matrix:
        return None
    lead = stored - len(meaning.letters)
    at = {letter: lead + i for i, letter in enumerate(meaning.letters)}
    outputs = tuple(at[a] for a in meaning.letters if a not in meaning.inner + meaning.group)
    return optax.contrib.MuonDimensionNumbers(tuple(at[a] for a in meaning.inner), outputs)


OPTIMIZERS = Registry("optimizer", {"adamw": AdamW, "lion": Lion, "sgd": SGD, "muon": Muon})
