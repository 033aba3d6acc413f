"""Requests in one batch: each gets what it would get alone, whatever its neighbors ask for."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import argosy
from argosy.core.errors import BadInput
from argosy.export.bundle import Bundle
from argosy.export.manifest import BundleSignature, TensorSignature
from argosy.ops.programs.store import ProgramStore
from argosy.predict.batching import Batcher, QueueFull, Unloaded
from argosy.predict.padding import BatchPlan, batch_axis
from argosy.predict.settings import BatchingSettings

W = np.arange(12, dtype=np.float32).reshape(4, 3)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Rows of any length, summed where the mask is 1; and the rows themselves."""
    path = tmp_path_factory.mktemp("bundles") / "sums"
    (batch, length) = export.symbolic_shape("batch, length")

    def sums(x: Any, scale: Any) -> dict[str, Any]:
        return {"sum": jnp.sum(x, 1) @ jnp.asarray(W) * scale, "rows": x * scale[:, :1, None]}

    x, scale = jax.ShapeDtypeStruct((batch, length, 4), jnp.float32), jax.ShapeDtypeStruct((batch, 3), jnp.float32)
    argosy.export(sums, (x, scale), path, platforms=["cpu"])
    opened = Bundle.open(path)
    # Rows do not change one another's results: what `batch=` says where no other axis is open.
    call = opened.manifest.signature().model_copy(update={"padding": ["batch"]})
    opened.manifest = opened.manifest.model_copy(update={"signatures": {"call": call}})
    return opened


