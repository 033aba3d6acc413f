"""Computes means over rows, their standard errors, and paired differences.

Every metric is a weighted mean over rows, R = sum(w x) / sum(w). Its standard error is that of a ratio of two sums over independent
rows, to first order: sqrt(n / (n - 1) sum(w^2 (x - R)^2)) / sum(w). With equal weights, this is the standard deviation over sqrt(n).
Rows are the units that are independent: a question, an IFEval prompt with several instructions, or a window of text with many tokens.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

# A 95 % interval of a normal distribution has this many standard errors on each side of the mean.
NORMAL_95 = 1.959964


@dataclass(frozen=True)
class RowScores:
    """The scores of one row.

    number: the index of the row.
    values: the value of each metric, by name.
    weights: the weight of each metric in the mean over rows, by name; 1 if it is absent.
    answer: further information about the row, such as the generated text.
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
    """The weighted mean of independent values. If `weights` is None, they are equal."""
    weights = [1.0] * len(values) if weights is None else weights
    total, n = math.fsum(weights), len(values)
    value = math.fsum(w * x for w, x in zip(weights, values, strict=True)) / total
    if n < 2:
        return MeanWithError(value, None)
    squares = math.fsum((w * (x - value)) ** 2 for w, x in zip(weights, values))
    return MeanWithError(value, math.sqrt(n / (n - 1) * squares) / total)


def means(rows: Sequence[RowScores]) -> dict[str, MeanWithError]:
    """The weighted mean of every metric over the rows."""
    names = list(dict.fromkeys(name for row in rows for name in row.values))
    return {name: mean([r.values[name] for r in rows], [r.weight(name) for r in rows]) for name in names}


def paired_difference(rows: Sequence[RowScores], baseline: Sequence[RowScores], name: str) -> dict[str, Any]:
    """The difference of a metric between two models on the same rows.

    Returns:
        difference: the mean of `rows` minus that of `baseline`, over the rows that both have.
        stderr: its standard error.
        interval: its 95 % interval by the normal approximation, as [low, high].
        n: the number of rows that both have. If it is 0, the other values are None.
    """
    by_number = {row.number: row for row in baseline if name in row.values}
    both = [(row, by_number[row.number]) for row in rows if name in row.values and row.number in by_number]
    if not both:
        return {"difference": None, "stderr": None, "interval": None, "n": 0}
    difference = mean([a.values[name] - b.values[name] for a, b in both], [a.weight(name) for a, _ in both])
    half = None if difference.stderr is None else NORMAL_95 * difference.stderr
    interval = None if half is None else [difference.value - half, difference.value + half]
    return {"difference": difference.value, "stderr": difference.stderr, "interval": interval, "n": len(both)}
