"""Environments of Gymnasium's form whose observations and actions are texts: any object with these methods.

    reset(seed=..., options=...) -> (observation, info)
    step(action) -> (observation, reward, terminated, truncated, info)

An action is the text of a turn without leading and trailing blanks. If `reset` has the parameter `options`, it receives a mapping with
the prompt and the columns of the data. Gymnasium itself is not needed.
"""

import importlib
import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any

from argosy.rl.environment import Turn
from argosy.rl.user_code import FILES, load_file


class Gymnasium:
    """Adapts a Gymnasium environment.

    Args:
        make: the source of the class or function that makes the environment, as `EnvironmentPool` takes it.
        args: keyword arguments of the call of `make`.
    """

    _maker: typing.ClassVar[Callable[..., Any] | None] = None

    def __init__(self, make: Mapping[str, Any], args: Mapping[str, Any]):
        self.own = (self._maker or self.load(make))(**args)
        for name in ("reset", "step"):
            if not callable(getattr(self.own, name, None)):
                raise TypeError(f"`{make['of']}` made a {type(self.own).__name__}, which has no method `{name}`")

    @classmethod
    def prepare(cls, make: Mapping[str, Any], **_: Any) -> None:
        """Loads the class once, in the process that the others are forked from."""
        cls._maker = staticmethod(cls.load(make))

    @staticmethod
    def load(make: Mapping[str, Any]) -> Callable[..., Any]:
        module = load_file(make) if "file" in make else importlib.import_module(make["module"])
        FILES.add(getattr(module, "__file__", None))
        return getattr(module, make["function"])

    def reset(self, prompt: Any, seed: int, **columns: Any) -> str:
        takes = inspect.signature(self.own.reset).parameters
        options = {"options": {"prompt": prompt, **columns}} if "options" in takes else {}
        observation, _ = self.own.reset(seed=seed, **options)
        return observation_text(observation)

    def step(self, said: Any) -> Turn:
        action = said if isinstance(said, str) else said["content"]
        observation, reward, terminated, truncated, _ = self.own.step(action.strip())
        return Turn(observation_text(observation), float(reward), bool(terminated), bool(truncated))


def observation_text(observation: Any) -> str:
    """Returns an observation unchanged if it is a text.

    Raises:
        TypeError: the observation is something else.
    """
    if not isinstance(observation, str):
        raise TypeError(f"an observation is a {type(observation).__name__}, not a text")
    return observation
