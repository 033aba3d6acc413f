"""The settings of when a run saves and which checkpoints it keeps."""

from typing import Annotated, Self

from pydantic import Field, model_validator

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
    """Keeps every checkpoint whose step is a multiple of this, in addition to the newest ones."""
    keep_best: Annotated[int, MayChange(), Also("load_best_model_at_end", "save_best")] = Field(1, ge=0)
    """Number of checkpoints with the lowest evaluation loss to keep. A step whose evaluation is among the best is saved at once,
    whatever `checkpoint.every` is. 0: none is kept for its loss.
    """
    local: Annotated[str | None, MayChange()] = None
    """A folder on a fast disk of each host, such as /dev/shm/argosy, for additional, more frequent checkpoints. A killed run resumes
    from the newest complete checkpoint of either kind. The folder is emptied when the run ends.
    """
    local_every: Annotated[int | None, MayChange()] = Field(None, gt=0)
    """Steps between local checkpoints. By default a tenth of `checkpoint.every`, at least 1. The newest two are kept."""
    local_copies: Annotated[int, MayChange()] = Field(1, ge=1)
    """Number of hosts that keep each shard of a local checkpoint; with 2, any one host may lose its disk. Copies made by data
    parallelism count.
    """

    @model_validator(mode="after")
    def _check_local(self) -> Self:
        if self.local is None and (self.local_every is not None or self.local_copies > 1):
            raise ValueError("local_every and local_copies need checkpoint.local=FOLDER")
        if self.local is not None and "://" in self.local:
            raise ValueError("local is a folder on each host; dir= may be an object store")
        if self.local_every is not None and self.local_every >= self.every:
            raise ValueError(f"local_every = {self.local_every} is no shorter than every = {self.every}: none would be local")
        return self

    @property
    def between(self) -> int:
        """Steps between local checkpoints."""
        return self.local_every or max(1, self.every // 10)
