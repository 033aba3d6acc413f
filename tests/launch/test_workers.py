"""Groups of workers on this machine, real processes, and the same calls over devices of this process."""

import gc
import itertools
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from launch import worker_functions as functions

from argosy.core.errors import BadInput, UnknownName, Unsupported
from argosy.launch.workers import Group, Ref, WorkerError, WorkerLost, Workers, here, open_workers
from argosy.launch.workers.engines.inline import Inline
from argosy.launch.workers.gang import WorkerGang

HERE = "launch.worker_functions"
GROUPS = {
    "pair": Group(processes=2, devices=2, mesh={"x": 2, "y": -1}, start=(functions.start, 7)),
    "one": Group(devices=3, mesh={"z": 3}),
}


@pytest.fixture(scope="module")
def local() -> Iterator[Workers]:
    with open_workers(GROUPS) as workers:
        yield workers


@pytest.fixture(scope="module", params=["local", "inline"])
def workers(request: pytest.FixtureRequest) -> Iterator[Workers]:
    if request.param == "local":
        yield request.getfixturevalue("local")
        return
    with open_workers(GROUPS, engine="inline") as workers:
        yield workers


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def same(first: Any, other: Any) -> None:
    flat, right = jax.tree_util.tree_flatten_with_path(first), jax.tree_util.tree_flatten_with_path(other)
    assert flat[1] == right[1]
    for (path, a), (_, b) in zip(flat[0], right[0]):
        assert np.asarray(a).dtype == np.asarray(b).dtype, path
        assert np.array_equal(np.asarray(a), np.asarray(b)), path


def expected() -> dict[str, Any]:
    return {
        "rows": {dtype: functions.numbers((4, 6), dtype, seed) for seed, dtype in enumerate(functions.DTYPES)},
        "own": {"numpy": np.arange(5, dtype=np.float32), "mine": np.arange(3, dtype=np.int32)},
        "odd": {
            "empty": np.zeros((0, 4), np.float32), "scalar": functions.numbers(()),
            "plain": (3, "words", None, 2.5, True, np.float32(1.5)),
        },
    }  # fmt: skip


def test_what_is_returned_stays_and_comes_when_asked(workers: Workers):
    state = workers["pair"].run(functions.everything)
    same(state.value(), expected())
    total = workers["pair"].run(f"{HERE}:product", workers["pair"].run(f"{HERE}:spread", (8, 3), ("x", "y")[:1]), by=3)
    assert total.value() == 3 * functions.numbers((8, 3)).sum()
    more = np.float32(2)
    assert workers["pair"].run(functions.add, total, more).value() == total.value() + 2


def test_every_kind_of_array_moves_with_each_byte_once(workers: Workers):
    state = workers["pair"].run(functions.everything)
    there = workers.move(state, to="one")
    same(there.value(), expected())
    full = sum(np.asarray(array).nbytes for key in ("rows", "own") for array in jax.tree.leaves(expected()[key])) + 4
    assert there.bytes_moved == full
    back = workers.move(there, to="pair", sharding={"rows": P("y"), "own": None, "odd": None})
    same(back.value(), expected())
    rows = sum(array.nbytes for array in jax.tree.leaves(expected()["rows"]))
    # Rows are shared by the processes as the mesh is: each has both halves along y. Inline there is one process.
    processes = 2 if workers["pair"].pids else 1
    assert back.bytes_moved == processes * full
    assert workers.move(there, to="pair", sharding={"rows": P("x"), "own": None, "odd": None}).bytes_moved == (
        rows + processes * (full - rows)
    )


AXES = {"pair": [None, "x", "y", ("x", "y"), ("y", "x")], "one": [None, "z"]}


@pytest.mark.parametrize("seed", range(3))
def test_any_sharding_to_any_other(workers: Workers, seed: int):
    """Every shard has the numbers that jax says belong there."""
    rng = np.random.default_rng(seed)
    for source, target in itertools.product(AXES, AXES):
        shape = tuple(int(12 * rng.integers(1, 3)) for _ in range(rng.integers(1, 4)))
        dtype = str(rng.choice(functions.DTYPES))

        def draw_sharding(group: str, rank: int = len(shape)) -> tuple[Any, ...]:
            out = [None] * rank
            if (axis := AXES[group][rng.integers(len(AXES[group]))]) is not None:
                out[rng.integers(rank)] = axis
            return tuple(out)

        start, end = draw_sharding(source), draw_sharding(target)
        reference = workers[source].run(functions.spread, shape, start, dtype, seed)
        moved_ref = workers.move(reference, to=target, sharding=P(*end))
        differing = workers[target].run(functions.differences, moved_ref, shape, end, dtype, seed)
        assert differing.values() == [[]] * len(differing.values()), (source, start, target, end)
        same(moved_ref.value(), functions.numbers(shape, dtype, seed))


