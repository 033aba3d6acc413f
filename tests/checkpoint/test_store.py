"""Checkpoints on disk: commits, going back past damage, what is kept, and disks that fail."""

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from argosy.checkpoint.checkpoints import Checkpoints, CheckpointSettings
from argosy.checkpoint.failures import root_of
from argosy.checkpoint.medium import folder, objects
from argosy.checkpoint.open import fetch_model
from argosy.checkpoint.run_directory import RunDirectory
from argosy.checkpoint.saving.memory import HostMemory
from argosy.checkpoint.step import shards
from argosy.checkpoint.step.layout import STATE
from argosy.checkpoint.step.load import load_data, load_item, load_weights, read_meta
from argosy.checkpoint.step.locks import ReadLock
from argosy.core.errors import ArgosyError, BadInput, Damaged
from argosy.core.formats.files import File
from argosy.core.storage import Store
from argosy.weights import manifest

WEIGHTS = {"embed.w": np.arange(12, dtype=np.float32).reshape(3, 4), "norm.scale": np.ones(4, np.float32)}


def save_steps(folder: Path | Store, steps: list[int], losses: dict[int, float] | None = None, **keep: int) -> Checkpoints:
    checkpoints = Checkpoints(folder, CheckpointSettings(**keep))
    for step in steps:
        weights = {name: w + step for name, w in WEIGHTS.items()}
        checkpoints.save(step, weights, {"step": np.int32(step)}, {"eval_loss": (losses or {}).get(step)})
        checkpoints.wait()
    return checkpoints


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)


def spoil(file: Path, kind: str) -> None:
    if kind == "torn":
        file.write_text("{")
    else:
        file.unlink()


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("store") / "checkpoints"
    save_steps(folder, [2, 4, 6])
    return folder


@pytest.fixture
def copy(three: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(three, tmp_path / "checkpoints"))


def test_what_is_saved_comes_back(three: Path):
    back = load_weights(three / "4")
    assert {n: np.asarray(a).tobytes() for n, a in back.items()} == {n: (w + 4).tobytes() for n, w in WEIGHTS.items()}
    assert int(load_item(three / "4", STATE)["step"]) == 4
    assert read_meta(three / "4") == {"eval_loss": None}


def test_the_position_in_the_data_keeps_types_that_jax_narrows(tmp_path: Path):
    data = {"rows": np.array([2**40 + 1, -1]), "share": np.array([1e300, np.nan]), "none": np.zeros((0, 3), np.int64)}
    data |= {"one": np.asarray(2**50)}
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, WEIGHTS, {"step": np.int32(1)}, {}, data)
    checkpoints.wait()
    back = load_data(tmp_path / "1")
    assert {name: (a.dtype, a.shape) for name, a in back.items()} == {name: (a.dtype, a.shape) for name, a in data.items()}
    assert all(np.array_equal(back[name], data[name], equal_nan=data[name].dtype.kind == "f") for name in data)


@pytest.mark.parametrize("name", ["", "..", "a/../b", "/abs", "a//b", ".hidden", "_METADATA", "x" * 256])
def test_a_name_that_is_no_folder_is_refused_and_nothing_is_left(tmp_path: Path, name: str):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {name: np.zeros(3, np.float32)}, {"step": np.int32(1)}, {})
    with pytest.raises(ArgosyError, match="cannot be a folder of a checkpoint"):
        checkpoints.wait()
    assert not list(tmp_path.iterdir())


def test_saving_copies_what_the_loop_then_overwrites(tmp_path: Path):
    checkpoints, weights = Checkpoints(tmp_path), {"w": np.zeros(1000, np.float32)}
    checkpoints.save(1, weights, {"step": np.int32(1)}, {})
    weights["w"] += 1
    checkpoints.wait()
    assert not np.asarray(load_weights(tmp_path / "1")["w"]).any()


def test_the_newest_good_one_is_found_and_damage_is_set_aside(copy: Path):
    messages: list[str] = []
    flip(copy / "6" / "meta.json")
    assert Checkpoints(copy, CheckpointSettings(), messages.append).latest_good() == 4
    assert sorted(d.name for d in copy.iterdir()) == ["2", "4", "6.damaged"]
    assert len(messages) == 1
    assert all(word in messages[0] for word in ("checkpoint 6", "6.damaged", "meta.json", "SHA-256", "using step 4"))


