"""Copies of a state: what they hold, which memory they take, and when that memory is used again."""

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from argosy.checkpoint.checkpoints import Checkpoints
from argosy.checkpoint.saving import memory as copies
from argosy.checkpoint.saving.memory import HostMemory
from argosy.checkpoint.step import files, shards
from argosy.checkpoint.step.layout import STATE, WEIGHTS
from argosy.checkpoint.step.load import load_weights
from argosy.checkpoint.tiers.local import LocalCheckpoints
from argosy.checkpoint.tiers.tiered import TieredCheckpoints

MIB = 1 << 20
TIERS = {"persistent": Checkpoints, "local": LocalCheckpoints}


def state(seed: int, types: Any = (jnp.float32, jnp.bfloat16, jnp.int8)) -> dict[str, jax.Array]:
    """Arrays of at least 1 MiB and a small one, of these types, laid out over two devices."""
    two = NamedSharding(Mesh(np.array(jax.devices()[:2]), "a"), P("a"))
    draw = np.random.default_rng(seed)
    large = {f"w{i}": jnp.asarray(draw.integers(-100, 100, (4, MIB)), dtype) for i, dtype in enumerate(types)}
    return {n: jax.device_put(a, two) for n, a in large.items()} | {"small": jnp.asarray(draw.standard_normal(3))}


def is_saved(folder: Path, weights: dict[str, jax.Array]) -> bool:
    loaded = load_weights(folder)
    return all(loaded[n].dtype == a.dtype and np.array_equal(loaded[n], a) for n, a in weights.items())


def addresses(memory: HostMemory) -> list[int]:
    return sorted(block.ctypes.data for free in memory._free.values() for block in free)


@pytest.mark.parametrize("tier", TIERS)
def test_the_second_save_copies_into_the_memory_of_the_first(tmp_path: Path, tier: str):
    memory = HostMemory()
    saves: Any = TIERS[tier](tmp_path, memory=memory)
    saved = {1: state(1), 2: state(2)}
    for step, weights in saved.items():
        saves.save(step, weights, {"step": jnp.asarray(step)}, {})
        reused = addresses(memory)
        saves.join()
        assert saves._failure is None
        if step == 1:
            first = addresses(memory)
            assert reused == []
            assert len(first) == 3, "whole arrays, which two devices share"
        else:
            assert addresses(memory) == first
    folders = tmp_path / "0" if tier == "local" else tmp_path
    for step, weights in saved.items():
        assert is_saved(folders / str(step), weights)


