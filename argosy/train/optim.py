"""Optimizers: settings that build an Optax transformation over flat `{address: array}` weights.

What a weight is follows from its meaning (`models.parts.weight`), not from its shape: weight decay skips norms and biases, and
Muon sees the true matrix of each layer and expert. Shapes would mislead: a stacked norm [L D] looks like a matrix, and a
projection [D N H] like a tensor with three axes.
"""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from argosy.core.errors import BadInput
from argosy.core.registry import Registry
from argosy.core.settings import Also, Settings
from argosy.train.schedule import Factor

# jax and optax are imported when something is built, so that mistakes in the settings are reported without them.
# optax.GradientTransformation
Transformation = Any
# {address: (`models.parts.weight.Meaning`, number of stored axes)}
Meanings = Mapping[str, tuple[Any, int]]


class Optimizer(Settings):
    """The settings of every optimizer."""

    learning_rate: Annotated[
        float, Also("lr", "max_lr", "peak_lr", "optimizer.lr", "base_lr", "peak_learning_rate")
    ] = Field(3e-4, gt=0)
    """Peak learning rate; the schedule multiplies it."""
    weight_decay: Annotated[float, Also("wd", "adam_weight_decay")] = Field(0.1, ge=0)
    """Decoupled weight decay, multiplied by the learning rate (arXiv:1711.05101)."""
    decay: Literal["matrices", "all"] = "matrices"
    """The weights that decay. matrices: matrices and embeddings, but no norms and biases; all: every weight."""
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
    """Largest global norm of the gradient; larger gradients are scaled down to it. None: no clipping."""

    def build(self, factor: Factor, meanings: Meanings, on_host: Any = None) -> Transformation:
        """The Optax transformation, including learning rate and clipping. on_host: its state is in the host's memory; the pieces that
        it is brought to the device in (`train.offload.Pieces`)."""
        import optax

        if not meanings:
            raise BadInput("nothing to train: every weight is frozen")
        self.check(meanings)
        clip = optax.identity() if self.clip is None else optax.clip_by_global_norm(self.clip)
        rule_of = lambda weights: self.rule(lambda step: self.learning_rate * factor(step), {a: meanings[a] for a in weights})  # noqa: E731
        if on_host is None:
            return _lenient(optax.chain(clip, rule_of(meanings)))
        from argosy.train.offload import hosted

        return _lenient(optax.chain(clip, hosted(rule_of, meanings, on_host)))

    def check(self, meanings: Meanings) -> None:
        """Raises BadInput if the optimizer is not for these weights."""

    def apart(self, meanings: Meanings) -> frozenset[str]:
        """The weights whose numbers the rule treats each alone."""
        return frozenset(meanings)

    def rule(self, rate: Factor, meanings: Meanings) -> Transformation:
        raise NotImplementedError

    def decays(self, meanings: Meanings) -> dict[str, bool]:
        return {a: self.decay == "all" or bool(m.inner) for a, (m, _) in meanings.items()}


