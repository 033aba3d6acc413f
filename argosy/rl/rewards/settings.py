"""The settings of rewards, without jax.

Settings that contain rewards have the field `reward: Annotated[list[RewardSettings], Repeats("of")]`, so that `reward=a.py:f
reward=b.py:g` are two rewards.
"""

from pydantic import Field, field_validator

from argosy.core.settings import Settings


class RewardSettings(Settings):
    """One reward of a completion, and its weight."""

    of: str
    """Where the reward comes from: FILE.py:FUNCTION (from the working directory), package.module:FUNCTION, the name of a built-in
    (`exact`, `maths`, `maths_strict`, `math_verify`, `format`, `code`), or the
    folder of a reward model, a model with a head of one score."""
    weight: float = 1.0
    """Factor of the reward before rewards are added. A negative weight makes it a penalty."""
    timeout: float = Field(10.0, gt=0)
    """Limit of one call of the function, in seconds. A call that exceeds it is ended with its process, and its completions have no
    reward. A call scores the whole batch, or one completion if the function says `per_completion = True`. Models have no limit.
    """

    @field_validator("of")
    @classmethod
    def _not_empty(cls, value: str) -> str:
        if not value.strip() or value.endswith(":") or value.startswith(":"):
            raise ValueError("should be FILE.py:FUNCTION, package.module:FUNCTION, a built-in or a model's folder")
        return value
