"""The settings of how slow processes are found, without jax (`observe.stragglers` compares, `run.hooks.pace` measures)."""

from pydantic import Field

from argosy.core.settings import Settings


class StragglerSettings(Settings):
    """How the processes of a run are compared, to name a slow process that the others wait for (docs/guides/processes.md)."""

    every: int = Field(4, ge=0)
    """Number of steps of a window, over which processes are compared. A window takes at least a second. 0: processes are not compared.
    """
    ratio: float = Field(1.5, gt=1)
    """A process is slow if its time exceeds this multiple of the median of the others. Host time counts only if devices waited for it,
    and if it exceeds a tenth of a step.
    """
    windows: int = Field(4, gt=0)
    """Number of windows in a row in which a process must be slow before it is named, and in which it must not be slow before that is
    revoked. By default a process is named within 20 steps of a second.
    """
