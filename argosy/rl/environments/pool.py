"""Environment processes, as the trainer uses them. A server process (`child.py`) loads the class, and each environment object runs in a
process that is forked from the server.

Nothing here waits for an environment unless the caller asks for it: `look` reads the replies that have arrived, and ends environments
that exceed their time limit.
"""

import json
import os
import pickle
import selectors
import socket
import struct
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from argosy.core.errors import ArgosyError, BadInput, nearest
from argosy.core.process.channel import Channel
from argosy.core.process.child import ChildProcess

CHILD = Path(__file__).with_name("child.py")
COMMAND = struct.Struct("<cQ")
# Limit for importing what a class needs, and for making the first object.
LOADING_S = 300.0
Reply = dict[str, Any]  # one of: about, observation (with reward, done, cut, counts after a step), wrong, raised, timed_out, died


@dataclass(eq=False)
class EnvironmentProcess:
    """The process of one episode's environment.

    number: the number of the environment within its pool.
    socket: the connection to the process.
    channel: the messages over the socket.
    timeout: the time limit of a step in seconds.
    until: the time at which the current step times out, by the monotonic clock.
    reply: the last reply; None while the environment computes.
    """

    number: int
    socket: socket.socket
    channel: Channel
    timeout: float
    until: float = 0.0
    reply: Reply | None = None

    def ask(self, document: Mapping[str, Any]) -> None:
        """Sends a message; `EnvironmentPool.look` reads the reply."""
        self.reply, self.until = None, time.monotonic() + self.timeout
        try:
            self.channel.send(json.dumps(document).encode(), self.timeout)
        except TimeoutError:
            self.reply = {"timed_out": True}
        except OSError as error:
            self.reply = {"died": error.strerror or str(error)}

    def receive(self) -> None:
        """Reads the reply if it has arrived, without waiting."""
        try:
            message = self.channel.arrived()
        except EOFError:
            self.reply = {"died": "its process ended"}
            return
        # The rest of a long reply waits for this process, which may be busy with the engine.
        self.until = time.monotonic() + self.timeout
        self.reply = None if message is None else json.loads(message)


