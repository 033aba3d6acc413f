"""Local checkpoints of one process: which step a run resumes from, what is kept, and what damage costs."""

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import campaign_flips
import jax
import numpy as np
import pytest
from campaign_kill import SMALL
from helpers import Heard
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import argosy
from argosy.checkpoint.checkpoints import Checkpoints
from argosy.checkpoint.settings import CheckpointSettings
from argosy.checkpoint.step import files
from argosy.checkpoint.step.layout import STATE, WEIGHTS
from argosy.checkpoint.step.load import load_data, load_item, load_weights
from argosy.checkpoint.tiers import peers
from argosy.checkpoint.tiers.local import LocalCheckpoints, copy_sources
from argosy.checkpoint.tiers.tiered import TieredCheckpoints
from argosy.core.errors import ArgosyError, BadInput, Damaged
from argosy.jobs.quickstart.proof import digest
from argosy.weights import manifest

ROWS = np.arange(48, dtype=np.float32).reshape(6, 8)


def place_on_mesh(values: np.ndarray, *axes: Any) -> tuple[jax.Array, NamedSharding]:
    place = NamedSharding(Mesh(np.asarray(jax.devices()[:4]).reshape(2, 2), ("a", "b")), P(*axes))
    return jax.device_put(values, place), place


def arrays(step: int) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    weights = {"split": place_on_mesh(ROWS + step, "b", "a"), "whole": place_on_mesh(ROWS - step)}
    arrays_of = {name: array for name, (array, _) in weights.items()}
    return arrays_of, {"step": place_on_mesh(np.int32(step))[0]}, {name: place for name, (_, place) in weights.items()}


def save_step(tiers: TieredCheckpoints, step: int, local: bool) -> None:
    weights, state, _ = arrays(step)
    save = tiers.save_local if local else tiers.save
    save(step, weights, state, {"step": step}, {"seen": np.arange(step)})
    tiers.local.join()
    tiers.persistent.wait()


def two(folder: Path, messages: list[str] | None = None) -> TieredCheckpoints:
    warn = messages.append if messages is not None else lambda _: None
    local = LocalCheckpoints(folder / "local" / "run", warn=warn)
    return TieredCheckpoints(Checkpoints(folder / "run" / "checkpoints", CheckpointSettings(keep=2), warn), local)


def test_a_step_is_kept_where_an_older_one_cannot_be_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    messages = list[str]()
    tiers = two(tmp_path, messages)
    with monkeypatch.context() as failing:
        failing.setattr("argosy.checkpoint.tiers.local._remove", lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        for step in (1, 2, 3):
            save_step(tiers, step, local=True)
    assert tiers.local.own_steps() == [1, 2, 3]
    assert [line for line in messages if "Input/output" in line and "older checkpoints could not be removed" in line]
    save_step(tiers, 4, local=True)
    assert tiers.local.own_steps() == [3, 4]


def check(tiers: TieredCheckpoints, step: int) -> None:
    """The arrays of the step, read as a run reads them."""
    _, _, places = arrays(step)
    everywhere = {"step": place_on_mesh(np.int32(0))[1]}
    tiers.prepare(step, {WEIGHTS: places, STATE: everywhere})
    back, state = load_weights(tiers.path(step), places), load_item(tiers.path(step), STATE, everywhere)
    np.testing.assert_array_equal(back["split"], ROWS + step)
    np.testing.assert_array_equal(back["whole"], ROWS - step)
    assert back["split"].sharding == places["split"]
    assert int(state["step"]) == step == tiers.meta(step)["step"]
    np.testing.assert_array_equal(load_data(tiers.path(step))["seen"], np.arange(step))


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)


def test_the_newest_good_step_of_any_tier_is_resumed_from(tmp_path: Path):
    tiers = two(tmp_path)
    assert two(tmp_path).latest_good() is None
    save_step(tiers, 4, local=False)
    for step in (5, 6, 7):
        save_step(tiers, step, local=True)
    step_folder = tmp_path / "local" / "run" / "0"
    assert sorted(step.name for step in step_folder.iterdir()) == ["6", "7"]
    assert tiers.local.steps() == [6, 7]
    assert tiers.steps() == [4]
    again = two(tmp_path)
    assert again.latest_good() == 7
    check(again, 7)
    save_step(tiers, 8, local=False)
    again = two(tmp_path)
    assert again.latest_good() == 8
    check(again, 8)
    again.wait()
    assert not (tmp_path / "local" / "run").exists()


def test_going_back_removes_local_steps_after_the_persistent_one(tmp_path: Path):
    tiers = two(tmp_path)
    save_step(tiers, 4, local=False)
    for step in (5, 6):
        save_step(tiers, step, local=True)
    assert tiers.go_back() == 4
    assert tiers.local.own_steps() == []
    check(tiers, 4)


