"""Means over rows, their standard errors, and paired differences.

Every metric is a weighted mean over rows, R = sum(w x) / sum(w). Its standard error is that of a ratio of two sums over independent
rows (linearized): sqrt(n / (n - 1) sum(w^2 (x - R)^2)) / sum(w). With equal weights that is the standard deviation over sqrt(n). A row
is what is drawn independently: a question, an IFEval prompt with its several instructions, a window of text with its many tokens.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

# Standard errors on each side of a 95 % interval, of a normal distribution.
NORMAL_95 = 1.959964


@dataclass(frozen=True)
class RowScores:
    """The numbers of one row.

    weights: of each value in the mean over rows; 1 where absent.
    answer: what to show with it.
    """

    number: int
    values: Mapping[str, float]
    weights: Mapping[str, float] = field(default_factory=dict)
    answer: Mapping[str, Any] = field(default_factory=dict)

    def weight(self, name: str) -> float:
        return self.weights.get(name, 1.0)


class MeanWithError(NamedTuple):
    """A weighted mean and its standard error, which is None for a single row."""

    value: float
    stderr: float | None


def mean(values: Sequence[float], weights: Sequence[float] | None = None) -> MeanWithError:
    """The weighted mean of independent values; equal weights by default."""
    weights = [1.0] * len(values) if weights is None else weights
    total, n = math.fsum(weights), len(values)
    value = math.fsum(w * x for w, x in zip(weights, values, strict=True)) / total
    if n < 2:
        return MeanWithError(value, None)
    squares = math.fsum((w * (x - value)) ** 2 for w, x in zip(weights, values))
    return MeanWithError(value, math.sqrt(n / (n - 1) * squares) / total)


def means(rows: Sequence[RowScores]) -> dict[str, MeanWithError]:
    """The result of every metric of these rows."""
    names = list(dict.fromkeys(name for row in rows for name in row.values))
    return {name: mean([r.values[name] for r in rows], [r.weight(name) for r in rows]) for name in names}


def paired_difference(rows: Sequence[RowScores], baseline: Sequence[RowScores], name: str) -> dict[str, Any]:
    """The difference of a metric between two models on the same rows.

    Returns:
        difference: the first minus the second; stderr; interval: of 95 %, by the normal approximation; n: the rows that both have.
    """
    by_number = {row.number: row for row in baseline if name in row.values}
    both = [(row, by_number[row.number]) for row in rows if name in row.values and row.number in by_number]
    if not both:
        return {"difference": None, "stderr": None, "interval": None, "n": 0}
    difference = mean([a.values[name] - b.values[name] for a, b in both], [a.weight(name) for a, _ in both])
    half = None if difference.stderr is None else NORMAL_95 * difference.stderr
    interval = None if half is None else [difference.value - half, difference.value + half]
    return {"difference": difference.value, "stderr": difference.stderr, "interval": interval, "n": len(both)}