def test_settings_with_a_flipped_bit_are_not_those_of_the_run(tmp_path: Path):
    """They would be valid JSON, with a key that no run has, and the run would be refused as another."""
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    for step in (2, 4):
        checkpoints.save(step, WEIGHTS, {"step": np.int32(step)}, {"settings": {"seed": step}})
        checkpoints.wait()
    assert RunDirectory(tmp_path).stored()[0] == {"seed": 4}
    meta = tmp_path / "checkpoints" / "4" / "meta.json"
    meta.write_text(meta.read_text().replace("seed", "sefd"))
    assert RunDirectory(tmp_path).stored()[0] == {"seed": 2}


def test_whoever_only_reads_moves_nothing(copy: Path):
    flip(copy / "6" / "meta.json")
    assert Checkpoints(copy).latest_good() == 4
    assert sorted(d.name for d in copy.iterdir()) == ["2", "4", "6"]


def test_where_all_are_damaged_nothing_is_touched_however_often_one_asks(copy: Path):
    for step in "246":
        flip(copy / step / "meta.json")
    before = sorted(str(f) for f in copy.rglob("*"))
    for _ in range(2):
        with pytest.raises(Damaged, match="all 3 checkpoints are damaged") as caught:
            Checkpoints(copy, CheckpointSettings()).latest_good()
        assert "dir=NEW" in str(caught.value)
    assert sorted(str(f) for f in copy.rglob("*")) == before


def test_no_checkpoint_is_no_damage(tmp_path: Path):
    assert Checkpoints(tmp_path / "none").latest_good() is None


def test_a_step_without_its_manifest_is_none_and_is_saved_again(copy: Path):
    (copy / "6" / "manifest.json").unlink()
    assert Checkpoints(copy).steps() == [2, 4]
    save_steps(copy, [6])
    assert Checkpoints(copy).latest_good() == 6


def test_a_second_damage_of_one_step_gets_a_name_of_its_own(copy: Path):
    for _ in range(2):
        flip(copy / "6" / "meta.json")
        Checkpoints(copy, CheckpointSettings()).latest_good()
        save_steps(copy, [6])
    assert {d.name for d in copy.iterdir()} == {"2", "4", "6", "6.damaged", "6.damaged-2"}


@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        ({"keep": 2, "keep_best": 0}, [5, 6]),
        ({"keep": 1, "keep_every": 2, "keep_best": 0}, [2, 4, 6]),
        ({"keep": 1, "keep_best": 2}, [1, 3, 6]),
        ({"keep": 3, "keep_every": 5, "keep_best": 1}, [3, 4, 5, 6]),
    ],
)
def test_retention(tmp_path: Path, keep: dict[str, int], expected: list[int]):
    losses = {1: 2.0, 2: 5.0, 3: 1.0, 4: 4.0, 5: 3.0}
    assert save_steps(tmp_path, [1, 2, 3, 4, 5, 6], losses, **keep).steps() == expected
    assert sorted(int(d.name) for d in tmp_path.iterdir()) == expected


def test_damage_to_an_old_one_does_not_stop_a_new_one(tmp_path: Path):
    save_steps(tmp_path, [1, 2], {1: 1.0})
    (tmp_path / "1" / "meta.json").write_text("{")
    assert 3 in save_steps(tmp_path, [3]).steps()


def test_a_kill_while_removing_leaves_nothing_that_looks_complete(copy: Path, monkeypatch: pytest.MonkeyPatch):
    def killed(path: Path, *_: object) -> None:
        next(f for f in sorted(Path(path).rglob("*")) if f.is_file()).unlink()
        raise KeyboardInterrupt("killed here")

    with monkeypatch.context() as patch:
        patch.setattr(folder, "remove_files", killed)
        with pytest.raises(ArgosyError, match="killed here"):
            save_steps(copy, [8], keep=1)
    steps = Checkpoints(copy).steps()
    assert len(steps) == 3
    assert 8 in steps
    for step in steps:
        manifest.verify_folder(copy / str(step))
    save_steps(copy, [10], keep=1)
    assert [d.name for d in copy.iterdir()] == ["10"]


def test_a_full_disk_is_reported_and_the_next_save_tries_again(copy: Path, monkeypatch: pytest.MonkeyPatch):
    messages: list[str] = []
    checkpoints = Checkpoints(copy, CheckpointSettings(keep=9), messages.append)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(manifest, "commit", full)
        checkpoints.save(8, WEIGHTS, {"step": np.int32(8)}, {})
        checkpoints.join()
        assert sorted(d.name for d in copy.iterdir()) == ["2", "4", "6"], "what could not be committed takes no room"
    checkpoints.save(10, WEIGHTS, {"step": np.int32(10)}, {})
    checkpoints.wait()
    assert len(messages) == 1
    assert "No space left" in messages[0]
    assert checkpoints.steps() == [2, 4, 6, 10]
    assert checkpoints.latest_good() == 10