def test_the_controller_sends_arrays_of_its_own(workers: Workers):
    """Whole ones, and those that lie over its devices; what was sent is offered no more, and may change."""
    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4], axis_types=(jax.sharding.AxisType.Auto,))
    spread = jax.device_put(functions.numbers((8, 6)), NamedSharding(mesh, P("x")))
    value = expected() | {"spread": spread}
    mine = value["own"]["numpy"]
    there = workers.send(value, to="one").wait()
    back = workers.send(spread, to="pair", sharding=P("x", "y"))
    assert workers["pair"].run(functions.differences, back, (8, 6), ("x", "y"), "float32").values()[0] == []
    mine += 100
    same(there.value(), expected() | {"spread": functions.numbers((8, 6))})
    assert workers._offers is None or not workers._offers._offered
    with pytest.raises(BadInput, match=r"what is sent\['a'\] is a object, neither an array nor a plain value"):
        workers.send({"a": object()}, to="one")
    with pytest.raises(BadInput, match="cannot be sharded"):
        workers.send(spread, to="pair", sharding=P(None, ("x", "y"))).wait()
    assert workers._offers is None or not workers._offers._offered


def test_a_later_call_may_reuse_the_memory_of_what_is_moved(workers: Workers, monkeypatch: pytest.MonkeyPatch):
    """Also where the move has not begun when it is asked for."""
    for kind in (WorkerGang, Inline):

        def slowly(self: Any, *arguments: Any, pull: Any = kind.pull) -> int:
            time.sleep(0.3)
            return pull(self, *arguments)

        monkeypatch.setattr(kind, "pull", slowly)
    state = workers["pair"].run(functions.spread, (512, 1024), ("x",))
    moved_ref = workers.move(state, to="one")
    new = workers["pair"].run(functions.add_donated, state)
    same(moved_ref.value(), functions.numbers((512, 1024)))
    same(new.value(), functions.numbers((512, 1024)) + 1)
    again = workers.move(new, to="pair", sharding=P("y"))
    workers["pair"].run(functions.add_donated, new).wait()
    same(again.value(), functions.numbers((512, 1024)) + 1)


def test_functions_know_where_they_are(local: Workers):
    places = local["pair"].run(functions.where).values()
    assert places == [("pair", rank, 2, {"x": 2, "y": 2}, local["pair"].pids[rank]) for rank in (0, 1)]
    assert local["one"].run(functions.where).value()[:4] == ("one", 0, 1, {"z": 3})
    with pytest.raises(BadInput, match="this process is no worker"):
        here()
    started = local["pair"].started
    assert started is not None
    assert started.value() == {"number": 7, "starts": 1}


def test_objects_stay_in_workers_and_their_methods_are_called(workers: Workers):
    thing = workers["pair"].run(functions.Thing)
    workers["pair"].run(f"{HERE}:Thing.ask", thing, 2)
    assert workers["pair"].run(functions.Thing.ask, thing, 3).value() == 5
    with pytest.raises(BadInput, match=r"the result is a Thing, neither an array nor a plain value"):
        thing.value()
    with pytest.raises(BadInput, match="Thing"):
        workers.move(thing, to="one").wait()


def test_what_is_freed_is_gone_in_the_workers(workers: Workers):
    gc.collect()
    group = workers["one"]
    # Inline both groups have the same things.
    workers["pair"].run(functions.rank).wait()

    def count() -> int:
        return group.run(functions.things).value()

    before = count()
    thing, other = group.run(functions.Thing), group.run(functions.Thing)
    answer = group.run(functions.Thing.ask, thing, 1)
    assert count() == before + 2
    thing.free()
    assert count() == before + 1
    assert answer.value() == 1
    with pytest.raises(BadInput, match="was freed"):
        thing.value()
    with pytest.raises(BadInput, match="was freed"):
        group.run(functions.Thing.ask, thing, 1).wait()
    # The last reference is enough, after what was asked with it.
    last = group.run(functions.Thing.ask, other, 4)
    del other
    assert last.value() == 4
    assert count() == before


