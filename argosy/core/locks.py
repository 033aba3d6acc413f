"""Locks that give one process at a time exclusive access to a run: a kernel lock, or a lease that is renewed (`Store.lock`)."""

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
    """Exclusive access to a directory, until `release` is called or the process ends. It is also a context manager."""

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
    """A kernel lock on a file. Only the holder may remove the file, together with its folder. So two processes can never lock two
    different files with the same name."""

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
            # Between the two calls the holder may have removed the file. A lock on a removed file would protect nothing.
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


# The tokens of the leases that this process took.
_TOKENS: set[str] = set()


class Lease:
    """Exclusive access by a file that tells which process holds the directory, and when it last renewed the lease."""

    def __init__(self, store: "Store"):
        self._store, self._token = store, uuid4().hex
        self._refuse_if_held()
        _TOKENS.add(self._token)
        self._renew()
        time.sleep(SETTLE_S)
        # Another process has taken the lease a moment later.
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
        """Whether the lease belongs to an earlier process with the host name and pid of this one, as in a restarted container. Waits to
        see whether it is renewed, because such a process may also be alive elsewhere."""
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
    """Whether the holder was a process on this host that has ended. After a kill, its lease need not expire first."""
    if holder.get("host") != socket.gethostname():
        return False
    try:
        os.kill(int(holder.get("pid", 0)), 0)
    except ProcessLookupError:
        return True
    except (OSError, ValueError):
        return False
    return False
