"""Trackers: what they are sent, after failures, kills and repeats; and each beside its real reader, where its package is installed."""

import json
import os
import signal
import sqlite3
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import ClassVar

import pytest

from argosy.core.formats.crc32c import masked_crc32c
from argosy.core.storage import Store
from argosy.observe.metrics import Metrics, read
from argosy.observe.trackers import TRACKERS
from argosy.observe.trackers.base import TrackedRun, TrackerSettings
from argosy.observe.trackers.follow import Follower, next_lines, numbers_of

LINES = [{"step": 0, "header": {"devices": 1}}]
LINES += [{"step": n, "loss": 5.0 - n / 7, "lr": 1e-3, "note": "text", "grad_norm": "nan" if n == 2 else 1.0} for n in range(1, 6)]
LINES += [{"step": 5, "eval_loss": 4.25}, {"step": 5, "seconds": {"step": 1.0}}]


class Recorder(TrackerSettings):
    """Keeps what it is sent in a class attribute; fails as often as told."""

    def open(self, run, id):
        return Recorded(run, id)


class Recorded:
    logged: ClassVar[list] = []
    fails: ClassVar[int] = 0
    whole_steps: ClassVar[bool] = False

    def __init__(self, run, id):
        self.id = id or "first"

    def log(self, step, numbers, time):
        if Recorded.fails:
            Recorded.fails -= 1
            raise OSError("the server is away")
        Recorded.logged.append((step, numbers))

    def flush(self): ...

    def close(self): ...


@pytest.fixture
def store(tmp_path):
    Recorded.logged, Recorded.fails, Recorded.whole_steps = [], 0, False
    return Store(tmp_path / "run")


def write_lines(store, lines):
    metrics = Metrics(store)
    for line in lines:
        metrics.write(line)
    metrics.close()


def follower(store, settings=None, messages=None, name="recorder"):
    run = TrackedRun("mine", Path(store.root) / "trackers", {"seed": 0})
    return Follower(name, settings or Recorder(), store, run, (messages if messages is not None else []).append)


def follow(store, **more):
    follower_run = follower(store, **more)
    follower_run.start()
    follower_run.close()
    return follower_run


def all_numbers(logged):
    out = {}
    for step, numbers in logged:
        for name, number in numbers.items():
            assert (step, name) not in out, "sent twice"
            out[step, name] = number
    return out


EXPECTED = {(line["step"], name): number for line in LINES for name, number in numbers_of(line).items()}


def test_every_number_is_sent_once_in_order_and_the_position_is_kept(store):
    write_lines(store, LINES[:4])
    first = follow(store)
    assert first.position == len(store.read_text("metrics.jsonl").encode())
    write_lines(store, LINES[4:])
    second = follow(store)
    assert second.id == "first"
    recorded = all_numbers(Recorded.logged)
    assert str(recorded) == str(EXPECTED)
    assert [step for step, _ in Recorded.logged] == sorted(step for step, _ in Recorded.logged)


def test_steps_that_a_resumed_run_writes_again_are_not_sent_again(store):
    write_lines(store, LINES)
    follow(store)
    write_lines(store, [*LINES[3:6], {"step": 6, "loss": 1.0}])
    follow(store)
    assert str(all_numbers(Recorded.logged)) == str(EXPECTED | {(6, "loss"): 1.0})


def test_a_tracker_of_whole_steps_gets_each_step_once(store):
    """The evaluation of a step comes after its loss, in a line of its own."""
    Recorded.whole_steps = True
    write_lines(store, LINES[:6])
    tracker = follower(store)
    while tracker.send(Recorded(None, "")):
        pass
    assert [step for step, _ in Recorded.logged] == [1, 2, 3, 4]
    write_lines(store, LINES[6:])
    follow(store)
    assert [step for step, _ in Recorded.logged] == [1, 2, 3, 4, 5]
    assert str(all_numbers(Recorded.logged)) == str(EXPECTED)


def test_a_torn_line_waits_until_it_is_whole(store):
    write_lines(store, LINES[:3])
    path = store.local_path("metrics.jsonl")
    whole = path.stat().st_size
    with path.open("a", encoding="utf-8") as file:
        file.write('{"step": 3, "lo')
    assert next_lines(store, 0, 100)[-1][1] == whole
    # As a run that starts again has it: the torn end is dropped.
    write_lines(store, LINES[3:])
    follow(store)
    assert str(all_numbers(Recorded.logged)) == str(EXPECTED)


