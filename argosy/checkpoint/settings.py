"""What a user can say about checkpoints."""

from typing import Annotated

from pydantic import Field

from argosy.core.settings import Also, Settings


class CheckpointSettings(Settings):
    """When to save, and what to keep."""

    every: Annotated[
        int,
        Also(
            "save_steps",
            "save_every",
            "checkpoint_period",
            "checkpoint.interval",
            "save_interval",
            "save_strategy",
            "saves_per_epoch",
            "checkpoint_every",
            "ckpt_every",
        ),
    ] = Field(100, gt=0)
    """Steps between checkpoints; the last step is always saved."""
    keep: Annotated[int, Also("save_total_limit", "keep_latest_k", "checkpoint.keep_latest_k", "max_to_keep")] = Field(
        3, gt=0
    )
    """The newest so many are kept."""
    keep_every: int | None = Field(None, gt=0)
    """Those whose step is a multiple of this are kept for good."""
    keep_best: Annotated[int, Also("load_best_model_at_end", "save_best")] = Field(1, ge=0)
    """So many of the lowest evaluation loss are kept."""
