"""The numbers of answers of several turns: their rewards, and what is logged of them."""

from collections.abc import Iterator, Sequence

import numpy as np

from argosy.rl.answers import Answer

ENVIRONMENT = "environment"
# Why an answer is over, beside its own end.
LIMITS = ("room", "turns", "environment")


def environment_rewards(answers: Sequence[Answer]) -> np.ndarray:
    """The environment's rewards as a column [B 1], NaN where it gave none."""
    found = [None if one.played is None else one.played.reward for one in answers]
    return np.array([[np.nan if value is None else value] for value in found], np.float32)


def failed(answers: Sequence[Answer]) -> np.ndarray:
    """Answers whose environment failed [B]: whatever functions say of them, they have no reward."""
    return np.array([one.played is not None and one.played.failure is not None for one in answers], bool)


def failures(answers: Sequence[Answer]) -> Iterator[tuple[str, str]]:
    """The kind and the message of each failure."""
    return (one.played.failure for one in answers if one.played is not None and one.played.failure is not None)


def played_numbers(answers: Sequence[Answer]) -> dict[str, float]:
    """Metrics of answers of several turns: means over answers, and sums of what failed and of what environments counted."""
    played = [one.played for one in answers if one.played is not None]
    if not played:
        return {}
    out = {
        "turns": float(np.mean([one.made for one in played])),
        "turns/max": float(max(one.made for one in played)),
        "observations/tokens": float(np.mean([one.observed for one in played])),
        "observations/cut": float(sum(one.cut for one in played)),
    }
    out |= {f"environment/{why}": float(np.mean([one.why == why for one in played])) for why in LIMITS[:2]}
    for kind, _ in failures(answers):
        key = f"environment/{kind.replace(' ', '_')}"
        out[key] = out.get(key, 0.0) + 1
    for one in played:
        for name, value in one.counts.items():
            out[name] = out.get(name, 0.0) + value
    return out