def test_a_tracker_that_fails_stops_nothing_and_catches_up(store, monkeypatch):
    monkeypatch.setattr("argosy.observe.trackers.follow.AGAIN_S", 0.01)
    write_lines(store, LINES)
    Recorded.fails, messages = 3, []
    tracker = follower(store, messages=messages)
    tracker.start()
    ends = time.monotonic() + 10
    while tracker.position == 0 and time.monotonic() < ends:
        time.sleep(0.01)
    tracker.close()
    assert str(all_numbers(Recorded.logged)) == str(EXPECTED)
    assert messages[0] == "recorder fails, and the run goes on: OSError: the server is away"
    assert messages[1] == "recorder answers again, and has caught up"


def test_what_a_tracker_did_not_get_comes_with_the_next_start(store):
    write_lines(store, LINES)
    Recorded.fails, messages = 1, []
    follow(store, messages=messages)
    assert any("has not caught up" in text for text in messages) or Recorded.logged
    Recorded.logged, Recorded.fails = [], 0
    store.write_text("trackers/recorder.json", json.dumps({"position": 0, "id": "x"}))
    again = follow(store)
    assert again.id == "x"
    assert str(all_numbers(Recorded.logged)) == str(EXPECTED)


# ---------------------------------------------------------------- TensorBoard


def events_of(folder):
    """{(step, tag): value} of all files of a folder, by the public format; checksums are checked."""
    out = {}
    for path in sorted(folder.glob("events.out.tfevents.*")):
        data, at = path.read_bytes(), 0
        while at + 12 <= len(data):
            (size,) = struct.unpack_from("<Q", data, at)
            content = data[at + 12 : at + 12 + size]
            if len(content) < size:
                break
            sums = struct.unpack_from("<I", data, at + 8) + struct.unpack_from("<I", data, at + 12 + size)
            assert list(sums) == masked_crc32c([data[at : at + 8], content])
            at += size + 16
            fields = dict(fields_of(content))
            for number, value in fields_of(fields.get(5, b"")):
                assert number == 1
                fields_of_value = dict(fields_of(value))
                out[fields.get(2, 0), fields_of_value[1].decode()] = fields_of_value[2]
    return out


def fields_of(data):
    at = 0

    def varint():
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at, value, shift = at + 1, value | (byte & 127) << shift, shift + 7
            if byte < 128:
                return value

    while at < len(data):
        key = varint()
        if key & 7 == 0:
            yield key >> 3, varint()
        elif key & 7 == 2:
            size = varint()
            yield key >> 3, data[at : at + size]
            at += size
        else:
            kind, size = ("<d", 8) if key & 7 == 1 else ("<f", 4)
            yield key >> 3, struct.unpack_from(kind, data, at)[0]
            at += size


def test_tensorboards_file_holds_every_number(store):
    write_lines(store, LINES)
    follow(store, settings=TRACKERS["tensorboard"](), name="tensorboard")
    events = events_of(Path(store.root) / "trackers" / "tensorboard")
    assert events.keys() == EXPECTED.keys()
    assert all(value == struct.unpack("<f", struct.pack("<f", EXPECTED[key]))[0] or value != value for key, value in events.items())


def test_tensorboard_itself_reads_the_file(store):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    write_lines(store, LINES)
    follow(store, settings=TRACKERS["tensorboard"](), name="tensorboard")
    reader = accumulator.EventAccumulator(str(Path(store.root) / "trackers" / "tensorboard"))
    reader.Reload()
    assert [(point.step, point.value) for point in reader.Scalars("loss")] == [
        (line["step"], pytest.approx(line["loss"])) for line in LINES if "loss" in line
    ]


# ---------------------------------------------------------------- the others, where they are installed


