"""Requests in one batch: each gets what it would get alone, whatever its neighbors ask for."""

import asyncio
import threading
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
from argosy.predict.batching import Batcher, QueueFull, Unloaded, batch_axis
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
    found = Bundle.open(path)
    # Rows do not change one another's results: what `batch=` says where no other axis is open.
    call = found.manifest.signature().model_copy(update={"padding": ["batch"]})
    found.manifest = found.manifest.model_copy(update={"signatures": {"call": call}})
    return found


def drawn(seed: int, rows: int, length: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    return {
        "x": draw.normal(size=(rows, length, 4)).astype(np.float32),
        "scale": draw.normal(size=(rows, 3)).astype(np.float32),
    }


@pytest.fixture
def batched(bundle: Bundle) -> Iterator[Callable[..., Batcher]]:
    """Makes batchers, and ends them."""
    made: list[Batcher] = []

    def make(seen: Any = lambda *_: None, **how: Any) -> Batcher:
        made.append(Batcher(bundle, BatchingSettings(**how), seen))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_each_gets_what_it_would_get_alone(bundle: Bundle, batched):
    """Lengths that differ are computed apart unless the signature says that they may be filled up."""
    seen: list[tuple[int, int]] = []
    batcher = batched(lambda _, calls, rows, __: seen.append((calls, rows)), max_queue_delay_ms=200, max_batch_size=8)
    asked = [drawn(i, 1 + i % 3, 2 + i % 2) for i in range(8)]

    async def all_at_once() -> list[Any]:
        return await asyncio.gather(*(batcher.call(one) for one in asked))

    for one, result in zip(asked, asyncio.run(all_at_once()), strict=True):
        alone = bundle.run(one)
        assert result.outputs.keys() == alone.keys() == {"sum", "rows"}
        for name, value in alone.items():
            np.testing.assert_allclose(result.outputs[name], value, rtol=1e-5, atol=1e-5)
    assert sum(rows for _, rows in seen) == sum(len(one["scale"]) for one in asked)
    assert len(seen) < len(asked)
    assert max(rows for _, rows in seen) <= 8


def test_more_rows_than_a_batch_are_split_and_joined(bundle: Bundle, batched):
    seen: list[int] = []
    one = drawn(0, 7, 2)
    found = asyncio.run(batched(lambda _, calls, rows, __: seen.append(rows), max_batch_size=3).call(one))
    np.testing.assert_allclose(found.outputs["sum"], bundle.run(one)["sum"], rtol=1e-5, atol=1e-5)
    assert sum(seen) == 7
    assert max(seen) <= 3


def test_bad_input_is_refused_and_disturbs_nobody(bundle: Bundle, batched):
    batcher, good = batched(max_queue_delay_ms=50), drawn(1, 2, 2)
    wrong: list[dict[str, Any]] = [
        {"x": good["x"]},
        {**good, "y": good["x"]},
        {**good, "x": good["x"].astype(np.float64)},
        {**good, "x": good["x"][:1]},
        {**good, "scale": good["scale"][:, :2]},
    ]

    async def both() -> Any:
        return await asyncio.gather(batcher.call(good), *(batcher.call(one) for one in wrong), return_exceptions=True)

    found, *errors = asyncio.run(both())
    np.testing.assert_allclose(found.outputs["sum"], bundle.run(good)["sum"], rtol=1e-5, atol=1e-5)
    assert [type(error) for error in errors] == [BadInput] * len(wrong)


def test_a_full_queue_refuses_and_a_cancelled_request_gives_its_place_back(bundle: Bundle, batched, monkeypatch):
    go, run = threading.Event(), bundle.run_arrays
    monkeypatch.setattr(bundle, "run_arrays", lambda *args: (go.wait(20), run(*args))[1])
    batcher = batched(max_queue_size=3, max_batch_size=1)

    async def crowd() -> None:
        running = asyncio.ensure_future(batcher.call(drawn(0, 1, 2)))
        while not batcher.running:
            await asyncio.sleep(0.01)
        waiting = [asyncio.ensure_future(batcher.call(drawn(i, 1, 2))) for i in range(1, 4)]
        await asyncio.sleep(0.05)
        with pytest.raises(QueueFull):
            await batcher.call(drawn(9, 1, 2))
        waiting[0].cancel()
        await asyncio.sleep(0.05)
        last = asyncio.ensure_future(batcher.call(drawn(9, 1, 2)))
        await asyncio.sleep(0.05)
        go.set()
        found = await asyncio.gather(running, *waiting[1:], last)
        assert len(found) == 4
        assert batcher.waiting_rows == 0
        assert waiting[0].cancelled()

    asyncio.run(crowd())


def test_what_waits_is_computed_before_a_version_ends_and_nothing_after(bundle: Bundle, batched):
    batcher = batched(max_queue_delay_ms=10_000)

    async def end() -> None:
        call = asyncio.ensure_future(batcher.call(drawn(0, 1, 2)))
        await asyncio.sleep(0.05)
        await asyncio.get_running_loop().run_in_executor(None, batcher.close)
        assert len((await call).outputs["sum"]) == 1
        with pytest.raises(Unloaded):
            await batcher.call(drawn(0, 1, 2))

    asyncio.run(end())


def test_an_error_of_the_program_reaches_its_callers_and_the_next_batch_runs(bundle: Bundle, batched, monkeypatch):
    batcher, run = batched(), bundle.run_arrays
    calls = []

    def fails_once(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 1:
            raise RuntimeError("no memory")
        return run(*args)

    monkeypatch.setattr(bundle, "run_arrays", fails_once)
    with pytest.raises(RuntimeError, match="no memory"):
        asyncio.run(batcher.call(drawn(0, 1, 2)))
    assert len(asyncio.run(batcher.call(drawn(0, 1, 2))).outputs["sum"]) == 1


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
    asked = [drawn(i, 3, 1)["scale"] for i in range(4)]

    async def all_at_once() -> list[Any]:
        return await asyncio.gather(*(batcher.call({"x": one}) for one in asked))

    try:
        for one, result in zip(asked, asyncio.run(all_at_once()), strict=True):
            np.testing.assert_allclose(result.outputs["y"], one - one.mean(0), atol=1e-6)
    finally:
        batcher.close()


def test_a_request_that_is_split_is_queued_whole_or_not_at_all(bundle: Bundle, batched, monkeypatch):
    go, run = threading.Event(), bundle.run_arrays
    monkeypatch.setattr(bundle, "run_arrays", lambda *args: (go.wait(20), run(*args))[1])
    batcher = batched(max_queue_size=4, max_batch_size=2)

    async def crowd() -> None:
        first = [asyncio.ensure_future(batcher.call(drawn(i, 1, 2))) for i in range(2)]
        while not batcher.running:
            await asyncio.sleep(0.01)
        first.append(asyncio.ensure_future(batcher.call(drawn(2, 1, 2))))
        await asyncio.sleep(0.05)
        waited = batcher.waiting_rows
        with pytest.raises(QueueFull):
            await batcher.call(drawn(9, 4, 2))
        assert batcher.waiting_rows == waited
        go.set()
        await asyncio.gather(*first)

    asyncio.run(crowd())


def test_dropped_requests_are_told_at_once(bundle: Bundle, batched):
    batcher = batched(max_queue_delay_ms=10_000)

    async def end() -> None:
        call = asyncio.ensure_future(batcher.call(drawn(0, 1, 2)))
        await asyncio.sleep(0.05)
        await asyncio.get_running_loop().run_in_executor(None, lambda: batcher.close(drop=True))
        with pytest.raises(Unloaded):
            await call

    asyncio.run(end())


@pytest.mark.parametrize("sizes", [(0, 4), (4, 2), (4, 64)])
def test_sizes_that_no_batch_can_have_are_refused(sizes: tuple[int, ...]):
    with pytest.raises(ValueError, match="ascending sizes from 1 to max_batch_size = 32"):
        BatchingSettings(allowed_batch_sizes=sizes)
