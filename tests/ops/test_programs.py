"""Programs that are prepared ahead, and kept on disk: what names them, what is refused, and that answers stay the same."""

import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_house import ROOMS

from argosy.infer.engine.engine import Engine
from argosy.infer.engine.request import Request
from argosy.infer.settings import EngineSettings
from argosy.models import FAMILIES
from argosy.models.parts.weight import split
from argosy.ops.op import implementations
from argosy.ops.programs import fingerprint as names
from argosy.ops.programs import store as program_store
from argosy.ops.programs.fingerprint import LATER, NoFingerprint, environment_fingerprint, fingerprint
from argosy.ops.programs.programs import Program, Programs, abstract_arrays
from argosy.ops.programs.store import ENDING, ProgramStore, StoredProgram, open_store
from argosy.weights.build import random_model

A = np.arange(12.0, dtype=np.float32).reshape(3, 4)


@pytest.fixture
def store(tmp_path: Path) -> ProgramStore:
    programs = ProgramStore(tmp_path / "programs", "this machine")
    programs.folder.mkdir()
    return programs


@pytest.fixture
def jax_events() -> Iterator[list[str]]:
    """What jax has traced, lowered and compiled since."""
    events: list[str] = []
    HEARD.append(events)
    yield events
    HEARD.remove(events)


HEARD: list[list[str]] = []


def _heard(event: str, seconds: float, **more: Any) -> None:
    if "/jax/core/compile/" in event:
        for heard in HEARD:
            heard.append(event)


jax.monitoring.register_event_duration_secs_listener(_heard)


def program_of(function: Any, **options: Any) -> Program:
    """As if it were defined in the package: a function of a test has no name."""
    function.__module__ = "argosy.infer.forward.passes"
    return Program(function, **options)


def scale_program(by: float) -> Program:
    def function(x: Any) -> Any:
        return jnp.sort(x.astype(jnp.float32) * by, 0) @ jnp.ones(4)

    return program_of(function)


def prepare_program(program: Program, *arguments: Any, store: ProgramStore | None = None, at: Any = 0) -> Programs:
    run = Programs()
    with run.ahead(store):
        run(program, at, *arguments)
    return run


def entries(store: ProgramStore) -> list[Path]:
    return sorted(store.folder.iterdir())


# ---------------------------------------------------------------- ahead of time


def test_while_programs_are_prepared_calls_return_descriptions_and_then_arrays():
    run, first, then = Programs(), scale_program(2), scale_program(3)
    with run.ahead():
        y = run(first, "y", A)
        assert (type(y), y.shape, y.dtype) == (jax.ShapeDtypeStruct, (3,), np.float32)
        z = run(then, "z", jax.ShapeDtypeStruct((5, 4), np.float32))
        assert z.shape == (5,)
    np.testing.assert_array_equal(run(first, "y", A), [12, 44, 76])
    assert run(then, "z", np.ones((5, 4), np.float32)).tolist() == [12] * 5
    assert first.compilations == then.compilations == 0, "not by jit"


def test_a_program_may_be_run_while_others_are_still_prepared():
    run, program = Programs(), scale_program(2)
    with run.ahead():
        assert prepared_now(run, program).tolist() == [12, 44, 76]
        assert isinstance(run(scale_program(3), 0, A), jax.ShapeDtypeStruct)


def prepared_now(run: Programs, program: Program) -> Any:
    return run.prepared(program, 0, A)(A)


def test_programs_may_be_prepared_again():
    run, program = Programs(), scale_program(2)
    for _ in range(2):
        with run.ahead():
            assert isinstance(run(program, 0, jax.ShapeDtypeStruct(A.shape, A.dtype)), jax.ShapeDtypeStruct)
            assert prepared_now(run, program).tolist() == [12, 44, 76]
    assert run(program, 0, A).tolist() == [12, 44, 76]
    assert program.compilations == 0


def prepare_with_an_error(run: Programs, program: Program) -> None:
    with run.ahead():
        run(program, 0, A)
        run(program, 1, A.reshape(2, 6))


