"""Autoencoding: an image through few latents, and back.

    loss = |x - y| + perceptual.weight d(x, y) + kl KL(q(z | x) || N(0, 1)) + spread (mean(z)^2 + (std(z) - 1)^2)
    y = decode(z), z ~ q(z | x)

Kingma and Welling 2013 (arXiv:1312.6114); the small weight of KL, the absolute error and the perceptual distance d (`perceptual`) are
those of Rombach et al. 2022 (arXiv:2112.10752), whose adversarial term is left out. Their latents are scaled by a number that is
measured after training; here `spread` holds mean and deviation of each channel, over the batch, at 0 and 1: denoisers read latents as
they are. Autoencoders without a distribution (TAESD) have no KL. The noise of an image follows from its number in the data and from the
step; in an evaluation it is always the same.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from argosy.core.settings import Also, Settings
from argosy.train.objectives.images.perceptual import PERCEPTUAL, Perceptual, perceptual_distance
from argosy.train.objectives.objective import Needs, Objective

if TYPE_CHECKING:
    from jaxtyping import Array

    from argosy.data.batch import Fields
    from argosy.train.objectives.loss import Loss, Models

# The peak signal-to-noise ratio is of images in -1..1.
RANGE = 2.0


class Autoencode(Settings, Objective):
    """Images through few latents, and back (autoencoders)."""

    needs: ClassVar[Needs] = Needs(inputs="images")

    error: Annotated[Literal["l1", "l2"], Also("rec_loss")] = "l1"
    """The distance between an image and what is decoded. l1: absolute; l2: squared, which blurs more."""
    kl: Annotated[float, Also("kl_weight", "kl_scale")] = Field(1e-6, ge=0)
    """Weight of the divergence of the latents from a standard normal, summed over an image's numbers and divided by its pixels."""
    spread: float = Field(0.01, ge=0)
    """Weight of the squared distance of each channel's mean from 0 and of its deviation from 1. 0: `model.scale` and `model.shift` say
    how denoisers read latents."""
    perceptual: Perceptual = Perceptual()
    """The distance of features, which keeps edges and textures sharp where the error of pixels alone blurs them."""
    conditions: ClassVar[frozenset[str]] = frozenset()
    condition: ClassVar[str] = "none"

    @property
    def roles(self) -> Mapping[str, str]:
        return {} if self.perceptual.net is None else {PERCEPTUAL: "online"}

    def reads(self) -> "Fields":
        import numpy as np

        from argosy.data.batch import Field as BatchField

        return {"images": BatchField("B h w c", np.float32, "row"), "row": BatchField("B", np.int32, "row")}

    def __call__(self, models: "Models", batch: "dict[str, Array]", key: Any) -> "Loss":
        import jax
        import jax.numpy as jnp

        from argosy.train.objectives.loss import Loss, WeightedMean

        model, images, row = models["model"], batch["images"], batch["row"]
        # Rows past the end of the last batch of an evaluation have no number.
        there = (row >= 0).astype(jnp.float32)
        found = model.encode(images)
        latents, divergence = found, jnp.zeros(len(images))
        if hasattr(found, "log_variance"):
            keys = jax.vmap(lambda r: jax.random.fold_in(key, r))(row)
            noise = jax.vmap(lambda k: jax.random.normal(k, found.mean.shape[1:]))(keys)
            latents = found.sample(noise)
            variance = jnp.exp(found.log_variance)
            divergence = 0.5 * jnp.sum(found.mean**2 + variance - 1 - found.log_variance, (1, 2, 3))
            divergence /= images.shape[1] * images.shape[2]
        decoded = model.decode(latents)
        difference = (decoded - images).astype(jnp.float32)
        squared = jnp.mean(difference**2, (1, 2, 3))
        error = jnp.mean(jnp.abs(difference), (1, 2, 3)) if self.error == "l1" else squared
        weight = there[:, None, None, None] * jnp.ones_like(latents[..., :1])
        mean = jnp.sum(latents * weight, (0, 1, 2)) / jnp.sum(weight)
        std = jnp.sqrt(jnp.sum((latents - mean) ** 2 * weight, (0, 1, 2)) / jnp.sum(weight) + 1e-12)
        apart = jnp.mean(mean**2 + (std - 1) ** 2)
        loss = error + self.kl * divergence + self.spread * apart
        distance = None
        if self.perceptual.net is not None:
            distance = perceptual_distance(models[PERCEPTUAL], decoded, images)
            loss = loss + self.perceptual.weight * distance
        psnr = 20 * jnp.log10(RANGE) - 10 * jnp.log10(jnp.maximum(squared, 1e-12))
        rows = jnp.sum(there)
        metrics = {"psnr": psnr, "kl": divergence, "latent_std": jnp.broadcast_to(jnp.mean(std), there.shape)}
        metrics |= {} if distance is None else {"perceptual": distance}
        return Loss(
            WeightedMean(jnp.sum(there * loss), rows),
            {name: WeightedMean(jnp.sum(there * value), rows) for name, value in metrics.items()},
        )
