"""Settings of captures by the profiler."""

import re
from typing import Annotated

from pydantic import field_validator

from argosy.core.settings import Settings
from argosy.core.settings.schema import Also

STEPS = re.compile(r"(\d+)(?:-(\d+))?")


class ProfileSettings(Settings):
    """Captures of steps by XLA's profiler, and the text of the compiled program."""

    steps: Annotated[str | int | None, Also("profiler_steps", "skip_first_n_steps_for_profiler", "profile_steps")] = None
    """Steps to capture, such as 10-12. `argosy profile RUN` shows them, and captures steps of a run that is under way. None: none."""
    program: Annotated[bool, Also("dump_hlo")] = False
    """Whether the optimized program of the step is written to `program.hlo.txt` when the run starts, for `argosy hlo RUN`."""

    @field_validator("steps")
    @classmethod
    def _is_window(cls, steps: str | int | None) -> str | int | None:
        match = None if steps is None else STEPS.fullmatch(str(steps))
        if steps is not None and (match is None or int(match[1]) < 1 or int(match[2] or match[1]) < int(match[1])):
            raise ValueError(f"profile.steps = {steps}: one step, or the first and the last, such as 10-12; steps count from 1")
        return steps

    @property
    def window(self) -> tuple[int, int] | None:
        """The first and the last step to capture."""
        match = None if self.steps is None else STEPS.fullmatch(str(self.steps))
        return None if match is None else (int(match[1]), int(match[2] or match[1]))
