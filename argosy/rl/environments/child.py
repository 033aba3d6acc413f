"""The server process that forks environment processes. It is run by path; no module imports it.

The server loads a class once, and forks a process for each object of the class, which costs 1 ms and copies nothing. So no episode
waits for another's environment, and an environment that hangs is killed alone. The server itself is a new interpreter, since the
parent has jax's threads.

The parent's first message is a pickle that names the class. Commands of 9 bytes follow. One command opens the environment with a given
number, and comes with the socket of its process; the other command ends it. The process of an environment receives JSON and replies
with JSON (`core.process.channel`). A guard (`core.process.guard`) ends all these processes with the parent, together with the processes
that they have started (on Linux; elsewhere their process groups).
"""

import gc
import importlib
import inspect
import json
import math
import os
import pickle
import signal
import socket
import struct
import sys
import warnings

# The files that it shares with other scripts, by path and not as parts of the package, whose import costs more than its own start. A
# user's file may have the same name as one of them.
sys.path.insert(0, os.path.abspath(os.path.join(__file__, "..", "..")))
sys.path.insert(0, os.path.join(sys.path[0], "..", "core", "process"))
import channel  # pyright: ignore[reportMissingImports]
import guard  # pyright: ignore[reportMissingImports]
import user_code

del sys.path[:2], sys.modules["channel"], sys.modules["guard"], sys.modules["user_code"]
# Environments of this package import it by its whole name. Loaded twice, it would know two sets of users' files.
sys.modules["argosy.rl.user_code"] = user_code

COMMAND = struct.Struct("<cQ")
# An observation is cut to far fewer tokens.
MOST_CHARACTERS = 1 << 20


def load_class(request):
    """Loads the class that a request names. Returns the class and its requirements, or the reason why it cannot be used."""
    sys.path[:] = request["path"]
    source, module = request["class"], None
    try:
        target = module = user_code.load_file(source) if "file" in source else importlib.import_module(source["module"])
        # A built-in environment runs a user's code, which is what an error is blamed on.
        if not module.__name__.startswith("argosy."):
            user_code.FILES.add(module.__file__)
        for part in source["function"].split("."):
            target = getattr(target, part)
    except AttributeError as error:
        if module is None or error.obj is not module:
            return None, {"wrong": user_code.load_failure(error, source)}
        return None, {"wrong": {"missing": [name for name, item in vars(module).items() if inspect.isclass(item)]}}
    except BaseException as error:
        return None, {"wrong": user_code.load_failure(error, source)}
    try:
        return target, class_requirements(target, source["args"])
    except user_code.Unusable as error:
        return None, {"wrong": error.args[0]}


def class_requirements(cls, args):
    """Reads the requirements of a class from its signature, without running it."""
    if not callable(cls):
        raise user_code.Unusable({"what": f"it is a {type(cls).__name__}, not a class"})
    try:
        inspect.signature(cls).bind(**args)
    except TypeError as error:
        hint = f"it takes {inspect.signature(cls)}" if inspect.isclass(cls) else "environment.args are what it is called with"
        raise user_code.Unusable({"what": f"it cannot be made of environment.args: {error}", "hint": hint}) from None
    except ValueError:
        pass
    # What is loaded once, before processes are forked. A method of objects may have this name too.
    if inspect.ismethod(prepare := getattr(cls, "prepare", None)):
        try:
            prepare(**args)
        except BaseException as error:
            raise user_code.Unusable({"what": f"{type(error).__name__}: {error}"}) from None
    return {}


class EnvironmentHost:
    """One environment object and its message loop."""

    def __init__(self, environment_class, source):
        self.environment_class, self.source, self.environment = environment_class, source, None

    def answered(self, request):
        """Handles one message of the parent, and returns the reply."""
        try:
            if "seed" in request:
                user_code.seed_generators(request["seed"])
            if self.environment is None:
                self.environment = self.environment_class(**self.source["args"])
            environment = self.environment
            if "about" in request:
                return environment_interface(environment)
            if "reset" in request:
                return {"observation": observation_document(environment.reset(**request["reset"]))}
            reply = turn_document(environment.step(request["step"]))
            if complaint := getattr(environment, "complaint", None):
                reply["complaint"], environment.complaint = str(complaint), None
            return reply
        except user_code.Unusable as error:
            return {"wrong": error.args[0]}
        except BaseException as error:
            since = user_code.traceback_below(error.__traceback__, __file__)
            return {"raised": user_code.traceback_text(error, since), "blamed": user_code.error_summary(error, since)}


def environment_interface(environment):
    """Describes an environment object: the parameters of its `reset`, and the tools that are shown to the model."""
    for name in ("reset", "step"):
        if not callable(getattr(environment, name, None)):
            hint = "it has reset(self, prompt, seed, ...) and step(self, said)"
            raise user_code.Unusable({"what": f"it has no method `{name}`", "hint": hint})
    try:
        inspect.signature(environment.step).bind("said")
    except TypeError as error:
        raise user_code.Unusable({"what": f"`step` takes what the model said: {error}", "hint": "def step(self, said)"}) from None
    interface = user_code.function_parameters(environment.reset, {})
    tools = getattr(environment, "tools", None)
    interface |= {"tools": None if tools is None else list(tools), "role": str(getattr(environment, "role", "user"))}
    json.dumps(interface)
    return {"about": interface}