def test_an_error_among_programs_leaves_none_half_prepared():
    run, program = Programs(), scale_program(2)
    with pytest.raises(TypeError):
        prepare_with_an_error(run, program)
    assert run(program, 0, A).tolist() == [12, 44, 76]
    with run.ahead():
        run(program, 0, A)
    assert run(program, 0, A).tolist() == [12, 44, 76]
    assert program.compilations == 1


def test_what_was_not_prepared_is_compiled_by_jit():
    program = scale_program(2)
    assert Programs()(program, 0, A).tolist() == [12, 44, 76]
    assert program.compilations == 1


@pytest.mark.parametrize("other", [A.astype(np.int32), A[:2], jax.device_put(A, jax.devices()[1])], ids=["type", "shape", "device"])
def test_other_arguments_than_a_program_was_prepared_for_are_compiled_and_counted(other: Any):
    missed: list[int] = []
    run, program = Programs(missed=lambda: missed.append(1)), scale_program(2)
    with run.ahead():
        run(program, 0, jax.device_put(A, jax.devices()[0]))
    assert run(program, 0, other).tolist() == [12, 44, 76][: len(other)]
    assert missed == [1]
    assert run(program, 0, other).tolist() == [12, 44, 76][: len(other)]
    assert (missed, program.compilations) == ([1], 1)


def test_two_threads_that_miss_a_prepared_program_both_compile_it():
    """Each finds the executable before either has let go of it."""
    programs, program = Programs(), Program(lambda a: a + 1)

    def first_of_two(*arguments: Any) -> Any:
        programs._ready.clear()  # what the other thread does meanwhile
        raise TypeError("other arguments")

    programs._ready[program, 1] = first_of_two
    np.testing.assert_array_equal(programs(program, 1, A), A + 1)


def test_results_are_described_on_the_device_of_the_arguments():
    run, device = Programs(), jax.devices()[2]
    with run.ahead():
        y = run(scale_program(2), 0, jax.device_put(A, device))
        z = run(scale_program(3), 1, jnp.asarray(A))
    assert y.sharding.device_set == {device}
    assert z.sharding is None, "as jit leaves it: bound to none"


# ---------------------------------------------------------------- on disk


def test_a_second_start_reads_programs_and_traces_nothing(store: ProgramStore, jax_events: list[str]):
    prepare_program(scale_program(2), A, store=store)
    assert len(entries(store)) == 1
    assert jax_events
    jax.clear_caches()
    jax_events.clear()
    run, program = Programs(), scale_program(2)
    with run.ahead(store):
        assert run(program, 0, A).shape == (3,)
    assert run(program, 0, A).tolist() == [12, 44, 76]
    assert not jax_events
    assert len(entries(store)) == 1


@pytest.fixture
def jax_cache(tmp_path: Path) -> Iterator[Path]:
    """The folder of JAX's compilation cache, turned on."""
    before = {name: getattr(jax.config, name) for name in ("jax_compilation_cache_dir", "jax_enable_compilation_cache")}
    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "jax"))
    program_store.reset_cache()
    yield tmp_path / "jax"
    for name, value in before.items():
        jax.config.update(name, value)
    program_store.reset_cache()


def with_several_functions() -> Program:
    def function(x: Any) -> Any:
        return jnp.sort(jnp.take(x @ x.T, jnp.argsort(x[:, 0]), 0)[1:, ::-1], 1).cumsum(0)

    return program_of(function)


SQUARE = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)


def test_programs_that_come_from_the_compilation_cache_of_jax_are_not_kept(jax_cache: Path, store: ProgramStore):
    """XLA:CPU serializes such a program without some of its functions: calling it fails once it is read."""
    expected = np.asarray(with_several_functions()(SQUARE))
    assert list(jax_cache.iterdir())
    jax.clear_caches()
    prepare_program(with_several_functions(), SQUARE, store=store)
    assert jax.config.jax_enable_compilation_cache
    assert_kept(store, expected)


def test_programs_that_this_process_has_from_the_cache_of_jax_are_compiled_anew(jax_cache: Path, store: ProgramStore):
    expected = np.asarray(with_several_functions()(SQUARE))
    jax.clear_caches()
    program = with_several_functions()
    prepare_program(program, SQUARE)
    prepare_program(program, SQUARE, store=store)
    assert_kept(store, expected)


