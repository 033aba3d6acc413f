"""Who holds a run: one process at a time, by a lock of the kernel or a lease that is renewed (`Store.lock`)."""

import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol
from uuid import uuid4

from argosy.core.errors import ArgosyError, Busy

if TYPE_CHECKING:
    from argosy.core.storage import Store

LOCK = ".lock"
# A lease that was not renewed for this long has expired.
LEASE_S = 60.0
# How long a process waits before it checks whether another took the lease at the same moment.
SETTLE_S = 0.5


class Lock(Protocol):
    """Exclusive access to a directory, until it is released or the process ends. Also a context manager."""

    def release(self) -> None: ...

    def __enter__(self) -> "Lock": ...

    def __exit__(self, *_: object) -> None: ...


def _holder() -> dict[str, Any]:
    return {"pid": os.getpid(), "host": socket.gethostname()}


def _busy(holder: dict[str, Any], where: str) -> Busy:
    owner = f"process {holder.get('pid', '?')} on {holder.get('host', '?')}" if holder else "another process"
    hint = "wait for it, end it, or give another directory: dir=NEW"
    return Busy(f"{owner} holds this run", where=f"in {where}", hint=hint)


def _parsed(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


class KernelLock:
    """A kernel lock on a file. Only its holder may remove it, with its folder; two processes never lock two files of one name."""

    _open_locks: ClassVar[set["KernelLock"]] = set()

    def __init__(self, path: Path):
        import fcntl

        while True:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = _parsed(os.read(self._file, 1000).decode("utf-8", "replace"))
                os.close(self._file)
                raise _busy(holder, str(path.parent)) from None
            except OSError:
                os.close(self._file)
                raise
            # Between the two calls its holder may have removed it: a lock on a file that nobody finds locks nothing.
            if path.exists() and os.path.samestat(os.fstat(self._file), path.stat()):
                break
            os.close(self._file)
        os.ftruncate(self._file, 0)
        os.write(self._file, json.dumps(_holder()).encode())
        self._open_locks.add(self)

    def release(self) -> None:
        if self in self._open_locks:
            self._open_locks.discard(self)
            os.ftruncate(self._file, 0)
            os.close(self._file)

    def __enter__(self) -> "KernelLock":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    @classmethod
    def _after_fork(cls) -> None:
        # The parent keeps its lock; a child that outlives it must not hold the run.
        for lock in cls._open_locks:
            os.close(lock._file)
        cls._open_locks.clear()


os.register_at_fork(after_in_child=KernelLock._after_fork)


# Of the leases that this process took.
_TOKENS: set[str] = set()


class Lease:
    """A file that says who holds the directory and when the lease was last renewed."""

    def __init__(self, store: "Store"):
        self._store, self._token = store, uuid4().hex
        self._refuse_if_held()
        _TOKENS.add(self._token)
        self._renew()
        time.sleep(SETTLE_S)
        # Another process took it at the same moment, and later.
        if self._read().get("token") != self._token:
            raise _busy(self._read(), store.root)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)
        self._thread.start()

    def release(self) -> None:
        if not self._stop.is_set():
            self._stop.set()
            self._thread.join()
            if self._read().get("token") == self._token:
                self._store.remove(LOCK)

    def __enter__(self) -> "Lease":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _refuse_if_held(self) -> None:
        holder = self._read()
        renewed = holder.get("renewed")
        fresh = isinstance(renewed, int | float) and time.time() - renewed < LEASE_S
        if fresh and not _is_dead(holder) and not self._is_leftover(holder):
            raise _busy(holder, self._store.root)

    def _is_leftover(self, holder: dict[str, Any]) -> bool:
        """Whether an earlier process with the name of this one had it: in a container that was started again, the program has the same
        number. It may be one that lives elsewhere, which would renew its lease; that takes seconds to see."""
        if (holder.get("host"), holder.get("pid")) != (socket.gethostname(), os.getpid()) or holder.get("token") in _TOKENS:
            return False
        until = time.monotonic() + LEASE_S / 3
        while time.monotonic() < until:
            time.sleep(SETTLE_S)
            if (now := self._read()) != holder:
                return not now
        return True

    def _read(self) -> dict[str, Any]:
        return _parsed(self._store.read_text(LOCK)) if self._store.exists(LOCK) else {}

    def _renew(self) -> None:
        self._store.write_text(LOCK, json.dumps(_holder() | {"token": self._token, "renewed": time.time()}))

    def _keep(self) -> None:
        while not self._stop.wait(LEASE_S / 4):
            try:
                if self._read().get("token") != self._token:
                    # The lease expired while this process stalled, and another process has it.
                    return
                self._renew()
            except ArgosyError:
                # Three more attempts before the lease expires.
                continue


def _is_dead(holder: dict[str, Any]) -> bool:
    """Whether the holder was a process of this host that has ended: after a kill, nobody waits for its lease."""
    if holder.get("host") != socket.gethostname():
        return False
    try:
        os.kill(int(holder.get("pid", 0)), 0)
    except ProcessLookupError:
        return True
    except (OSError, ValueError):
        return False
    return False
