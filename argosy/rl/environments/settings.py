"""The settings of environments, without jax. Each class of settings names the environment class that processes load.

A named environment is a class of settings. `environment=FILE.py:CLASS` chooses `custom` with the user's environment class.
"""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field, field_validator, model_validator

from argosy.core.counts import plural
from argosy.core.errors import BadInput, Unsupported
from argosy.core.registry import Registry
from argosy.core.settings import Also, MayChange, Repeats, Settings
from argosy.rl.rewards.sources import text_of_file

if TYPE_CHECKING:
    from argosy.data.rows.prompts import Prompts
    from argosy.rl.rollouts.episodes.trajectories import EpisodeSetup

ENVIRONMENTS = Registry(
    "environment",
    {
        "none": "argosy.rl.environments.settings:NoEnvironment",
        "custom": "argosy.rl.environments.settings:CustomEnvironment",
        "tools": "argosy.rl.environments.settings:ToolsEnvironment",
        "calculator": "argosy.rl.environments.settings:CalculatorEnvironment",
        "python": "argosy.rl.environments.settings:PythonEnvironment",
        "guess": "argosy.rl.environments.settings:GuessEnvironment",
        "gymnasium": "argosy.rl.environments.settings:GymnasiumEnvironment",
    },
)
OWN = "argosy.rl.environments"


class NoEnvironment(Settings):
    """No environment: a completion is one turn."""

    played: ClassVar[bool] = False


class EnvironmentSettings(Settings):
    """The settings of every environment."""

    played: ClassVar[bool] = True
    # Whether it gives rewards; otherwise there are reward functions.
    gives: ClassVar[bool] = True
    # Whether it reads texts, messages, or either.
    reads: ClassVar[str] = "either"

    weight: float = 1.0
    """Factor of the sum of the environment's rewards, before rewards are added."""
    turns: Annotated[int, Also("max_turns", "max_steps", "max_assistant_turns", "max_tool_calling_iterations")] = Field(8, gt=0)
    """Limit of model turns in a completion."""
    tokens: Annotated[int | None, Also("max_turn_tokens")] = Field(None, gt=0)
    """Limit of a model turn in tokens; a longer turn is cut there. None: the room that `rollout.tokens` leaves."""
    timeout: Annotated[float, MayChange(), Also("step_timeout", "env_timeout")] = Field(10.0, gt=0)
    """Limit in seconds of a step, and of making and resetting an environment. An environment that exceeds it is ended with its process,
    and its completion has no reward.
    """
    observation: Annotated[int, Also("max_tool_response_length", "max_observation_length")] = Field(256, gt=0)
    """Limit of an observation in tokens. A longer text is cut and says so; cut observations are counted."""
    stop: str | None = None
    """A text that ends a model turn, such as a line break, for prompts that are texts. None: only end tokens do."""
    wait: int | None = Field(16, ge=0)
    """Engine steps between a turn and the next one of its completion. The environment has that time to reply; if it needs more, the
    engine waits, so that the same run gives the same completions, bit for bit, however long environments take. None: a completion
    continues as soon as there is a reply, which suits slow environments; results then differ by rounding from run to run.
    """
    processes: int = Field(256, gt=0)
    """Number of environments that run at a time, each in its own process; other completions wait."""

    @field_validator("stop")
    @classmethod
    def _not_empty(cls, value: str | None) -> str | None:
        if value == "":
            raise ValueError("should be a text, or none")
        return value

    def source(self) -> dict[str, Any]:
        """Returns the description from which a process loads the environment (`EnvironmentPool`).

        Raises:
            UserError: the environment cannot be found, or cannot run here.
        """
        raise NotImplementedError


class CustomEnvironment(EnvironmentSettings):
    """An environment class of the user (`argosy.rl.environment`)."""

    of: Annotated[str, Also("env_class", "env_name", "environment_factory")]
    """FILE.py:CLASS (from the working directory) or package.module:CLASS."""
    args: Annotated[dict[str, Any], Also("env_config", "env_kwargs")] = Field(default_factory=dict)
    """Keyword arguments of the class."""

    @field_validator("of")
    @classmethod
    def _names_a_class(cls, value: str) -> str:
        if not all(value.rpartition(":")):
            raise ValueError("should be FILE.py:CLASS or package.module:CLASS")
        return value

    def source(self) -> dict[str, Any]:
        return file_source(self.of) | {"args": dict(self.args)}


