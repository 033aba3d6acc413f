"""The settings of what happens when the numbers of a run go wrong, without jax (`train.guard` acts on them)."""

from typing import Annotated, Literal

from pydantic import Field

from argosy.core.settings import Also, Settings

Action = Literal["stop", "skip", "rollback"]


class GuardSettings(Settings):
    """What happens when the numbers of a run go wrong (docs/guides/faults.md)."""

    nonfinite: Annotated[Action, Also("abort_on_nan_loss", "abort_on_inf_loss", "skip_step_on_nan")] = "stop"
    """What follows a loss or a norm of the gradient that is not finite. stop: the run ends, and the state before that step is saved;
    skip: the step changes no weights and no optimizer state; rollback: the run goes back to the newest checkpoint, and leaves out the
    batches from there to that of the step (PaLM, arXiv:2204.02311, section 5.1)."""
    spike: Annotated[Literal["off", "stop", "skip", "rollback"], Also("skip_step_on_spikes")] = "off"
    """What follows a loss that is far above those before it, in the same words. off: nothing."""
    deviations: Annotated[float, Also("skip_step_scaling_factor", "sigma_factor")] = Field(6.0, gt=0)
    """How far above their median a spike is, in deviations: 1.4826 times the median distance from the median, which is the standard
    deviation of a normal distribution, and at least a thousandth of the median and 1e-6 nats (losses may be exactly 0). Six of them
    over 128 losses, with mean and standard deviation, are the defaults of OLMo-core and MaxText."""
    window: Annotated[int, Also("skip_step_interval", "rolling_interval_length")] = Field(128, ge=4)
    """The number of losses that one is compared with. Until half as many are known, nothing is a spike."""
    in_row: int = Field(10, gt=0)
    """Most steps that are skipped one after the other; one more stops the run."""
    rollbacks: int = Field(10, gt=0)
    """Most rollbacks of a run; one more stops it. So does a second one at the same step."""
    beyond: int = Field(0, ge=0)
    """Batches that a rollback leaves out after that of the bad step."""
    replay: int = Field(0, ge=0)
    """Every so many steps, a step is made twice and compared bit for bit, and so are the copies of weights and optimizer state on
    different devices; a difference stops the run. It costs an extra step each time, a copy of the state and two checksums of
    it, and memory for another copy of what is trained and of the optimizer's state. 0: never."""

    @property
    def actions(self) -> frozenset[str]:
        """What may follow."""
        return frozenset({self.nonfinite, self.spike}) - {"off"}