@pytest.mark.parametrize("file", ["manifest.json", "meta.json", "weights/split/c/0/0", "weights/split/zarr.json", "data/seen/c/0"])
@pytest.mark.parametrize("kind", ["flipped", "gone"])
def test_damage_to_a_local_step_costs_that_step(tmp_path: Path, file: str, kind: str):
    messages: list[str] = []
    tiers = two(tmp_path, messages)
    save_step(tiers, 4, local=False)
    save_step(tiers, 5, local=True)
    save_step(tiers, 6, local=True)
    path = tmp_path / "local" / "run" / "0" / "6" / file
    flip(path) if kind == "flipped" else path.unlink()
    again = two(tmp_path, messages)
    assert again.latest_good() == 5
    check(again, 5)
    # It would be retained in the place of a newer one.
    assert not path.parent.exists()
    assert file == "manifest.json" or "local checkpoint 6 lacks 1 of its" in messages[0]
    shutil.rmtree(tmp_path / "local")
    assert two(tmp_path).latest_good() == 4


def test_a_damaged_persistent_step_is_set_aside_for_a_local_one(tmp_path: Path):
    tiers = two(tmp_path)
    save_step(tiers, 5, local=True)
    save_step(tiers, 6, local=False)
    flip(tmp_path / "run" / "checkpoints" / "6" / "meta.json")
    again = two(tmp_path)
    assert again.latest_good() == 5
    check(again, 5)
    assert (tmp_path / "run" / "checkpoints" / "6.damaged").is_dir()


def test_a_full_local_disk_is_reported_and_persistent_saves_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    messages: list[str] = []
    tiers, write = two(tmp_path, messages), files.write_files

    def full(folder: Path, arrays: Any, pace: Any) -> Any:
        if "local" not in folder.parts:
            return write(folder, arrays, pace)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "write_files", full)
    save_step(tiers, 5, local=True)
    assert not (tmp_path / "local" / "run" / "0" / "5").exists()
    save_step(tiers, 6, local=False)
    monkeypatch.setattr(files, "write_files", write)
    save_step(tiers, 7, local=True)
    assert messages == ["a local checkpoint could not be written: [Errno 28] No space left on device; trying again with step 7"]
    assert two(tmp_path).latest_good() == 7


def test_settings_that_do_nothing_are_refused():
    for words in ({"local_every": 5}, {"local_copies": 2}, {"local": "gs://a/b"}):
        with pytest.raises(ValueError, match="local"):
            CheckpointSettings(**words)
    assert CheckpointSettings(local="/x").between == 10
    assert CheckpointSettings(local="/x", every=5).between == 1
    assert CheckpointSettings(local="/x", local_every=7).between == 7
    with pytest.raises(ValueError, match="local_every = 50 is no shorter than every = 50"):
        CheckpointSettings(local="/x", local_every=50, every=50)


def test_copies_need_hosts(tmp_path: Path):
    with pytest.raises(BadInput, match="local_copies=2 needs as many hosts; this run has 1 host"):
        LocalCheckpoints(tmp_path / "run", copies=2)


def test_copies_are_on_other_hosts():
    """Two hosts of two processes and one of three, by hand."""
    places = ["a", "a", "b", "b", "c", "c", "c"]
    assert [copy_sources(places, rank, 1) for rank in range(7)] == [[]] * 7
    assert [copy_sources(places, rank, 2) for rank in range(7)] == [[4, 6], [5], [0], [1], [2], [3], []]
    sources = [copy_sources(places, rank, 3) for rank in range(7)]
    for source in range(7):
        assert {places[rank] for rank in range(7) if source in sources[rank]} == {"a", "b", "c"} - {places[source]}


def test_a_file_goes_to_who_knows_the_token_and_only_one_that_is_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "a").write_bytes(os.urandom(3_000_000))
    (tmp_path / "secret").write_text("not offered")
    offer = peers.Offer("127.0.0.1", {"a": tmp_path / "a"})
    try:
        about = manifest.hash_file(tmp_path / "a")
        assert peers.is_there(offer.address)
        peers.fetch(offer.address, "a", tmp_path / "to" / "a", about)
        assert (tmp_path / "to" / "a").read_bytes() == (tmp_path / "a").read_bytes()
        # Who says another token is not told from who finds no place, and tries again.
        monkeypatch.setattr(peers, "AGAIN_S", 0.001)
        host, port, _ = offer.address
        for address, name in (((host, port, "0" * 32), "a"), (offer.address, "secret"), (offer.address, "../secret")):
            with pytest.raises(ArgosyError):
                peers.fetch(address, name, tmp_path / "to" / "b")
        with pytest.raises(Damaged):
            peers.fetch(offer.address, "a", tmp_path / "to" / "b", about | {"sha256": "0" * 64})
        assert [file.name for file in (tmp_path / "to").iterdir()] == ["a"]
    finally:
        offer.close()
    assert not peers.is_there(offer.address)