def test_the_last_save_failing_is_an_error_and_earlier_ones_stay(copy: Path, monkeypatch: pytest.MonkeyPatch):
    checkpoints = Checkpoints(copy, CheckpointSettings())

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(manifest, "commit", full)
    checkpoints.save(8, WEIGHTS, {"step": np.int32(8)}, {})
    with pytest.raises(ArgosyError, match="No space left") as caught:
        checkpoints.wait()
    assert caught.value.hint is not None
    assert "free some space" in caught.value.hint
    assert checkpoints.latest_good() == 6


def test_a_checkpoint_that_is_not_there_is_bad_input(tmp_path: Path):
    with pytest.raises(BadInput, match="no checkpoint at"):
        read_meta(tmp_path / "9")


@pytest.mark.parametrize("kind", ["torn", "gone"])
@pytest.mark.parametrize("file", ["_METADATA", "embed.w/zarr.json", "embed.w/c/0/0"])
def test_a_checkpoint_that_cannot_be_read_is_damage(copy: Path, file: str, kind: str):
    broken = copy / "6" / "weights" / file
    spoil(broken, kind)
    with pytest.raises(Damaged, match="cannot be read"):
        load_weights(copy / "6")


def packed(folder: Path) -> dict[str, dict[str, np.ndarray]]:
    """A step whose arrays Orbax wrote by itself, in files that they share."""
    from orbax.checkpoint import v1

    items = {"weights": {n: w + 2 for n, w in WEIGHTS.items()}, "state": {"step": np.asarray(2)}, "data": {"seen": np.arange(3)}}
    v1.save_checkpointables(folder, items)
    (folder / "meta.json").write_text('{"step": 2}')
    manifest.write_manifest(folder)
    assert json.loads((folder / "weights" / "_METADATA").read_text())["use_ocdbt"]
    return items


@pytest.mark.parametrize("kind", ["torn", "gone"])
@pytest.mark.parametrize("file", ["_METADATA", "manifest.ocdbt"])
def test_a_packed_checkpoint_that_cannot_be_read_is_damage(tmp_path: Path, file: str, kind: str):
    packed(tmp_path / "6")
    spoil(tmp_path / "6" / "weights" / file, kind)
    with pytest.raises(Damaged, match="cannot be read"):
        load_weights(tmp_path / "6")


def test_a_step_that_orbax_wrote_is_read_and_gone_on_from(tmp_path: Path):
    items = packed(tmp_path / "2")
    checkpoints = save_steps(tmp_path, [4])
    assert checkpoints.steps() == [2, 4]
    flip(tmp_path / "4" / "weights" / "embed.w" / "c" / "0" / "0")
    assert checkpoints.latest_good() == 2
    assert {n: np.asarray(a).tobytes() for n, a in load_weights(tmp_path / "2").items()} == {
        n: w.tobytes() for n, w in items["weights"].items()
    }
    assert int(load_item(tmp_path / "2", STATE)["step"]) == 2
    np.testing.assert_array_equal(load_data(tmp_path / "2")["seen"], np.arange(3))


@pytest.mark.parametrize("where", ["folder", "memory"])
def test_a_step_from_before_the_first_release_is_refused(copy: Path, remote: Store, where: str):
    """By one sentence, and it is no damage: nothing is renamed."""
    if where == "memory":
        save_steps(remote, [2, 4, 6])
    place = Store(str(copy)) if where == "folder" else remote
    files = json.loads(place.read_text("6/manifest.json"))["files"]
    digest = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
    place.write_text("6/manifest.json", json.dumps({"files": files, "sha256": digest}))
    before = place.list()
    with pytest.raises(BadInput, match="written before the first release") as caught:
        Checkpoints(place, CheckpointSettings()).latest_good()
    assert caught.value.hint == "train again with dir=NEW"
    assert place.list() == before
    later = {"format": 2, "files": files}
    later["sha256"] = hashlib.sha256(json.dumps([2, files], sort_keys=True).encode()).hexdigest()
    place.write_text("6/manifest.json", json.dumps(later))
    with pytest.raises(BadInput, match="has format 2, and this version of argosy reads format 1"):
        Checkpoints(place, CheckpointSettings()).latest_good()


