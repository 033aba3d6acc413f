"""The programs of the sampler where the host decides which settings they have, as it does on GPUs."""

import numpy as np
import pytest

from argosy.infer.engine import runner
from argosy.infer.engine.engine import Engine
from argosy.infer.engine.request import Request
from argosy.infer.lm import LM
from argosy.infer.sampling.sample import Sampling
from argosy.infer.sampling.sampler import SamplerFeatures
from argosy.infer.settings import EngineSettings
from argosy.models import FAMILIES
from argosy.weights.build import random_model

SETTINGS = EngineSettings(slots=4, page=8, context=64, pages=40)
PROMPT = [5, 3, 9, 2, 7]
# Settings of a request, likeliest tokens that it wants, and what its sampler has.
CASES = {
    "greedy": (Sampling(), 0, SamplerFeatures.TEMPERATURE),
    "greedy, with filters that nothing is drawn from": (Sampling(top_k=3, top_p=0.5), 0, SamplerFeatures.TEMPERATURE),
    "a temperature": (Sampling(temperature=1.5), 0, SamplerFeatures.TEMPERATURE),
    "top_k": (Sampling(temperature=1.5, top_k=5), 0, SamplerFeatures.FILTERS),
    "top_p": (Sampling(temperature=1.5, top_p=0.7), 0, SamplerFeatures.FILTERS),
    # More tokens than the sampler ranks: the threshold is found among all of them.
    "top_p of many tokens": (Sampling(temperature=50.0, top_p=0.999), 0, SamplerFeatures.FILTERS),
    "min_p": (Sampling(temperature=1.5, min_p=0.2), 0, SamplerFeatures.FILTERS),
    "greedy, with typical_p": (Sampling(typical_p=0.6), 0, SamplerFeatures.TEMPERATURE),
    "typical_p": (Sampling(temperature=1.5, typical_p=0.6), 0, SamplerFeatures.ALL),
    "a penalty": (Sampling(repetition_penalty=1.7), 0, SamplerFeatures.ALL),
    "a bias": (Sampling(logit_bias={3: 2.0}), 0, SamplerFeatures.ALL),
    "bans": (Sampling(bad_words=((4,),)), 0, SamplerFeatures.ALL),
    "tokens at least": (Sampling(min_tokens=4), 0, SamplerFeatures.ALL),
    "likeliest tokens": (Sampling(), 3, SamplerFeatures.ALL),
}


@pytest.fixture(scope="module")
def lm() -> LM:
    config = FAMILIES["llama"].examples()["plain"]
    return LM(config, random_model(config, 0).module)


@pytest.fixture(scope="module", params=[1, pytest.param(4, marks=pytest.mark.slow)], ids="{} steps".format)
def engines(lm: LM, request: pytest.FixtureRequest):
    """An engine whose device decides, and one whose host does."""
    settings = SETTINGS.model_copy(update={"steps": request.param})
    on_device = Engine(lm.module, settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "platform", lambda: "gpu")
        on_host = Engine(lm.module, settings)
    assert (on_device.runner._slot_features is None, on_host.runner._slot_features is None) == (True, False)
    return on_device, on_host


def request_of(case: str, row: int = 0) -> Request:
    sampling, top, _ = CASES[case]
    return Request([*PROMPT, row], 6, sampling, frozenset([1]), seed=7, row=row, top=top)


@pytest.mark.parametrize("case", CASES)
def test_a_request_has_the_program_of_its_settings(case: str):
    sampling, top, features = CASES[case]
    assert SamplerFeatures.by(sampling, top, mask=bool(sampling.bad_words or sampling.min_tokens)) is features


@pytest.mark.parametrize("cases", [[case] for case in CASES] + [["a temperature", "top_p", "greedy"], list(CASES)], ids=len)
def test_who_decides_changes_no_completion(engines: tuple[Engine, Engine], cases: list[str], monkeypatch: pytest.MonkeyPatch):
    """A row alone, and in batches whose mates ask for more."""
    _, on_host = engines
    features_by_step: list[SamplerFeatures] = []
    features_of = on_host.runner._features_of

    def observed(owners: np.ndarray) -> SamplerFeatures:
        features_by_step.append(features_of(owners))
        return features_by_step[-1]

    monkeypatch.setattr(on_host.runner, "_features_of", observed)
    expected, completions = (engine.generate([request_of(case, row) for row, case in enumerate(cases)]) for engine in engines)
    for first, second in zip(expected, completions, strict=True):
        assert [(event.token, event.finish_reason) for event in first] == [(event.token, event.finish_reason) for event in second]
        assert [event.drawn for event in first] == pytest.approx([event.drawn for event in second], abs=1e-5)
        assert [event.top for event in first] == [event.top for event in second]
    if len(cases) <= SETTINGS.slots:
        assert max(features_by_step) is max(CASES[case][2] for case in cases)


def test_a_mate_that_has_ended_asks_for_nothing(engines: tuple[Engine, Engine]):
    _, on_host = engines
    on_host.generate([request_of("a bias")])
    on_host.add(request_of("a temperature"))
    on_host.step()
    assert on_host.runner._features_of(on_host._in_flight[0][0].owners) is SamplerFeatures.TEMPERATURE
    list(on_host.run())


@pytest.mark.parametrize("steps", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_nothing_compiles_after_the_warm_up(lm: LM, monkeypatch: pytest.MonkeyPatch, steps: int):
    monkeypatch.setattr(runner, "platform", lambda: "gpu")
    engine = Engine(lm.module, SETTINGS.model_copy(update={"steps": steps}))
    engine.warm_up()
    before = engine.stats.compilations
    engine.generate([request_of(case, row) for row, case in enumerate(CASES)])
    assert engine.stats.compilations == before
