"""The settings of `argosy launch`, by engine."""

from pydantic import Field

from argosy.core.registry import Registry
from argosy.core.settings import Settings

ENGINES = Registry("engine")


class Local(Settings):
    """Several processes on this machine. A process that ends ends the others, and all start again from the last checkpoint."""

    processes: int = Field(2, gt=0)
    """Number of processes. GPUs are shared out evenly."""
    devices: int | None = Field(None, gt=0)
    """On CPUs: devices of each process. None: one."""
    restarts: int = Field(10, ge=0)
    """Most restarts in a row without a new checkpoint. A run that makes progress may restart as often as it must."""
    stuck: float = Field(1800, gt=0)
    """Most seconds that the first step, an evaluation or a checkpoint may take before a process counts as stuck; all then say where
    they are, and start again. Other steps may take ten times as long as the slowest before, at least 30 seconds."""
    grace: float = Field(30, gt=0)
    """Seconds that processes have to end by themselves after one of them failed, before they are killed."""
    logs: str | None = None
    """Folder for what each process prints. None: that of rank 0 is shown, and that of a process that fails."""


ENGINES.add("local", Local)
