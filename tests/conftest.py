"""Tests run strict: shapes checked at every boundary, no implicit promotion, warnings as errors, eight fake devices, no network."""

import ast
import contextlib
import ctypes
import gc
import hashlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
# Compiling is most of what tests do. Without LLVM's optimizations it takes a third of the time, and without XLA's fusion emitters
# (MLIR) a quarter of that; in one piece instead of 32 a fifth less. `./run docs` and the benchmarks run the optimized programs.
# With ARGOSY_TEST_OPTIMIZED=yes, tests run the programs that users run; a part of CI does.
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    if os.environ.get("ARGOSY_TEST_OPTIMIZED") == "yes"
    else f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
).strip()
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
os.environ["HF_HUB_OFFLINE"] = "1"

# A shell starts what runs in the background without Ctrl-C, and Python then has no handler for it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

sys.path.insert(0, str(Path(__file__).parents[1]))  # tools
sys.path.insert(0, str(Path(__file__).parent))  # helpers

import jax
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from jaxtyping import install_import_hook
from jaxtyping._import_hook import JaxtypingTransformer

_visit = JaxtypingTransformer.visit_FunctionDef


def _outside_functions(self: JaxtypingTransformer, node: ast.FunctionDef) -> ast.FunctionDef:
    """Leaves a function inside a function as it is: its checks would be compiled at each call of the outer one."""
    return node if any(isinstance(parent, ast.FunctionDef) for parent in self._parents) else _visit(self, node)


JaxtypingTransformer.visit_FunctionDef = _outside_functions
# Every annotated function of these rooms checks its arguments: shapes and types, at run time, in tests only.
install_import_hook(["argosy.models", "argosy.ops", "argosy.adapt", "argosy.train", "argosy.infer", "argosy.rl"], "beartype.beartype")


def _keep_programs() -> None:
    """Compiled programs are kept under .argosy, shared by workers and by later runs: compiling is two thirds of the time of the
    suite. One folder for each kind of processor, since programs are machine code."""
    if os.environ.get("ARGOSY_TEST_CACHE") == "no":
        jax.config.update("jax_enable_compilation_cache", False)
        return
    with contextlib.suppress(OSError):
        about = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
        kind = [line for line in about.splitlines() if line.startswith(("model name", "flags"))]
        name = hashlib.sha256("\n".join([jax.__version__, *kind]).encode()).hexdigest()[:12]
        folder = Path(__file__).parents[1] / ".argosy" / "programs" / name
        folder.mkdir(parents=True, exist_ok=True)
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


_keep_programs()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """The garbage collector would look through all that is imported again and again: a fifth of this time."""
    is_on = gc.isenabled()
    gc.disable()
    try:
        return (yield)
    finally:
        if is_on:
            gc.enable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """What is imported stays: the garbage collector need not look at it again, a tenth of the time of tests that trace. It also comes
    after 20,000 objects instead of 700, and looks at old ones a fourth as often: traced programs are many small objects that stay."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture(autouse=True)
def _programs_of_described_devices(request: pytest.FixtureRequest) -> Iterator[None]:
    """JAX writes a program for devices that are not there into its cache, and cannot read it again. It remembers whether it uses the
    cache, from its first compilation on."""
    if not request.node.get_closest_marker("tpu"):
        yield
        return
    before = jax.config.jax_enable_compilation_cache  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_enable_compilation_cache", False)
    reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", before)
    reset_cache()


# What a worker may have in memory before it forgets its programs: in bytes after a test and after a file, and in pieces.
MOST_BYTES, MOST_BYTES_LATER, MOST_MAPS = 1_800_000_000, 1_500_000_000, 10_000


def _resident_bytes() -> int:
    memory = Path("/proc/self/statm")
    return int(memory.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if memory.exists() else 0


def _forget_programs() -> None:
    jax.clear_caches()
    if sys.platform == "linux":
        # The C library would keep what is freed: of 1.6 GB, 0.6 are left.
        ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture(autouse=True)
def _little_memory() -> Iterator[None]:
    """The programs of some files alone took 3.5 GB."""
    yield
    if _resident_bytes() > MOST_BYTES:
        _forget_programs()


@pytest.fixture(scope="module", autouse=True)
def _few_programs() -> Iterator[None]:
    """A worker that kept the programs of half of the suite had 4.5 GB. Linux also maps at most 65,530 pieces of memory into a process,
    of which each program takes several, and XLA aborts it there."""
    yield
    maps = Path("/proc/self/maps")
    if _resident_bytes() > MOST_BYTES_LATER or (maps.exists() and len(maps.read_bytes().splitlines()) > MOST_MAPS):
        _forget_programs()


@pytest.fixture(scope="module")
def one_device() -> Iterator[None]:
    """A mesh of one device where the settings ask for one, although there are eight."""
    from argosy.parallel.mesh import MeshSettings

    with pytest.MonkeyPatch.context() as patch:
        build = MeshSettings.build
        alone = lambda mesh: (mesh.data, mesh.fsdp, mesh.tensor) == (1, 1, 1)  # noqa: E731
        patch.setattr(MeshSettings, "build", lambda mesh, devices=None: build(mesh, jax.devices()[:1] if alone(mesh) else devices))
        yield


@pytest.fixture
def clock(record_property: Callable[[str, object], None]) -> Callable[[str], contextlib.AbstractContextManager[None]]:
    """Times what a test waits for, under the name `noticed` or `over`: `campaign_faults.py` reads the seconds."""

    @contextlib.contextmanager
    def timed(name: str) -> Iterator[None]:
        begun = time.monotonic()
        yield
        record_property(name, time.monotonic() - begun)

    return timed


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that reaches for another machine fails."""
    connect = socket.socket.connect

    def only_here(self: socket.socket, address: object) -> None:
        if isinstance(address, tuple) and address[0] not in ("127.0.0.1", "::1", "localhost"):
            raise RuntimeError(f"a test reached for {address}")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", only_here)


# Lists to which each compilation is added.
_LISTENERS: list[list[str]] = []


def _note_compilation(event: str, seconds: float, **details: object) -> None:
    if "backend_compile" in event:
        for listener in _LISTENERS:
            listener.append(event)


jax.monitoring.register_event_duration_secs_listener(_note_compilation)


@pytest.fixture
def compilations() -> Iterator[list[str]]:
    """What has been compiled since the list was cleared."""
    events: list[str] = []
    _LISTENERS.append(events)
    yield events
    _LISTENERS.remove(events)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--share", default="0/1", help="NUMBER/OF: these tests of the selected ones, each file's in turn")


SLOW_CASES = frozenset(Path(__file__).with_name("slow_cases.txt").read_text(encoding="utf-8").splitlines())


def pytest_itemcollected(item: pytest.Item) -> None:
    """The costliest tests and cases (`slow_cases.py`) are slow ones, except where files are named: these run whole."""
    if item.nodeid in SLOW_CASES and not any(word.partition("::")[0].endswith(".py") for word in item.config.args):
        item.add_marker(pytest.mark.slow)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of what `-m` and `-k` left, one share."""
    number, of = map(int, config.getoption("--share").split("/"))
    selected = [item for i, item in enumerate(items) if i % of == number]
    config.hook.pytest_deselected(items=[item for i, item in enumerate(items) if i % of != number])
    items[:] = selected