def test_orbax_itself_reads_what_a_run_of_one_process_writes(tmp_path: Path):
    from orbax.checkpoint import v1

    weights = {
        "rows": np.arange(35, dtype=np.float32).reshape(7, 5),
        "half": np.arange(6).astype("bfloat16"),
        "large": np.arange(5_000_001, dtype=np.int32),
        "none": np.zeros((0, 3), np.float32),
        "true": np.asarray([True, False]),
    }
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, weights, {"step": np.int32(7)}, {})
    checkpoints.wait()
    back = v1.load_checkpointables(tmp_path / "1")
    assert {n: (a.shape, a.dtype, np.asarray(a).tobytes()) for n, a in back["weights"].items()} == {
        n: (a.shape, a.dtype, a.tobytes()) for n, a in weights.items()
    }
    assert int(back["state"]["step"]) == 7
    ours = load_weights(tmp_path / "1")
    assert {n: np.asarray(a).tobytes() for n, a in ours.items()} == {n: a.tobytes() for n, a in weights.items()}


def test_a_run_of_one_process_needs_no_second_reading_for_its_hashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "hash_file", lambda *_, **__: pytest.fail("a file was read again"))
        patch.setattr(shards, "open_array", lambda *_: pytest.fail("TensorStore was asked"))
        save_steps(tmp_path, [2])
        load_weights(tmp_path / "2")
    manifest.verify_folder(tmp_path / "2")


def test_what_a_kill_left_while_writing_is_removed_by_the_next_save(tmp_path: Path):
    (tmp_path / "3" / "weights").mkdir(parents=True)
    (tmp_path / "3" / "manifest.json.part").write_text("{}")
    assert Checkpoints(tmp_path).steps() == []
    save_steps(tmp_path, [4])
    assert [d.name for d in tmp_path.iterdir()] == ["4"]


KILLED = """
import os, signal, sys, threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
sys.path.insert(0, {tests!r})
from test_store import save_steps

def trace(frame, event, arg):
    name = frame.f_code.co_filename
    if "argosy/checkpoint" not in name and not name.endswith("manifest.py"):
        return None
    if event == "line" and (lines := lines + 1 if False else trace.lines + 1):
        trace.lines = lines
        if lines == {last}:
            os.kill(os.getpid(), signal.SIGKILL)
    return trace
trace.lines = 0
threading.settrace(trace)
save_steps(Path({folder!r}), [8], keep=2, keep_best=0)
print(trace.lines)
"""


