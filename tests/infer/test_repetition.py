"""Answers that repeat themselves end."""

import itertools

import pytest
from laws.families import CASES, noisy_model

from argosy.core.errors import BadInput
from argosy.infer.lm import LM
from argosy.infer.sampling.repetition import Repetition
from argosy.models.parts.stack import Unroll


def repeats(answer: tuple[int, ...], repetition: Repetition) -> bool:
    """Word for word what the setting says."""
    sizes = range(repetition.shortest, repetition.longest + 1)
    return any(len(answer) >= n * repetition.count and answer[-n * repetition.count :] == answer[-n:] * repetition.count for n in sizes)


@pytest.mark.parametrize("repetition", [Repetition(1, 2), Repetition(3, 2), Repetition(2, 3), Repetition(3, 3, 2), Repetition(4, 2, 4)])
def test_all_short_answers_are_judged_as_the_setting_says(repetition: Repetition):
    answers = [answer for n in range(10) for answer in itertools.product((0, 1), repeat=n)]
    judged = [repetition(list(answer)) for answer in answers]
    assert judged == [repeats(answer, repetition) for answer in answers]
    assert True in judged
    assert False in judged


def test_settings_that_mean_nothing_are_refused():
    for wrong in ({"longest": 3, "count": 1}, {"longest": 0, "count": 2}, {"longest": 2, "count": 2, "shortest": 3}):
        with pytest.raises(BadInput):
            Repetition(**wrong)


def test_an_answer_ends_with_the_first_repetition_and_others_go_on():
    lm = LM(CASES["llama-plain"], noisy_model(CASES["llama-plain"], Unroll()))
    bias = {"logit_bias": {7: 1000.0}}
    (answer,) = lm.generate([[5, 3]], 20, repetition=Repetition(3, 4), **bias)
    assert (answer.tokens, answer.finish_reason) == ([7, 7, 7, 7], "repetition")
    plain = lm.generate([[5, 3]], 20)
    (again,) = lm.generate([[5, 3]], 20, repetition=Repetition(2, 20))
    assert (again.tokens, again.finish_reason) == (plain[0].tokens, "length")
    assert plain[0].finish_reason == "length"
