"""One server over several processes: the front door in the first, the others in lock step."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import ml_dtypes
import numpy as np
import pytest
from helpers import free_port
from laws.families import CASES, noisy_model
from predict_servers import write_scaled

from argosy.cli import main
from argosy.core.errors import BadInput
from argosy.core.process.channel import Channel
from argosy.export.bundle import Bundle
from argosy.export.model import export_model
from argosy.infer.lm import LM
from argosy.jobs.launch_servers import STEADY_S, Uptime
from argosy.models.parts.stack import Unroll
from argosy.predict.metrics import PredictMetrics
from argosy.predict.processes.follower import LeaderLost, ProcessFollower, leader_connection
from argosy.predict.processes.leader import ProcessLeader, ProcessListener
from argosy.predict.processes.messages import packed_message, unpacked_message
from argosy.predict.repository import Repository
from argosy.predict.settings import PredictSettings


def test_messages_carry_arrays_of_every_type():
    arrays = {
        "a": np.arange(6, dtype=np.int32).reshape(2, 3),
        "one": np.asarray(7, np.uint32),
        "none": np.zeros((0, 4), np.float32),
        "half": np.asarray([[1.5], [-2]], ml_dtypes.bfloat16),
    }
    head, copies = unpacked_message(packed_message({"do": "run", "bundle": 3}, arrays))
    assert head == {"do": "run", "bundle": 3}
    for name, array in arrays.items():
        assert copies[name].dtype == array.dtype
        np.testing.assert_array_equal(copies[name], array)


class Pair:
    """A leader and a follower in this process, whose bundles are for one device each."""

    def __init__(self) -> None:
        mine, theirs = socket.socketpair()
        self.lost: list[int] = []
        self.stop = 0
        self.leader = ProcessLeader({1: mine}, self.lost.append)
        self.follower = ProcessFollower(theirs, lambda: self.stop, lambda _: None)
        self.pool = ThreadPoolExecutor(1)
        self.followed = self.pool.submit(self.follower.follow)


@pytest.fixture
def pair() -> Iterator[Pair]:
    processes = Pair()
    yield processes
    if not processes.followed.done():
        processes.leader.end(0)
    processes.pool.shutdown()


def until(true: Callable[[], Any], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def repository_of(folder: Path, pair: Pair, messages: list[str]) -> Repository:
    return Repository(folder, PredictSettings(), PredictMetrics(), messages.append, None, pair.leader.open)


def test_a_follower_opens_runs_and_closes_what_the_leader_does(pair, tmp_path, monkeypatch):
    write_scaled(tmp_path / "scaled" / "1", 2.0)
    runs, original = list[Any](), Bundle.computed

    def computed(self: Bundle, signature: Any, program: Any, arrays: Any) -> Any:
        if type(self) is Bundle:
            runs.append((signature, program, {name: np.array(a) for name, a in arrays.items()}))
        return original(self, signature, program, arrays)

    monkeypatch.setattr(Bundle, "computed", computed)
    messages: list[str] = []
    repository = repository_of(tmp_path, pair, messages)
    repository.look()
    version = repository.find("scaled")
    (bundle,) = pair.follower.bundles.values()
    assert bundle.manifest == version.bundle.manifest
    warm, runs[:] = len(runs), []
    assert warm
    for i in range(5):
        outputs = version.bundle.run({"x": np.full((2, 3), i, np.float32)})
        np.testing.assert_array_equal(outputs["y"], np.full((2, 3), 2.0 * i))
    until(lambda: len(runs) == 5)
    of = bundle.manifest.signatures["call"]
    assert [(signature, program, arrays["x"][0, 0]) for signature, program, arrays in runs] == [
        (of, of.programs[0], float(i)) for i in range(5)
    ]
    write_scaled(tmp_path / "scaled" / "2", 3.0)
    repository.look()
    assert [b.path.name for b in pair.follower.bundles.values()] == ["2"]
    assert "scaled version 1 is unloaded" in messages
    repository.close()


def test_what_a_follower_cannot_open_is_not_loaded(pair, tmp_path, monkeypatch):
    write_scaled(tmp_path / "scaled" / "1", 2.0)
    other = write_scaled(tmp_path / "elsewhere", 3.0)
    original = pair.follower._load

    def load(head: dict[str, Any]) -> None:
        original(head | ({"path": path} if head["do"] == "open" else {}))

    monkeypatch.setattr(pair.follower, "_load", load)
    nothing = tmp_path / "nothing", r"no bundle at .*nothing.* \(in process 1\)"
    for elsewhere, why in (nothing, (other, "process 1 has another bundle at")):
        path, messages = str(elsewhere), list[str]()
        repository = repository_of(tmp_path / "scaled", pair, messages)
        repository.look()
        assert re.search(why, messages[-1]), messages
        until(lambda: not pair.follower.bundles)
    # It is tried again, for the follower may see the files later, and said once.
    repository.look()
    assert len(messages) == 1
    path = str(tmp_path / "scaled" / "1")
    repository.look()
    np.testing.assert_array_equal(repository.find("scaled").bundle.run({"x": np.ones((1, 3), np.float32)})["y"], 2)
    repository.close()


@pytest.mark.parametrize("in_leader", [True, False])
def test_a_bundle_that_one_process_alone_finds_altered_is_not_loaded(pair, tmp_path, monkeypatch, in_leader):
    """The other has opened it. Batches of other models go on."""
    write_scaled(tmp_path / "altered" / "1", 3.0)
    write_scaled(tmp_path / "whole" / "1", 2.0)
    original, alone = Bundle.load, threading.Lock()

    def load(self: Bundle) -> None:
        with alone:
            if self.path.parent.name != "altered" or (type(self) is not Bundle) is not in_leader:
                return original(self)
            (program,) = (self.path / "programs").iterdir()
            before = program.read_bytes()
            program.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
            try:
                original(self)
            finally:
                program.write_bytes(before)

    monkeypatch.setattr(Bundle, "load", load)
    messages: list[str] = []
    # Without warm-up a batch would be the first to read the files.
    settings = PredictSettings(warm_up=False)
    repository = Repository(tmp_path, settings, PredictMetrics(), messages.append, None, pair.leader.open)
    repository.look()
    where = "" if in_leader else r" \(in process 1\)"
    assert re.fullmatch(
        rf"altered version 1 is not loaded: programs/\S+ was altered after the bundle was opened{where}", messages[0]
    ), messages
    until(lambda: len(pair.follower.bundles) == 1)
    np.testing.assert_array_equal(repository.find("whole").bundle.run({"x": np.ones((2, 3), np.float32)})["y"], 2)
    assert not pair.lost
    repository.close()


def test_a_batch_reads_no_file(pair, tmp_path):
    folder = write_scaled(tmp_path / "scaled" / "1", 2.0)
    repository = Repository(tmp_path, PredictSettings(warm_up=False), PredictMetrics(), print, None, pair.leader.open)
    repository.look()
    bundle = repository.find("scaled").bundle
    for file in [*folder.glob("programs/*"), *folder.glob("weights/*")]:
        file.unlink()
    np.testing.assert_array_equal(bundle.run({"x": np.ones((2, 3), np.float32)})["y"], 2)
    repository.close()


def test_what_a_follower_cannot_compile_is_tried_once(pair, tmp_path, monkeypatch):
    """It would take the memory of models that serve, at every look."""
    write_scaled(tmp_path / "scaled" / "1", 2.0)
    original, loads, messages = Bundle.load, list[Bundle](), list[str]()

    def load(self: Bundle) -> None:
        loads.append(self)
        original(self)

    compiled = Bundle.compile

    def compile_bundle(self: Bundle, *args: Any, **more: Any) -> int:
        if type(self) is Bundle:
            raise RuntimeError("RESOURCE_EXHAUSTED")
        return compiled(self, *args, **more)

    monkeypatch.setattr(Bundle, "load", load)
    monkeypatch.setattr(Bundle, "compile", compile_bundle)
    repository = repository_of(tmp_path, pair, messages)
    for _ in range(3):
        repository.look()
    assert [type(bundle) is Bundle for bundle in loads].count(True) == 1
    assert "scaled version 1 is not loaded" in messages[0]
    assert "in process 1" in messages[0]
    assert len(messages) == 1
    repository.close()


def test_a_leader_that_fails_alone_ends_all(pair, tmp_path, monkeypatch):
    """Its followers are in the batch already, and would be one behind for ever."""
    write_scaled(tmp_path / "scaled" / "1", 2.0)
    repository = repository_of(tmp_path, pair, [])
    repository.look()
    bundle, original = repository.find("scaled").bundle, Bundle.computed

    def computed(self: Bundle, signature: Any, program: Any, arrays: Any) -> Any:
        if type(self) is not Bundle:
            raise MemoryError
        return original(self, signature, program, arrays)

    with pytest.raises(BadInput):
        bundle.run({"x": np.zeros((2, 3), np.int32)})
    assert not pair.lost
    monkeypatch.setattr(Bundle, "computed", computed)
    with pytest.raises(MemoryError):
        bundle.run({"x": np.zeros((2, 3), np.float32)})
    assert pair.lost == [0]
    monkeypatch.undo()
    repository.close()


def test_an_end_without_a_word_is_noticed_on_both_sides(tmp_path):
    pair = Pair()
    pair.leader._connections[1].close()
    with pytest.raises(LeaderLost):
        pair.followed.result(30)
    pair.leader.end(0)
    pair = Pair()
    pair.follower._connection.shutdown(socket.SHUT_RDWR)
    until(lambda: pair.lost == [1])
    with pytest.raises(LeaderLost):
        pair.followed.result(30)
    pair.leader.end(0)


def test_a_follower_that_is_asked_to_stop_asks_the_leader(pair):
    pair.stop = 143
    until(lambda: pair.leader.asked == 143)
    assert not pair.followed.done()
    pair.leader.end(pair.leader.asked)
    assert pair.followed.result(30) == 143


def test_only_the_processes_of_the_server_connect():
    listener = ProcessListener("127.0.0.1")
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(listener.accept, 2)
        hello = {"token": listener.token, "rank": 1}
        wrong = [json.dumps(hello | part).encode() for part in ({"token": "guess"}, {"rank": 3})]
        for words in [b"GET / HTTP/1.1", b"[]", b'{"token": "x", "rank": 1e999}', b"[" * 100_000, *wrong]:
            with socket.create_connection((listener.host, listener.port)) as client:
                Channel(client.fileno()).send(words)
                client.setblocking(True)
                assert client.recv(1) == b""
        first, second = (leader_connection(listener.address, rank) for rank in (2, 1))
        connections = accepted.result(30)
    assert sorted(connections) == [1, 2]
    for connection in (first, second, *connections.values()):
        connection.close()


def test_a_server_that_ran_for_long_may_fail_any_number_of_times(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    uptime = Uptime()
    before = uptime()
    clock[0] += STEADY_S / 2
    assert uptime() == before
    clock[0] += STEADY_S + 1
    assert uptime() != before


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["-- predict {folder} prot=1"], "unknown setting `prot`"),
        (["proceses=2 -- predict {folder}"], "unknown setting `proceses`"),
        (["-- predict {folder}/nothing"], "no such folder"),
        (["-- predict"], "names no models"),
        (["-- predict {folder} host=0.0.0.0"], "lets everybody on the network use this server"),
    ],
)
def test_mistakes_of_a_launch_are_found_before_it_starts(tmp_path, capsys, words, why):
    write_scaled(tmp_path / "scaled" / "1", 2.0)
    assert main(["launch", *words[0].format(folder=tmp_path).split()]) == 2
    assert why in capsys.readouterr().err


# ---------------------------------------------------------------- real processes


@contextmanager
def launch_server(repository: Path, logs: Path) -> Iterator[tuple[int, list[str], subprocess.Popen[str]]]:
    """A server of two processes with two devices each: its port, what it says, which grows, and its supervisor."""
    port, lines = free_port(), list[str]()
    base = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}
    words = [sys.executable, "-m", "argosy", "launch", "processes=2", "devices=2", f"logs={logs}", "--", "predict", str(repository)]
    with subprocess.Popen([*words, f"port={port}"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=base) as process:
        reader = threading.Thread(target=lambda: lines.extend(map(str.strip, process.stdout)))  # type: ignore[arg-type]
        reader.start()
        try:
            wait_ready(lines, process)
            yield port, lines, process
        finally:
            process.terminate()
            try:
                process.wait(60)
            finally:
                process.kill()
                reader.join()


def wait_ready(lines: list[str], process: subprocess.Popen[str], times: int = 1) -> None:
    until(lambda: process.poll() is not None or sum("ready on " in line for line in lines) == times, 300)
    assert process.poll() is None, lines


def members(process: subprocess.Popen[str]) -> dict[int, int]:
    """The processes of a server by rank."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    ranks = {}
    for child in map(int, children):
        environment = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        ranks |= {int(word.removeprefix(b"ARGOSY_RANK=")): child for word in environment if word.startswith(b"ARGOSY_RANK=")}
    return ranks


