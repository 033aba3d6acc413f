"""Tools that a model may call: plain Python functions. Their signatures and docstrings become the JSON schemas that the model reads.

    def add(a: int, b: int = 0) -> int:
        \"\"\"Adds two numbers.

        Args:
            a: the first.
        \"\"\"

A turn with calls gets one message from each called tool. A turn without calls ends the episode. Failed calls (unparsable text, an
unknown tool, wrong arguments, an exception, a tool that takes too long) are reported to the model and counted, and the episode goes on,
because a model must learn to call tools. State in a tool's module belongs to one episode.
"""

import importlib
import inspect
import json
import signal
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from argosy.rl.environment import Turn
from argosy.rl.user_code import FILES, load_file, user_line

KINDS: dict[Any, str] = {
    str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object", type(None): "null",
}  # fmt: skip
FAILED = ("malformed", "unknown", "wrong_arguments", "raised", "timed_out")
HINT = "hint: the model reads the message; calls that raise are counted as `tools/raised`"
# Of an exception's message.
MOST_CHARACTERS = 500


class Tools:
    """The tools of one episode.

    Args:
        functions: a mapping for each function. It has `function` (the name), and `module` or `file` with the text of the file as
            `source`.
        seconds: the time limit of a call in seconds.
        fixed: arguments that every function receives and that the model does not see.
    """

    # For whoever trains, of the last call that raised.
    complaint: str | None = None
    _loaded: typing.ClassVar[dict[str, Callable[..., Any]]] = {}

    def __init__(self, functions: Sequence[Mapping[str, Any]], seconds: float = 5.0, fixed: Mapping[str, Any] | None = None):
        self.seconds, self.fixed = seconds, dict(fixed or {})
        self.functions = self._loaded or self.load(functions)
        self.tools = [schema_of(function, self.fixed) for function in self.functions.values()]

    @classmethod
    def prepare(cls, functions: Sequence[Mapping[str, Any]], **_: Any) -> None:
        """Loads the functions once, in the process that the others are forked from."""
        cls._loaded = cls.load(functions)

    @staticmethod
    def load(functions: Sequence[Mapping[str, Any]]) -> dict[str, Callable[..., Any]]:
        """Loads the functions and returns them by name.

        Raises:
            ValueError: a source is no function, or two functions have the same name.
        """
        by_name: dict[str, Callable[..., Any]] = {}
        for source in functions:
            module = load_file(source) if "file" in source else importlib.import_module(source["module"])
            if not module.__name__.startswith("argosy."):
                FILES.add(getattr(module, "__file__", None))
            function = getattr(module, source["function"], None)
            if not inspect.isfunction(function) or inspect.iscoroutinefunction(function):
                raise ValueError(f"`{source['of']}` is no plain function")
            if function.__name__ in by_name:
                raise ValueError(f"two tools are named `{function.__name__}`")
            by_name[function.__name__] = function
        return by_name

    def reset(self) -> None: ...

    def step(self, said: Any) -> Turn:
        counts = {"tools/calls": 0.0, "tools/failed": 0.0}
        if said.get("malformed"):
            text = "error: this is no call that can be read: give a name and the arguments as one JSON object"
            # Mistral's templates refuse a result whose id has not nine letters, though there is no call.
            reply = {"role": "tool", "name": "error", "tool_call_id": "malformed", "content": text}
            return Turn([reply], counts=self._failed(counts, "malformed"))
        calls = said.get("tool_calls") or ()
        if not calls:
            return Turn(done=True, counts=counts)
        messages = []
        for call in calls:
            name, (text, failure) = call["function"]["name"], self.called(**call["function"])
            counts = self._failed(counts, failure) if failure else counts | {"tools/calls": counts["tools/calls"] + 1}
            messages.append({"role": "tool", "name": name, "tool_call_id": call["id"], "content": text})
        return Turn(messages, counts=counts)

    def _failed(self, counts: Mapping[str, float], kind: str) -> dict[str, float]:
        """Returns the counts with one more call, which failed in the way that `kind` names."""
        more = dict(counts)
        for name in ("tools/calls", "tools/failed", f"tools/{kind}"):
            more[name] = more.get(name, 0.0) + 1
        return more

    def called(self, name: str, arguments: Any) -> tuple[str, str | None]:
        """Calls a tool. Returns the result as the model reads it, and the kind of failure; None if the call succeeded."""
        function = self.functions.get(name)
        if function is None:
            return f"error: there is no tool `{name}`; there are {', '.join(self.functions)}", "unknown"
        schema = self.tools[list(self.functions).index(name)]["function"]["parameters"]
        if wrong := mistake(name, schema, arguments):
            return f"error: {wrong}", "wrong_arguments"
        try:
            with time_limit(self.seconds):
                result = function(**arguments, **self.fixed)
        except TimeIsOver:
            return f"error: {name} takes more than {self.seconds:g} seconds", "timed_out"
        except BaseException as error:
            text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            if (line := user_line(error.__traceback__)) is not None:
                self.complaint = f"the tool `{name}` raised {type(error).__name__} in {line}\n{HINT}"
            return f"error: {text[:MOST_CHARACTERS]}", "raised"
        if isinstance(result, str):
            return result, None
        try:
            return json.dumps(result, ensure_ascii=False), None
        except (TypeError, ValueError):
            return str(result), None


