"""Diffusion: a model learns to tell noise from images, at all levels of noise.

    x_t = alpha image + sigma noise        loss = w(t) mean (target - model(x_t, t, conditions))^2

    velocity   alpha = 1 - t, sigma = t          target = noise - image              flow matching, arXiv:2209.03003
    epsilon    alpha^2 + sigma^2 = 1 (betas)     target = noise                      Ho et al. 2020 (arXiv:2006.11239)
    v          the same                          target = alpha noise - sigma image  Salimans and Ho 2022 (arXiv:2202.00512)
    sample     the same                          target = image

`model.prediction` names the target, since samplers need it too. `min_snr` weights levels by min(SNR, gamma), SNR = alpha^2 / sigma^2,
of the error of the image (Hang et al. 2023, arXiv:2303.09556). `label_dropout` replaces conditions by the null one, for
classifier-free guidance (Ho and Salimans 2022, arXiv:2207.12598).

The noise of an image follows from its number in the data and from the step, so it does not depend on devices. In an evaluation it is
always the same. Beside the loss, the plain error of each quarter of the noise levels is a metric (`error_q1` to `error_q4`, from images
to noise): their mean hides which levels improve.
"""

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from argosy.core.settings import Also, Choice, Settings
from argosy.models.diffusion.noise import STEPS, BetaNoise, FlowNoise, target
from argosy.train.objectives.images.timesteps import TIMESTEPS
from argosy.train.objectives.objective import Needs, Objective

if TYPE_CHECKING:
    from jaxtyping import Array

    from argosy.data.batch import Fields
    from argosy.models.diffusion.base import Conditions
    from argosy.train.objectives.loss import Loss, Models, WeightedMean


