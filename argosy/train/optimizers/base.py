"""The interface of optimizers: settings that build an Optax transformation over a flat mapping {parameter name: array}.

The kind of a weight follows from its meaning (`models.parts.weight`), not from its shape. So weight decay skips norms and biases, and
optimizers of matrices see the true matrix of each layer and expert. Shapes would mislead: a stacked norm [L D] looks like a matrix, and
a projection [D N H] like a tensor with three axes.

To write an optimizer, write a class of settings that derives from `Optimizer` and defines `rule`. The arrays of its state must mirror
the
weights: they are under the weights' parameter names, each axis is as long as the weight's or 1, and further axes follow at the end.
Then the state is sharded, stored in few bits, moved to the host and converted between layouts of layers as the weights are.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from argosy.core.errors import BadInput
from argosy.core.settings import Also, Repeats, Settings
from argosy.train.optimizers.groups import GroupFactors, OptimizerGroup, in_groups
from argosy.train.optimizers.lookahead import LookaheadSettings
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
    groups: Annotated[
        list[OptimizerGroup], Repeats("match"), Also("param_groups", "parameter_groups", "optimizer_grouped_parameters")
    ] = Field(default_factory=list)
    """Groups of weights with a learning rate or a weight decay of their own, or frozen. Where two groups match a weight, the later one
    decides. `optimizer.groups='[{match: "embed.*", rate: 0.1}]'`."""
    layer_decay: Annotated[float | None, Also("layer_lr_decay", "llrd", "layerwise_lr_decay")] = Field(None, gt=0, le=1)
    """Factor on the learning rate from each layer to the one below: of L layers, layer l has it to the power L - l, the embeddings to
    the power L + 1, the final norm and the head to the power 0 (arXiv:1801.06146, arXiv:2106.08254). It multiplies `rate` of the
    groups. None: 1."""
    lookahead: LookaheadSettings = LookaheadSettings()
    """Slow weights that follow the optimizer's every few steps."""
    state: Annotated[
        Literal["float32", "bfloat16", "int8"],
        Also("optim_bits", "mu_dtype", "optimizer_memory", note="adamw_8bit and the like are optimizer.state=int8"),
    ] = "float32"
    """How averages of gradients are stored between steps. int8: 8 bits a number, with a scale for each block of 256 along the last axis
    (arXiv:2110.02861), for weights of at least 4,096 numbers; bfloat16: 2 bytes, rounded to the nearest. Updates are computed in
    float32 in all three cases."""

    # Whether an update of a weight depends on no other weight.
    separable: ClassVar[bool] = True
    # Whether the weights that are evaluated are an average that the optimizer's state holds (`average_of`).
    averages: ClassVar[bool] = False
    # Fields of its state that are never negative, which 8 bits represent more finely.
    nonnegative: ClassVar[frozenset[str]] = frozenset(["nu"])
    # Fields of its state that stay float32: they are no averages of gradients.
    exact: ClassVar[frozenset[str]] = frozenset()

    def build(
        self,
        factor: Factor,
        meanings: Meanings,
        on_host: Any = None,
        layers: Callable[[str], list[str]] = lambda address: [address],
    ) -> Transformation:
        """Builds the Optax transformation, including learning rate and clipping.

        Args:
            factor: (number of updates so far) -> the factor of the schedule on the learning rate.
            meanings: the meanings of the trained weights, by parameter name.
            on_host: the pieces in which the state is brought to the device (`train.offload.Pieces`), if the state is in the host's
                memory; otherwise None.
            layers: (parameter name) -> the names of the weight in each of its layers, in order (`models.parts.stack.layer_addresses`).

        Raises:
            BadInput: the optimizer does not work for these weights, or a group matches none of them.
        """
        import optax

        if not meanings:
            raise BadInput("nothing to train: every weight is frozen")
        factors = GroupFactors.of(self.groups, self.layer_decay, meanings, layers)
        self.check(meanings)
        clip = optax.identity() if self.clip is None else optax.clip_by_global_norm(self.clip)
        if factors.partial:
            clip = optax.chain(factors.masked(), clip)

        def rule_of(weights: Any) -> Transformation:
            from argosy.train.optimizers.lookahead import with_slow_weights
            from argosy.train.optimizers.state_types import with_state_type

            selected = {a: meanings[a] for a in weights}
            rule = self.rule(lambda step: self.learning_rate * factor(step), selected, self.decays(selected, factors))
            rule = with_state_type(self.state, rule, selected, self.nonnegative, self.exact)
            return with_slow_weights(in_groups(rule, factors), self.lookahead)

        if on_host is None:
            return _lenient(optax.chain(clip, rule_of(meanings)))
        from argosy.train.offload import state_on_host

        if not self.separable:
            problem = f"{type(self).__name__} reads all weights at once, and state on the host is updated weight by weight"
            raise BadInput(problem, where="set by execution.offload", hint="execution.offload=none")
        if factors.by_layer:
            problem = "groups that tell the layers of a stack apart are for state on the device"
            raise BadInput(problem, where="set by execution.offload", hint="execution.offload=none")
        return _lenient(optax.chain(clip, state_on_host(rule_of, meanings, on_host)))

    def check(self, meanings: Meanings) -> None:
        """Raises BadInput if the optimizer does not work for these weights."""

    def apart(self, meanings: Meanings) -> frozenset[str]:
        """Returns the names of the weights whose update is elementwise, so that they can be updated in pieces."""
        return frozenset(meanings) if self.state != "int8" else frozenset()

    def rule(self, rate: Factor, meanings: Meanings, decays: "Mapping[str, Any]") -> Transformation:
        """Makes the transformation from gradients to updates, including the learning rate.

        Args:
            rate: (number of updates so far) -> the learning rate.
            meanings: the meanings of the weights, by parameter name.
            decays: the weight decay of each weight: a number, or an array of one number per layer that broadcasts to the weight.
        """
        raise NotImplementedError

    def decays(self, meanings: Meanings, factors: GroupFactors | None = None) -> dict[str, Any]:
        """Returns the weight decay of each weight.

        Args:
            factors: the settings of groups, which may change it.
        """
        usual = {a: self.weight_decay if self.decay == "all" or m.inner else 0.0 for a, (m, _) in meanings.items()}
        return usual if factors is None else {a: factors.decay(a, usual[a]) for a in usual}


