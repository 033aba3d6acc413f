"""Predicts the time that training will take, from the first steps on this machine."""

from collections.abc import Mapping
from typing import Any

from argosy.core.counts import plural
from argosy.run.settings.run import Run
from argosy.run.view import View


class PredictingView:
    """A view that measures a step and reports how long all steps will take. All other events go to `view`.

    The first logged interval does not count, because memory is touched for the first time in it.

    seconds: the prediction for all steps, None until it is made.
    """

    def __init__(self, view: View, run: Run):
        self.view, self.run, self.seconds = view, run, None
        self._intervals = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.view, name)

    def step(self, step: int, numbers: Mapping[str, float]) -> None:
        self.view.step(step, numbers)
        self._intervals += 1
        if self._intervals == 2:
            each = self.run.data.batch * self.run.data.sequence / numbers["tokens_per_s"]
            self.seconds: float | None = each * self.run.steps
            self.view.say(f"a step takes {1000 * each:.0f} ms here: about {self.seconds:.0f} s for {plural(self.run.steps, 'step')}")