def test_moved_arrays_are_freed(local: Workers):
    gc.collect()
    state = local["pair"].run(functions.spread, (64, 64), ("x",))
    before = local["one"].run(functions.arrays).value()
    references = [local.move(state, to="one").wait() for _ in range(5)]
    assert local["one"].run(functions.arrays).value() >= before + 5
    del references
    assert local["one"].run(functions.arrays).value() == before


def test_groups_work_at_the_same_time_and_one_group_in_order(workers: Workers, tmp_path: Path):
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    left_ref, right = workers["pair"].run(functions.meet, a, b), workers["one"].run(functions.meet, b, a)
    later = workers["one"].run(functions.meet, b, b)
    assert not later.done() or left_ref.done()
    assert left_ref.value() is right.value() is later.value() is True
    moves = [workers.move(ref, to) for ref, to in [(left_ref, "one"), (right, "pair")] * 5]
    assert all(ref.value() is True for ref in moves)


def test_what_a_function_raises_comes_with_its_traceback(workers: Workers):
    ref = workers["pair"].run(functions.fails)
    with pytest.raises(WorkerError, match="ValueError: no") as caught:
        ref.wait()
    assert caught.value.group == "pair"
    assert 'raise ValueError(f"no\\nway' in str(caught.value)
    assert "in process" in str(caught.value)
    with pytest.raises(WorkerError, match="ValueError: no"):
        workers["pair"].run(functions.add, ref, 1).wait()
    with pytest.raises(WorkerError, match="ValueError: no"):
        workers.move(ref, to="one").wait()
    assert workers["pair"].run(functions.rank).values()[0] == 0


def test_an_error_that_nobody_waits_for_is_said(workers: Workers, capsys: pytest.CaptureFixture[str]):
    workers["one"].run(functions.fails)
    assert workers["one"].run(functions.rank).value() == 0
    stderr = capsys.readouterr().err
    assert "launch.worker_functions:fails failed in the group `one`, and nothing waits for it: error: ValueError: no" in stderr


def test_processes_that_differ(local: Workers):
    ranks = local["pair"].run(functions.rank)
    assert ranks.values() == [0, 1]
    with pytest.raises(BadInput, match="process 1 of the group `pair` returned differs"):
        ranks.value()
    arrays = local["pair"].run(np.full, 3, ranks)
    with pytest.raises(BadInput, match="the result of process 1 of the group `pair` is another than that of process 0") as caught:
        local.move(arrays, to="one").wait()
    assert "Ref.values() brings" in str(caught.value)
    same(arrays.values(), [np.full(3, 0), np.full(3, 1)])
    with pytest.raises(BadInput, match="is an array of all processes"):
        local["pair"].run(functions.spread, (4,), ("x",)).values()
    with pytest.raises(WorkerError, match="no"):
        local["pair"].run(functions.fails, (1,)).wait()


def mistakes(workers: Workers, ref: Ref) -> list[tuple[Any, str]]:
    pair = workers["pair"]
    return [
        (lambda: workers["pear"], "unknown group `pear`"),
        (lambda: workers.move(ref, to="pear"), "unknown group `pear`"),
        (lambda: pair.run("mine"), "`mine` names no function"),
        (lambda: pair.run(lambda: 1), "cannot be imported by that name"),
        (lambda: pair.run(3), "3 is no function with a name"),
        (lambda: pair.run("no_such.module:f").wait(), "there is no module no_such"),
        (lambda: pair.run(f"{HERE}:nothing").wait(), "worker_functions has no nothing"),
        (lambda: pair.run(f"{HERE}:DTYPES").wait(), "is a list, not a function"),
        (lambda: pair.run(functions.add, ref, 1), 'is an argument in the group `pair`'),
        (lambda: pair.run(functions.add, object(), 1), r"the arguments\[0\]\[0\] is a object, neither an array"),
        (lambda: pair.run(functions.add, np.array(["a"]), 1), "is an array of <U1, not of numbers"),
        (lambda: pair.run(functions.add, jax.random.key(0), 1), "jax.random.key_data"),
        (lambda: workers.move(ref, to="pair", sharding=P("w")).wait(), r"cannot be sharded as .*'w'"),
        (lambda: workers.move(ref, to="pair", sharding=P("x")).wait(), r"the result \(3, 5\) cannot be sharded as .*'x'"),
        (lambda: workers.move(ref, to="pair", sharding=(None, None)).wait(), "sharding= does not fit what is moved"),
        (lambda: workers.move(workers["one"].run(np.full, 3, 2.5), to="pair").wait(), "is float64, which would become float32"),
        (lambda: workers.move(ref, to="pair", sharding="x").wait(), "sharding= has a str for the result"),
    ]  # fmt: skip