class TimeIsOver(BaseException):
    """A call has exceeded its time limit. This is no `Exception`, so that a tool's `except Exception` does not catch it."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises `TimeIsOver` in Python code that runs for longer than `seconds`. Code that never returns to the interpreter is only ended
    with the process of its episode.
    """

    def interrupt(*_: object) -> None:
        raise TimeIsOver

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# ---------------------------------------------------------------- schemas


def schema_of(function: Callable[..., Any], fixed: Mapping[str, Any]) -> dict[str, Any]:
    """Makes the JSON schema of a function, in the form that chat templates read.

    Args:
        fixed: arguments that the model does not see, which the schema leaves out.

    Raises:
        ValueError: a parameter has no type, has a type that JSON lacks, or cannot be given by name.
    """
    hints = typing.get_type_hints(function)
    described, about = parameter_texts(function)
    properties: dict[str, Any] = {}
    required = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name in fixed:
            continue
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ValueError(f"the parameter `{parameter}` of the tool `{function.__name__}` cannot be given by name")
        if name not in hints:
            raise ValueError(f"the parameter `{name}` of the tool `{function.__name__}` has no type")
        properties[name] = json_kind(hints[name], f"`{name}` of the tool `{function.__name__}`")
        if name in about:
            properties[name]["description"] = about[name]
        if parameter.default is parameter.empty:
            required.append(name)
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": function.__name__, "description": described, "parameters": parameters}}


def json_kind(hint: Any, where: str) -> dict[str, Any]:
    """Returns the JSON schema of a type hint.

    Args:
        where: the name of the parameter, for errors.
    """
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint in KINDS:
        return {"type": KINDS[hint]}
    if origin is typing.Annotated:
        return json_kind(args[0], where)
    if origin is typing.Literal and all(isinstance(choice, str | int | bool) for choice in args):
        return {"enum": list(args)}
    if origin is list:
        return {"type": "array", "items": json_kind(args[0], where)}
    if origin is dict and args[0] is str:
        return {"type": "object", "additionalProperties": json_kind(args[1], where)}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [json_kind(arg, where) for arg in args]}
    raise ValueError(f"{where} is of the type {hint}, which JSON has not")


def parameter_texts(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """Reads the description of a function and those of its parameters from a docstring in Google's style."""
    text, _, rest = (inspect.getdoc(function) or "").partition("\nArgs:\n")
    about: dict[str, str] = {}
    last = None
    for line in rest.splitlines():
        if not line.strip() or not line.startswith(" "):
            break
        name, colon, description = line.strip().partition(":")
        if colon and len(line) - len(line.lstrip()) <= 4:
            last = name.partition(" ")[0]
            about[last] = description.strip()
        elif last is not None:
            about[last] += " " + line.strip()
    return " ".join(text.split()), about


# ---------------------------------------------------------------- arguments


def mistake(name: str, schema: Mapping[str, Any], arguments: Any) -> str | None:
    """Returns a sentence that says what is wrong with the arguments of a call; None if they are right."""
    if not isinstance(arguments, dict):
        return f"the arguments of {name} are no JSON object"
    properties = schema["properties"]
    if more := [argument for argument in arguments if argument not in properties]:
        return f"{name} has no argument `{more[0]}`; it has {', '.join(properties) or 'none'}"
    if missing := [argument for argument in schema["required"] if argument not in arguments]:
        return f"{name} needs `{missing[0]}`"
    for argument, value in arguments.items():
        if not fits(properties[argument], value):
            return f"`{argument}` of {name} is {json.dumps(value)[:60]}, and should be {json.dumps(kind_words(properties[argument]))}"
    return None


def kind_words(schema: Mapping[str, Any]) -> Any:
    return {name: item for name, item in schema.items() if name != "description"}


def fits(schema: Mapping[str, Any], value: Any) -> bool:
    """Whether a value matches a schema of `json_kind`."""
    if "anyOf" in schema:
        return any(fits(branch, value) for branch in schema["anyOf"])
    if "enum" in schema:
        return any(value == choice and isinstance(value, bool) == isinstance(choice, bool) for choice in schema["enum"])
    kind = schema["type"]
    if kind == "array":
        return isinstance(value, list) and all(fits(schema["items"], element) for element in value if "items" in schema)
    if kind == "object":
        inner = schema.get("additionalProperties")
        return isinstance(value, dict) and (inner is None or all(fits(inner, element) for element in value.values()))
    if kind in ("integer", "number"):
        allowed = int if kind == "integer" else (int, float)
        return isinstance(value, allowed) and not isinstance(value, bool)
    return isinstance(value, {"string": str, "boolean": bool, "null": type(None)}[kind])