@pytest.mark.slow
def test_a_kill_at_any_line_of_a_save_leaves_good_steps_alone(three: Path, tmp_path: Path):
    """Of the thread that writes step 8 and retires 2 and 4: what has a manifest is complete, and a good step is always there."""

    def killed(last: int) -> tuple[Path, str]:
        folder = Path(shutil.copytree(three, tmp_path / str(last)))
        code = KILLED.format(tests=str(Path(__file__).parent), last=last, folder=str(folder))
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        return folder, done.stdout

    count = int(killed(0)[1])
    assert count > 200
    for last in range(1, count, max(1, count // 24)):
        folder, _ = killed(last)
        steps = Checkpoints(folder).steps()
        assert {6, 8} & {*steps}
        for step in steps:
            manifest.verify_folder(folder / str(step))
        save_steps(folder, [10], keep=1, keep_best=0)
        assert [d.name for d in folder.iterdir()] == ["10"]


# ---------------------------------------------------------------- readers beside a run


def test_a_step_that_is_read_is_not_retired(tmp_path: Path):
    save_steps(tmp_path, [2])
    lock = ReadLock(tmp_path / "2")
    assert save_steps(tmp_path, [4], keep=1, keep_best=0).steps() == [2, 4]
    lock.release()
    assert save_steps(tmp_path, [6], keep=1, keep_best=0).steps() == [6]


def test_a_step_retired_while_it_is_verified_is_no_damage(copy: Path, monkeypatch: pytest.MonkeyPatch):
    """The run retires 6 and commits 8 just when a reader looks at 6."""
    real, messages = manifest.compare_files, []

    def racing(folder: Path, files: dict) -> dict:
        if folder.name == "6" and folder.exists():
            save_steps(copy, [8], keep=1, keep_best=0)
        return real(folder, files)

    monkeypatch.setattr(manifest, "compare_files", racing)
    assert Checkpoints(copy, warn=messages.append).latest_good() == 8
    assert messages == []


def test_all_copies_off_the_devices_start_before_the_first_is_waited_for(monkeypatch: pytest.MonkeyPatch):
    events: list[str] = []

    class OnDevice:
        nbytes = 8

        def copy_to_host_async(self) -> None:
            events.append("start")

        def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray:
            events.append("wait")
            return np.zeros(2, np.float32)

    arrays = {name: jnp.zeros(2) for name in "abc"}
    monkeypatch.setattr(shards, "_shards_of", lambda array, replicas: {(0,): SimpleNamespace(index=(), data=devices[id(array)])})
    devices = {id(array): OnDevice() for array in arrays.values()}
    shards.copy_shards({"weights": arrays}, HostMemory().copies(), True)
    assert events == ["start"] * 3 + ["wait"] * 3


# ---------------------------------------------------------------- object stores


@pytest.fixture
def remote(tmp_path: Path) -> Iterator[Store]:
    """A store without renames: memory of this process, through fsspec."""
    store = Store(f"memory://{tmp_path.name}/checkpoints")
    yield store
    Store(f"memory://{tmp_path.name}").remove("checkpoints")


def test_an_object_store_holds_checkpoints_too(remote: Store):
    checkpoints = save_steps(remote, [2, 4, 6], keep=2, keep_best=0)
    assert Checkpoints(remote).steps() == [4, 6]
    assert remote.list() == ["4", "6"]
    assert checkpoints.latest_good() == 6
    back = load_weights(checkpoints.path(4))
    assert {n: np.asarray(a).tobytes() for n, a in back.items()} == {n: (w + 4).tobytes() for n, w in WEIGHTS.items()}


def test_an_object_store_commits_by_the_manifest_last(remote: Store, monkeypatch: pytest.MonkeyPatch):
    save_steps(remote, [2])
    upload, names = objects.upload, []

    def counted(store: Store, folder: str, file: File) -> dict:
        names.append(f"{folder}/{file.name}")
        return upload(store, folder, file)

    def cut(self: Store, name: str, text: str) -> None:
        names.append(name)
        raise OSError(5, "connection lost")

    with monkeypatch.context() as patch:
        patch.setattr(objects, "upload", counted)
        patch.setattr(Store, "write_text", cut)
        with pytest.raises(ArgosyError, match="connection lost"):
            save_steps(remote, [4])
    assert names[-1] == "4/manifest.json"
    assert {name.partition("/")[2] for name in names} == {*objects.files_under(remote, "2")}, "all other files before it"
    assert Checkpoints(remote).steps() == [2]
    assert 4 in save_steps(remote, [4]).steps()


def test_damage_in_an_object_store_is_gone_back_past(remote: Store):
    save_steps(remote, [2, 4])
    remote.write_text("4/meta.json", "{")
    messages: list[str] = []
    assert Checkpoints(remote, CheckpointSettings(), messages.append).latest_good() == 2
    assert Checkpoints(remote).steps() == [2]
    assert "4.damaged" in messages[0]
    assert remote.list() == ["2", "4.damaged"]


def test_damage_in_an_object_store_is_kept_when_the_step_is_trained_again(remote: Store):
    for text in "{", "[":
        save_steps(remote, [2, 4])
        remote.write_text("4/meta.json", text)
        Checkpoints(remote, CheckpointSettings()).latest_good()
    save_steps(remote, [4, 6])
    assert remote.list() == ["2", "4", "4.damaged", "4.damaged-2", "6"]
    assert [remote.read_text(f"{name}/meta.json") for name in ("4.damaged", "4.damaged-2")] == ["{", "["]
    assert remote.exists("4.damaged/manifest.json")


def test_a_kill_while_damage_is_set_aside_loses_no_file(remote: Store, monkeypatch: pytest.MonkeyPatch):
    save_steps(remote, [2, 4])
    remote.write_text("4/meta.json", "{")
    files = objects.files_under(remote, "4")
    copied, copy = [], Store.copy

    def cut(self: Store, name: str, to: str) -> None:
        if len(copied) == 3:
            raise KeyboardInterrupt
        copied.append(to)
        copy(self, name, to)

    with monkeypatch.context() as patch:
        patch.setattr(Store, "copy", cut)
        with pytest.raises(KeyboardInterrupt):
            Checkpoints(remote, CheckpointSettings()).latest_good()
    assert objects.files_under(remote, "4") == files
    assert Checkpoints(remote, CheckpointSettings()).latest_good() == 2
    assert remote.list() == ["2", "4.damaged"]
    assert objects.files_under(remote, "4.damaged") == files


def test_a_model_that_was_fetched_is_renamed_and_not_copied(remote: Store, monkeypatch: pytest.MonkeyPatch):
    save_steps(remote, [2])

    def copies(*_: object, **__: object) -> None:
        raise AssertionError("a copy: twice the disk")

    monkeypatch.setattr(shutil, "copytree", copies)
    fetched = fetch_model(remote.root.removesuffix("/checkpoints"))
    assert fetched.name == "2"
    manifest.verify_folder(fetched)


def test_an_interrupted_download_is_not_taken_as_the_step(remote: Store, monkeypatch: pytest.MonkeyPatch):
    checkpoints, got, read = save_steps(remote, [2]), [], objects._read

    def cut(source: Any, where: str, size: int = -1) -> bytes:
        if len(got) == 5:
            raise KeyboardInterrupt
        got.append(where)
        return read(source, where, 3)

    with monkeypatch.context() as patch:
        patch.setattr(objects, "_read", cut)
        patch.setattr(objects, "_manifest", lambda store, step: (store.open(f"{step}/manifest.json").read(), step))
        with pytest.raises(KeyboardInterrupt):
            checkpoints.path(2)
    assert checkpoints.latest_good() == 2
    manifest.verify_folder(checkpoints.path(2))


def test_a_store_that_is_away_for_a_save_costs_that_save(remote: Store, monkeypatch: pytest.MonkeyPatch):
    messages: list[str] = []
    checkpoints = Checkpoints(remote, CheckpointSettings(keep=9), messages.append)

    def away(*_: object, **__: object) -> None:
        raise RuntimeError("503: try again later")

    with monkeypatch.context() as patch:
        for name in ("exists", "open", "ls", "isdir", "rm", "pipe_file"):
            patch.setattr(remote._files, name, away)
        checkpoints.save(1, WEIGHTS, {"step": np.int32(1)}, {})
        checkpoints.join()
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "retire", away)
        checkpoints.save(2, WEIGHTS, {"step": np.int32(2)}, {})
        checkpoints.wait()
    assert messages[0].startswith("a checkpoint could not be written: ")
    assert messages[0].endswith("trying again with step 2; the run has no checkpoint yet")
    assert messages[1:] == ["older checkpoints could not be removed: 503: try again later; after the next save this is tried again"]
    assert checkpoints.steps() == [2]


def test_a_step_written_again_is_fetched_again(remote: Store):
    checkpoints = save_steps(remote, [2], {2: 1.0})
    assert checkpoints.meta(2) == {"eval_loss": 1.0}
    remote.remove("2")
    save_steps(remote, [2], {2: 0.5})
    assert checkpoints.meta(2) == {"eval_loss": 0.5}


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), TimeoutError(110, "Connection timed out")])
@pytest.mark.parametrize("where", ["folder", "memory"])
def test_a_step_that_cannot_be_reached_is_not_set_aside(
    copy: Path, remote: Store, monkeypatch: pytest.MonkeyPatch, where: str, error: OSError
):
    place: Path | Store = copy
    if where == "memory":
        save_steps(remote, [2, 4])
        place = remote
    newest = "6/meta.json" if where == "folder" else "4/meta.json"

    def refused(*_: object, **__: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        if where == "folder":
            patch.setattr(manifest, "hash_file", refused)
        else:
            patch.setattr(remote._files, "open", refused)
        with pytest.raises(ArgosyError, match=r"(?i)permission|connection timed out") as caught:
            Checkpoints(place, CheckpointSettings()).latest_good()
    assert not isinstance(caught.value, Damaged)
    assert Store(str(copy)).exists(newest) if where == "folder" else remote.exists(newest)
    assert Checkpoints(place, CheckpointSettings()).latest_good() == int(newest[0])


def test_the_reason_of_a_failed_save_is_the_systems():
    """TensorStore says it after paths and before its settings."""
    text = f"RESOURCE_EXHAUSTED: Error writing {'a/b ' * 90}: No space left on device [os_error_code='28'] [tensorstore_spec='{{}}']"
    outer = RuntimeError("outer")
    outer.__cause__ = ValueError(text)
    assert root_of(outer) == "[Errno 28] No space left on device"
    assert root_of(ValueError("first\nsecond")) == "first"
