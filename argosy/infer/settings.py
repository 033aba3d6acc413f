"""Settings of the engine. No jax here."""

from pydantic import Field

from argosy.core.settings import Settings

# Tokens per row of a prompt, if several rows may belong to one sequence.
ROW = 32


class EngineSettings(Settings):
    """Settings of the engine: memory, and how prefill and decoding share a step."""

    slots: int = Field(32, gt=0)
    """Number of sequences that run at a time; others wait."""
    page: int = Field(16, gt=0)
    """Tokens per page of the cache."""
    pages: int | None = Field(None, gt=0)
    """Number of pages of the cache. By default enough for `slots` sequences of `context` tokens, but on a CPU at most 4 GB and a
    quarter of the free memory, elsewhere at most 0.8 of what the weights leave; or what one sequence needs if that is more."""
    context: int | None = Field(None, gt=0)
    """Longest sequence in tokens, prompt and answer; by default the model's context."""
    budget: int = Field(512, ge=ROW)
    """Prompt tokens per step, if no sequence decodes."""
    beside: int = Field(128, ge=ROW)
    """Prompt tokens per step, if sequences decode too. A lower value shortens the time between tokens, a higher one the time to
    the first token."""
    reuse: bool = True
    """Prefix caching: the common beginning of prompts is computed once. Off for models with recurrent layers, whose states are not
    kept."""
