"""The settings of how slow processes are found, without jax (`observe.stragglers` compares, `run.hooks.pace` measures)."""

from pydantic import Field

from argosy.core.settings import Settings


class StragglerSettings(Settings):
    """How the processes of a run are compared, to name the one that the others wait for (docs/guides/processes.md)."""

    every: int = Field(4, ge=0)
    """Steps of a window: the fewest over which processes are compared. A window takes at least a second. 0: never compared."""
    ratio: float = Field(1.5, gt=1)
    """How many times the median of the others' time is slow. Time of the host counts only where devices waited for it, and more than a
    tenth of a step."""
    windows: int = Field(4, gt=0)
    """The number of windows in a row in which a process is slow before it is named, and in which it is not before it is said to be as
    the others again. By default a process is named within 20 steps of a second."""
