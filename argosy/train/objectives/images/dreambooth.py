"""DreamBooth: a denoiser learns a subject from a few images, and keeps what it knows of the subject's class.

    loss = mean over the subject's images of L + prior_loss_weight mean over the class's images of L

L is the error of `diffusion`. The class's images are drawn by the model itself before the first step, from `class_prompt` ("a photo of
a dog"); the subject's have a caption with a rare word ("a photo of sks dog"): `data.image.caption`. Ruiz et al. 2022
(arXiv:2208.12242), equation 2, with the names of diffusers' train_dreambooth.py.

Each image of the subject comes with one of the class, which gets the noise level half the range away, so that both see all levels in
small batches. Text encoders are not trained.
"""

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from argosy.core.settings import Also
from argosy.train.objectives.images.diffusion import Diffusion
from argosy.train.objectives.objective import Needs

if TYPE_CHECKING:
    from jaxtyping import Array

    from argosy.data.batch import Fields
    from argosy.train.objectives.loss import WeightedMean


class DreamBooth(Diffusion):
    """Denoising of a subject's images beside images of its class (DreamBooth)."""

    needs: ClassVar[Needs] = Needs(inputs="images", rows_per_group=2)

    class_prompt: str
    """The prompt of the class: a photo of a dog. The model draws the class's images from it."""
    prior_loss_weight: Annotated[float, Also("prior_reg_weight")] = Field(1.0, gt=0)
    """Weight of the class's images against those of the subject."""
    num_class_images: int = Field(100, gt=0)
    """Images of the class. Those that are missing in their folder are drawn, with `sample.steps` and `sample.guidance`."""
    class_data_dir: Annotated[str | None, Also("reg_data_dir")] = None
    """The folder of the class's images. None: `class_images` in the run's directory."""
    condition: Literal["text"] = "text"
    """What the model reads beside the image: captions."""
    label_dropout: float = Field(0.0, ge=0, lt=1)
    """Share of captions that are replaced by the empty one."""

    def reads(self) -> "Fields":
        import numpy as np

        from argosy.data.batch import Field as BatchField

        return {**super().reads(), "prior": BatchField("B", np.float32, "row")}

    def quantiles(self, each: "Array") -> "Array":
        import jax.numpy as jnp

        if not self.stratified:
            return each
        pairs = len(each) // 2
        u = (jnp.arange(pairs, dtype=jnp.float32) + each[0]) / pairs
        return jnp.stack([u, (u + 0.5) % 1], 1).reshape(-1)

    def row_weights(self, batch: "dict[str, Array]") -> "tuple[Array, Array]":
        prior = batch["prior"]
        return 1 - prior + self.prior_loss_weight * prior, 1 - prior

    def row_metrics(self, batch: "dict[str, Array]", error: "Array", there: "Array") -> "dict[str, WeightedMean]":
        import jax.numpy as jnp

        from argosy.train.objectives.loss import WeightedMean

        parts = {"error_subject": there * (1 - batch["prior"]), "error_prior": there * batch["prior"]}
        return {name: WeightedMean(jnp.sum(error * w), jnp.sum(w)) for name, w in parts.items()}
