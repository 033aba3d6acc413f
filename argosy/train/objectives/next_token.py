"""Next-token prediction: cross-entropy over the targets, weighted by the batch's mask.

    sum of m_t (-log p(y_t) + z log(Z_t)^2) / sum of m_t

m_t is the weight of a target, Z_t the partition function of its logits (PaLM, arXiv:2204.02311), and z the setting `z_loss`. For models
with modules that predict later tokens, the mean cross-entropy of these tokens is added (multi-token prediction, arXiv:2412.19437,
equation 25).
"""

from typing import TYPE_CHECKING, Any

from pydantic import Field

from argosy.train.objectives.objective import TokenObjective

if TYPE_CHECKING:
    from jaxtyping import Array

    from argosy.data.batch import Fields
    from argosy.train.objectives.loss import Loss, Models, WeightedMean


class NextToken(TokenObjective):
    """Cross-entropy of the next token, normalized by the weight of all targets in the global batch."""

    z_loss: float = Field(0.0, ge=0)
    """Weight of the squared log partition function, which keeps logits near 0 (PaLM, arXiv:2204.02311, uses 1e-4)."""
    mtp: float = Field(0.3, ge=0)
    """Weight of the multi-token prediction loss, for models that have such modules: their mean cross-entropy is multiplied by it
    (arXiv:2412.19437, equation 25)."""

    def reads(self) -> "Fields":
        from argosy.train.objectives.tokens import FIELDS

        return FIELDS

    def __call__(self, models: "Models", batch: "dict[str, Array]", key: Any) -> "Loss":
        return next_token_loss(self, models, batch)


def next_token_loss(settings: NextToken, models: "Models", batch: "dict[str, Array]") -> "Loss":
    """Computes the loss of a batch."""
    import jax.numpy as jnp

    from argosy.models.parts.attention.attend import Packed
    from argosy.models.parts.inputs import batch_inputs
    from argosy.train.objectives.loss import Loss, WeightedMean
    from argosy.train.objectives.routers import with_routers
    from argosy.train.objectives.tokens import losses

    model = models["model"]
    x, _, aux = model.hidden(batch_inputs(batch), Packed(batch["segments"]))
    nll, lse = losses(settings, model, x, batch["targets"])
    mask = batch["mask"]
    weight = jnp.sum(mask)
    cross_entropy, z = jnp.sum(nll * mask), jnp.sum(lse * lse * mask)
    metrics = {"cross_entropy": WeightedMean(cross_entropy, weight)}
    if settings.z_loss:
        metrics["z_loss"] = WeightedMean(settings.z_loss * z, weight)
    total = cross_entropy + settings.z_loss * z
    depths = getattr(model.config, "mtp", 0) if settings.mtp else 0
    if depths:
        ahead, aux_ahead = _later_tokens(settings, model, x, batch, depths)
        metrics["mtp_cross_entropy"], aux = ahead, aux | {"mtp": aux_ahead}
        total = total + settings.mtp / depths * ahead.total
    return with_routers(Loss(WeightedMean(total, weight), metrics), model, aux, jnp.sum(batch["mask"], 1))


def _later_tokens(
    settings: NextToken, model: Any, x: "Array", batch: "dict[str, Array]", depths: int
) -> "tuple[WeightedMean, dict[str, Array]]":
    """Computes the cross-entropy of the tokens after the next one (multi-token prediction), over all depths. Also returns the aux
    outputs of the modules' layers, [depths ...].

    Args:
        x: the input of the model's head [B T D].
        depths: the number of modules, each of which predicts one token further.
    """
    import jax
    import jax.numpy as jnp

    from argosy.models.parts.attention.attend import Packed
    from argosy.train.objectives.loss import WeightedMean
    from argosy.train.objectives.tokens import losses

    segments, sums, aux = batch["segments"], [], []
    for depth in range(1, depths + 1):
        # Whether the predicted token belongs to the same text.
        inside = _shifted(segments, depth) == segments
        attend = Packed(jnp.where(inside, segments, 0))
        x, _, layer_aux = model.ahead(depth, x, _shifted(batch["tokens"], depth), attend)
        targets, mask = _shifted(batch["targets"], depth), jnp.where(inside, _shifted(batch["mask"], depth), 0.0)
        nll, _ = losses(settings, model, x, targets)
        sums.append(WeightedMean(jnp.sum(nll * mask), jnp.sum(mask)))
        aux.append(layer_aux)
    return sum(sums[1:], sums[0]), jax.tree.map(lambda *each: jnp.stack(each), *aux)


def _shifted(a: "Array", steps: int) -> "Array":
    """Shifts each row to the left by `steps` positions; 0 beyond the end."""
    import jax.numpy as jnp

    return jnp.pad(a[:, steps:], ((0, 0), (0, steps)))