class ToolSettings(EnvironmentSettings):
    """Tools that the model may call, in prompts that are messages (`argosy.rl.environments.tools`)."""

    gives: ClassVar[bool] = False
    reads: ClassVar[str] = "messages"
    # Their calls are read by the notation of the chat template.
    called: ClassVar[bool] = True

    call_timeout: Annotated[float, MayChange()] = Field(5.0, gt=0)
    """Limit of a tool call in seconds. If a call exceeds it, the model is told so, and the completion goes on."""

    @model_validator(mode="after")
    def _in_time(self) -> "ToolSettings":
        if self.call_timeout >= self.timeout:
            raise ValueError(f"call_timeout = {self.call_timeout:g} is not below timeout = {self.timeout:g}")
        return self


class ToolsEnvironment(ToolSettings):
    """Plain Python functions as tools."""

    functions: Annotated[list[str], Repeats()] = Field(min_length=1)
    """The functions of the tools, each as FILE.py:FUNCTION or package.module:FUNCTION."""

    @field_validator("functions")
    @classmethod
    def _name_functions(cls, value: list[str]) -> list[str]:
        for name in value:
            if not all(name.rpartition(":")):
                raise ValueError(f"`{name}` should be FILE.py:FUNCTION or package.module:FUNCTION")
        return value

    def source(self) -> dict[str, Any]:
        functions = [file_source(name) for name in self.functions]
        return builtin_source("tools:Tools", {"functions": functions, "seconds": self.call_timeout})


class CalculatorEnvironment(ToolSettings):
    """A tool that computes exactly (`argosy.rl.environments.calculator`)."""

    def source(self) -> dict[str, Any]:
        functions = [file_source(f"{OWN}.calculator:calculate")]
        return builtin_source("tools:Tools", {"functions": functions, "seconds": self.call_timeout}) | {"of": "calculator"}


class PythonEnvironment(ToolSettings):
    """A tool that runs Python in a sandbox (`argosy.rl.environments.python`)."""

    seconds: float = Field(3.0, gt=0)
    """Limit of a program in seconds, both of the clock and of the CPU."""
    memory_mb: int = Field(512, ge=64)
    """Memory limit of a program, in megabytes."""

    @model_validator(mode="after")
    def _programs_in_time(self) -> "PythonEnvironment":
        if self.seconds >= self.call_timeout:
            raise ValueError(f"seconds = {self.seconds:g} is not below call_timeout = {self.call_timeout:g}")
        return self

    def source(self) -> dict[str, Any]:
        from argosy.rl.sandbox import available

        if reasons := available():
            problem = f"environment=python cannot run code here: {'; '.join(reasons)}"
            raise Unsupported(problem, hint="it needs Linux with Landlock")
        limits = {"cpu_s": max(1, round(self.seconds)), "wall_s": self.seconds, "memory_mb": self.memory_mb}
        arguments = {"functions": [file_source(f"{OWN}.python:python")], "seconds": self.call_timeout, "fixed": {"limits": limits}}
        return builtin_source("python:Python", arguments)


class GymnasiumEnvironment(EnvironmentSettings):
    """An environment with Gymnasium's interface, whose observations and actions are texts (`argosy.rl.environments.gymnasium`)."""

    make: str
    """The class, or the function that makes the environment, as FILE.py:NAME or package.module:NAME."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of `make`."""

    @field_validator("make")
    @classmethod
    def _names_it(cls, value: str) -> str:
        if not all(value.rpartition(":")):
            raise ValueError("should be FILE.py:NAME or package.module:NAME")
        return value

    def source(self) -> dict[str, Any]:
        return builtin_source("gymnasium:Gymnasium", {"make": file_source(self.make), "args": dict(self.args)}) | {"of": self.make}