class Diffusion(Settings, Objective):
    """Denoising at all levels of noise: flow matching, or prediction of noise, v or the image, as `model.prediction` says."""

    needs: ClassVar[Needs] = Needs(inputs="images")

    timesteps: Annotated[Any, Choice(TIMESTEPS), Also("weighting_scheme", "timestep_sampling")] = "logit_normal"
    """The law of the noise levels: uniform, logit_normal or mode. Models that do not predict velocities usually train with uniform."""
    stratified: bool = True
    """Draws the levels of a batch from equal strata of the law, one for each image, which lowers the variance of the gradient."""
    betas: BetaNoise = BetaNoise(start=0.0001, end=0.02, curve="linear")
    """Noise of each of 1,000 steps, for models that do not predict velocities; by default that of DDPM and DiT."""
    min_snr: Annotated[float | None, Also("snr_gamma", "min_snr_gamma")] = Field(None, gt=0)
    """Weights levels by min(SNR, this) of the image's error; 5 in the paper. None: all levels count as they are."""
    label_dropout: Annotated[
        float, Also("class_dropout_prob", "conditioning_dropout_prob", "caption_dropout_rate", "proportion_empty_prompts")
    ] = Field(0.1, ge=0, lt=1)
    """Share of images whose class is replaced by the null one, or whose caption by the empty one, so that guidance can compare with it.
    0: no guidance later."""
    condition: Literal["labels", "text", "none"] = "labels"
    """What the model reads beside the image. labels: the class; text: what `encoders` make of the caption."""
    guidance: Annotated[float, Also("guidance_scale")] = Field(1.0, ge=0)
    """The scale of guidance that models read which learned it (Flux dev)."""

    @property
    def conditions(self) -> frozenset[str]:
        """The fields of `Conditions` that batches give."""
        given = {"labels": ("labels",), "text": ("text", "text_mask", "pooled", "guidance"), "none": ()}
        return frozenset(given[self.condition])

    def reads(self) -> "Fields":
        import numpy as np

        from argosy.data.batch import Field as BatchField

        images = BatchField("B h w c", np.float32, "row")
        of = {
            "labels": {"labels": BatchField("B", np.int32, "row")},
            "text": {
                "text": BatchField("B s e", np.float32, "row"),
                "text_mask": BatchField("B s", np.int32, "row"),
                "pooled": BatchField("B o", np.float32, "row"),
            },
            "none": {},
        }
        return {"images": images, "row": BatchField("B", np.int32, "row")} | of[self.condition]

    def __call__(self, models: "Models", batch: "dict[str, Array]", key: Any) -> "Loss":
        import jax
        import jax.numpy as jnp

        from argosy.train.objectives.loss import Loss, WeightedMean

        model, images, row = models["model"], batch["images"], batch["row"]
        config, rows = model.config, len(images)
        of_noise, of_levels, of_labels = (jax.random.fold_in(key, i) for i in range(3))
        noise = self.noise_by_row(of_noise, images, row)
        each = jax.random.uniform(of_levels, (rows,))
        u = self.quantiles(each)
        positions = images.shape[1] * images.shape[2] // config.size_multiple**2
        t = self.timesteps.levels(u, positions)
        if isinstance(self.noise_of(config.prediction), BetaNoise):
            t = jnp.minimum(jnp.floor(t * STEPS), STEPS - 1) / STEPS
        timestep, alpha, sigma = self.levels_at(config.prediction, t)
        a, s = (x[:, None, None, None] for x in (alpha, sigma))
        conditions = self.conditions_of(config, batch, of_labels)
        predicted = model(a * images + s * noise, timestep, conditions)
        error = jnp.mean((self.target(config.prediction, images, noise, a, s) - predicted) ** 2, (1, 2, 3))
        # Rows past the end of the last batch of an evaluation have no number.
        there = (row >= 0).astype(jnp.float32)
        scale, counted = self.row_weights(batch)
        weight = there * scale * self.weights(config.prediction, alpha, sigma)
        quarters = {f"error_q{q + 1}": there * in_quarter(t, q) for q in range(4)}
        metrics = {name: WeightedMean(jnp.sum(error * w), jnp.sum(w)) for name, w in quarters.items()}
        metrics |= self.row_metrics(batch, error, there)
        return Loss(WeightedMean(jnp.sum(weight * error), jnp.sum(there * counted)), metrics)

    def noise_by_row(self, key: Any, images: "Array", row: "Array") -> "Array":
        """Normal noise like the images, each from its number in the data."""
        import jax

        keys = jax.vmap(lambda r: jax.random.fold_in(key, r))(row)
        return jax.vmap(lambda k: jax.random.normal(k, images.shape[1:]))(keys)

    def conditions_of(self, config: Any, batch: "dict[str, Array]", key: Any) -> "Conditions":
        """What the model reads beside the images; labels are dropped by the key."""
        import jax
        import jax.numpy as jnp

        from argosy.models.diffusion.base import Conditions

        rows = (len(batch["images"]),)
        if self.condition == "labels":
            null = jax.random.uniform(key, rows) < self.label_dropout
            return Conditions(labels=jnp.where(null, config.classes_known, batch["labels"]))
        if self.condition == "none":
            return Conditions()
        # Captions are dropped where their states are read: the empty one has states of its own.
        scale = jnp.full(rows, self.guidance, jnp.float32)
        return Conditions(text=batch["text"], text_mask=batch["text_mask"], pooled=batch["pooled"], guidance=scale)

    def quantiles(self, each: "Array") -> "Array":
        """The quantiles of a batch's noise levels, from uniform numbers [B]."""
        import jax.numpy as jnp

        return (jnp.arange(len(each), dtype=jnp.float32) + each[0]) / len(each) if self.stratified else each

    def row_weights(self, batch: "dict[str, Array]") -> "tuple[Array | float, Array | float]":
        """The weight of each row's error [B], and what each row counts in the mean [B]."""
        return 1.0, 1.0

    def row_metrics(self, batch: "dict[str, Array]", error: "Array", there: "Array") -> "dict[str, WeightedMean]":
        """Further metrics from the error of each row [B]; `there` is 0 for rows of padding."""
        return {}

    def levels_at(self, prediction: str, t: "Array") -> "tuple[Array, Array, Array]":
        """What the model is told, alpha and sigma [B] at these times, 0 (an image) to 1 (noise)."""
        return t * STEPS, *self.noise_of(prediction).levels(t * STEPS)

    def target(self, prediction: Any, images: "Array", noise: "Array", alpha: "Array", sigma: "Array") -> "Array":
        """What the model is trained to predict, like the images."""
        return target(prediction, images, noise, alpha, sigma)

    def noise_of(self, prediction: str) -> Any:
        """How noise is mixed into images for a model with this prediction."""
        return FlowNoise() if prediction == "velocity" else self.betas

    def weights(self, prediction: str, alpha: "Array", sigma: "Array") -> "Array":
        """The weight of each level."""
        import jax.numpy as jnp

        if self.min_snr is None:
            return jnp.ones_like(alpha)
        snr = (alpha / jnp.maximum(sigma, 1e-6)) ** 2
        # The squared error of the image, over that of the target.
        of_image = {
            "velocity": sigma**2,
            "epsilon": 1 / jnp.maximum(snr, 1e-8),
            "v": sigma**2,
            "sample": jnp.ones_like(snr),
        }
        return jnp.minimum(snr, self.min_snr) * of_image[prediction]


def in_quarter(t: "Array", quarter: int) -> "Array":
    """1 where a time step is in this quarter of 0 to 1."""
    import jax.numpy as jnp

    return (jnp.minimum(jnp.floor(t * 4), 3) == quarter).astype(jnp.float32)