class EnvironmentPool:
    """Makes environments of one class.

    Args:
        source: a mapping that describes the class to load. It has `of` (the name in errors), `module` or `file` with the text of the
            file as `source`, `function` (the name of the class) and `args` (its keyword arguments).
        timeout: the time limit of a step in seconds.
        columns: names of the columns of the data, to check the parameters of `reset`.

    Raises:
        BadInput: the class does not exist, cannot be loaded or instantiated, lacks a method, or needs a column that the data lack.
        ArgosyError: the server process cannot be started, or ends.
    """

    def __init__(self, source: Mapping[str, Any], timeout: float, columns: Sequence[str]):
        self.source, self.timeout = dict(source), timeout
        # Is told, once each, of what an environment answers for itself and a user should know, such as a tool that raises.
        self.say: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True)
        self._said: set[str] = set()
        self._next = 0
        self._selector = selectors.DefaultSelector()
        self._open: dict[int, EnvironmentProcess] = {}
        # As for reward functions: sets are walked in the same order everywhere, and no process takes an accelerator from the trainer.
        environment = os.environ | {"PYTHONHASHSEED": "0", "JAX_PLATFORMS": "cpu"}
        self._process = ChildProcess(["-P", "-X", "utf8", str(CHILD)], "environments", environment, guarded=True)
        self._end = weakref.finalize(self, _end, self._process, os.getpid())
        try:
            self._load()
            self.about = self._ask_interface()
            self._check(columns)
        except BaseException:
            self.close()
            raise

    @property
    def tools(self) -> list[Mapping[str, Any]] | None:
        """The JSON schemas of the tools that are shown to the model; None if there are no tools."""
        return self.about["tools"]

    def first_message(self, prompt: Any, seed: int, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Makes the message that begins an episode. It has those of the prompt, the seed and the columns that `reset` takes."""
        everything = {**columns, "prompt": prompt, "seed": seed}
        arguments = everything
        if not self.about["every"]:
            arguments = {name: everything[name] for name in everything if name in self.about["takes"]}
        return {"seed": seed, "reset": arguments}

    def open(self) -> EnvironmentProcess:
        """Starts a process for one episode. The environment object is made when the first message arrives."""
        ours, theirs = socket.socketpair()
        number, self._next = self._next, self._next + 1
        try:
            socket.send_fds(self._process.socket, [COMMAND.pack(b"o", number)], [theirs.fileno()])
        except OSError:
            ours.close()
            problem = f"the process of the environment `{self.source['of']}` ended"
            raise ArgosyError(problem, hint="it was killed: out of memory?") from None
        finally:
            theirs.close()
        played = self._open[number] = EnvironmentProcess(number, ours, Channel(ours.fileno()), self.timeout)
        self._selector.register(ours, selectors.EVENT_READ, played)
        return played

    def end(self, played: EnvironmentProcess) -> None:
        """Ends the process of an episode."""
        if self._open.pop(played.number, None) is not None:
            with suppress(KeyError):
                self._selector.unregister(played.socket)
            played.socket.close()
            with suppress(OSError):
                self._process.socket.sendall(COMMAND.pack(b"e", played.number))

    def end_all(self) -> None:
        """Ends the processes of all episodes."""
        for played in list(self._open.values()):
            self.end(played)

    def look(self, processes: Iterable[EnvironmentProcess], wait_s: float = 0.0) -> None:
        """Reads the replies that have arrived. For an environment that exceeds its time limit, the reply is set to one that says so.

        Args:
            processes: the processes whose replies are read; their `reply` is set.
            wait_s: the longest time to wait for the first reply, in seconds.
        """
        waiting = [process for process in processes if process.reply is None]
        remaining = min((process.until for process in waiting), default=0.0) - time.monotonic()
        for key, _ in self._selector.select(max(0.0, min(wait_s, remaining))):
            if key.data.reply is None:
                key.data.receive()
                self._complain(key.data.reply or {})
            else:
                # Its process ended, which would end every wait at once. It is told when it is asked again.
                self._selector.unregister(key.fileobj)
        now = time.monotonic()
        for process in waiting:
            if process.reply is None and now > process.until:
                process.reply = {"timed_out": True}

    def _complain(self, reply: Reply) -> None:
        if (complaint := reply.get("complaint")) is not None and complaint not in self._said:
            self._said.add(complaint)
            self.say(complaint)

    def close(self) -> None:
        """Ends all processes."""
        for played in self._open.values():
            played.socket.close()
        self._open.clear()
        self._selector.close()
        self._end()

    # ---------------------------------------------------------------- before work starts

    def _load(self) -> None:
        request = pickle.dumps({"class": self.source, "path": [os.getcwd(), *(entry for entry in sys.path if entry)]}, protocol=5)
        of = self.source["of"]
        try:
            self._process.send(request, LOADING_S)
            reply = json.loads(self._process.receive(LOADING_S))
        except TimeoutError:
            raise ArgosyError(f"loading `{of}` takes more than {LOADING_S:g} s") from None
        except (OSError, EOFError):
            problem = f"a process ended while it loaded `{of}`"
            raise ArgosyError(problem, hint="it was killed, or a module ends the interpreter") from None
        # From here on both sides send commands over it, and wait.
        self._process.socket.setblocking(True)
        if "wrong" in reply:
            raise self._unusable(reply["wrong"])

    def _unusable(self, wrong: Mapping[str, Any]) -> BadInput:
        of, place = self.source["of"], self.source.get("file") or self.source["module"]
        if "missing" in wrong:
            class_name = self.source["function"]
            hint = nearest(class_name, wrong["missing"])
            return BadInput(f"no class `{class_name}` for the environment `{of}`", where=f"in {place}", hint=hint)
        if "line" in wrong:
            line = f": {wrong['line']}" if wrong["line"] else ""
            return BadInput(f"the environment `{of}` cannot be loaded: {wrong['what']}", where=f"{wrong['where']}{line}")
        return BadInput(f"the environment `{of}`: {wrong['what']}", where=f"in {place}", hint=wrong.get("hint"))

    def _ask_interface(self) -> dict[str, Any]:
        first = self.open()
        first.timeout = LOADING_S
        first.ask({"seed": 0, "about": True})
        while first.reply is None:
            self.look([first], 1.0)
        reply = first.reply
        self.end(first)
        if "about" in reply:
            return reply["about"]
        of = self.source["of"]
        if "wrong" in reply:
            raise self._unusable(reply["wrong"] if isinstance(reply["wrong"], dict) else {"what": reply["wrong"]})
        text = str(reply.get("raised") or reply.get("died") or f"it takes more than {LOADING_S:g} s").strip()
        problem, where = reply.get("blamed", (text, None))
        hint = "its constructor is called before the run, with environment.args"
        raise BadInput(f"the environment `{of}` cannot be made: {problem}", where=f"in {where}" if where else None, hint=hint)

    def _check(self, columns: Sequence[str]) -> None:
        missing = [name for name in self.about["needs"] if name not in ("prompt", "seed", *columns)]
        if missing:
            there = f"the columns are {', '.join(columns)}" if columns else "the data have no other columns than the prompt"
            names = " and ".join(f"`{name}`" for name in missing)
            raise BadInput(f"`reset` of the environment `{self.source['of']}` needs {names}", hint=there)


def _end(process: ChildProcess, owner: int) -> None:
    # A forked process has the object, but not the processes.
    if os.getpid() == owner:
        process.end()
