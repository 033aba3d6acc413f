"""Standard errors and intervals, against NumPy and against what repeated draws show."""

import numpy as np
import pytest

from argosy.evals.run import with_perplexity
from argosy.evals.statistics import MeanWithError, RowScores, mean, means, paired_difference


def test_equal_weights_give_the_standard_error_of_the_mean():
    values = np.random.default_rng(0).normal(size=40)
    estimate = mean(values.tolist())
    assert estimate.value == pytest.approx(values.mean())
    assert estimate.stderr == pytest.approx(values.std(ddof=1) / np.sqrt(40))
    assert mean([3.0]) == MeanWithError(3.0, None)


def test_the_standard_error_of_a_weighted_mean_is_the_spread_of_repeated_draws():
    rng = np.random.default_rng(1)

    def draw() -> MeanWithError:
        weights = rng.integers(1, 20, 60).astype(float)
        # Long rows are harder, so the sum of the weights varies with the value.
        values = rng.normal(weights / 10, 1)
        return mean(values.tolist(), weights.tolist())

    draws = [draw() for _ in range(2000)]
    spread = np.std([estimate.value for estimate in draws])
    assert np.mean([estimate.stderr for estimate in draws if estimate.stderr is not None]) == pytest.approx(
        spread, rel=0.05
    )


def test_a_paired_difference_is_less_uncertain_than_two_evaluations():
    rng = np.random.default_rng(2)
    ease = rng.uniform(0.1, 0.9, 400)
    mine = [RowScores(i, {"acc": float(u < p)}) for i, (u, p) in enumerate(zip(rng.uniform(size=400), ease))]
    # The other model answers as this one does, but for a few rows.
    theirs = [RowScores(row.number, {"acc": 1 - row.values["acc"] if row.number % 20 == 0 else row.values["acc"]}) for row in mine]
    comparison = paired_difference(mine, theirs, "acc")
    apart = np.hypot(means(mine)["acc"].stderr or 0, means(theirs)["acc"].stderr or 0)
    assert comparison["n"] == 400
    assert comparison["difference"] == pytest.approx(means(mine)["acc"].value - means(theirs)["acc"].value)
    assert comparison["stderr"] < 0.5 * apart
    low, high = comparison["interval"]
    assert low < comparison["difference"] < high
    assert (high - low) / 2 == pytest.approx(1.96 * comparison["stderr"], rel=1e-3)


def test_rows_that_only_one_model_has_do_not_count():
    mine, theirs = [RowScores(i, {"acc": 1.0}) for i in range(5)], [RowScores(i, {"acc": 0.0}) for i in range(3, 9)]
    assert paired_difference(mine, theirs, "acc")["n"] == 2
    assert paired_difference(mine, [], "acc") == {"difference": None, "stderr": None, "interval": None, "n": 0}


def test_perplexity_is_the_exponential_of_the_loss_with_its_first_order_error():
    figures = with_perplexity({"loss": MeanWithError(2.0, 0.1)})
    assert list(figures) == ["loss", "perplexity"]
    assert figures["perplexity"] == pytest.approx((np.exp(2), 0.1 * np.exp(2)))
    assert with_perplexity({"loss": MeanWithError(1e4, None)})["perplexity"].value == float("inf")
