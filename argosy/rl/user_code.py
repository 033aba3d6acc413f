"""Loads users' files in separate processes, seeds their random generators, and finds the line of an error. It needs the standard
library alone, because the scripts of these processes import it by path.
"""

import importlib.machinery
import inspect
import os
import random
import sys
import traceback
import types

MOST_TRACEBACK = 8000
# Of users: what an error is blamed on, however deep in a library it was raised.
FILES = set()


class Unusable(Exception):
    """A function or its result cannot be used. The argument is a mapping {what, where, hint} or a sentence."""


# ---- loading


def load_file(source):
    """Makes a module from the text of a file that the parent has read. So editing the file during a run changes nothing."""
    path, name = source["file"], "reward_of_" + os.path.basename(source["file"]).removesuffix(".py")
    folder = os.path.dirname(path)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    module = types.ModuleType(name)
    module.__file__ = path
    sys.modules[name] = module
    FILES.add(path)
    exec(compile(source["source"], path, "exec"), module.__dict__)
    return module


def source_function(module, source):
    """Returns the function of a module that a source description names."""
    try:
        function = module
        for part in source["function"].split("."):
            function = getattr(function, part)
    except AttributeError:
        names = [n for n, item in vars(module).items() if callable(item) and not n.startswith("_")]
        raise Unusable({"missing": names}) from None
    if inspect.isclass(function) or not callable(function):
        kind = "a class" if inspect.isclass(function) else f"a {type(function).__name__}"
        hint = "name a function, or an object that can be called"
        raise Unusable({"what": f"`{source['of']}` is {kind}, not a function", "hint": hint})
    return function


def function_parameters(function, fixed):
    """Reads the signature of a function.

    Returns:
        A mapping: `needs`, the parameters without a default; `takes`, all parameters; `every`, whether it accepts any keyword; and
        `per_completion`, the attribute of that name. Parameters in `fixed` are left out.
    """
    needs, takes, every = [], [], False
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind == parameter.VAR_KEYWORD:
            every = True
        elif parameter.kind == parameter.POSITIONAL_ONLY:
            raise Unusable({"what": f"its parameter `{name}` cannot be given by name", "hint": "remove the `/` from its parameters"})
        elif parameter.kind != parameter.VAR_POSITIONAL and name not in fixed:
            takes.append(name)
            if parameter.default is parameter.empty:
                needs.append(name)
    return {"needs": needs, "takes": takes, "every": every, "per_completion": bool(getattr(function, "per_completion", False))}


def load_failure(error, source):
    """Describes an error that a module raised when it was loaded, with the line."""
    message = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    place, line = source.get("file") or source["module"], None
    if isinstance(error, SyntaxError) and error.filename:
        message, place, line = f"{type(error).__name__}: {error.msg}", f"{error.filename}:{error.lineno}", (error.text or "").strip()
    else:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == source.get("file")]
        if frames:
            place, line = f"{frames[-1].filename}:{frames[-1].lineno}", frames[-1].line
    return {"what": message, "where": f"in {place}", "line": line}


# ---- seeds


class Seeding:
    """An entry of `sys.meta_path` that seeds NumPy's global generator if NumPy is imported after the seed was set."""

    seed = None

    def find_spec(self, name, path=None, target=None):
        if name != "numpy.random" or self.seed is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def seeded(module):
                run(module)
                module.seed(self.seed)

            spec.loader.exec_module = seeded
        return spec


SEEDING = Seeding()


def seed_generators(number):
    """Seeds the global generators of `random` and NumPy. If NumPy is not imported yet, its generator is seeded when it is."""
    random.seed(number)
    SEEDING.seed = number % 2**32
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed(SEEDING.seed)
    elif SEEDING not in sys.meta_path:
        sys.meta_path.insert(0, SEEDING)


# ---- blame


def traceback_text(error, tb):
    """Formats an exception: one line with the user's line of code, then the traceback."""
    text = "".join(traceback.format_exception(type(error), error, tb))
    first = ", in ".join(filter(None, error_summary(error, tb)))
    return f"{first}\n{text if len(text) <= MOST_TRACEBACK else '... ' + text[-MOST_TRACEBACK:]}"


def error_summary(error, tb):
    """Returns an exception in one line, such as `KeyError: 'a'`, and `FILE:LINE: CODE` of the innermost line in a user's file."""
    summary = traceback.format_exception_only(type(error), error)[-1].strip().partition("\n")[0]
    return summary, user_line(tb)


def user_line(tb):
    """Returns `FILE:LINE: CODE` of the innermost frame in a user's file; None if there is none."""
    frames = [frame for frame in traceback.extract_tb(tb) if frame.filename in FILES]
    return f"{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else None


def traceback_below(tb, file):
    """Returns the part of a traceback below the last frame of `file`."""
    start = tb
    while tb is not None:
        tb, ours = tb.tb_next, tb.tb_frame.f_code.co_filename == file
        start = tb if ours else start
    return start


def short_repr(value):
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


