"""Small bundles, and `argosy predict` as a process."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax.numpy as jnp

import argosy


def write_scaled(path: Path, factor: float) -> Path:
    """A bundle that multiplies rows by a number."""
    argosy.export(lambda x: {"y": x * factor}, (jnp.zeros((1, 3)),), path, platforms=["cpu"], batch="symbolic")
    return path


class ServerLog(list[str]):
    """What a server says, line by line. pid: its process."""

    pid = 0


@contextmanager
def serving(repository: Path, *words: str) -> Iterator[tuple[str, ServerLog]]:
    """A server: its address, and what it says, which grows. With gRPC, `grpc_address` reads its address from that."""
    command = [sys.executable, "-m", "argosy", "predict", str(repository), "port=0", *words]
    log = ServerLog()
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"}) as process:
        assert process.stderr is not None
        log.pid = process.pid
        for line in process.stderr:
            log.append(line.strip())
            if line.startswith("ready on "):
                break
        else:
            raise AssertionError("\n".join(log))
        # Read on: a full pipe would stop the server.
        reader = threading.Thread(target=lambda: log.extend(map(str.strip, process.stderr)))  # type: ignore[arg-type]
        reader.start()
        try:
            yield log[-1].split()[2], log
        finally:
            process.terminate()
            code = process.wait(30)
            reader.join()
    assert code in (0, 143), log


def grpc_address(log: list[str]) -> str:
    """Host and port in the line that says that a server is ready."""
    return next(line for line in log if line.startswith("ready on ")).rpartition("://")[2]
