"""Means of several runs with their 95 % intervals, for the benchmarks whose result differs from seed to seed."""

import numpy as np

# Student's t for a two-sided 95 % interval, by degrees of freedom.
T = {1: 12.71, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


def half(values: list[float]) -> float:
    """Half the width of the 95 % interval of the mean; 0 of a single value."""
    return T[len(values) - 1] * float(np.std(values, ddof=1)) / len(values) ** 0.5 if len(values) > 1 else 0.0


def spread(values: list[float], digits: int = 3) -> str:
    """The mean of several runs and its 95 % interval."""
    mean = f"{np.mean(values):.{digits}f}"
    return f"{mean} +- {half(values):.{digits}f}" if len(values) > 1 else mean
