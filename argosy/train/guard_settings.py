"""The settings of what happens when the numbers of a run go wrong, without jax (`train.guard` acts on them)."""

from typing import Annotated, Literal

from pydantic import Field

from argosy.core.settings import Also, Settings

Action = Literal["stop", "skip", "rollback"]


class GuardSettings(Settings):
    """How a run reacts to non-finite numbers, loss spikes and corruption (docs/guides/faults.md)."""

    nonfinite: Annotated[Action, Also("abort_on_nan_loss", "abort_on_inf_loss", "skip_step_on_nan")] = "stop"
    """Reaction to a non-finite loss or gradient norm. stop: the run ends, and the state before that step is saved; skip: the step
    changes no weights and no optimizer state; rollback: the run returns to the newest checkpoint, and skips the batches from there to
    that of the step (PaLM, arXiv:2204.02311, section 5.1).
    """
    spike: Annotated[Literal["off", "stop", "skip", "rollback"], Also("skip_step_on_spikes")] = "off"
    """Reaction to a loss far above the losses before it: stop, skip or rollback as for `nonfinite`. off: none."""
    deviations: Annotated[float, Also("skip_step_scaling_factor", "sigma_factor")] = Field(6.0, gt=0)
    """Distance of a spike from the median of the earlier losses, in deviations. A deviation is 1.4826 times the median distance from
    the median, which is the standard deviation of a normal distribution, and at least a thousandth of the median and 1e-6 nats (losses
    may be exactly 0). The defaults of OLMo-core and MaxText are six over 128 losses, by mean and standard deviation.
    """
    window: Annotated[int, Also("skip_step_interval", "rolling_interval_length")] = Field(128, ge=4)
    """Number of earlier losses that a loss is compared with. Until half as many are known, no loss counts as a spike."""
    in_row: int = Field(10, gt=0)
    """Largest number of steps that are skipped in a row; one more stops the run."""
    rollbacks: int = Field(10, gt=0)
    """Largest number of rollbacks of a run; one more stops it. A second rollback at the same step also stops it."""
    beyond: int = Field(0, ge=0)
    """Number of batches after that of the bad step that a rollback skips too."""
    replay: int = Field(0, ge=0)
    """Steps between two checks for silent corruption: a step is computed twice and compared bit for bit, and so are the copies of
    weights and optimizer state on different devices; a difference stops the run. Each check costs an extra step, a copy of the state
    and two checksums of it, and memory for another copy of the trained weights and the optimizer state. 0: never.
    """

    @property
    def actions(self) -> frozenset[str]:
        """The possible reactions under these settings."""
        return frozenset({self.nonfinite, self.spike}) - {"off"}
