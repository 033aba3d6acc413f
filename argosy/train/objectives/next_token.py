"""Predict the next token: cross-entropy over the targets that the batch's mask weighs."""

import math
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int
from pydantic import Field

from argosy.core.settings import Settings
from argosy.data.batch import Field as BatchField
from argosy.data.batch import Fields
from argosy.models.parts.attend import Packed
from argosy.models.parts.einsum import Einsum
from argosy.ops.cross_entropy import from_logits, row_chunks, vocabulary_blocks
from argosy.parallel.scope import axis_sizes, platform
from argosy.train.objectives import Loss, Mean, Models
from argosy.train.objectives.routers import with_routers

Losses = tuple[Float[Array, "B T"], Float[Array, "B T"]]
ROOMY_BYTES = 2 << 30  # of float32 logits that are simply kept, on each device
FIELDS: Fields = {
    "tokens": BatchField("B T", np.int32),
    "targets": BatchField("B T", np.int32),
    "segments": BatchField("B T", np.int32),
    "mask": BatchField("B T", np.float32),
}


class NextToken(Settings):
    """Cross-entropy of the next token, normalised by the weight of all targets in the global batch."""

    z_loss: float = Field(0.0, ge=0)
    """Weight of the squared log partition function, which keeps logits near 0 (PaLM, arXiv:2204.02311: 1e-4)."""
    head: Literal["auto", "logits", "blocks", "chunks"] = "auto"
    """How the loss over the vocabulary is computed. logits: all at once; blocks: a block of the vocabulary at a time, fastest on
    CPUs; chunks: some rows at a time, recomputed in the backward pass, for memory. auto: chunks where the logits would take more
    than 2 GiB a device, else the fastest. All agree to rounding, in bfloat16 too."""
    chunk: int = Field(1024, gt=0)
    """Rows of logits that exist at once under `chunks`."""

    mtp: float = Field(0.3, ge=0)
    """Weight of predicting further ahead, where a model has modules for that: of their mean cross-entropy (arXiv:2412.19437,
    equation 25)."""

    rows_per_group: ClassVar[int] = 1

    def reads(self) -> Fields:
        return FIELDS

    def __call__(self, models: Models, batch: dict[str, Array], key: Array) -> Loss:
        model = models["model"]
        x, _, aux = model.hidden(batch["tokens"], Packed(batch["segments"]))
        nll, lse = self.losses(model, x, batch["targets"])
        mask = batch["mask"]
        weight = jnp.sum(mask)
        cross_entropy, z = jnp.sum(nll * mask), jnp.sum(lse * lse * mask)
        metrics = {"cross_entropy": Mean(cross_entropy, weight)}
        if self.z_loss:
            metrics["z_loss"] = Mean(self.z_loss * z, weight)
        total = cross_entropy + self.z_loss * z
        depths = getattr(model.config, "mtp", 0) if self.mtp else 0
        if depths:
            further, aux_ahead = self.further(model, x, batch, depths)
            metrics["mtp_cross_entropy"], aux = further, aux | {"mtp": aux_ahead}
            total = total + self.mtp / depths * further.total
        return with_routers(Loss(Mean(total, weight), metrics), model, aux, jnp.sum(batch["mask"], 1))

    def further(self, model: Any, x: Array, batch: dict[str, Array], depths: int) -> tuple[Mean, dict[str, Array]]:
        """Cross-entropy of the tokens after the next one, over all depths, and the aux outputs of their layers, [depths ...].

        Args:
            x: what the head of the model reads [B T D].
        """
        segments, sums, aux = batch["segments"], [], []
        for depth in range(1, depths + 1):
            inside = _later(segments, depth) == segments  # the token that is predicted belongs to the same text
            attend = Packed(jnp.where(inside, segments, 0))
            x, _, own = model.ahead(depth, x, _later(batch["tokens"], depth), attend)
            targets, mask = _later(batch["targets"], depth), jnp.where(inside, _later(batch["mask"], depth), 0.0)
            nll, _ = self.losses(model, x, targets)
            sums.append(Mean(jnp.sum(nll * mask), jnp.sum(mask)))
            aux.append(own)
        return sum(sums[1:], sums[0]), jax.tree.map(lambda *each: jnp.stack(each), *aux)

    def losses(self, model: Any, x: Float[Array, "B T D"], targets: Int[Array, "B T"]) -> Losses:
        """Loss and log partition function of each target, [B T] each. Rows stay rows: flattened, they could not be laid out over
        devices by the rules of a batch."""
        how, plain = self.head, plain_head(model)
        if how == "auto":
            roomy = 4 * targets.size * model.config.vocab <= ROOMY_BYTES * math.prod(axis_sizes().values())
            how = ("blocks" if plain and platform() == "cpu" else "logits") if roomy else "chunks"
        losses: Any
        flat = targets.reshape(-1)
        if how == "blocks" and plain:
            losses = vocabulary_blocks(x.reshape(-1, x.shape[-1]), plain[0], flat, plain[1])
        elif how == "chunks":
            rows = x.reshape(-1, x.shape[-1])
            losses = row_chunks(lambda rows: model.unembed(rows[:, None])[:, 0], rows, flat, min(self.chunk, len(flat)))
        else:
            logits = model.unembed(x)
            losses = from_logits(logits.reshape(-1, logits.shape[-1]), flat)
        return losses[0].reshape(targets.shape), losses[1].reshape(targets.shape)


def _later(a: Array, steps: int) -> Array:
    """What stands so many steps later in each row; 0 beyond its end."""
    return jnp.pad(a[:, steps:], ((0, 0), (0, steps)))


def plain_head(model: Any) -> tuple[Array, str] | None:
    """The head's weight and how it lies, if the head is that product and nothing else (no bias, cap, adapter or int8)."""
    head, order = (model.embed, "VD") if model.head is None else (model.head, "DV")
    if type(head) is not Einsum or head.b is not None or getattr(model, "logit_cap", None) is not None:
        return None
    return (head.w[...], order) if isinstance(head.w, nnx.Variable) else None