def _lenient(transform: Transformation) -> Transformation:
    """Runs a transformation with lenient type promotion: Optax raises floats to integer powers, and Argosy runs under strict
    promotion."""
    import jax
    import optax

    def init(params: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            return transform.init(params)

    def update(updates: Any, state: Any, params: Any = None, **others: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            return transform.update(updates, state, params, **others)

    return optax.GradientTransformationExtraArgs(init, update)


class AdamW(Optimizer):
    """Adam with decoupled weight decay. Loshchilov and Hutter 2017 (arXiv:1711.05101)."""

    b1: Annotated[float, Also("beta1", "adam_beta1", "adam_b1")] = Field(0.9, ge=0, lt=1)
    """Decay rate of the mean of gradients."""
    b2: Annotated[float, Also("beta2", "adam_beta2", "adam_b2")] = Field(0.95, ge=0, lt=1)
    """Decay rate of the mean of squared gradients."""
    eps: Annotated[float, Also("adam_epsilon", "adam_eps", "epsilon")] = Field(1e-8, gt=0)
    """Added to the square root of the latter, to avoid division by zero."""

    def rule(self, rate: Factor, meanings: Meanings) -> Transformation:
        import optax

        return optax.adamw(rate, self.b1, self.b2, self.eps, weight_decay=self.weight_decay, mask=self.decays(meanings))


class Lion(Optimizer):
    """The sign of a mix of gradient and momentum. Chen et al. 2023 (arXiv:2302.06675). It needs about a tenth of Adam's learning
    rate and ten times its weight decay."""

    b1: float = Field(0.9, ge=0, lt=1)
    """Share of the momentum in the update."""
    b2: float = Field(0.99, ge=0, lt=1)
    """Decay rate of the momentum."""

    def rule(self, rate: Factor, meanings: Meanings) -> Transformation:
        import optax

        return optax.lion(rate, self.b1, self.b2, weight_decay=self.weight_decay, mask=self.decays(meanings))


class SGD(Optimizer):
    """Stochastic gradient descent, with momentum if set."""

    momentum: float = Field(0.0, ge=0, lt=1)
    """Decay rate of the sum of gradients; 0 turns momentum off."""
    nesterov: bool = False
    """Uses Nesterov momentum."""

    def rule(self, rate: Factor, meanings: Meanings) -> Transformation:
        import optax

        decay = optax.add_decayed_weights(self.weight_decay, mask=self.decays(meanings))
        trace = optax.trace(self.momentum, self.nesterov) if self.momentum else optax.identity()
        return optax.chain(trace, decay, optax.scale_by_learning_rate(rate))


class Muon(Optimizer):
    """Orthogonalized momentum for matrices, and AdamW for embeddings, norms and biases. Jordan et al. 2024
    (kellerjordan.github.io/posts/muon), Liu et al. 2025 (arXiv:2502.16982)."""

    learning_rate: Annotated[float, Also("lr", "max_lr", "matrix_lr", "muon_lr")] = Field(0.02, gt=0)
    """Peak learning rate of the matrices."""
    adam_learning_rate: Annotated[float, Also("embedding_lr", "adam_lr", "scalar_lr")] = Field(3e-3, gt=0)
    """Peak learning rate of everything else."""
    momentum: Annotated[float, Also("muon_momentum", "muon_beta")] = Field(0.95, ge=0, lt=1)
    """Decay rate of the mean of gradients."""
    ns_steps: Annotated[int, Also("newton_schulz_steps")] = Field(5, gt=0)
    """Number of Newton-Schulz iterations."""
    consistent_rms: float | None = Field(None, gt=0)
    """Scales each update to this root mean square, so that Adam's learning rates fit (0.2; arXiv:2502.16982). None: scales it by
    sqrt(max(1, outputs / inputs))."""

    def rule(self, rate: Factor, meanings: Meanings) -> Transformation:
        import optax

        dimensions = self._dimensions(meanings)
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

    def check(self, meanings: Meanings) -> None:
        if not self._dimensions(meanings):
            raise BadInput("optimizer muon: none of the trained weights is a matrix", hint="use optimizer=adamw")

    def apart(self, meanings: Meanings) -> frozenset[str]:
        return frozenset(meanings) - set(self._dimensions(meanings))

    def _dimensions(self, meanings: Meanings) -> dict[str, Any]:
        return {a: d for a, (m, stored) in meanings.items() if (d := muon_dimensions(m, stored)) is not None}

    def _sized(self, updates: Any, dimensions: Mapping[str, Any]) -> dict[str, Any]:
        """Orthogonal updates, scaled so that one learning rate fits matrices of any shape."""

        def size(shape: tuple[int, ...], axes: Any) -> float:
            inputs, outputs = (math.prod(shape[i] for i in side) for side in axes)
            if self.consistent_rms is not None:
                return self.consistent_rms * math.sqrt(max(inputs, outputs))
            return math.sqrt(max(1.0, outputs / inputs))

        return {a: u * size(u.shape, dimensions[a]) for a, u in updates.items()}


def _apart(rules: Mapping[str, Transformation], labels: Mapping[str, str]) -> Transformation:
    """Applies each rule to the weights with its label, as if there were no others. State: {label: the rule's state}."""
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


def scaled(optimizer: Any, prefix: str, factor: float) -> Any:
    """The optimizer with so many times the learning rate for the weights whose addresses begin so."""
    import optax

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return {a: factor * own if a.startswith(prefix) else own for a, own in updates.items()}, state

    return optax.chain(optimizer, optax.GradientTransformation(lambda params: optax.EmptyState(), update))


def muon_dimensions(meaning: Any, stored: int) -> Any:
    """The axes of a weight as a matrix, summed letters by kept letters, separate for each layer and expert. None: not for
    Muon."""
    import optax

    if not meaning.is_matrix:
        return None
    lead = stored - len(meaning.letters)
    at = {letter: lead + i for i, letter in enumerate(meaning.letters)}
    outputs = tuple(at[a] for a in meaning.letters if a not in meaning.inner + meaning.group)
    return optax.contrib.MuonDimensionNumbers(tuple(at[a] for a in meaning.inner), outputs)


OPTIMIZERS = Registry("optimizer", {"adamw": AdamW, "lion": Lion, "sgd": SGD, "muon": Muon})