class GuessEnvironment(EnvironmentSettings):
    """A game in which the model guesses a number and learns whether it is higher or lower (`argosy.rl.environments.guess`), for prompts
    that are texts.
    """

    reads: ClassVar[str] = "texts"
    stop: str | None = "\n"
    low: int = 1
    """The lowest number."""
    high: int = 9
    """The highest number."""
    tries: int = Field(3, gt=0)
    """Number of guesses in a game."""

    @model_validator(mode="after")
    def _in_order(self) -> "GuessEnvironment":
        if self.high <= self.low:
            raise ValueError(f"high = {self.high} is not above low = {self.low}")
        if self.tries > self.turns:
            raise ValueError(f"tries = {self.tries} is above turns = {self.turns}")
        return self

    def source(self) -> dict[str, Any]:
        return builtin_source("guess:Guess", {"low": self.low, "high": self.high, "tries": self.tries})


def builtin_source(name: str, args: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the source description of an environment that comes with Argosy.

    Args:
        name: the module and the class, MODULE:CLASS.
        args: keyword arguments of the class.
    """
    module, _, class_name = name.partition(":")
    return {"of": module, "module": f"{OWN}.{module}", "function": class_name, "args": dict(args)}


def file_source(of: str) -> dict[str, Any]:
    """Returns the source description of a class or function, named as FILE.py:NAME or package.module:NAME. A file is read here, once.

    Raises:
        BadInput: there is no such file.
    """
    place, _, name = of.rpartition(":")
    if place.endswith(".py"):
        return {"of": of, "file": os.path.abspath(place), "function": name, "source": text_of_file(place, of, "environment")}
    return {"of": of, "module": place, "function": name}


def environment_summary(settings: EnvironmentSettings) -> str:
    """Describes an environment for the header of a run."""
    name = settings.of if isinstance(settings, CustomEnvironment) else type(settings).__name__.removesuffix("Environment").lower()
    return f"{name}, at most {plural(settings.turns, 'turn')}"


def open_table(settings: EnvironmentSettings, prompts: "Prompts", held_out: "Prompts | None") -> "EpisodeSetup":
    """Starts the server process of an environment, and checks that the environment fits the prompts and their chat template.

    Args:
        prompts: the prompts of the run.
        held_out: the prompts of the evaluation.

    Raises:
        UserError: the environment cannot be used, or does not fit the prompts.
    """
    from argosy.infer.tools.notations import KNOWN, find_notation
    from argosy.rl.environments.pool import EnvironmentPool
    from argosy.rl.rollouts.episodes.trajectories import EpisodeSetup
    from argosy.rl.rollouts.episodes.turns import TurnCodec

    pool = EnvironmentPool(settings.source(), settings.timeout, prompts.names)
    try:
        for each in (prompts, held_out) if held_out is not None else (prompts,):
            each.tools = pool.tools
        turns = TurnCodec(prompts, settings.observation, pool.about["role"], settings.stop)
        first = prompts.rendered(prompts.records[0])
        is_text = isinstance(first.content, str)
        if settings.reads not in ("either", "texts" if is_text else "messages"):
            name, kind = environment_summary(settings).partition(",")[0], "a text" if is_text else "messages"
            raise BadInput(f"environment={name} reads {settings.reads}, and the prompt is {kind}", where=first.where)
        if getattr(settings, "called", False) and find_notation(prompts.template_for(pool.tools), prompts.tokenizer) is None:
            problem = f"calls in the notation of this chat template cannot be read with this tokenizer: those of {KNOWN} can"
            raise BadInput(problem, where=first.where, hint="data.template=FILE.jinja gives another one")
        if is_text and pool.tools:
            raise BadInput("an environment with tools needs prompts that are messages", where=first.where)
        turns.check(first)
        identity = {name: item for name, item in dict(settings).items() if name not in ("timeout", "call_timeout", "processes")}
        limits = (settings.turns, settings.processes, settings.wait, settings.tokens, settings.weight, settings.gives)
        return EpisodeSetup(pool, turns, *limits, repr(identity))
    except BaseException:
        pool.close()
        raise