def assert_kept(store: ProgramStore, expected: np.ndarray) -> None:
    assert len(entries(store)) == 1
    jax.clear_caches()
    (program,) = prepare_program(with_several_functions(), SQUARE, store=store)._ready.values()
    np.testing.assert_array_equal(program(SQUARE), expected)


def cut_end(content: bytes) -> bytes:
    return content[:-1]


def flip_bit(content: bytes) -> bytes:
    return content[:-100] + bytes([content[-100] ^ 1]) + content[-99:]


@pytest.mark.parametrize("damage", [cut_end, flip_bit, lambda content: b"", lambda content: b"something else" * 9])
def test_a_damaged_entry_is_compiled_anew_and_replaced(store: ProgramStore, damage: Callable[[bytes], bytes]):
    prepare_program(scale_program(2), A, store=store)
    (path,) = entries(store)
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    program = scale_program(2)
    assert prepare_program(program, A, store=store)(program, 0, A).tolist() == [12, 44, 76]
    assert len(path.read_bytes()) == len(whole)
    key = scale_program(2).key(abstract_arrays((A,)), names.options_fingerprint())
    assert key is not None
    assert store.read(key) is not None


def test_an_entry_under_the_name_of_another_is_damaged(store: ProgramStore):
    prepare_program(scale_program(2), A, store=store)
    prepare_program(scale_program(3), A, store=store, at=1)
    entry, other = entries(store)
    entry.write_bytes(other.read_bytes())
    for by in (2, 3):
        program = scale_program(by)
        assert prepare_program(program, A, store=store)(program, 0, A).tolist() == (by * np.float32([6, 22, 38])).tolist()


def rewrite_entry(store: ProgramStore, program: Program, change: Callable[[StoredProgram], StoredProgram]) -> None:
    """Writes the entry of a program anew, with something else in it and the right hash."""
    prepare_program(program, A, store=store)
    (path,) = entries(store)
    content = path.read_bytes()
    stored = program_store._unpacked(path.name, content)
    assert stored is not None
    path.write_bytes(program_store._packed(path.name, pickle.dumps(tuple(change(stored)))))


@pytest.mark.parametrize(
    "change",
    [
        lambda entry: entry._replace(binary=entry.binary[:-10]),
        lambda entry: entry._replace(binary=b""),
        lambda entry: entry._replace(inputs=(((4, 4), np.dtype(np.float32)),)),
        lambda entry: entry._replace(in_tree=jax.tree.structure(({"x": 0}, {}))),
    ],
    ids=["no executable", "empty", "other shapes", "another tree"],
)
def test_an_intact_entry_that_does_not_fit_is_compiled_anew(store: ProgramStore, change: Callable[[StoredProgram], StoredProgram]):
    rewrite_entry(store, scale_program(2), change)
    program = scale_program(2)
    run = prepare_program(program, A, store=store)
    assert run(program, 0, A).tolist() == [12, 44, 76]
    assert program.compilations == 0


def test_several_starts_at_once_leave_whole_entries(store: ProgramStore):
    errors: list[Exception] = []
    program = scale_program(2)
    compiled = program.lower(*abstract_arrays((A,))).compile(compiler_options=program_store.ANEW)

    def start() -> None:
        try:
            for _ in range(20):
                assert store.write("key", compiled)
                assert store.read("key") is not None
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert entries(store) == [store.path("key")], "no file of another name is left"


def test_what_was_used_longest_ago_is_removed_first(store: ProgramStore):
    for i, name in enumerate("abc"):
        path = store.folder / f"{name}{ENDING}"
        path.write_bytes(bytes(100))
        os.utime(path, (i, i))
    prepare_program(scale_program(2), A, store=store)
    used = entries(store)[-1] if entries(store)[-1].stat().st_size > 100 else max(entries(store), key=lambda p: p.stat().st_size)
    os.utime(used, (0.5, 0.5))
    key = scale_program(2).key(abstract_arrays((A,)), names.options_fingerprint())
    assert key is not None
    assert store.read(key) is not None, "reading counts as use"
    store.tidy(used.stat().st_size + 200)
    assert {path.name for path in entries(store)} == {used.name, f"b{ENDING}", f"c{ENDING}"}
    store.tidy(0)
    assert not entries(store)