@pytest.mark.slow
def test_mlflow_holds_every_number_and_goes_on_with_its_run(store):
    mlflow = pytest.importorskip("mlflow")
    settings = TRACKERS["mlflow"]()
    write_lines(store, LINES[:4])
    first = follow(store, settings=settings, name="mlflow")
    write_lines(store, LINES[4:])
    second = follow(store, settings=settings, name="mlflow")
    assert first.id == second.id
    client = mlflow.tracking.MlflowClient(f"sqlite:///{(Path(store.root) / 'trackers' / 'mlflow.db').resolve()}")
    history = client.get_metric_history(second.id, "loss")
    assert [(point.step, point.value) for point in history] == [(line["step"], line["loss"]) for line in LINES if "loss" in line]
    assert client.get_run(second.id).data.params["seed"] == "0"
    assert client.get_run(second.id).info.status == "FINISHED"


def leveldb_records(data, ahead=7):
    """The records of a file in LevelDB's log format: blocks of 32 KiB, pieces with checksum, length and kind (whole, first, middle,
    last). ahead: bytes of the first block before the data."""
    at, parts = 0, b""
    while at + 7 <= len(data):
        room = 32768 - (at + ahead) % 32768
        if room < 7:
            at += room
            continue
        size, kind = struct.unpack_from("<HB", data, at + 4)
        parts += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            yield parts
            parts = b""


@pytest.mark.slow
def test_wandb_offline_holds_every_number_under_one_run(store, monkeypatch):
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    settings, recorded, ids = TRACKERS["wandb"](mode="offline"), {}, set()
    for lines in (LINES[:4], LINES[4:]):
        write_lines(store, lines)
        ids.add(follow(store, settings=settings, name="wandb").id)
        # It names its files by the second.
        time.sleep(1.1)
    assert len(ids) == 1
    for path in sorted((Path(store.root) / "trackers").rglob("*.wandb")):
        for raw in leveldb_records(path.read_bytes()[7:]):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(raw)
            if record.WhichOneof("record_type") == "history":
                items = {(item.key or ".".join(item.nested_key)): json.loads(item.value_json) for item in record.history.item}
                recorded |= {(items["_step"], name): value for name, value in items.items() if not name.startswith("_")}
    assert recorded.keys() == EXPECTED.keys()
    assert recorded[3, "loss"] == EXPECTED[3, "loss"]


@pytest.mark.slow
def test_trackio_holds_every_number(store, monkeypatch, tmp_path):
    pytest.importorskip("trackio")
    monkeypatch.setattr("trackio.utils.TRACKIO_DIR", tmp_path / "trackio", raising=False)
    write_lines(store, LINES)
    follow(store, settings=TRACKERS["trackio"](project="house"), name="trackio")
    from trackio.sqlite_storage import SQLiteStorage

    with sqlite3.connect(SQLiteStorage.get_project_db_path("house")) as database:
        rows = database.execute("select step, metrics from metrics where run_name = 'mine' order by step").fetchall()
    recorded = {(step, name) for step, text in rows for name in json.loads(text)}
    assert {key for key in EXPECTED if key[1] != "grad_norm"} <= recorded


# ---------------------------------------------------------------- a real run that is killed


@pytest.mark.slow
def test_a_run_that_is_killed_loses_no_number(tmp_path):
    run = tmp_path / "run"
    words = ["track=tensorboard", "log.every=1", "checkpoint.every=5", "eval.batches=0", "data.max_bytes=40000", "steps=30"]
    words += ["model.width=16", "model.layers=1", "model.heads=2", "model.ffn=32", "data.sequence=32", "data.batch=8"]
    command = [sys.executable, "-m", "argosy", "train", "tiny", f"dir={run}", *words]
    killed = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    ends = time.monotonic() + 200
    while time.monotonic() < ends and killed.poll() is None:
        if (run / "metrics.jsonl").exists() and len((run / "metrics.jsonl").read_text().splitlines()) > 8:
            os.kill(killed.pid, signal.SIGKILL)
            break
        time.sleep(0.005)
    assert killed.wait() == -signal.SIGKILL
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    events = events_of(run / "trackers" / "tensorboard")
    expected = {(line["step"], name): number for line in read(Store(run)) for name, number in numbers_of(line).items()}
    assert {step for step, name in expected if name == "loss"} == set(range(1, 31))
    assert events.keys() == expected.keys()
    # What was made again has the same values.
    for (step, name), value in events.items():
        if name == "loss":
            assert value == struct.unpack("<f", struct.pack("<f", expected[step, name]))[0]