def test_memory_is_not_used_again_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Two tiers share the memory, and one saves while the other still writes."""
    memory, may_go_on, real = HostMemory(), threading.Event(), files.write_files
    tiers = TieredCheckpoints(Checkpoints(tmp_path / "far", memory=memory), LocalCheckpoints(tmp_path / "near", memory=memory))

    def slow_write(folder: Path, arrays: Any, pace: Any) -> Any:
        assert may_go_on.wait(60)
        return real(folder, arrays, pace)

    tiers.save(1, state(1), {}, {})
    tiers.join()
    monkeypatch.setattr(files, "write_files", slow_write)
    tiers.save_local(2, state(2), {}, {})
    tiers.save(3, state(3), {}, {})
    may_go_on.set()
    tiers.join()
    for folder, seed in ((tmp_path / "near" / "0" / "2", 2), (tmp_path / "far" / "3", 3)):
        assert is_saved(folder, state(seed))


@pytest.mark.parametrize("tier", TIERS)
def test_a_step_that_overwrites_the_state_changes_nothing_of_what_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tier: str
):
    """The loop donates the state to the next step, which computes in its memory while the save is written."""
    may_go_on, real = threading.Event(), files.write_files

    def slow_write(folder: Path, arrays: Any, pace: Any) -> Any:
        assert may_go_on.wait(60)
        return real(folder, arrays, pace)

    monkeypatch.setattr(files, "write_files", slow_write)
    saves: Any = TIERS[tier](tmp_path)
    weights = state(1) | {"alone": jax.device_put(jnp.arange(float(MIB)), jax.devices()[0])}
    addresses = [shard.data.unsafe_buffer_pointer() for shard in weights["w0"].addressable_shards]
    alone_array = weights.pop("alone")
    alone = alone_array.unsafe_buffer_pointer()
    saves.save(1, weights | {"alone": alone_array}, {}, {})
    step = jax.jit(lambda state: jax.tree.map(lambda a: a + jnp.ones((), a.dtype), state), donate_argnums=0)
    after, one_after = step(weights), jax.block_until_ready(step(alone_array))
    assert [shard.data.unsafe_buffer_pointer() for shard in after["w0"].addressable_shards] == addresses, "in place"
    # Beside a view of it, jax would compute elsewhere, and take memory for another state.
    assert one_after.unsafe_buffer_pointer() == alone
    may_go_on.set()
    saves.join()
    saved = tmp_path / "0" / "1" if tier == "local" else tmp_path / "1"
    assert is_saved(saved, state(1) | {"alone": jnp.arange(float(MIB))})


def test_a_save_that_fails_keeps_nothing_and_the_next_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    messages: list[str] = []
    saves = Checkpoints(tmp_path, warn=messages.append)
    with monkeypatch.context() as broken:
        broken.setattr(files, "write_files", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        saves.save(1, state(1), {}, {})
        saves.join()
    assert addresses(saves.memory) == []
    saves.save(2, state(2), {}, {})
    saves.wait()
    assert len(addresses(saves.memory)) == 3
    assert "No space left" in messages[0]


def test_where_the_machine_has_no_room_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    free = 10 * MIB
    monkeypatch.setattr(copies, "memory_bytes", lambda: (1 << 40, free))
    saves = Checkpoints(tmp_path)
    saves.reserve(state(1), {}).join()
    saves.save(1, state(1), {}, {})
    saves.wait()
    assert addresses(saves.memory) == [], "28 MiB were copied, and 10 are free"
    assert is_saved(tmp_path / "1", state(1))
    free = 60 * MIB
    saves.save(2, state(2), {}, {})
    saves.wait()
    assert len(addresses(saves.memory)) == 3


@pytest.mark.parametrize("tier", TIERS)
def test_what_is_reserved_is_what_the_first_save_takes(tmp_path: Path, tier: str):
    saves: Any = TIERS[tier](tmp_path)
    saves.reserve(state(1), {"step": jnp.asarray(1)}).join()
    reserved = addresses(saves.memory)
    assert reserved
    saves.save(1, state(1), {"step": jnp.asarray(1)}, {})
    assert addresses(saves.memory) == []
    saves.join()
    assert addresses(saves.memory) == reserved


def test_tiers_reserve_once_what_both_copy(tmp_path: Path):
    memory = HostMemory()
    tiers = TieredCheckpoints(Checkpoints(tmp_path / "far", memory=memory), LocalCheckpoints(tmp_path / "near", memory=memory))
    small_state = {name: jax.device_put(a, jax.devices()[0]) for name, a in state(1).items()}
    tiers.reserve(small_state, {}).join()
    assert len(addresses(memory)) == 3


def test_reserving_stops_where_another_state_would_no_longer_fit(monkeypatch: pytest.MonkeyPatch):
    # As other processes take theirs: room for the first block, then for none.
    free_bytes = iter([100 * MIB, 100 * MIB, 20 * MIB])
    monkeypatch.setattr(copies, "memory_bytes", lambda: (1 << 40, next(free_bytes)))
    memory = HostMemory()
    memory.reserve(Counter({8 * MIB: 3, 100: 5})).join()
    assert len(addresses(memory)) == 1


def test_a_save_that_comes_first_ends_the_reserving(monkeypatch: pytest.MonkeyPatch):
    """It takes what it lacks itself, and gives that back: with what came later, two states would be kept."""
    memory, requested, may_go_on = HostMemory(), threading.Event(), threading.Event()

    def room() -> tuple[int, int]:
        requested.set()
        assert may_go_on.wait(60)
        return 1 << 40, 1 << 40

    monkeypatch.setattr(copies, "memory_bytes", room)
    thread = memory.reserve(Counter({8 * MIB: 3}))
    assert requested.wait(60)
    first = memory.copies()
    for _ in range(3):
        first.of(jnp.zeros(2 * MIB))
    may_go_on.set()
    thread.join()
    first.release()
    assert len(addresses(memory)) <= 4, "three of the save, and the one that was being taken"


def test_a_machine_that_gives_no_memory_or_thread_reserves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def no_memory(*_: Any) -> Any:
        raise MemoryError

    def no_thread(*_: Any) -> Any:
        raise RuntimeError("can't start new thread")

    memory = HostMemory()
    with monkeypatch.context() as small:
        small.setattr(copies.np, "empty", no_memory)
        memory.reserve(Counter({8 * MIB: 3})).join()
    assert addresses(memory) == []
    saves = Checkpoints(tmp_path)
    with monkeypatch.context() as small:
        small.setattr(threading.Thread, "start", no_thread)
        saves.reserve(state(1), {})
        with pytest.raises(RuntimeError, match="new thread"):
            saves.save(1, {"step": jnp.asarray(1)}, {}, {})
    saves.join()
    assert addresses(saves.memory) == []


def test_what_has_another_size_in_each_save_is_not_kept(tmp_path: Path):
    """The position in the data, which is in the host's memory: texts that wait, answers that were collected."""
    saves = Checkpoints(tmp_path)
    for step in range(1, 4):
        saves.save(step, {"w": jnp.zeros(MIB)}, {}, {}, {"waiting": np.zeros(step * MIB, np.int32)})
        saves.join()
    assert len(addresses(saves.memory)) == 1
    saves.reserve({"w": np.zeros(MIB, np.float32)}, {}).join()
    assert len(addresses(saves.memory)) == 1


@pytest.mark.parametrize("tier", TIERS)
def test_the_end_of_a_run_frees_the_memory(tmp_path: Path, tier: str):
    saves: Any = TIERS[tier](tmp_path)
    saves.save(1, state(1), {}, {})
    saves.close()
    assert saves.steps() == [1]
    assert addresses(saves.memory) == []


def test_an_array_that_devices_share_is_counted_once():
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    array = jax.device_put(jnp.zeros((4, MIB)), NamedSharding(Mesh(devices, ("a", "b")), P("a")))
    items = {WEIGHTS: {"w": array}, STATE: {}}
    assert shards.copied_sizes(items) == shards.copied_sizes(items, replicas=True) == {16 * MIB: 1}
