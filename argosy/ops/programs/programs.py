"""Programs that are compiled ahead of time, or read from disk, so that a start computes nothing with the model.

    run = Programs()
    run(layer, sizes, weights, x)               # jit, as long as nothing is prepared
    with run.ahead(store):
        run(layer, sizes, weights, x)           # loads or compiles; arguments may be descriptions, and so is what it returns
    run(layer, sizes, weights, x)               # the executable

A warm-up that computed each step, 1,133 tokens in all, spent 3 of 8 s on that with SmolLM2-135M on two cores, and 4 on tracing
and lowering 57 programs.
"""

import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np

from argosy.core.process.cores import core_count
from argosy.core.progress import Say
from argosy.ops.programs.fingerprint import NoFingerprint, fingerprint, options_fingerprint
from argosy.ops.programs.store import ANEW, ProgramStore, StoredProgram, without_compilation_cache
from argosy.parallel.scope import default_device


class Program:
    """A function that is compiled by jit. The values in its closure decide the program.

    Args:
        donate: the argument, or arguments, whose memory it reuses.
        static: index of the last argument, if that is no array.
        made_of: a name that is the same in every process, if the closure has none.
        implied: number of leading arguments whose shapes and types follow from `made_of`.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        donate: int | tuple[int, ...] = (),
        static: int | None = None,
        made_of: str | None = None,
        implied: int = 0,
    ):
        self.function, self.donate, self.static = function, donate, static
        self._made_of, self.implied = made_of, implied
        self.jitted: Any = jax.jit(function, donate_argnums=donate, static_argnums=static)
        self.lower = self.jitted.lower

    def __call__(self, *arguments: Any) -> Any:
        return self.jitted(*arguments)

    @property
    def compilations(self) -> int:
        """How many times jit has compiled it. Programs that were prepared ahead are not counted."""
        return self.jitted._cache_size()

    def dynamic(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments that are arrays."""
        return arguments if self.static is None else arguments[: self.static]

    @cached_property
    def made_of(self) -> str:
        """The fingerprint of the function. Raises: NoFingerprint."""
        return fingerprint(self._made_of or self.function, self.donate)

    def key(self, arguments: tuple[Any, ...], options: str) -> str | None:
        """The fingerprint of this program for these arguments, under these options of jax; None if it has none."""
        leaves, tree = jax.tree.flatten(self.dynamic(arguments)[self.implied :])
        static = None if self.static is None else arguments[self.static]
        mesh = jax.sharding.get_abstract_mesh()
        scope = None if mesh.empty else (mesh.shape_tuple, mesh.axis_types)
        try:
            devices = [device.id for device in program_devices(arguments)]
            return fingerprint(self.made_of, static, tree, leaves, devices, str(scope), options)
        except NoFingerprint:
            return None


RunProgram = Callable[..., Any]


def run_jitted(program: Program, at: Hashable, *arguments: Any) -> Any:
    """Calls a program as jit compiles it."""
    return program(*arguments)


class Programs:
    """Calls programs. A prepared program is looked up by itself and `at`, which stands for the shapes of its arguments.

    Args:
        scope: around compiling: the mesh of programs over several devices.
        missed: called when arguments differ from those that a program was prepared for, such as weights in another type: jit then
            compiles it again.
    """

    def __init__(
        self, scope: Callable[[], AbstractContextManager[Any]] = nullcontext, missed: Callable[[], None] = lambda: None
    ):
        self.scope, self.missed = scope, missed
        self._ready: dict[tuple[Program, Hashable], Any] = {}
        self._outputs: dict[tuple[Program, Hashable], Any] = {}
        self._ahead: _Ahead | None = None

    def __call__(self, program: Program, at: Hashable, *arguments: Any) -> Any:
        if self._ahead is not None:
            return self._ahead(program, at, arguments)
        return self._call_program(program, at, *arguments)

    def _call_program(self, program: Program, at: Hashable, *arguments: Any) -> Any:
        executable = self._ready.get((program, at))
        if executable is None:
            return program(*arguments)
        try:
            return executable(*program.dynamic(arguments))
        except (TypeError, ValueError):
            # Raised before anything runs: other types, shapes or devices than it was compiled for.
            self._ready.pop((program, at), None)
            self._outputs.pop((program, at), None)
            self.missed()
            return program(*arguments)

    def prepared(self, program: Program, at: Hashable, *arguments: Any) -> Callable[..., Any]:
        """The function to call with such arguments. While programs are prepared it is the executable, as soon as that is ready."""
        if self._ahead is not None and (program, at) not in self._ready:
            self._outputs[program, at] = self._ahead(program, at, arguments)
            self._ready[program, at] = self._ahead.ready(program, at)
        return partial(self._call_program, program, at)

    @contextmanager
    def ahead(self, store: ProgramStore | None = None, say: Say | None = None) -> Iterator[None]:
        """Inside, calls load or compile, in parallel, and return descriptions of results. Afterwards all of them are ready.

        Args:
            store: where programs are read from and written to. say: called each second with what is still being done.
        """
        # Programs for GPUs are timed while they are compiled, each alone.
        threads = min(8, core_count()) if jax.default_backend() == "cpu" else 1
        with ExitStack() as anew, ThreadPoolExecutor(threads, "compile") as pool:
            self._ahead = _Ahead(self.scope, store, pool, anew, self._outputs)
            try:
                yield
            finally:
                ahead, self._ahead = self._ahead, None
            self._ready |= ahead.finished(say)
            self._outputs = ahead.outputs
        if store is not None and ahead.compiled:
            store.tidy()


