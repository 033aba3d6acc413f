"""A worker: a process of a group, which calls functions for the controller and keeps their results.

A worker receives commands over an inherited socket, and ends when the socket is closed, however the controller ended. Functions are
called one after another in the main thread. Meanwhile another thread handles other requests of the controller (fetching and freeing
values), and further threads send arrays to other groups. A worker trusts its controller, which can call any function in it.
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
    """Imports the function with the name `module:function`.

    Raises:
        BadInput: there is no such function. Errors that its module raises are passed on.
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
    """Describes an error for the controller.

    Args:
        ours: whether the worker itself found the mistake, before a function of the user ran.
    """
    first = (str(error) or type(error).__name__).splitlines()[0]
    out: dict[str, Any] = {"what": f"{type(error).__name__}: {first}"[:1000], "kind": "raised"}
    out["traceback"] = "".join(traceback.format_exception(error))[-20_000:]
    if ours and isinstance(error, ArgosyError):
        kind = "input" if isinstance(error, UserError) else type(error).__name__
        out |= {"what": error.what, "where": error.where, "hint": error.hint, "kind": kind}
    return out


class Worker:
    """The state of a worker, and the commands of the controller.

    hello: the controller's first message, which tells this process its group and rank (`workers.settings.Group.hello`).
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
        """Reads commands until the controller is gone. Then this process ends."""
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
        """Joins the other processes of the group. Returns the address at which this process serves its peers."""
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
        """Calls a function, waits for the computation of its result, and keeps the result."""
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
        """Returns the array shards that the controller requests from this process, each as (index of the array, box, numpy array)."""
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
    """A mistake that the worker found before the function ran."""


def _receive(controller: Channel) -> bytes | None:
    """Waits for the next message and returns it; None if the controller has closed its end."""
    try:
        return controller.receive()
    except EOFError:
        return None


def main(descriptor: int) -> None:
    """Runs the worker process to its end.

    Args:
        descriptor: the file descriptor of the socket to the controller.
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