def add_decay(decays: Mapping[str, Any]) -> Transformation:
    """Makes a stateless transformation that adds each weight times its decay to the update."""
    import optax

    def update(updates: Any, params: Any) -> Any:
        moving = {a: d for a, d in decays.items() if not isinstance(d, float) or d}
        return {a: u + moving[a] * params[a] if a in moving else u for a, u in updates.items()}

    return optax.stateless(update)


def by_label(rules: Mapping[str, Transformation], labels: Mapping[str, str]) -> Transformation:
    """Makes a transformation that applies each rule to the weights with its label, as if there were no others. Its state is
    {label: state of the rule}.

    Args:
        rules: the rules, by label.
        labels: the label of each weight.
    """
    import optax

    def part(leaves: Any, label: str) -> Any:
        return None if leaves is None else {a: leaf for a, leaf in leaves.items() if labels[a] == label}

    def init(params: Any) -> Any:
        return {label: rule.init(part(params, label)) for label, rule in rules.items()}

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        out: dict[str, Any] = {}
        new: dict[str, Any] = {}
        for label, rule in rules.items():
            new_updates: Any
            new_updates, new[label] = rule.update(part(updates, label), state[label], part(params, label))
            out |= new_updates
        return {a: out[a] for a in updates}, new

    return optax.GradientTransformation(init, update)


def _lenient(transform: Transformation) -> Transformation:
    """Runs a transformation with lenient type promotion, because Optax raises floats to integer powers and Argosy runs under strict
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


def scale_updates(optimizer: Any, prefix: str, factor: float) -> Any:
    """Multiplies the learning rate of some weights.

    Args:
        prefix: the prefix of the names of these weights.
        factor: the factor on their updates.
    """
    import optax

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return {a: factor * update if a.startswith(prefix) else update for a, update in updates.items()}, state

    return optax.chain(optimizer, optax.GradientTransformation(lambda params: optax.EmptyState(), update))