def test_a_full_disk_costs_the_entry_and_nothing_else(store: ProgramStore, monkeypatch: pytest.MonkeyPatch):
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(program_store.os, "replace", full)
    program = scale_program(2)
    assert prepare_program(program, A, store=store)(program, 0, A).tolist() == [12, 44, 76]
    assert not entries(store)


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="no owners of files here")
def test_only_a_folder_of_the_user_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Entries are code."""
    monkeypatch.setattr(program_store, "environment_fingerprint", lambda sources=True: "this machine")
    before = jax.config.jax_enable_compilation_cache
    try:
        jax.config.update("jax_enable_compilation_cache", True)
        store_opened = open_store(tmp_path / "a" / "programs")
        assert store_opened is not None
        assert store_opened.folder.stat().st_mode & 0o777 == 0o700
        for mode in (0o720, 0o702):
            store_opened.folder.chmod(mode)
            warned: list[str] = []
            assert open_store(store_opened.folder, warned.append) is None
            assert warned == [f"compiled programs are neither read nor kept: others may write to {store_opened.folder}"]
        store_opened.folder.chmod(0o755)
        assert open_store(store_opened.folder) is not None
        (tmp_path / "file").write_text("")
        # Every start would compile everything, and nobody would know why.
        for path in (tmp_path / "file", tmp_path / "file" / "programs"):
            warned = []
            assert open_store(path, warned.append) is None
            assert [line.startswith(f"compiled programs are not kept: {path}: ") for line in warned] == [True]
        assert open_store(None) is None
        jax.config.update("jax_enable_compilation_cache", False)
        assert open_store(store_opened.folder) is None
        jax.config.update("jax_enable_compilation_cache", True)
        monkeypatch.setattr(program_store.os, "getuid", lambda: store_opened.folder.stat().st_uid + 1)
        assert open_store(store_opened.folder) is None
    finally:
        jax.config.update("jax_enable_compilation_cache", before)


# ---------------------------------------------------------------- names


def keys(program: Program, *arguments: Any) -> str | None:
    return program.key(abstract_arrays(arguments), names.options_fingerprint())


def test_equal_programs_have_one_name():
    assert keys(scale_program(2), A) == keys(scale_program(2), np.zeros((3, 4), np.float32)) is not None


def test_whatever_decides_a_program_is_in_its_name():
    def sized(x: Any, size: int) -> Any:
        return x[:size]

    def of_options() -> str | None:
        with jax.default_matmul_precision("float32"):
            return keys(scale_program(2), A)

    def of_implementation() -> str | None:
        with implementations(paged_attention="reference"):
            return keys(scale_program(2), A)

    without = names.library.unavailable()

    def without_kernels() -> str | None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(names.library, "unavailable", lambda: "" if without else "turned off")
            return keys(scale_program(2), A)

    static = program_of(sized, static=1)
    on = [jax.device_put(A, device) for device in jax.devices()[:2]]
    fingerprints = [
        keys(scale_program(2), A),
        keys(scale_program(2.5), A),
        keys(program_of(scale_program(2).function, donate=0), A),
        keys(scale_program(2), A[:2]),
        keys(scale_program(2), A.astype(np.int32)),
        keys(scale_program(2), {"x": A}),
        keys(scale_program(2), {"y": A}),
        keys(Program(names.fingerprint), A),
        *(keys(scale_program(2), a) for a in on),
        of_options(),
        of_implementation(),
        without_kernels(),
        *(static.key((*abstract_arrays((A,)), size), "") for size in (1, 2)),
    ]
    assert None not in fingerprints
    assert len({*fingerprints}) == len(fingerprints)


@dataclass(frozen=True)
class Foreign:
    width: int = 3


@pytest.mark.parametrize("value", [object(), Foreign(), Foreign, lambda: 0, {"a": [object()]}, np.array([None])])
def test_what_another_process_would_not_name_alike_has_no_name(value: Any):
    """A class of a test is code whose version nobody knows; nor does a program that closes over it have a name."""
    with pytest.raises(NoFingerprint):
        fingerprint(value)

    def function(x: Any) -> Any:
        return x if value is None else x + 1

    assert keys(program_of(function), A) is None


def test_a_program_without_a_name_is_compiled_and_not_kept(store: ProgramStore):
    something = object()

    def function(x: Any) -> Any:
        return x if something is None else x + 1

    program = program_of(function)
    assert prepare_program(program, A, store=store)(program, 0, A).tolist() == (A + 1).tolist()
    assert not entries(store)


def test_the_order_of_sets_does_not_count_and_types_of_numbers_do():
    assert fingerprint({"a", "b", "c"}) == fingerprint({"c", "b", "a"})
    values = [1, 1.0, True, "1", b"1", None, (1,), [1], {1}, {1: 1}, np.float32(1), np.dtype(np.int8), jnp.float32, partial(max, 1)]
    values += [np.ones(1), np.ones(1, np.float32), np.zeros(1), jax.ShapeDtypeStruct((1,), np.float32), jax.nn.silu, jax.nn.gelu]
    assert len({fingerprint(value) for value in values}) == len(values)


CHANGES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "XLA_FLAGS": lambda patch: patch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true"),
    "package": lambda patch: patch.setattr(names, "version", lambda name: "0"),
    "processor": lambda patch: patch.setattr(names, "_processor", lambda: ["another", "8 cores"]),
    "sources": lambda patch: patch.setattr(names, "_sources", lambda: "changed"),
    "Python": lambda patch: patch.setattr(sys, "version", "3.99"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_programs_of_another_environment_are_not_read(change: str, monkeypatch: pytest.MonkeyPatch):
    before = environment_fingerprint.__wrapped__()
    assert environment_fingerprint.__wrapped__() == before
    CHANGES[change](monkeypatch)
    assert environment_fingerprint.__wrapped__() != before


def test_every_source_that_programs_may_come_from_is_hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert set(ROOMS[ROOMS.index("infer") + 1 :]) == LATER - {"configs", "__pycache__"}
    for name in ("ops/one.py", "ops/kernels/two.so", "serve/app.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    monkeypatch.setattr(names, "PACKAGE", tmp_path)
    before = names._sources()
    (tmp_path / "serve/app.py").write_text("2")
    assert names._sources() == before, "a later room decides no program"
    (tmp_path / "ops/kernels/two.so").write_text("2")
    assert names._sources() != before


def program_names() -> list[str]:
    """The names of every family's programs."""
    out = []
    for name in FAMILIES:
        config = next(iter(FAMILIES[name].examples().values()))
        if config.inputs != "tokens":
            # An engine runs no ranker.
            continue
        model = config.build()
        out.append(fingerprint(split(model)[0], model.layers.plan))
    return out


