"""Built-in rewards: functions like those of users, each for one completion alone."""

from collections.abc import Sequence


def exact(completions: Sequence[str], answer: Sequence[str]) -> list[float]:
    """1 where a completion is the answer, blanks at both ends aside; 0 elsewhere."""
    return [float(completion.strip() == right.strip()) for completion, right in zip(completions, answer, strict=True)]
