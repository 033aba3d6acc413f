"""Serves arrays of the controller to groups, which fetch them as they fetch arrays of other groups (`launch.workers.arrays.transfers`):
shard by shard over TCP from one port of the controller. Peers must send a token, and each piece has a CRC-32.
"""

import threading
from typing import Any

from argosy.checkpoint.tiers.peers import Listener
from argosy.core.errors import BadInput
from argosy.launch.workers.arrays.references import Ref
from argosy.launch.workers.arrays.transfers import TransferSource, answer
from argosy.launch.workers.arrays.trees import apart, describe_tree, is_own
from argosy.launch.workers.group import WorkerGroup

NAME = "controller"
HINT = "send arrays and plain values"


class Offers:
    """The arrays that the controller offers to groups.

    host: the address that the controller listens on, from the first offer on.
    """

    def __init__(self, host: str):
        self.host = host
        self._listener: Listener | None = None
        self._offered: dict[int, list[Any]] = {}
        self._count, self._lock = 0, threading.Lock()

    def offer(self, value: Any) -> TransferSource:
        """Offers a pytree to workers until it is withdrawn. Returns the source from which workers fetch it.

        Raises:
            BadInput: the value is no pytree of arrays and plain values, or an array is not complete in this process.
        """
        _, paths, arrays = apart(value, "what is sent", HINT)
        for path, array in zip(paths, arrays):
            if not is_own(array) and array.size:
                raise BadInput(f"{path} is an array of several processes", hint="send what this process has whole")
        skeleton, leaves = describe_tree(value, several=False)
        with self._lock:
            if self._listener is None:
                self._listener = Listener(self.host, lambda request, peer: answer(self._arrays, request, peer))
            self._count += 1
            self._offered[self._count] = arrays
            return TransferSource(NAME, self._count, skeleton, [leaves], [self._listener.address])

    def _arrays(self, number: int) -> list[Any]:
        if number not in self._offered:
            raise BadInput(f"the controller does not offer value {number} any more")
        return self._offered[number]

    def withdraw(self, number: int) -> None:
        self._offered.pop(number, None)

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()


def send_value(value: Any, group: WorkerGroup, sharding: Any, offers: Offers | None) -> Ref:
    """Sends a pytree of the controller to a group. Returns a reference at once.

    Args:
        sharding: as in `Workers.move`.
        offers: the controller's offers; None if the group is in the controller's process.
    """
    new = Ref(group, "what the controller sent")
    if offers is None:
        apart(value, "what is sent", HINT)
        return group.enqueue(new, lambda life, number: life.pull(number, value, sharding))
    source = offers.offer(value)
    try:
        return group.enqueue(new, lambda life, number: life.pull(number, source, sharding), lambda _: offers.withdraw(source.number))
    except BaseException:
        offers.withdraw(source.number)
        raise