def test_mistakes_are_said(workers: Workers):
    ref = workers["one"].run(functions.spread, (3, 5), ())
    for do, message in mistakes(workers, ref):
        with pytest.raises((BadInput, UnknownName)) as caught:
            do()
        assert caught.match(message) if "`" not in message else message in str(caught.value) or caught.match(message)
    assert ref.value().shape == (3, 5)


@pytest.mark.parametrize(
    "groups, engine, message",
    [
        ({}, "local", "there are no groups"),
        ({"a": Group()}, "locl", "engine='locl'"),
        ({"a b": Group()}, "local", "`a b` is no name"),
        ({"a": Group(processes=0)}, "local", "processes=0"),
        ({"a": Group(devices=4, mesh={"x": 3})}, "local", "a mesh of x=3 over 4 devices"),
        ({"a": Group(devices=4, mesh={"x": -1, "y": -1})}, "local", "a mesh of x=-1, y=-1"),
        ({"a": Group(stuck=0)}, "local", "stuck=0"),
        ({"a": Group(start=lambda: 1)}, "local", "cannot be imported"),
        ({"a": Group(gpus=True, devices=999)}, "local", "the groups want 999 GPUs"),
        ({"a": Group(devices=5), "b": Group(devices=4)}, "inline", "want 9 devices, and this process has 8"),
    ],
)
def test_groups_that_cannot_be(groups: dict[str, Group], engine: str, message: str):
    with pytest.raises(BadInput, match=message), open_workers(groups, engine=engine):
        pass


def test_inline_refuses_what_needs_processes():
    with pytest.raises(BadInput, match="engine=inline takes no logs="), open_workers({"a": Group()}, engine="inline", logs="x"):
        pass
    with pytest.raises(BadInput, match="engine=local takes no address="), open_workers({"a": Group()}, address="auto"):
        pass
    for group in (Group(stuck=3), Group(restarts=1), Group(environment={"A": "b"})):
        with pytest.raises(Unsupported, match="engine=inline has no"), open_workers({"a": group}, engine="inline"):
            pass


def test_a_death_is_told_others_live_on_and_the_group_comes_back(local: Workers):
    kept_ref, copy = local["pair"].run(functions.spread, (4,), ("x",)), local["one"].run(functions.rank)
    kept_ref.wait()
    pids, begun = local["pair"].pids, time.monotonic()
    pending, queued = local["pair"].run(functions.sleep, 60.0), local["pair"].run(functions.rank)
    time.sleep(0.2)
    os.kill(pids[1], signal.SIGKILL)
    for ref in (pending, queued):
        with pytest.raises(WorkerLost, match="process 1 of the group `pair` ended by SIGKILL") as caught:
            ref.wait(20)
        assert (caught.value.group, caught.value.rank, caught.value.code) == ("pair", 1, -signal.SIGKILL)
    assert time.monotonic() - begun < 10
    with pytest.raises(WorkerLost):
        local.move(kept_ref, to="one").wait(20)
    with pytest.raises(WorkerLost):
        local.move(copy, to="pair").wait(20)
    assert copy.value() == 0
    local["pair"].restart()
    assert not any(is_alive(pid) for pid in pids)
    for do in (
        kept_ref.value,
        lambda: local.move(kept_ref, to="one").wait(20),
        lambda: local["pair"].run(functions.add, kept_ref, 1).wait(20),
    ):
        with pytest.raises(WorkerLost, match="process 1 of the group `pair` ended by SIGKILL"):
            do()
    started = local["pair"].started
    assert started is not None
    assert started.value() == {"number": 7, "starts": 1}
    assert local.move(copy, to="pair").value() == 0
