"""The settings of the frozen models that a denoiser's images and captions go through (`encoders`)."""

from typing import Annotated

from pydantic import Field

from argosy.core.settings import Also, Settings


class EncoderSettings(Settings):
    """Frozen models that make latents of images and states of captions. What they make is computed once, before the first step, and
    kept in the cache of the data (`data.cache`)."""

    pipeline: str | None = None
    """A diffusers folder: its autoencoder, text encoders and tokenizers; images are then drawn as its pipeline does. `model=FOLDER` of
    such a folder sets it."""
    autoencoder: Annotated[str | None, Also("vae", "pretrained_vae_model_name_or_path")] = None
    """An autoencoder of its own: a folder, or a run of `argosy train vae`. None: that of `pipeline`; without one, the model reads the
    images themselves."""
    text: Annotated[str | None, Also("text_encoder")] = None
    """A text model of its own, whose states of all tokens the denoiser reads, and their mean as the one vector of the text: a folder of
    an encoder such as BERT, CLIP or T5. None: those of `pipeline`."""
    text_tokens: Annotated[int, Also("max_sequence_length")] = Field(77, gt=0)
    """Tokens that `text` reads of a caption; a longer one loses its end, which is said. Padding is zeros."""

    @property
    def used(self) -> bool:
        """Whether there are any."""
        return any((self.pipeline, self.autoencoder, self.text))

    @property
    def reads_text(self) -> bool:
        """Whether captions are read."""
        return any((self.pipeline, self.text))
