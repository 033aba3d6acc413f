"""Programs that are compiled ahead of time or read from disk, so that warming up needs no computation with the model.

    run = Programs()
    run(layer, sizes, weights, x)               # compiled by jit, since nothing is prepared
    with run.ahead(store):
        run(layer, sizes, weights, x)           # loads or compiles; takes arrays or descriptions, and returns descriptions
    run(layer, sizes, weights, x)               # calls the prepared executable

A warm-up that ran each step, 1,133 tokens in all, took 8 s with SmolLM2-135M on two cores. 3 s of these were for running the steps, and
4 s for tracing and lowering 57 programs.
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
    """A function that is compiled by jit, and that can be identified across processes by a key.

    Args:
        function: the function. The values in its closure are constants of the program.
        donate: the indexes of the arguments whose memory the program reuses.
        static: the index of the last argument, if that argument is not an array.
        made_of: a name for the function that is the same in every process. Default: the fingerprint of the function.
        implied: the number of leading arguments whose shapes and dtypes follow from `made_of`.
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
        """How many times jit has compiled the function. Programs that were prepared ahead of time are not counted."""
        return self.jitted._cache_size()

    def dynamic(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Returns the arguments without the static one."""
        return arguments if self.static is None else arguments[: self.static]

    @cached_property
    def made_of(self) -> str:
        """The fingerprint of the function, or of the name `made_of`.

        Raises:
            NoFingerprint: the function has no fingerprint.
        """
        return fingerprint(self._made_of or self.function, self.donate)

    def key(self, arguments: tuple[Any, ...], options: str) -> str | None:
        """Returns the fingerprint of this program for these arguments. None: it has no fingerprint.

        Args:
            options: the result of `options_fingerprint`.
        """
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
    """Calls a program through jit. It has the signature of `Programs.__call__`."""
    return program(*arguments)


class Programs:
    """Calls programs, by prepared executables if there are any.

    A call is `run(program, at, *arguments)`. The executable is looked up by `program` and `at`, a key for the shapes of the arguments.

    Args:
        scope: returns a context around compilation, such as the mesh of programs over several devices.
        missed: is called if arguments differ from those that a program was prepared for, such as weights in another dtype. jit then
            compiles the program again.
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
            # The executable raises this before it runs, if arguments have other dtypes, shapes or devices than it was compiled for.
            self._ready.pop((program, at), None)
            self._outputs.pop((program, at), None)
            self.missed()
            return program(*arguments)

    def prepared(self, program: Program, at: Hashable, *arguments: Any) -> Callable[..., Any]:
        """Returns a function that calls the program with such arguments. Inside of `ahead`, waits until the executable is ready."""
        if self._ahead is not None and (program, at) not in self._ready:
            self._outputs[program, at] = self._ahead(program, at, arguments)
            self._ready[program, at] = self._ahead.ready(program, at)
        return partial(self._call_program, program, at)

    @contextmanager
    def ahead(self, store: ProgramStore | None = None, say: Say | None = None) -> Iterator[None]:
        """A context in which calls load or compile programs, in parallel, and return descriptions of results. When the context ends,
        all these programs are ready.

        Args:
            store: the store that programs are read from and written to. None: all programs are compiled.
            say: is called every second with a sentence about what is still being prepared.
        """
        # For GPUs, XLA measures kernels during compilation, so programs are compiled one at a time.
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
    """Loads and compiles programs in threads.

    outputs: descriptions of the results of programs, including programs that are already ready.
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
        """Starts to load or compile a program. Returns descriptions of its results."""
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
            # With several devices, XLA decides the shardings of results, which are known after compilation.
            places = jax.tree.leaves(future.result().output_shardings)
        else:
            places = [next(iter(homes), None)] * len(leaves)
        shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place) for a, place in zip(leaves, places, strict=True)]
        outputs = jax.tree.unflatten(tree, shapes)
        self._waiting[program, at], self.outputs[program, at] = future, outputs
        return outputs

    def ready(self, program: Program, at: Hashable) -> Any:
        """Waits until a program is loaded or compiled, and returns the executable."""
        return self._waiting[program, at].result()

    def finished(self, say: Say | None) -> dict[tuple[Program, Hashable], Any]:
        """Waits until all programs are ready, and returns the executables."""
        while pending := len(wait(self._waiting.values(), timeout=1).not_done):
            if say is not None:
                say(f"preparing {pending} of {len(self._waiting)} programs")
        return {name: future.result() for name, future in self._waiting.items()}

    def _loaded(self, stored: StoredProgram, key: str, program: Program, arguments: tuple[Any, ...]) -> Any:
        try:
            return stored.load(program_devices(arguments))
        except Exception:
            # XLA raises many kinds of errors if an intact entry is not valid for this machine after all.
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
    """Replaces arrays by descriptions: shape, dtype, and the sharding of arrays that are committed to devices."""
    return jax.tree.map(_describe, tree)


def _describe(a: Any) -> jax.ShapeDtypeStruct:
    if isinstance(a, jax.Array):
        return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding if a.committed else None, weak_type=a.weak_type)
    return a if isinstance(a, jax.ShapeDtypeStruct) else jax.ShapeDtypeStruct(np.shape(a), np.asarray(a).dtype)


def program_devices(arguments: Any) -> list[Any]:
    """Returns the devices of a program for these arguments, in the order of the mesh if there is one."""
    for a in jax.tree.leaves(arguments):
        place = getattr(a, "sharding", None)
        if isinstance(place, jax.sharding.NamedSharding) and isinstance(place.mesh, jax.sharding.Mesh):
            return list(place.mesh.devices.flat)
        if place is not None:
            return list(place.device_set)
    return [default_device()]