@pytest.mark.slow
def test_the_programs_of_every_family_have_names_which_other_processes_give_them_too():
    code = "import sys; sys.path.insert(0, 'tests'); from ops.test_programs import program_names; print(*program_names())"
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
        assert completed.stdout.split() == program_names()


# ---------------------------------------------------------------- an engine

SMALLEST = EngineSettings(slots=1, page=8, context=32, pages=8, budget=32, budget_decoding=32)


def test_an_engine_that_reads_its_programs_traces_nothing_and_answers_alike(store: ProgramStore, jax_events: list[str]):
    module = random_model(FAMILIES["llama"].examples()["plain"], 0).module
    request, outputs, counts = Request([5, 6, 7], 6), [], []
    for turn in range(2):
        jax.clear_caches()
        engine = Engine(module, SMALLEST)
        # Random keys of the request and the first transfers are warmed up, too.
        jax_events.clear()
        counts.append((engine.warm_up(store), len(entries(store))))
        outputs.append([(event.token, event.logprob) for event in engine.generate([request])[0]])
        assert bool([event for event in jax_events if "trace" not in event]) == (turn == 0)
        assert engine.stats.compilations == counts[0][0]
        assert engine.warm_up(store) == 0
    assert outputs[0] == outputs[1]
    assert counts[0] == counts[1]
