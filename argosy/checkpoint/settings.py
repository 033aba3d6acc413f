"""What a user can say about checkpoints."""

from pydantic import Field

from argosy.core.settings import Settings


class CheckpointSettings(Settings):
    """When to save, and what to keep."""

    every: int = Field(100, gt=0)
    """Steps between checkpoints; the last step is always saved."""
    keep: int = Field(3, gt=0)
    """The newest so many are kept."""
    keep_every: int | None = Field(None, gt=0)
    """Those whose step is a multiple of this are kept for good."""
    keep_best: int = Field(1, ge=0)
    """So many of the lowest evaluation loss are kept."""
