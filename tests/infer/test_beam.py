"""Beam search against a search over the logits of whole sequences."""

import numpy as np
import pytest
from helpers import default
from laws.families import CASES, noisy_model

from argosy.core.errors import BadInput
from argosy.infer.engine.request import Event
from argosy.infer.lm import LM
from argosy.infer.sampling.beam import Beam, Beams
from argosy.models.parts.stack import Unroll

PROMPTS = [[5, 9, 33], [7, 1, 80, 80, 21, 3, 4, 60, 11]]


@pytest.fixture(scope="module")
def lm() -> LM:
    return LM(CASES["llama-plain"], noisy_model(CASES["llama-plain"], Unroll()))


def search(lm: LM, prompt: list[int], width: int, most: int, ends: set[int], penalty: float) -> list[tuple[float, list[int]]]:
    """All (score, tokens) that a search without an early end completes, best first. Each step computes whole sequences."""
    open_, complete = [(0.0, [])], []
    for _ in range(most):
        grown = []
        for total, tokens in open_:
            logits = lm.logits([[*prompt, *tokens]])[0, -1].astype(np.float64)
            logprobs = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
            for token in np.argsort(-logprobs)[: 2 * width].tolist():
                beam = (total + logprobs[token], [*tokens, token])
                (complete if token in ends else grown).append(beam)
        open_ = sorted(grown, key=lambda beam: -beam[0] / len(beam[1]) ** penalty)[:width]
    complete += open_
    return sorted(((total / len(tokens) ** penalty, tokens) for total, tokens in complete), reverse=True)


WAYS = [(1, 1.0), (3, 1.0), (3, 0.0), (4, 2.0), (2, -1.0)]


@pytest.mark.parametrize(("width", "penalty"), default((3, 1.0), (3, 0.0), of=WAYS))
def test_beams_are_those_of_a_search_over_whole_sequences(lm: LM, width: int, penalty: float):
    likely = np.argsort(-lm.logits([PROMPTS[0]])[0, -1])[:9].tolist()
    ends = {likely[1], likely[6]}
    results = lm.beam_search(PROMPTS, 6, beam_width=width, length_penalty=penalty, stop_tokens=sorted(ends))
    for prompt, beams in zip(PROMPTS, results, strict=True):
        expected = search(lm, prompt, width, 6, ends, penalty)[:width]
        assert [[*b.tokens, *([b.stopped_by] if b.stopped_by is not None else [])] for b in beams] == [t for _, t in expected]
        for beam, (score, tokens) in zip(beams, expected):
            assert beam.finish_reason == ("stop" if tokens[-1] in ends else "length")
            if beam.finish_reason == "length":
                np.testing.assert_allclose(sum(beam.logprobs) / 6**penalty, score, rtol=1e-4)
    reasons = {beam.finish_reason for beams in results for beam in beams}
    assert ("stop" in reasons) == (penalty <= 0), "without a penalty every token costs, so short answers win"


def test_one_beam_is_greedy(lm: LM):
    greedy = lm.generate(PROMPTS, 8)
    assert [beams[0].tokens for beams in lm.beam_search(PROMPTS, 8, beam_width=1)] == [answer.tokens for answer in greedy]


def test_a_search_ends_once_no_open_beam_can_win():
    beams = Beams([1], 2, 50, frozenset({0}))
    beams.open = [Beam((3,), (-60.0,)), Beam((4,), (-70.0,))]
    beams.complete = [Beam((3,), (-0.1, -0.1), 0)]

    def answer(*top: tuple[int, float]) -> list[Event]:
        return [Event(0, top[0][0], top[0][1], "length", 0.0, top)]

    beams.take([answer((5, -0.5), (6, -1.0)), answer((6, -1.0), (7, -1.0))])
    assert beams.open, "only one is complete and may stay so"
    beams.complete.append(Beam((9,), (-0.2, -0.3), 0))
    beams.take([answer((5, -1.0)) for _ in beams.open])
    assert not beams.open
    assert [beam.score(1.0) for beam in beams.best()] == [-0.1, -0.25]


def test_a_width_out_of_range_is_refused(lm: LM):
    for width in (0, 11):
        with pytest.raises(BadInput, match=f"{width} beams"):
            lm.beam_search(PROMPTS, 4, beam_width=width)
    with pytest.raises(BadInput, match="no prompt"):
        lm.beam_search([], 4)
