"""The prediction of the quickstart comes from steps of this machine."""

from argosy.jobs.quickstart.prediction import PredictingView
from argosy.run.settings.compose import compose
from argosy.run.settings.run import Run
from argosy.run.view import Quiet


class Listener(Quiet):
    def __init__(self) -> None:
        self.words: list[str] = []
        self.steps: list[int] = []

    def say(self, text: str) -> None:
        self.words.append(text)

    def step(self, step: int, numbers: object) -> None:
        self.steps.append(step)


def test_the_prediction_is_the_pace_of_the_second_interval_times_all_steps():
    run = compose(Run, "quickstart", ["data.batch=8", "data.sequence=128", "steps=400"]).value
    heard = Listener()
    view = PredictingView(heard, run)
    view.say("a word passes")
    for step, rate in ((10, 512.0), (20, 10240.0), (30, 1.0)):
        view.step(step, {"tokens_per_s": rate})
    assert view.seconds == 40.0
    assert heard.steps == [10, 20, 30]
    assert heard.words == ["a word passes", "a step takes 100 ms here: about 40 s for 400 steps"]
