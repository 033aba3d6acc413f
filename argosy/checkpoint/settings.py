"""When a run saves and what it keeps."""

from typing import Annotated

from pydantic import Field

from argosy.core.settings import Also, MayChange, Settings


class CheckpointSettings(Settings):
    """When to save, and which checkpoints to keep."""

    every: Annotated[
        int,
        MayChange(),
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
            "save_freq",
        ),
    ] = Field(100, gt=0)
    """Steps between checkpoints, at least 1 (a large number saves only at the end). The last step, and the step at which a run
    is stopped, are always saved."""
    keep: Annotated[
        int, MayChange(), Also("save_total_limit", "keep_latest_k", "checkpoint.keep_latest_k", "max_to_keep")
    ] = Field(3, gt=0)
    """Number of newest checkpoints to keep."""
    keep_every: Annotated[int | None, MayChange()] = Field(None, gt=0)
    """Also keep, for good, each checkpoint whose step is a multiple of this."""
    keep_best: Annotated[int, MayChange(), Also("load_best_model_at_end", "save_best")] = Field(1, ge=0)
    """Number of checkpoints with the lowest evaluation loss to keep. A step whose evaluation is among the best is saved at once,
    whatever `checkpoint.every` is; 0 keeps none for their loss."""
