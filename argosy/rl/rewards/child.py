"""The process that runs reward functions. It is run by path; no module imports it. It needs the standard library alone, and jax only if
a user's function does.

Messages (`core.process.channel`) from the parent are pickles. Replies are JSON, so that nothing that a function returns can run code in
the parent. The first message loads the functions; each further message calls one of them.

The process and everything that it has started end with its parent, even inside a call that never returns to the interpreter
(`core.process.guard`).
"""

import asyncio
import contextlib
import importlib
import inspect
import json
import os
import pickle
import sys
import zlib

# The files that it shares with other scripts, by path and not as parts of the package, whose import costs more than its own start. A
# user's file may have the same name as one of them.
sys.path.insert(0, os.path.abspath(os.path.join(__file__, "..", "..")))
sys.path.insert(0, os.path.join(sys.path[0], "..", "core", "process"))
import channel  # pyright: ignore[reportMissingImports]
import guard  # pyright: ignore[reportMissingImports]
import user_code

del sys.path[:2], sys.modules["channel"], sys.modules["guard"], sys.modules["user_code"]

# ---- loading


def load_functions(request):
    """Loads reward functions. Returns, for each function, its parameters or the reason why it cannot be used."""
    sys.path[:] = request["path"]
    modules, functions, requirements = {}, [], []
    for source in request["functions"]:
        try:
            key = source.get("file") or source["module"]
            if key not in modules:
                modules[key] = user_code.load_file(source) if "file" in source else importlib.import_module(source["module"])
                user_code.FILES.add(getattr(modules[key], "__file__", None))
            function = user_code.source_function(modules[key], source)
            requirements.append(user_code.function_parameters(function, source.get("fixed", {})))
            functions.append(with_fixed_arguments(function, source))
        except user_code.Unusable as error:
            requirements.append({"wrong": error.args[0]})
        except BaseException as error:
            requirements.append({"wrong": user_code.load_failure(error, source)})
    return functions, requirements


def with_fixed_arguments(function, source):
    """Binds the arguments that the source of a function fixes. Returns a function of the other arguments."""
    fixed = source.get("fixed", {})
    return (lambda **arguments: function(**arguments, **fixed)) if fixed else function


# ---- calling


def answer_call(functions, request, runner):
    """Calls a reward function. Returns its rewards, or the reason why there are none."""
    function, arguments = functions[request["function"]], request["given"]
    # The same draws whichever process runs the call, and whatever ran before in it.
    user_code.seed_generators(request["seed"])
    try:
        result = function(**arguments)
        if inspect.isawaitable(result):
            result = runner.run(_awaited(result))
        return {"values": rewards_of(result, request["count"])}
    except user_code.Unusable as error:
        return {"wrong": error.args[0]}
    except BaseException as error:
        return {"raised": user_code.traceback_text(error, user_code.traceback_below(error.__traceback__, __file__))}


async def _awaited(awaitable):
    return await awaitable


def rewards_of(rewards, count):
    """Converts the return value of a reward function to a list of numbers and None.

    Args:
        count: the number of completions, and so of rewards.
    """
    if hasattr(rewards, "tolist"):
        rewards = rewards.tolist()
    if isinstance(rewards, str | bytes | dict) or not hasattr(rewards, "__iter__"):
        raise user_code.Unusable(f"returned {user_code.short_repr(rewards)}, not a list of numbers")
    rewards = list(rewards)
    if len(rewards) != count:
        raise user_code.Unusable(f"returned {len(rewards)} rewards for {count} completions")
    return [reward_of(item) for item in rewards]


def reward_of(item):
    if hasattr(item, "item"):
        item = item.item()
    if item is None:
        return None
    if isinstance(item, bool | int | float):
        try:
            return float(item)
        except OverflowError:
            return float("inf")
    raise user_code.Unusable(f"returned {user_code.short_repr(item)} where a number or None belongs")


def run_rewards(lifeline, descriptor):
    os.set_inheritable(descriptor, False)
    guard.run_guarded(lifeline, descriptor)
    parent = channel.Channel(descriptor)
    functions, requirements = load_functions(pickle.loads(next_request(parent)))
    parent.send(json.dumps({"functions": requirements}).encode())
    with asyncio.Runner() as runner:
        while True:
            data = next_request(parent)
            try:
                request = pickle.loads(data)
                request["seed"] = zlib.crc32(data)
            except BaseException as error:
                answer = {"raised": f"the batch cannot be read in a process of its own: {type(error).__name__}: {error}"}
            else:
                answer = answer_call(functions, request, runner)
            with contextlib.suppress(Exception):
                sys.stdout.flush()
            parent.send(json.dumps(answer).encode())


def next_request(parent):
    """Waits for the next message of the parent and returns it. If the parent is gone, this process exits, even if functions have left
    threads running."""
    try:
        return parent.receive()
    except EOFError:
        os._exit(0)


if __name__ == "__main__":
    run_rewards(int(sys.argv[1]), int(sys.argv[2]))
