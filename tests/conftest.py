"""Tests run strict: shapes checked at every boundary, no implicit promotion, warnings as errors, eight fake devices, no network."""

import os
import socket
import sys
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
# Unoptimised code compiles three times as fast, and compiling is what most tests do; `./run docs` and the benchmarks run the
# optimised programs.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
).strip()
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
os.environ["HF_HUB_OFFLINE"] = "1"

sys.path.insert(0, str(Path(__file__).parent))

import pytest
from jaxtyping import install_import_hook

# Every annotated function of these rooms checks its arguments: shapes and types, at run time, in tests only.
install_import_hook(["argosy.models", "argosy.ops", "argosy.adapt", "argosy.train", "argosy.infer"], "beartype.beartype")


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that reaches for another machine fails."""
    connect = socket.socket.connect

    def only_here(self: socket.socket, address: object) -> None:
        if isinstance(address, tuple) and address[0] not in ("127.0.0.1", "::1", "localhost"):
            raise RuntimeError(f"a test reached for {address}")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", only_here)
