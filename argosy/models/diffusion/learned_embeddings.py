"""Learned embeddings (textual inversion): embeddings of a new token in prompts, which the text encoders' vocabularies do not have.

    E'(token) = [v_1 ... v_n]         E'(other) = E(other)         for each text encoder, with its own rows v

Nothing else of the model is trained. Gal et al. 2022 (An Image is Worth One Word, arXiv:2208.01618). Supported are the text encoders of
Stable Diffusion 1, 2 and XL. Files have diffusers' format (`weights.hub.learned_embeddings`), which has no config.json.

Letters of this file: J rows of a token, D width of an encoder's embedding.
"""

from typing import Annotated, Any, ClassVar

from pydantic import Field, field_validator, model_validator

from argosy.core.keymap import KeyRow
from argosy.core.settings import Also
from argosy.models import parts
from argosy.models.base.config import InputKind, ModelConfig
from argosy.models.diffusion.base import ImageSpace

# The names of the weights, which are the folders of the text encoders in a pipeline of diffusers.
ENCODERS = ("text_encoder", "text_encoder_2")


class LearnedEmbeddingsConfig(ModelConfig):
    """Learned embeddings of a token (textual inversion, arXiv:2208.01618)."""

    inputs: ClassVar[InputKind] = "images"
    # Empty, because prompts are made from templates: captions in the data are not read.
    conditions: ClassVar[frozenset[str]] = frozenset()

    token: Annotated[str, Also("placeholder_token")]
    """The name of the token in prompts, such as <cat-toy>. It is no token of the vocabulary."""
    vectors: Annotated[int, Also("num_vectors")] = Field(1, gt=0)
    """Rows J that stand for the token."""
    widths: tuple[int, ...] = Field(min_length=1, max_length=len(ENCODERS))
    """Width D of the embedding of each text encoder."""
    channels: int = Field(gt=0)
    """Channels of the latents that the denoiser reads."""
    multiple: int = Field(1, gt=0)
    """The number that divides height and width of the latents."""
    text_tokens: int = Field(77, gt=0)
    """Tokens of a prompt."""

    @field_validator("token")
    @classmethod
    def _names_something(cls, token: str) -> str:
        if not token.strip() or token != token.strip():
            raise ValueError(f"token = {token!r}: a name without blanks around it")
        return token

    @model_validator(mode="after")
    def _fits_a_prompt(self) -> "LearnedEmbeddingsConfig":
        if any(width < 1 for width in self.widths):
            raise ValueError("widths are at least 1")
        # A prompt begins and ends with a special token.
        if self.vectors > self.text_tokens - 2:
            raise ValueError(f"vectors = {self.vectors}: a prompt has {self.text_tokens} tokens")
        return self

    @classmethod
    def examples(cls) -> dict[str, Any]:
        return {"one": cls(token="<a>", widths=(6,), channels=4), "two": cls(token="<a>", vectors=3, widths=(6, 5), channels=4)}

    @property
    def encoders(self) -> tuple[str, ...]:
        """The names of the text encoders, which are also the names of the weights."""
        return ENCODERS[: len(self.widths)]

    @property
    def size_multiple(self) -> int:
        """The number that must divide height and width of the latents."""
        return self.multiple

    @property
    def id_spaces(self) -> ImageSpace:
        return ImageSpace(self.channels, self.multiple, 0)

    @property
    def dims(self) -> dict[str, int]:
        return {"J": self.vectors} | {f"D{i}": width for i, width in enumerate(self.widths)}

    def hub_rows(self) -> tuple[list[KeyRow], dict[str, int]]:
        return [KeyRow(name, name, f"J D{i} -> J D{i}") for i, name in enumerate(self.encoders)], self.dims

    def mixing_flops(self, tokens: int) -> int:
        """Returns 0, because embeddings are only looked up."""
        return 0

    def build(self, run: "parts.Execution | None" = None) -> Any:
        """Builds the module. It has no layers."""
        from argosy.models.blocks.learned_embeddings import LearnedEmbeddings

        return LearnedEmbeddings(self)