def private_bytes(pid: int) -> int:
    """The memory that a process shares with no file."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+) kB", status)[1]) * 1024  # type: ignore[index]


def predict(port: int, tokens: list[list[int]], model: str = "llama") -> np.ndarray:
    rows = [{"tokens": row, "mask": [1] * len(row)} for row in tokens]
    answer = httpx.post(f"http://127.0.0.1:{port}/v1/models/{model}:predict", json={"instances": rows}, timeout=60)
    assert answer.status_code == 200, answer.text
    return np.asarray(answer.json()["predictions"], np.float32)


@pytest.mark.slow
def test_two_processes_serve_a_model_that_is_split_over_both(tmp_path):
    case = CASES["llama-window"]
    lm = LM(case, noisy_model(case, Unroll()))
    options: dict[str, Any] = {"platforms": ["cpu"], "length": [8, 16]}
    export_model(lm, tmp_path / "repository" / "llama" / "1", mesh={"tensor": 2, "fsdp": 2}, **options)
    export_model(lm, tmp_path / "repository" / "plain" / "1", **options)
    shutil.copytree(tmp_path / "repository" / "llama", tmp_path / "repository" / "halfway")
    (weights,) = (tmp_path / "repository" / "halfway" / "1" / "weights").iterdir()
    weights.rename(tmp_path / "rest")
    alone = Bundle.open(tmp_path / "repository" / "plain" / "1")
    rng = np.random.default_rng(0)
    texts = [[rng.integers(3, case.vocab, size=length).tolist()] for length in rng.integers(1, 17, size=40)]
    want = [alone.run({"tokens": np.asarray(text, np.int32)})["logits"] for text in texts]

    def check(port: int, model: str = "llama") -> None:
        with ThreadPoolExecutor(8) as pool:
            for got, right in zip(pool.map(lambda text: predict(port, text, model), texts), want, strict=True):
                np.testing.assert_allclose(got, right, rtol=0, atol=1e-4 * np.abs(right).max())

    with launch_server(tmp_path / "repository", tmp_path / "logs") as (port, lines, process):
        assert "plain version 1 is not loaded: its programs are for 1 device, and the 2 processes have 4" in lines
        assert f"halfway version 1 is not loaded: weights/{weights.name} is missing" in lines
        check(port)
        # The copy goes on.
        (tmp_path / "rest").rename(weights)
        assert httpx.post(f"http://127.0.0.1:{port}/v2/repository/models/halfway/load", timeout=120).status_code == 200
        check(port, "halfway")
        # Loads and unloads reach both.
        for verb in ("unload", "load"):
            assert httpx.post(f"http://127.0.0.1:{port}/v2/repository/models/llama/{verb}", timeout=120).status_code == 200
        check(port)
        os.kill(members(process)[1], signal.SIGKILL)
        wait_ready(lines, process, 2)
        assert "error: process 1 of this server ended, and a model is split over all of them: all end" in lines
        assert "process 1 of 2 ended by SIGKILL" in lines
        check(port)
        # One that is asked to stop has all of them drain.
        os.kill(members(process)[1], signal.SIGTERM)
        assert process.wait(60) == 143


@pytest.mark.slow
def test_a_process_holds_its_share_of_the_weights(tmp_path):
    """240 MB of weights, which each process would hold if they were not split."""
    settings = {"width": 512, "ffn": 8192, "layers": 4, "heads": 8, "kv_heads": 8, "vocab": 8192, "context": 64}
    config = CASES["llama-plain"].model_copy(update=settings)
    lm = LM(config, noisy_model(config, Unroll()))
    weights = 4 * config.parameters()
    assert weights > 2e8
    used = {}
    for name, mesh in (("split", {"tensor": 4}), ("small", None)):
        model = lm if mesh else LM(CASES["llama-plain"], noisy_model(CASES["llama-plain"], Unroll()))
        sizes: Any = mesh or {"tensor": 2, "fsdp": 2}
        export_model(model, tmp_path / name / "llama" / "1", platforms=["cpu"], mesh=sizes, batch=1, length=8)
        with launch_server(tmp_path / name, tmp_path / "logs") as (port, _, process):
            predict(port, [[1, 2, 3]])
            used[name] = {rank: private_bytes(pid) for rank, pid in members(process).items()}
    for rank in (0, 1):
        assert used["split"][rank] - used["small"][rank] < 0.75 * weights, used
