"""How fast a save is written: when it rests, for how long, and what ends a rest."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from argosy.checkpoint.checkpoints import Checkpoints
from argosy.checkpoint.saving import pace as module
from argosy.checkpoint.saving.pace import SavePace
from argosy.checkpoint.settings import CheckpointSettings
from argosy.checkpoint.step import files
from argosy.checkpoint.step.load import load_weights
from argosy.checkpoint.tiers.local import LocalCheckpoints
from argosy.core.formats import TensorEntry
from argosy.core.formats.files import File
from argosy.core.formats.zarr import array_files


def rests(monkeypatch: pytest.MonkeyPatch, cores: float, at: list[tuple[float, float, float]]) -> list[float]:
    """The rests of a pace that is called at these times: seconds of the clock, of the process, of the thread."""
    clock, rested = iter(at), list[float]()
    now: list[tuple[float, float, float]] = []

    def wall() -> float:
        now[:] = [next(clock)]
        return now[0][0]

    times = SimpleNamespace(perf_counter=wall, process_time=lambda: now[0][1], thread_time=lambda: now[0][2])
    monkeypatch.setattr(module, "time", times)
    monkeypatch.setattr(module, "cores", lambda: cores)
    pace: Any = SavePace()
    pace._awaited = SimpleNamespace(wait=rested.append, is_set=lambda: False)
    for _ in at:
        pace.worked()
    return rested


def test_it_rests_six_times_as_long_as_it_worked_while_all_cores_are_busy(monkeypatch: pytest.MonkeyPatch):
    assert rests(monkeypatch, 2, [(0.0, 5.0, 1.0), (0.1, 5.2, 1.08), (0.7, 6.4, 1.1)]) == pytest.approx([0.48, 0.12])


@pytest.mark.parametrize("cores", [3, 16])
def test_it_does_not_rest_where_a_core_is_idle(monkeypatch: pytest.MonkeyPatch, cores: int):
    assert rests(monkeypatch, cores, [(0.0, 5.0, 1.0), (0.1, 5.2, 1.08), (0.7, 6.4, 1.1)]) == []


def test_it_rests_again_when_training_goes_on(monkeypatch: pytest.MonkeyPatch):
    # An evaluation's data were waited for, between the first two calls.
    assert rests(monkeypatch, 2, [(0.0, 5.0, 1.0), (1.0, 6.0, 1.9), (1.1, 6.2, 2.0)]) == pytest.approx([0.6])


@pytest.mark.parametrize("tier", [Checkpoints, LocalCheckpoints])
@pytest.mark.parametrize("waiter", ["join", "save"])
def test_whoever_waits_for_a_save_ends_its_rests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tier: Any, waiter: str):
    saves, rested = tier(tmp_path), list[bool]()
    # For ever, where nobody waits.
    monkeypatch.setattr(SavePace, "worked", lambda self: rested.append(self._awaited.wait(60)))
    weights = {"w": jnp.arange(1000.0)}
    saves.save(1, weights, {}, {})
    if waiter == "join":
        saves.join()
    else:
        saves.save(2, weights, {}, {})
    saves.join()
    assert rested
    assert all(rested)
    assert saves.steps() == ([1] if waiter == "join" else [1, 2])


def test_saves_that_had_to_be_waited_for_rest_half_as_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    saves, rests = Checkpoints(tmp_path), list[float]()

    def until_awaited(pace: Any) -> None:
        rests.append(pace._rest)
        assert pace._awaited.wait(60)

    monkeypatch.setattr(SavePace, "worked", until_awaited)
    for step in (1, 2, 3):
        saves.save(step, {"w": jnp.arange(1000.0)}, {}, {})
    saves.wait()
    monkeypatch.setattr(SavePace, "worked", lambda pace: rests.append(pace._rest))
    saves.save(4, {"w": jnp.arange(1000.0)}, {}, {})
    saves.wait()
    assert sorted({*rests}, reverse=True) == [module.REST, module.REST / 2, module.REST / 4], "the last was not waited for by a save"


def test_what_is_written_at_a_pace_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "cores", lambda: 0)
    monkeypatch.setattr(module, "REST", 0.01)
    draw = np.random.default_rng(0)
    weights = {"w": jnp.asarray(draw.standard_normal((3, 1 << 20), np.float32))}
    saves, slabs, real = Checkpoints(tmp_path), list[int](), SavePace.worked
    monkeypatch.setattr(SavePace, "worked", lambda self: (slabs.append(1), real(self))[1])
    saves.save(1, weights, {}, {})
    saves.wait()
    assert len(slabs) > 1
    assert Checkpoints(tmp_path).latest_good() == 1
    assert np.array_equal(load_weights(tmp_path / "1")["w"], weights["w"])


def small_files(count: int) -> list[File]:
    arrays = [TensorEntry(f"w{i}", (10,), np.dtype(np.float32), lambda: np.zeros(10, np.float32)) for i in range(count)]
    return [file for array in arrays for file in array_files(array)]


@pytest.mark.parametrize("waited", [False, True])
def test_small_files_are_forced_to_disk_one_by_one_while_nobody_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waited: bool
):
    """Together they would take all cores from a step at once."""
    where, pace = list[str](), SavePace(0.0)
    monkeypatch.setattr(files, "sync", lambda path: where.append(threading.current_thread().name))
    monkeypatch.setattr(pace, "_cores", 0)
    if waited:
        pace.hurry()
    files.write_files(tmp_path, small_files(20), pace)
    assert len(where) == 40
    assert all(name.startswith("sync") == waited for name in where)


@pytest.mark.parametrize(("tier", "kept_steps"), [(Checkpoints, 1), (LocalCheckpoints, 2)])
def test_older_steps_are_removed_file_by_file_at_a_pace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tier: Any, kept_steps: int):
    saves = tier(tmp_path, CheckpointSettings(keep=1)) if tier is Checkpoints else tier(tmp_path)
    folder = tmp_path if tier is Checkpoints else tmp_path / "0"
    weights, newest = {"w": jnp.arange(1000.0)}, kept_steps + 1
    for step in range(1, newest):
        saves.save(step, weights, {}, {})
        saves.join()
    count, remaining, real = sum(path.is_file() for path in (folder / "1").rglob("*")), list[int](), SavePace.worked

    def worked(pace: Any) -> bool:
        if (folder / str(newest) / "manifest.json").exists():
            remaining.append(sum(path.is_file() for path in folder.rglob("*") if "1" in path.parts))
        return real(pace)

    monkeypatch.setattr(SavePace, "worked", worked)
    saves.save(newest, weights, {}, {})
    saves.join()
    assert saves._failure is None
    assert saves.steps() == list(range(2, newest + 1))
    # The manifest is removed first, by itself.
    assert remaining == list(reversed(range(count - 1)))


def test_a_conversion_has_no_pace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(SavePace, "worked", lambda self: pytest.fail("nobody trains beside it"))
    names = files.write_files(tmp_path, small_files(1))
    assert sorted(names) == ["w0/c/0", "w0/zarr.json"]