def turn_document(turn):
    """Converts a turn to a JSON object."""
    if not all(hasattr(turn, name) for name in ("observation", "reward", "done", "cut", "counts")):
        raise user_code.Unusable(f"`step` returned {user_code.short_repr(turn)}, not a Turn")
    reward = turn.reward.item() if hasattr(turn.reward, "item") else turn.reward
    if reward is not None and not isinstance(reward, bool | int | float):
        raise user_code.Unusable(f"`step` returned the reward {user_code.short_repr(reward)}")
    reward = None if reward is None else float(reward)
    if reward is not None and not (math.isfinite(reward) and abs(reward) < 3e38):
        raise FloatingPointError(f"`step` returned the reward {reward}")
    counts = {str(name): float(value) for name, value in dict(turn.counts).items()}
    over = {"done": bool(turn.done), "cut": bool(turn.cut)}
    return {"observation": observation_document(turn.observation), "reward": reward, "counts": counts, **over}


def observation_document(observation):
    """Converts an observation, which is a text, messages or None, to JSON. A text above a megabyte is cut, and its full length is
    added."""
    if observation is None:
        return None
    if isinstance(observation, str):
        if len(observation) <= MOST_CHARACTERS:
            return observation
        return {"text": observation[:MOST_CHARACTERS], "characters": len(observation)}
    if isinstance(observation, list | tuple) and all(
        isinstance(message, dict) and isinstance(message.get("role"), str) for message in observation
    ):
        out = []
        for message in observation:
            content = message.get("content")
            if not isinstance(content, str):
                raise user_code.Unusable(f"an observation has a message whose content is {user_code.short_repr(content)}, not a text")
            if len(content) > MOST_CHARACTERS:
                message = message | {"content": content[:MOST_CHARACTERS], "characters": len(content)}
            out.append(message)
        return out
    raise user_code.Unusable(f"an observation is {user_code.short_repr(observation)}, not a text, a list of messages or None")


# ---- processes


def host_process(connection, environment, source, server):
    """Runs one environment object; on Linux in a child of this process. However that child ends, its orphaned children are reparented
    to this process, which ends them.
    """
    guard.end_with(server)
    if sys.platform == "linux":
        guard.collect_orphans()
        host_pid = os.getpid()
        if pid := os.fork():
            # The other end is told at once when that process ends.
            connection.close()
            # Orphans that came to this process end too.
            while os.waitpid(-1, 0)[0] != pid:
                pass
            return guard.kill_started(host_pid)
        guard.end_with(host_pid)
    try:
        host_messages(connection, environment, source)
    finally:
        os._exit(0)


def host_messages(connection, environment, source):
    """Runs one environment object until its channel closes."""
    played = EnvironmentHost(environment, source)
    messages = channel.Channel(connection.fileno())
    while True:
        try:
            request = json.loads(messages.receive())
        except EOFError:
            return
        try:
            data = json.dumps(played.answered(request)).encode()
        except (TypeError, ValueError) as error:
            data = json.dumps({"wrong": f"what it returned is not JSON: {error}"}).encode()
        sys.stdout.flush()
        messages.send(data)


def serve_commands(control, lifeline, environment, source):
    """Forks and ends processes until the parent is gone."""
    server, processes = os.getpid(), {}
    control.settimeout(1.0)
    while True:
        for number, pid in list(processes.items()):
            if os.waitpid(pid, os.WNOHANG)[0]:
                del processes[number]
        try:
            data, sockets, _, _ = socket.recv_fds(control, COMMAND.size, 1)
        except TimeoutError:
            continue
        if not data:
            os.killpg(0, signal.SIGKILL)
        while len(data) < COMMAND.size:
            data += control.recv(COMMAND.size - len(data))
        command, number = COMMAND.unpack(data)
        if command == b"e":
            if number in processes:
                # It may hang, or not have seen yet that it is over.
                os.kill(processes[number], signal.SIGSTOP)
                guard.kill_started(processes[number])
                os.kill(processes[number], signal.SIGKILL)
                os.waitpid(processes.pop(number), 0)
            continue
        pid = os.fork()
        if pid == 0:
            try:
                control.close()
                os.close(lifeline)
                host_process(socket.socket(fileno=sockets[0]), environment, source, server)
            finally:
                os._exit(0)
        processes[number] = pid
        os.close(sockets[0])


def run_environments(lifeline, descriptor):
    guard.run_guarded(lifeline, descriptor)
    os.set_inheritable(descriptor, False)
    parent = channel.Channel(descriptor)
    request = pickle.loads(parent.receive())
    environment_class, reply = load_class(request)
    parent.send(json.dumps(reply).encode())
    # What is loaded stays shared with the processes that are forked.
    gc.freeze()
    warnings.simplefilter("ignore", DeprecationWarning)
    serve_commands(socket.socket(fileno=descriptor), lifeline, environment_class, request["class"])


if __name__ == "__main__":
    run_environments(int(sys.argv[1]), int(sys.argv[2]))
