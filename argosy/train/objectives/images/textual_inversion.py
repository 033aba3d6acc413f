"""Textual inversion: rows of a new token learn what a few images show, while the model stays as it is.

    loss = L of the UNet on prompts with the token        L: the error of `diffusion`

Gal et al. 2022 (arXiv:2208.01618), as diffusers' textual_inversion.py. The trained model is the rows (`models.diffusion.
learned_embeddings`); the UNet and its text encoders are frozen beside it, and the gradient reaches the rows through both. Each image is
seen with a prompt from a list of templates, drawn anew in each epoch.

Differences: no weight of an encoder has a gradient, where the script restores them after each update; weight decay leaves rows alone
unless `optimizer.decay=all`.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, field_validator

from argosy.core.settings import Also
from argosy.train.objectives.images.diffusion import Diffusion

if TYPE_CHECKING:
    from jaxtyping import Array

    from argosy.data.batch import Fields
    from argosy.train.objectives.loss import Loss, Models

# The role of the frozen UNet.
UNET = "unet"
# Prompts for what an image shows: short forms of those of the paper's appendix, whose words CLIP was evaluated with.
OBJECT_TEMPLATES = (
    "a photo of a {}", "a rendering of a {}", "a cropped photo of the {}", "the photo of a {}", "a photo of a clean {}",
    "a photo of a dirty {}", "a dark photo of the {}", "a photo of my {}", "a photo of the cool {}", "a close-up photo of a {}",
    "a bright photo of the {}", "a cropped photo of a {}", "a photo of the {}", "a good photo of the {}", "a photo of one {}",
    "a close-up photo of the {}", "a rendition of the {}", "a photo of the clean {}", "a rendition of a {}", "a photo of a nice {}",
    "a good photo of a {}", "a photo of the nice {}", "a photo of the small {}", "a photo of the weird {}", "a photo of the large {}",
    "a photo of a cool {}", "a photo of a small {}",
)  # fmt: skip
# Prompts for how an image looks.
STYLE_TEMPLATES = (
    "a painting in the style of {}", "a rendering in the style of {}", "a cropped painting in the style of {}",
    "a clean painting in the style of {}", "a dirty painting in the style of {}", "a dark painting in the style of {}",
    "a picture in the style of {}", "a cool painting in the style of {}", "a close-up painting in the style of {}",
    "a bright painting in the style of {}", "a good painting in the style of {}", "a rendition in the style of {}",
    "a nice painting in the style of {}", "a small painting in the style of {}", "a weird painting in the style of {}",
    "a large painting in the style of {}",
)  # fmt: skip


class TextualInversion(Diffusion):
    """Denoising by a frozen model, of images whose prompts name a learned token (textual inversion)."""

    initializer: Annotated[str, Also("initializer_token")]
    """The word whose row the token's rows begin as: toy. One token of each text encoder."""
    teaches: Annotated[Literal["object", "style"], Also("learnable_property")] = "object"
    """What the images teach, which decides the prompts. object: what they show, "a photo of a <cat-toy>"; style: how they look, "a
    painting in the style of <cat-toy>"."""
    templates: tuple[str, ...] = ()
    """Prompts of your own, with {} where the token stands. Empty: those of `teaches`."""
    condition: Literal["text"] = "text"
    """What the model reads beside the image: prompts with the token."""
    label_dropout: float = Field(0.0, ge=0, lt=1)
    """Share of prompts that are replaced by the empty one."""

    @field_validator("templates")
    @classmethod
    def _names_the_token(cls, templates: tuple[str, ...]) -> tuple[str, ...]:
        for template in templates:
            if template.count("{}") != 1 or template.count("{") != 1 or template.count("}") != 1:
                raise ValueError(f"templates: {template!r} has no {{}} where the token stands, or several")
        return templates

    @property
    def roles(self) -> Mapping[str, str]:
        return {UNET: "online"}

    @property
    def prompts(self) -> tuple[str, ...]:
        """The templates."""
        return self.templates or (OBJECT_TEMPLATES if self.teaches == "object" else STYLE_TEMPLATES)

    def reads(self) -> "Fields":
        import numpy as np

        from argosy.data.batch import Field as BatchField

        own = {name: field for name, field in super().reads().items() if name not in ("text", "text_mask", "pooled")}
        return own | {"prompts": BatchField("B n t", np.int32, "row")}

    def __call__(self, models: "Models", batch: "dict[str, Array]", key: Any) -> "Loss":
        import jax.numpy as jnp

        from argosy.models.blocks.clip import text_states, unet_conditions

        learned, states = models["model"], []
        for i, name in enumerate(learned.config.encoders):
            encoder, ids = models[name], batch["prompts"][:, i]
            attend = encoder.config.attend(jnp.ones_like(ids))
            states.append(text_states(encoder, learned.inputs(name, ids, encoder.config.vocab), attend))
        text, pooled = unet_conditions(states)
        mask, none = jnp.ones(text.shape[:2], jnp.int32), jnp.zeros((len(text), 1), jnp.float32)
        batch = batch | {"text": text, "text_mask": mask, "pooled": none if pooled is None else pooled}
        return super().__call__({"model": models[UNET]}, batch, key)