def test_a_file_is_fetched_once_its_holder_has_a_place_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A holder that answers two at a time, asked by twelve at once."""
    (tmp_path / "a").write_bytes(os.urandom(3_000_000))
    about = manifest.hash_file(tmp_path / "a")
    monkeypatch.setattr(peers, "MOST_AT_ONCE", 2)
    monkeypatch.setattr(peers, "AGAIN_S", 0.02)
    offer = peers.Offer("127.0.0.1", {"a": tmp_path / "a"})
    try:
        with ThreadPoolExecutor(12) as pool:
            list(pool.map(lambda i: peers.fetch(offer.address, "a", tmp_path / str(i), about), range(12)))
        assert all((tmp_path / str(i)).read_bytes() == (tmp_path / "a").read_bytes() for i in range(12))
        # Nobody gets a place: the tries are bounded.
        monkeypatch.setattr(peers, "AGAIN_S", 0.001)
        connections = [peers.socket.create_connection(offer.address[:2]) for _ in range(2)]
        tries, connect = [], peers.connect
        monkeypatch.setattr(peers, "connect", lambda *of: (tries.append(1), connect(*of))[1])
        with pytest.raises(ArgosyError, match="a cannot be fetched"):
            peers.fetch(offer.address, "a", tmp_path / "to", about)
        assert len(tries) == peers.TRIES
        for connection in connections:
            connection.close()
    finally:
        offer.close()


def test_a_file_of_another_size_is_refused_before_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "a").write_bytes(os.urandom(3_000_000))
    monkeypatch.setattr(peers, "MOST_UNKNOWN_BYTES", 2_000_000)
    offer = peers.Offer("127.0.0.1", {"a": tmp_path / "a"})
    opened: list[str] = []
    real = Path.open
    monkeypatch.setattr(Path, "open", lambda self, mode="r", *rest: (opened.append(mode), real(self, mode, *rest))[1])
    try:
        with pytest.raises(Damaged, match="3000000 bytes, not 5"):
            peers.fetch(offer.address, "a", tmp_path / "to", {"bytes": 5, "sha256": ""})
        with pytest.raises(ArgosyError, match="more than 2000000"):
            peers.fetch(offer.address, "a", tmp_path / "to")
    finally:
        offer.close()
    assert not any("w" in mode for mode in opened)


def test_emptying_the_local_tier_removes_ranks_that_the_run_no_longer_has(tmp_path: Path):
    tiers = two(tmp_path)
    root = tmp_path / "local" / "run"
    save_step(tiers, 5, local=True)
    shutil.copytree(root / "0", root / "3")
    save_step(tiers, 6, local=False)
    tiers.wait()
    assert not root.exists()


class Killed(BaseException):
    """Ends a run as a kill does: nothing is saved after it."""


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on_from_its_local_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Bit for bit; a run of the same name that starts anew does not."""
    words = [*SMALL, "checkpoint.every=4", f"checkpoint.local={tmp_path / 'fast'}", "checkpoint.local_every=1", "steps=8"]
    argosy.fit("tiny", *words, f"dir={tmp_path / 'alone'}")
    assert not list((tmp_path / "fast").iterdir())
    run, heard = tmp_path / "run", Heard()
    save = LocalCheckpoints.save

    def killed(self: LocalCheckpoints, step: int, *rest: Any) -> None:
        if step == 7:
            self.join()
            raise Killed
        save(self, step, *rest)

    monkeypatch.setattr(LocalCheckpoints, "save", killed)
    with pytest.raises(Killed):
        argosy.fit("tiny", *words, f"dir={run}")
    monkeypatch.undo()
    (key,) = (tmp_path / "fast").iterdir()
    assert sorted(step.name for step in (key / "0").iterdir()) == ["5", "6"]
    shutil.copytree(run, tmp_path / "other")
    argosy.fit("tiny", *words, f"dir={run}", view=heard)
    assert "resuming from step 6 of 8" in heard.words
    assert digest(run, 8) == digest(tmp_path / "alone", 8)
    # A copy of the run is another run.
    other = Heard()
    argosy.fit("tiny", *words, f"dir={tmp_path / 'other'}", view=other)
    assert "resuming from step 4 of 8" in other.words


def test_damage_in_every_tier_is_found(tmp_path: Path):
    """A share of `campaign_flips`, drawn over tiers, kinds of file and damages."""
    blows = campaign_flips.campaign(tmp_path, 20)
    assert len({blow.tier for blow in blows}) == 3
    assert all(blow.good for blow in blows), blows
