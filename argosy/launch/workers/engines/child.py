"""A worker: a process of a group, which calls functions for the controller and keeps their results.

It receives commands over an inherited socket, and ends when that is closed, however the controller ended. Functions are called one
after another in the main thread. Another thread handles the controller's other requests (fetching and freeing values) meanwhile, and
further threads send arrays to other groups. A worker trusts its controller, which can call any function in it.
"""

import importlib
import os
import pickle
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from argosy.core.errors import ArgosyError, BadInput, UserError
from argosy.core.process.channel import Channel
from argosy.core.process.guard import end_with


def function_of(name: str) -> Callable[..., Any]:
    """The function of a name `module:function`.

    Raises:
        BadInput: there is no such function. Errors of importing its module are passed on.
    """
    module, _, path = name.partition(":")
    try:
        function: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        hint = "workers import what the controller's sys.path reaches"
        raise BadInput(f"`{name}`: there is no module {error.name}", hint=hint) from None
    for part in path.split("."):
        if not hasattr(function, part):
            raise BadInput(f"`{name}`: {module} has no {path}")
        function = getattr(function, part)
    if not callable(function):
        raise BadInput(f"`{name}` is a {type(function).__name__}, not a function")
    return function


def _failure(error: BaseException, ours: bool) -> dict[str, Any]:
    """What the controller is told. ours: whether it was found here, before a function of the user's ran."""
    first = (str(error) or type(error).__name__).splitlines()[0]
    out: dict[str, Any] = {"what": f"{type(error).__name__}: {first}"[:1000], "kind": "raised"}
    out["traceback"] = "".join(traceback.format_exception(error))[-20_000:]
    if ours and isinstance(error, ArgosyError):
        kind = "input" if isinstance(error, UserError) else type(error).__name__
        out |= {"what": error.what, "where": error.where, "hint": error.hint, "kind": kind}
    return out


class Worker:
    """The worker's state and its commands.

    hello: the identity of this process (`worker_gang.hello`).
    """

    def __init__(self, controller: Channel, hello: dict[str, Any]):
        self.controller, self.hello = controller, hello
        self.objects: dict[int, Any] = {}
        self.todo: queue.SimpleQueue[tuple[int, str, Any]] = queue.SimpleQueue()
        self._sending = threading.Lock()

    # ---------------------------------------------------------------- with the controller

    def reply(self, number: int, outcome: Any) -> None:
        data = pickle.dumps((number, outcome), protocol=5)
        with self._sending, suppress(OSError):
            self.controller.send(data)

    def listen(self) -> None:
        """Reads commands until the controller is gone; then this process ends."""
        while (data := _receive(self.controller)) is not None:
            number, kind, payload = pickle.loads(data)
            if kind in ("call", "pull"):
                self.todo.put((number, kind, payload))
            elif kind == "free":
                for key in payload:
                    self.objects.pop(key, None)
            else:
                self.answer(number, kind, payload)
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(0)

    def answer(self, number: int, kind: str, payload: Any) -> None:
        try:
            self.reply(number, {"done": getattr(self, kind)(payload)})
        except BaseException as error:
            self.reply(number, {"failed": _failure(error, ours=kind != "call" or isinstance(error, _Unknown))})

    # ---------------------------------------------------------------- commands

    def join(self) -> dict[str, Any]:
        """Joins the other processes of the group. Returns the address at which this one serves its peers."""
        import jax

        from argosy.checkpoint.tiers.peers import Listener
        from argosy.launch.cluster import detect_place, join
        from argosy.launch.workers.arrays.transfers import answer
        from argosy.launch.workers.engines.here import Here, mesh_over, settle

        # A process that is alone may stand in its controller's cluster, whose variables it has.
        if self.hello["processes"] > 1 and (place := detect_place(os.environ)) is not None:
            join(place)
        count = len(jax.local_devices())
        if count != self.hello["devices"]:
            problem = f"a process of the group `{self.hello['group']}` has {count} devices, not {self.hello['devices']}"
            raise BadInput(problem, hint="Group(devices=...) counts the devices of each process")
        mesh = mesh_over(sorted(jax.devices(), key=lambda device: (device.process_index, device.id)), self.hello["mesh"])
        settle(Here(self.hello["group"], self.hello["rank"], self.hello["processes"], mesh))
        listener = Listener(self.hello["host"], lambda request, peer: answer(self.arrays, request, peer))
        return {"address": listener.address, "pid": os.getpid()}

    def arrays(self, number: int) -> list[Any]:
        from argosy.launch.workers.arrays.trees import apart

        return apart(self.stored(number), "the result", "")[2]

    def stored(self, number: int) -> Any:
        if number not in self.objects:
            raise BadInput(f"the group `{self.hello['group']}` does not have value {number} any more", hint="it was freed")
        return self.objects[number]

    def call(self, payload: dict[str, Any]) -> None:
        """Calls a function, and keeps its result once it is computed."""
        import jax

        from argosy.launch.workers.arrays.trees import unpack_arguments

        try:
            function = function_of(payload["function"])
            words, kwargs = unpack_arguments(payload["arguments"], self.stored)
        except UserError as error:
            raise _Unknown(error.what, where=error.where, hint=error.hint) from None
        self.objects[payload["number"]] = jax.block_until_ready(function(*words, **kwargs))

    def describe(self, number: int) -> tuple[bytes, list[Any]]:
        from argosy.launch.workers.arrays.trees import describe_tree

        return describe_tree(self.stored(number), several=self.hello["processes"] > 1)

    def value(self, payload: dict[str, Any]) -> list[tuple[int, Any, Any]]:
        """The array shards that the controller requests from this process: (index of the array, box, numpy array)."""
        import numpy as np

        from argosy.launch.workers.arrays.trees import shards_of

        arrays = self.arrays(payload["number"])
        return [(index, box, np.asarray(shards_of(arrays[index])[box])) for index, box in payload["wanted"]]

    def pull(self, payload: dict[str, Any]) -> int:
        from argosy.launch.workers.arrays.transfers import pull
        from argosy.launch.workers.engines.here import here

        source = payload["source"]
        skeleton, sharding = pickle.loads(source.skeleton), pickle.loads(payload["sharding"])
        tree, total = pull(source, skeleton, here().mesh, sharding, self.hello["rank"])
        self.objects[payload["number"]] = tree
        return total

    def run(self) -> None:
        try:
            self.reply(0, {"done": self.join()})
        except BaseException as error:
            self.reply(0, {"failed": _failure(error, ours=True)})
        while True:
            self.answer(*self.todo.get())


class _Unknown(BadInput):
    """A mistake that was found before the function ran."""


def _receive(controller: Channel) -> bytes | None:
    """The next message; None where the controller has closed its end."""
    try:
        return controller.receive()
    except EOFError:
        return None


def main(descriptor: int) -> None:
    """Runs the process to its end.

    Args:
        descriptor: file descriptor of its socket.
    """
    os.set_inheritable(descriptor, False)
    controller = Channel(descriptor)
    if (data := _receive(controller)) is None:
        os._exit(0)
    hello = pickle.loads(data)
    # It was forked by a thread that lives as long as the controller.
    end_with(hello["parent"])
    # Ctrl-C is for the controller, which ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    worker = Worker(controller, hello)
    threading.Thread(target=worker.listen, name="commands", daemon=True).start()
    worker.run()