class _Ahead:
    """Programs that are being loaded and compiled.

    outputs: descriptions of results, of those too that are ready already.
    """

    def __init__(
        self,
        scope: Callable[[], AbstractContextManager[Any]],
        store: ProgramStore | None,
        pool: ThreadPoolExecutor,
        anew: ExitStack,
        outputs: Mapping[tuple[Program, Hashable], Any],
    ):
        self.scope, self.store, self.pool, self.anew = scope, store, pool, anew
        self.compiled, self.options = 0, options_fingerprint()
        self._lock = threading.Lock()
        self._waiting: dict[tuple[Program, Hashable], Future[Any]] = {}
        self.outputs = dict(outputs)

    def __call__(self, program: Program, at: Hashable, arguments: tuple[Any, ...]) -> Any:
        """Begins to load or compile a program; returns descriptions of what it will return."""
        if (program, at) in self.outputs:
            return self.outputs[program, at]
        arguments = tuple(a if i == program.static else abstract_arrays(a) for i, a in enumerate(arguments))
        key = None if self.store is None else program.key(arguments, self.options)
        stored = None if self.store is None or key is None else self.store.read(key)
        if stored is not None and key is not None and stored.takes(program.dynamic(arguments)):
            future = self.pool.submit(self._loaded, stored, key, program, arguments)
            outputs = stored.described
        else:
            lowered = program.lower(*arguments)
            future, outputs = self.pool.submit(self._compiled, lowered, key), lowered.out_info
        leaves, tree = jax.tree.flatten(outputs)
        homes = {a.sharding for a in jax.tree.leaves(arguments) if getattr(a, "sharding", None) is not None}
        if any(isinstance(home, jax.sharding.NamedSharding) for home in homes):
            # XLA decides how results are laid out over several devices.
            places = jax.tree.leaves(future.result().output_shardings)
        else:
            places = [next(iter(homes), None)] * len(leaves)
        shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place) for a, place in zip(leaves, places, strict=True)]
        outputs = jax.tree.unflatten(tree, shapes)
        self._waiting[program, at], self.outputs[program, at] = future, outputs
        return outputs

    def ready(self, program: Program, at: Hashable) -> Any:
        """A program, as soon as it is loaded or compiled."""
        return self._waiting[program, at].result()

    def finished(self, say: Say | None) -> dict[tuple[Program, Hashable], Any]:
        """Every program, once all are ready."""
        while pending := len(wait(self._waiting.values(), timeout=1).not_done):
            if say is not None:
                say(f"preparing {pending} of {len(self._waiting)} programs")
        return {name: future.result() for name, future in self._waiting.items()}

    def _loaded(self, stored: StoredProgram, key: str, program: Program, arguments: tuple[Any, ...]) -> Any:
        try:
            return stored.load(program_devices(arguments))
        except Exception:
            # XLA raises errors of many kinds where an intact entry does not fit this machine after all.
            with self.scope():
                return self._compiled(program.lower(*arguments), key)

    def _compiled(self, lowered: Any, key: str | None) -> Any:
        if self.store is None or key is None:
            return lowered.compile()
        with self._lock:
            if not self.compiled:
                self.anew.enter_context(without_compilation_cache())
            self.compiled += 1
        executable = lowered.compile(compiler_options=ANEW)
        self.store.write(key, executable)
        return executable


def abstract_arrays(tree: Any) -> Any:
    """Arrays as descriptions: shape, type, and the devices of those that are bound to some."""
    return jax.tree.map(_describe, tree)


def _describe(a: Any) -> jax.ShapeDtypeStruct:
    if isinstance(a, jax.Array):
        return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding if a.committed else None, weak_type=a.weak_type)
    return a if isinstance(a, jax.ShapeDtypeStruct) else jax.ShapeDtypeStruct(np.shape(a), np.asarray(a).dtype)


def program_devices(arguments: Any) -> list[Any]:
    """The devices of a program for these arguments, in the order of their mesh."""
    for a in jax.tree.leaves(arguments):
        place = getattr(a, "sharding", None)
        if isinstance(place, jax.sharding.NamedSharding) and isinstance(place.mesh, jax.sharding.Mesh):
            return list(place.mesh.devices.flat)
        if place is not None:
            return list(place.device_set)
    return [default_device()]
