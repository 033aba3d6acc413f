"""Predict the next token: cross-entropy over the targets that the batch's mask weighs."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array
from pydantic import Field

from argosy.core.settings import Settings
from argosy.models.parts.attend import Packed
from argosy.models.parts.einsum import Einsum
from argosy.ops.cross_entropy import Losses, from_logits, row_chunks, vocabulary_blocks
from argosy.train.objectives import Loss, Mean
from argosy.train.objectives.routers import with_routers

ROOMY_BYTES = 2 << 30  # of float32 logits that are simply kept, on each device


class NextToken(Settings):
    """Cross-entropy of the next token, normalised by the weight of all targets in the global batch."""

    z_loss: float = Field(0.0, ge=0)
    """Weight of the squared log partition function, which keeps logits near 0 (PaLM, arXiv:2204.02311: 1e-4)."""
    head: Literal["auto", "logits", "blocks", "chunks"] = "auto"
    """How the loss over the vocabulary is taken: all logits, by vocabulary block (CPUs), or by rows when memory asks."""
    chunk: int = Field(1024, gt=0)
    """Rows of logits alive at once under `chunks`."""

    def __call__(self, model: Any, batch: dict[str, Array], key: Array) -> Loss:
        x, _, told = model.hidden(batch["tokens"], Packed(batch["segments"]))
        nll, lse = self.losses(model, x.reshape(-1, x.shape[-1]), batch["targets"].reshape(-1))
        mask = batch["mask"].reshape(-1)
        weight = jnp.sum(mask)
        cross_entropy, z = jnp.sum(nll * mask), jnp.sum(lse * lse * mask)
        metrics = {"cross_entropy": Mean(cross_entropy, weight)}
        if self.z_loss:
            metrics["z_loss"] = Mean(self.z_loss * z, weight)
        return with_routers(Loss(Mean(cross_entropy + self.z_loss * z, weight), metrics), model, told, weight)

    def losses(self, model: Any, x: Array, targets: Array) -> Losses:
        how, plain = self.head, plain_head(model)
        if how == "auto":
            roomy = 4 * len(targets) * model.config.vocab <= ROOMY_BYTES * jax.device_count()
            how = ("blocks" if plain and jax.default_backend() == "cpu" else "logits") if roomy else "chunks"
        if how == "blocks" and plain:
            return vocabulary_blocks(x, plain[0], targets, plain[1])
        if how == "chunks":
            return row_chunks(lambda rows: model.unembed(rows[None])[0], x, targets, min(self.chunk, len(targets)))
        return from_logits(model.unembed(x[None])[0], targets)


def plain_head(model: Any) -> tuple[Array, str] | None:
    """The head's weight and how it lies, if the head is that product and nothing else (no bias, cap, adapter or int8)."""
    head, order = (model.embed, "VD") if model.head is None else (model.head, "DV")
    if type(head) is not Einsum or head.b is not None or getattr(model, "logit_cap", None) is not None:
        return None
    return (head.w[...], order) if isinstance(head.w, nnx.Variable) else None
