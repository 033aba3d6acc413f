"""Workers on a real Ray of this machine (`pip install -e '.[ray]'`), and the start of Pathways' proxy by pathwaysutils
(`pip install -e '.[pathways]'`), with a client in place of its server, as that package's tests do. Then `pytest -m slow` on this file.
"""

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from launch import worker_functions as functions
from launch.test_workers import GROUPS, expected, is_alive, same

from argosy.core.errors import ArgosyError, Unsupported
from argosy.launch.workers import Group, WorkerError, WorkerLost, open_workers
from argosy.launch.workers.engines import inline as workers_inline

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="the extra `ray` is not installed")
needs_pathways = pytest.mark.skipif(importlib.util.find_spec("pathwaysutils") is None, reason="the extra `pathways` is not installed")


def test_what_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(Unsupported, match="not installed") as caught, open_workers({"a": Group()}, engine="ray"):
        pass
    assert "[ray]'" in str(caught.value)
    monkeypatch.setitem(sys.modules, "pathwaysutils", None)
    assert not workers_inline.pathways()
    # The devices are there already: this asks for none.
    before = jax.config.jax_platforms
    jax.config.update("jax_platforms", "proxy")
    try:
        message = "JAX_PLATFORMS=proxy needs pathwaysutils, which is not installed"
        with pytest.raises(Unsupported, match=message) as caught, open_workers({"a": Group()}, engine="inline"):
            pass
    finally:
        jax.config.update("jax_platforms", before)
    assert "[pathways]'" in str(caught.value)


@needs_ray
@pytest.mark.slow
def test_workers_on_ray():
    """Calls, moves, deaths of a process and of an actor, and the end of all. JAX is in use here, which warns of the forks of Ray."""
    jax.devices()
    with open_workers(GROUPS, engine="ray") as workers:
        pair, single = workers["pair"], workers["one"]
        state = pair.run(functions.everything)
        there = workers.move(state, to="one")
        same(there.value(), expected())
        with pytest.raises(WorkerError, match="ValueError: no"):
            pair.run(functions.fails).wait()
        pids = pair.pids
        pending = pair.run(functions.sleep, 100.0)
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(WorkerLost, match="process 1 of the group `pair` ended by SIGKILL"):
            pending.wait(60)
        same(there.value(), expected())
        pair.restart()
        same(workers.move(there, to="pair").value(), expected())
        pids += pair.pids
        parent = int(Path(f"/proc/{pids[-1]}/stat").read_text().rpartition(")")[2].split()[1])
        assert b"ray::" in Path(f"/proc/{parent}/cmdline").read_bytes()
        pending = pair.run(functions.sleep, 100.0)
        os.kill(parent, signal.SIGKILL)
        with pytest.raises(WorkerLost, match="process 1 of the group `pair`"):
            pending.wait(60)
        pair.restart()
        assert pair.run(functions.rank).values() == [0, 1]
        pids += [*pair.pids, *single.pids]
    assert not any(map(is_alive, pids))


@needs_ray
@pytest.mark.slow
def test_no_room_on_ray_is_said():
    groups = {"a": Group(gpus=True)}
    with pytest.raises(ArgosyError, match="Ray has no room for 1 processes"), open_workers(groups, engine="ray", wait=3):
        pass


PROXY = """
import os
from unittest import mock

import jax
from jax.extend.backend import ifrt_proxy

from argosy.launch.workers.engines.inline import pathways

client = mock.MagicMock()
with mock.patch.object(ifrt_proxy, "get_client", return_value=client) as get:
    assert pathways()
    backends = jax.extend.backend.backends()
assert backends["proxy"] is client, backends
get.assert_called_once()
assert get.call_args.args[0] == "grpc://localhost:12345", get.call_args
assert pathways()
print("proxy")
"""


@needs_pathways
@pytest.mark.slow
def test_the_proxy_of_pathways_is_made_a_platform():
    variables = os.environ | {"JAX_PLATFORMS": "proxy", "JAX_BACKEND_TARGET": "grpc://localhost:12345"}
    done = subprocess.run([sys.executable, "-c", PROXY], env=variables, capture_output=True, text=True)
    assert done.stdout == "proxy\n", done.stderr
