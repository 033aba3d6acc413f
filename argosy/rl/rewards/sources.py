"""Resolves `RewardSettings.of` to a function or model, and checks it as far as that is possible without running user code."""

import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from argosy.core.command import install_extra
from argosy.core.errors import BadInput, Unsupported, UserError, nearest, raise_mistakes
from argosy.core.registry import Registry
from argosy.rl.rewards.settings import RewardSettings
from argosy.rl.sandbox import available

# Built-in rewards, functions like those of users.
REWARDS = Registry(
    "reward",
    {name: f"argosy.rl.rewards.builtin:{name}" for name in ("exact", "format", "maths", "maths_strict", "code")}
    | {"math_verify": "argosy.rl.rewards.math_verify_reward:math_verify"},
)
REWARDS.add_installed("argosy.rewards")

# What a run knows of each completion beside its text. A function gets it if it has a parameter of that name. finish_reasons: `stop`, or
# `length` where the limit of tokens cut it. thinking_prompts: whether the rendered prompt ends inside a thought.
GIVEN = ("finish_reasons", "thinking_prompts")

HINT = "write FILE.py:FUNCTION, package.module:FUNCTION, a built-in reward or the folder of a reward model"


def source_of(reward: RewardSettings) -> dict[str, Any] | Path:
    """Returns the description from which a process loads a reward function, or the folder of a reward model.

    The text of a file is read here, once, so that all processes run the same code, even those that start later. Modules that the file
    imports may still change.

    Raises:
        BadInput: there is no such file, built-in or folder, or the library of a built-in is missing.
        Unsupported: this machine has no sandbox for the built-in `code`.
    """
    of = reward.of
    place, _, function = of.rpartition(":")
    if place.endswith(".py"):
        return {"of": of, "file": os.path.abspath(place), "function": function, "source": text_of_file(place, of)}
    if of.endswith(".py"):
        raise BadInput(f"`{of}` names a file and no function", hint=f"write `{of}:FUNCTION`")
    if of in REWARDS:
        return _builtin(of, reward.timeout)
    if Path(of).is_dir():
        return Path(of)
    if place and "/" not in place:
        return {"of": of, "module": place, "function": function}
    if Path(of).suffix == ".gguf" and Path(of).exists():
        raise BadInput(f"`{of}` is a GGUF file, which has no head of scores", hint="give the folder of a reward model")
    close = nearest(of, REWARDS)
    raise BadInput(f"no reward `{of}`", hint=close if close and close.startswith("did you mean") else HINT)


def _builtin(of: str, timeout: float) -> dict[str, Any]:
    if of == "math_verify" and find_spec("math_verify") is None:
        problem = "the reward `math_verify` needs the library of that name"
        raise BadInput(problem, hint=f"{install_extra('maths')}; or use `maths`")
    if of == "code" and (reasons := available()):
        raise Unsupported(f"the reward `code` cannot run code here: {'; '.join(reasons)}", hint="it needs Linux with Landlock")
    module, _, function = REWARDS._items[of].partition(":")
    return {"of": of, "module": module, "function": function, "fixed": {"timeout": timeout} if of == "code" else {}}


def text_of_file(place: str, of: str, noun: str = "reward") -> str:
    """Reads the text of a source file.

    Args:
        place: the path of the file.
        of: the name of the reward in errors.
        noun: what the file defines, for errors.

    Raises:
        BadInput: the file does not exist, or is no text.
    """
    path = Path(place)
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        siblings = [file.name for file in path.parent.glob("*.py")] if path.parent.is_dir() else []
        hint = nearest(path.name, siblings) if siblings else f"the working directory is {os.getcwd()}"
        raise BadInput(f"no file `{path}` for the {noun} `{of}`", hint=hint) from None
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror or str(error) if isinstance(error, OSError) else "it is not UTF-8 text"
        raise BadInput(f"cannot read `{path}`: {why.lower()}") from None


def reward_names(rewards: Sequence[RewardSettings]) -> list[str]:
    """Returns a short name for each reward, for metrics: the name of the function or folder. Where two of these are equal, the name of
    the file or module is added.

    Raises:
        BadInput: the same reward is given twice.
    """
    ofs = [reward.of for reward in rewards]
    if twice := next((of for of in ofs if ofs.count(of) > 1), None):
        raise BadInput(f"the reward `{twice}` is given twice", hint="give it once, with the sum of the weights")
    short = [_last(of) for of in ofs]
    longer = [name if short.count(name) == 1 else _with_place(of) for name, of in zip(short, ofs)]
    return [name if longer.count(name) == 1 else of for name, of in zip(longer, ofs)]


def _last(of: str) -> str:
    place, colon, function = of.rpartition(":")
    return function if colon else Path(place or function).name or of


def _with_place(of: str) -> str:
    place, colon, function = of.rpartition(":")
    if colon:
        return f"{place.removesuffix('.py').rpartition('/')[2].rpartition('.')[2]}.{function}"
    return "/".join(Path(of).parts[-2:])


def check_functions(sources: Sequence[dict[str, Any]], about: Sequence[dict[str, Any]], columns: Sequence[str] | None) -> None:
    """Checks the reports of a process that has loaded the functions, and the parameters of the functions.

    Args:
        sources: the description of each function.
        about: the report of the process on each function.
        columns: the columns of the data; None: not known yet, so parameters are not compared with them.

    Raises:
        BadInput, SettingsError: a function cannot be loaded, or needs a missing column.
    """
    mistakes: list[UserError] = []
    for source, requirements in zip(sources, about, strict=True):
        if "wrong" in requirements:
            mistakes.append(_not_usable(source, requirements["wrong"]))
        elif wrong := lacking(source["of"], requirements, columns):
            mistakes.append(wrong)
    raise_mistakes(mistakes)


def _not_usable(source: dict[str, Any], wrong: dict[str, Any]) -> UserError:
    of, place = source["of"], source.get("file") or source["module"]
    if "missing" in wrong:
        function = source["function"]
        hint = nearest(function, wrong["missing"])
        return BadInput(f"no function `{function}` for the reward `{of}`", where=f"in {place}", hint=hint)
    if "line" in wrong:
        line = f": {wrong['line']}" if wrong["line"] else ""
        return BadInput(f"the reward `{of}` cannot be loaded: {wrong['what']}", where=f"{wrong['where']}{line}")
    return BadInput(wrong["what"], where=f"in {place}", hint=wrong.get("hint"))


def lacking(of: str, requirements: dict[str, Any], columns: Sequence[str] | None) -> BadInput | None:
    """Returns the error of a function that does not take completions or needs a missing column; None if it can be used."""
    if not requirements["every"] and "completions" not in requirements["takes"]:
        hint = "def reward(completions, **columns), or with `prompts` and columns by name"
        return BadInput(f"the reward `{of}` has no parameter `completions`", hint=hint)
    if columns is None:
        return None
    missing = [name for name in requirements["needs"] if name not in ("prompts", "completions", *columns)]
    if not missing:
        return None
    data_columns = [name for name in columns if name not in GIVEN]
    there = f"the columns are {', '.join(data_columns)}" if data_columns else "the data have no other columns than the prompt"
    return BadInput(f"the reward `{of}` needs {' and '.join(f'`{name}`' for name in missing)}", hint=there)