def random_inputs(seed: int, rows: int, length: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    return {
        "x": draw.normal(size=(rows, length, 4)).astype(np.float32),
        "scale": draw.normal(size=(rows, 3)).astype(np.float32),
    }


@pytest.fixture
def make_batcher(bundle: Bundle) -> Iterator[Callable[..., Batcher]]:
    """Makes batchers, and ends them."""
    batchers: list[Batcher] = []

    def make(seen: Any = lambda *_: None, **options: Any) -> Batcher:
        batchers.append(Batcher(bundle, BatchingSettings(**options), seen))
        return batchers[-1]

    yield make
    for batcher in batchers:
        batcher.close()


def test_each_gets_what_it_would_get_alone(bundle: Bundle, make_batcher):
    """Lengths that differ are computed apart unless the signature says that they may be filled up."""
    seen: list[tuple[int, int]] = []
    batcher = make_batcher(lambda _, calls, rows, __: seen.append((calls, rows)), max_queue_delay_ms=200, max_batch_size=8)
    requests = [random_inputs(i, 1 + i % 3, 2 + i % 2) for i in range(8)]

    async def all_at_once() -> list[Any]:
        return await asyncio.gather(*(batcher.call(inputs) for inputs in requests))

    for inputs, result in zip(requests, asyncio.run(all_at_once()), strict=True):
        alone = bundle.run(inputs)
        assert result.outputs.keys() == alone.keys() == {"sum", "rows"}
        for name, value in alone.items():
            np.testing.assert_allclose(result.outputs[name], value, rtol=1e-5, atol=1e-5)
    assert sum(rows for _, rows in seen) == sum(len(request["scale"]) for request in requests)
    assert len(seen) < len(requests)
    assert max(rows for _, rows in seen) <= 8


def test_more_rows_than_a_batch_are_split_and_joined(bundle: Bundle, make_batcher):
    seen: list[int] = []
    inputs = random_inputs(0, 7, 2)
    result = asyncio.run(make_batcher(lambda _, calls, rows, __: seen.append(rows), max_batch_size=3).call(inputs))
    np.testing.assert_allclose(result.outputs["sum"], bundle.run(inputs)["sum"], rtol=1e-5, atol=1e-5)
    assert sum(seen) == 7
    assert max(seen) <= 3


def test_bad_input_is_refused_and_disturbs_nobody(bundle: Bundle, make_batcher):
    batcher, good = make_batcher(max_queue_delay_ms=50), random_inputs(1, 2, 2)
    wrong: list[dict[str, Any]] = [
        {"x": good["x"]},
        {**good, "y": good["x"]},
        {**good, "x": good["x"].astype(np.float64)},
        {**good, "x": good["x"][:1]},
        {**good, "scale": good["scale"][:, :2]},
    ]

    async def both() -> Any:
        return await asyncio.gather(batcher.call(good), *(batcher.call(bad_inputs) for bad_inputs in wrong), return_exceptions=True)

    result, *errors = asyncio.run(both())
    np.testing.assert_allclose(result.outputs["sum"], bundle.run(good)["sum"], rtol=1e-5, atol=1e-5)
    assert [type(error) for error in errors] == [BadInput] * len(wrong)


def test_a_full_queue_refuses_and_a_cancelled_request_gives_its_place_back(bundle: Bundle, make_batcher, monkeypatch):
    go, run = threading.Event(), bundle.run_arrays
    monkeypatch.setattr(bundle, "run_arrays", lambda *args: (go.wait(20), run(*args))[1])
    batcher = make_batcher(max_queue_size=3, max_batch_size=1)

    async def crowd() -> None:
        running = asyncio.ensure_future(batcher.call(random_inputs(0, 1, 2)))
        while not batcher.running:
            await asyncio.sleep(0.01)
        waiting = [asyncio.ensure_future(batcher.call(random_inputs(i, 1, 2))) for i in range(1, 4)]
        await asyncio.sleep(0.05)
        with pytest.raises(QueueFull):
            await batcher.call(random_inputs(9, 1, 2))
        waiting[0].cancel()
        await asyncio.sleep(0.05)
        last = asyncio.ensure_future(batcher.call(random_inputs(9, 1, 2)))
        await asyncio.sleep(0.05)
        go.set()
        results = await asyncio.gather(running, *waiting[1:], last)
        assert len(results) == 4
        assert batcher.waiting_rows == 0
        assert waiting[0].cancelled()

    asyncio.run(crowd())


def test_what_waits_is_computed_before_a_version_ends_and_nothing_after(bundle: Bundle, make_batcher):
    batcher = make_batcher(max_queue_delay_ms=10_000)

    async def end() -> None:
        call = asyncio.ensure_future(batcher.call(random_inputs(0, 1, 2)))
        await asyncio.sleep(0.05)
        await asyncio.get_running_loop().run_in_executor(None, batcher.close)
        assert len((await call).outputs["sum"]) == 1
        with pytest.raises(Unloaded):
            await batcher.call(random_inputs(0, 1, 2))

    asyncio.run(end())


def test_an_error_of_the_program_reaches_its_callers_and_the_next_batch_runs(bundle: Bundle, make_batcher, monkeypatch):
    batcher, run = make_batcher(), bundle.run_arrays
    calls = []

    def fails_once(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 1:
            raise RuntimeError("no memory")
        return run(*args)

    monkeypatch.setattr(bundle, "run_arrays", fails_once)
    with pytest.raises(RuntimeError, match="no memory"):
        asyncio.run(batcher.call(random_inputs(0, 1, 2)))
    assert len(asyncio.run(batcher.call(random_inputs(0, 1, 2))).outputs["sum"]) == 1


def test_the_batch_is_the_axis_that_everything_has_first(bundle: Bundle):
    assert batch_axis(bundle.manifest.signature()) == "batch"


def test_rows_that_may_change_one_another_are_never_computed_together(tmp_path: Path):
    """An open first axis alone does not say that rows are independent."""
    (batch,) = export.symbolic_shape("batch")
    x = jax.ShapeDtypeStruct((batch, 3), jnp.float32)
    argosy.export(lambda x: {"y": x - jnp.mean(x, 0)}, (x,), tmp_path / "centered", platforms=["cpu"])
    bundle = Bundle.open(tmp_path / "centered")
    assert batch_axis(bundle.manifest.signature()) is None
    batcher = Batcher(bundle, BatchingSettings(max_queue_delay_ms=50))
    requests = [random_inputs(i, 3, 1)["scale"] for i in range(4)]

    async def all_at_once() -> list[Any]:
        return await asyncio.gather(*(batcher.call({"x": inputs}) for inputs in requests))

    try:
        for inputs, result in zip(requests, asyncio.run(all_at_once()), strict=True):
            np.testing.assert_allclose(result.outputs["y"], inputs - inputs.mean(0), atol=1e-6)
    finally:
        batcher.close()


def test_a_request_that_is_split_is_queued_whole_or_not_at_all(bundle: Bundle, make_batcher, monkeypatch):
    go, run = threading.Event(), bundle.run_arrays
    monkeypatch.setattr(bundle, "run_arrays", lambda *args: (go.wait(20), run(*args))[1])
    batcher = make_batcher(max_queue_size=4, max_batch_size=2)

    async def crowd() -> None:
        first = [asyncio.ensure_future(batcher.call(random_inputs(i, 1, 2))) for i in range(2)]
        while not batcher.running:
            await asyncio.sleep(0.01)
        first.append(asyncio.ensure_future(batcher.call(random_inputs(2, 1, 2))))
        await asyncio.sleep(0.05)
        waited = batcher.waiting_rows
        with pytest.raises(QueueFull):
            await batcher.call(random_inputs(9, 4, 2))
        assert batcher.waiting_rows == waited
        go.set()
        await asyncio.gather(*first)

    asyncio.run(crowd())


def test_dropped_requests_are_told_at_once(bundle: Bundle, make_batcher):
    batcher = make_batcher(max_queue_delay_ms=10_000)

    async def end() -> None:
        call = asyncio.ensure_future(batcher.call(random_inputs(0, 1, 2)))
        await asyncio.sleep(0.05)
        await asyncio.get_running_loop().run_in_executor(None, lambda: batcher.close(drop=True))
        with pytest.raises(Unloaded):
            await call

    asyncio.run(end())


@pytest.mark.parametrize("sizes", [(0, 4), (4, 2), (4, 64)])
def test_sizes_that_no_batch_can_have_are_refused(sizes: tuple[int, ...]):
    with pytest.raises(ValueError, match="ascending sizes from 1 to max_batch_size = 32"):
        BatchingSettings(allowed_batch_sizes=sizes)


def block_batches(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Batches wait until the event is set."""
    go, run = threading.Event(), bundle.run_arrays
    monkeypatch.setattr(bundle, "run_arrays", lambda *args: (go.wait(20), run(*args))[1])
    return go


async def start_call(batcher: Batcher, inputs: dict[str, np.ndarray], **options: Any) -> "asyncio.Task[Any]":
    """A call that waits or runs."""
    call = asyncio.ensure_future(batcher.call(inputs, **options))
    await asyncio.sleep(0.02)
    return call


def test_a_higher_priority_is_computed_first_and_takes_the_place_of_a_lower_one(bundle: Bundle, make_batcher, monkeypatch):
    go = block_batches(bundle, monkeypatch)
    batcher = make_batcher(max_batch_size=1, max_queue_size=3, priority_levels=3, default_priority_level=2)
    order: list[str] = []

    async def crowd() -> Any:
        calls = {"running": await start_call(batcher, random_inputs(0, 1, 2))}
        for name, priority in (("late", 3), ("later", 3), ("usual", 0)):
            calls[name] = await start_call(batcher, random_inputs(1, 1, 2), priority=priority)
        with pytest.raises(QueueFull):
            await batcher.call(random_inputs(1, 1, 2), priority=3)
        calls["first"] = await start_call(batcher, random_inputs(1, 1, 2), priority=1)
        for name, call in calls.items():
            call.add_done_callback(lambda _, name=name: order.append(name))
        go.set()
        return await asyncio.gather(*calls.values(), return_exceptions=True)

    results = asyncio.run(crowd())
    assert [type(result).__name__ for result in results] == ["CallResult", "CallResult", "QueueFull", "CallResult", "CallResult"]
    order.remove("later")
    assert order == ["running", "first", "usual", "late"]


def test_a_request_that_loses_a_part_computes_nothing_more(bundle: Bundle, make_batcher, monkeypatch):
    """The last of its three parts gives way; the other two would be computed for nobody."""
    go, seen = block_batches(bundle, monkeypatch), []
    batcher = make_batcher(lambda _, calls, rows, __: seen.append(rows), max_batch_size=2, max_queue_size=6, priority_levels=2)

    async def crowd() -> None:
        running = await start_call(batcher, random_inputs(0, 1, 2))
        split = await start_call(batcher, random_inputs(1, 6, 2), priority=2)
        first = await start_call(batcher, random_inputs(2, 1, 2), priority=1)
        with pytest.raises(QueueFull):
            await asyncio.wait_for(split, 5)
        go.set()
        await asyncio.gather(running, first)

    asyncio.run(crowd())
    assert seen == [1, 1]


@pytest.mark.parametrize("levels, priority", [(0, 1), (2, 3), (2, -1)])
def test_a_priority_that_there_is_not_is_refused(bundle: Bundle, make_batcher, levels: int, priority: int):
    with pytest.raises(BadInput, match=f"priority is {priority}"):
        asyncio.run(make_batcher(priority_levels=levels).call(random_inputs(0, 1, 2), priority=priority))


def test_several_instances_compute_at_once(bundle: Bundle, make_batcher, monkeypatch):
    both, run = threading.Barrier(2, timeout=20), bundle.run_arrays
    monkeypatch.setattr(bundle, "run_arrays", lambda *args: (both.wait(), run(*args))[1])
    batcher = make_batcher(instances=2, max_batch_size=1)

    async def two() -> Any:
        return await asyncio.gather(*(batcher.call(random_inputs(i, 1, 2)) for i in range(2)))

    results = asyncio.run(two())
    monkeypatch.undo()
    for i, result in enumerate(results):
        np.testing.assert_allclose(result.outputs["sum"], bundle.run(random_inputs(i, 1, 2))["sum"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("policy, rows", [("pad_up", [5]), ("batch_down", [4, 1]), ("minimize_cost", [5])])
def test_a_batch_between_two_sizes_follows_the_policy(bundle: Bundle, make_batcher, monkeypatch, policy: str, rows: list[int]):
    go, seen = block_batches(bundle, monkeypatch), []
    batcher = make_batcher(lambda _, calls, rows, __: seen.append(rows), max_batch_size=8, batch_padding_policy=policy)

    async def crowd() -> None:
        calls = [await start_call(batcher, random_inputs(9, 1, 2))]
        calls += [await start_call(batcher, random_inputs(i, 1, 2)) for i in range(5)]
        go.set()
        await asyncio.gather(*calls)

    asyncio.run(crowd())
    assert seen == [1, *rows]


def test_the_first_call_is_in_every_batch(bundle: Bundle, make_batcher, monkeypatch):
    """A call above the size below would otherwise wait as long as smaller ones arrive."""
    go, order = block_batches(bundle, monkeypatch), []
    batcher = make_batcher(max_batch_size=8, batch_padding_policy="batch_down")

    async def crowd() -> None:
        calls = [await start_call(batcher, random_inputs(9, 1, 2))]
        for rows in (5, 1, 1):
            calls.append(await start_call(batcher, random_inputs(rows, rows, 2)))
            calls[-1].add_done_callback(lambda _, rows=rows: order.append(rows))
        go.set()
        await asyncio.gather(*calls)

    asyncio.run(crowd())
    assert order[0] == 5


def test_a_size_that_was_compiled_once_is_not_avoided(bundle: Bundle, make_batcher, monkeypatch):
    """The first batch of a size may wait for the compiler; its time says nothing of the next."""
    run, warm_sizes, seen = bundle.run_arrays, set(), []
    gate = threading.Event()

    def slow(arrays: Any, *more: Any) -> Any:
        gate.wait(20)
        rows = len(arrays["x"])
        time.sleep(0.4 if rows == 8 and rows not in warm_sizes else 0.01)
        warm_sizes.add(rows)
        return run(arrays, *more)

    monkeypatch.setattr(bundle, "run_arrays", slow)
    batcher = make_batcher(lambda _, calls, rows, __: seen.append(rows), max_batch_size=8)

    async def crowd(rows: int) -> None:
        gate.clear()
        calls = [await start_call(batcher, random_inputs(9, 1, 2))]
        calls += [await start_call(batcher, random_inputs(i, 1, 2)) for i in range(rows)]
        gate.set()
        await asyncio.gather(*calls)

    for rows in (4, 4, 8, 5):
        asyncio.run(crowd(rows))
    assert seen == [1, 4, 1, 4, 1, 8, 1, 5]


def test_a_batch_that_would_cost_more_padded_goes_in_two(bundle: Bundle, make_batcher, monkeypatch):
    """Eight rows take long, so five go as four and one."""
    run, seen = bundle.run_arrays, []
    gate = threading.Event()

    def slow(arrays: Any, *more: Any) -> Any:
        gate.wait(20)
        time.sleep(0.2 if len(arrays["x"]) == 8 else 0.01)
        return run(arrays, *more)

    monkeypatch.setattr(bundle, "run_arrays", slow)
    batcher = make_batcher(lambda _, calls, rows, __: seen.append(rows), max_batch_size=8)

    async def crowd(rows: int) -> None:
        gate.clear()
        calls = [await start_call(batcher, random_inputs(9, 1, 2))]
        calls += [await start_call(batcher, random_inputs(i, 1, 2)) for i in range(rows)]
        gate.set()
        await asyncio.gather(*calls)

    for rows in (8, 8, 4, 4, 5):
        asyncio.run(crowd(rows))
    assert seen == [1, 8, 1, 8, 1, 4, 1, 4, 1, 4, 1]


def test_programs_are_compiled_in_every_size_and_found_again(bundle: Bundle, make_batcher, tmp_path: Path):
    rows = bundle.manifest.signature().model_copy(update={"limits": {"length": 20}, "padding": ["batch", "length"]})
    padded = Bundle.open(bundle.path)
    padded.manifest = padded.manifest.model_copy(update={"signatures": {"call": rows}})
    store = ProgramStore(tmp_path / "programs", "this machine")
    store.folder.mkdir()
    for _ in range(2):
        batcher = Batcher(padded, BatchingSettings(max_batch_size=3))
        try:
            # 1, 2 and 3 rows; lengths of 16 and 20.
            assert batcher.warm_up(store) == 6
            inputs = random_inputs(3, 2, 17)
            np.testing.assert_allclose(
                asyncio.run(batcher.call(inputs)).outputs["sum"], bundle.run(inputs)["sum"], rtol=1e-5, atol=1e-5
            )
        finally:
            batcher.close()
        assert len(list(store.folder.iterdir())) == 6
        padded.close()


def sequences(limit: int) -> BundleSignature:
    """A signature of rows of tokens."""
    tokens = TensorSignature(name="tokens", shape=["batch", "length"], dtype="int32")
    vector = TensorSignature(name="vector", shape=["batch", 4], dtype="float32")
    about: dict[str, Any] = {"programs": [], "weights": [], "padding": ["batch", "length"], "limits": {"length": limit}}
    return BundleSignature(inputs=[tokens], outputs=[vector], **about)


def test_long_rows_make_small_batches():
    plan = BatchPlan.of(sequences(8192), BatchingSettings(max_batch_size=32, max_batch_tokens=4096))
    assert plan.padded([{"batch": 3, "length": 20}]) == {"batch": 4, "length": 20}
    lengths = [1, 17, 21, 25, 29, 33, 49, 65, 8192]
    padded = [plan.padded([{"batch": 1, "length": length}])["length"] for length in lengths]
    assert padded == [16, 20, 24, 28, 32, 48, 64, 96, 8192]
    assert [plan.rows_at({"batch": 1, "length": length}) for length in (20, 128, 129, 2048, 4097)] == [32, 32, 21, 2, 1]
    combinations = plan.combinations()
    assert combinations is not None
    tokens = [sizes["batch"] * sizes["length"] for sizes in combinations]
    assert tokens == sorted(tokens)
    # A batch of 21 rows of 192 tokens is filled up to 32.
    assert {"batch": 32, "length": 192} in combinations
    assert {"batch": 1, "length": 8192} in combinations
    assert {"batch": 2, "length": 8192} not in combinations


def test_long_requests_are_split_by_their_tokens(bundle: Bundle, make_batcher):
    plan = bundle.manifest.signature().model_copy(update={"limits": {"length": 64}, "padding": ["batch", "length"]})
    long = Bundle.open(bundle.path)
    long.manifest = long.manifest.model_copy(update={"signatures": {"call": plan}})
    seen: list[int] = []
    batcher = Batcher(long, BatchingSettings(max_batch_tokens=96), lambda _, calls, rows, __: seen.append(rows))
    try:
        inputs = random_inputs(3, 7, 40)
        result = asyncio.run(batcher.call(inputs))
        np.testing.assert_allclose(result.outputs["sum"], bundle.run(inputs)["sum"], rtol=1e-5, atol=1e-4)
        assert seen == [2, 2, 2, 1]
    finally:
        batcher.close()
