"""Runs that are named by an address are shown, compared and reported as the same files on this machine are."""

import json
import os
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from test_views import make_run

from argosy.cli import main
from argosy.core.storage import Store
from argosy.jobs.history.report import record

RUN = "checkpoints/20/weights/data"


def send_files(folder: Path, scheme: str = "memory") -> str:
    """The files of a folder, in a store."""
    address = f"memory://{uuid4().hex}/{folder.name}" if scheme == "memory" else f"{scheme}://{folder}"
    for file in folder.rglob("*"):
        if file.is_file() and scheme == "memory":
            Store(address).put_file(file.relative_to(folder).as_posix(), file)
    return address


def ask(capsys: pytest.CaptureFixture, *words: str) -> Any:
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("scheme", ["memory", "local", "file"])
def test_an_address_is_shown_and_compared_as_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture, scheme: str):
    folder, other = make_run(tmp_path / "a"), make_run(tmp_path / "b", steps=40)
    address = send_files(folder, scheme)
    for more in ([], ["--verify"]):
        here, there = ask(capsys, "runs", "show", str(folder), *more), ask(capsys, "runs", "show", address, *more)
        if scheme != "file":
            assert there.pop("path") == address
            assert here.pop("path") == str(folder)
        assert abs(there.pop("written_s") - here.pop("written_s")) < 60
        assert there == here
    assert here["state"] == "done"
    assert main(["runs", "show", f"{address}/"]) == 0
    assert "10 (10.0 KiB), 20 (10.0 KiB)" in capsys.readouterr().out
    document = ask(capsys, "runs", "compare", address, str(other))
    assert document["settings"] == {"steps": [20, 40]}
    assert document["numbers"]["state"] == ["done", "can resume"]


@pytest.mark.parametrize("scheme", ["memory", "local"])
def test_a_report_of_an_address_shows_what_that_of_its_folder_does(tmp_path: Path, capsys: pytest.CaptureFixture, scheme: str):
    folder = make_run(tmp_path / "a")
    (folder / "quickstart.json").write_text('{"killed_at": 3}')
    (folder / "evaluations.jsonl").write_text('{"step": 20, "tasks": {"arc": {"accuracy": 0.5}}}\n')
    address = send_files(folder, scheme)
    here, there = record(folder), record(address)
    assert replace(there, date=here.date, command=here.command) == here
    assert [saved.step for saved in there.checkpoints] == [10, 20]
    assert f"train {address} dir=" in there.command
    assert ask(capsys, "report", address) == {"report": f"{address}/report.html"}
    assert "<svg" in Store(address).read_text("report.html")


def test_what_is_wrong_with_a_checkpoint_in_a_store(tmp_path: Path, capsys: pytest.CaptureFixture):
    store = Store(send_files(make_run(tmp_path / "a")))
    good = (tmp_path / "a" / RUN).read_bytes()

    def problem(*more: str) -> str | None:
        document = ask(capsys, "runs", "show", store.root, *more)
        assert (document["state"] == "damaged") == bool(document["problem"])
        return document["problem"]

    def write(data: bytes) -> None:
        with store.open(RUN, "wb") as file:
            file.write(data)

    write(good[:-1])
    assert problem() == "checkpoint 20: weights/data has 10239 bytes, not 10240"
    write(bytes([good[0] ^ 4]) + good[1:])
    assert problem() is None, "sizes alone are looked at"
    assert "weights/data differs from what was written" in str(problem("--verify"))
    store.remove(RUN)
    assert problem() == "checkpoint 20: weights/data is missing"
    write(good)
    assert problem("--verify") is None
    store.write_text("checkpoints/20/manifest.json", "{}")
    assert "manifest" in str(problem())
    assert main(["runs", "show", store.root]) == 0
    assert "20 (damaged)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("lease", "state"),
    [
        ({"host": "elsewhere", "pid": 1, "renewed": time.time() + 600}, "running"),
        ({"host": "elsewhere", "pid": 1, "renewed": time.time() - 600}, "can resume"),
        ({"host": socket.gethostname(), "pid": os.getpid(), "renewed": time.time() - 600}, "running"),
        ({"host": socket.gethostname(), "pid": 2**22 + 1, "renewed": time.time() + 600}, "can resume"),
        ({"host": "elsewhere"}, "can resume"),
    ],
)
def test_a_lease_tells_who_trains(tmp_path: Path, capsys: pytest.CaptureFixture, lease: dict[str, Any], state: str):
    address = send_files(make_run(tmp_path / "a", steps=40))
    Store(address).write_text(".lock", json.dumps(lease))
    assert ask(capsys, "runs", "show", address)["state"] == state


def test_runs_under_an_address_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture):
    root = f"memory://{uuid4().hex}"
    for name in ("a", "b"):
        folder = make_run(tmp_path / name)
        for file in ("settings.yml", "metrics.jsonl"):
            Store(root).put_file(f"{name}/{file}", folder / file)
    Store(root).write_text("notes/text", "no run")
    assert sorted(run["path"] for run in ask(capsys, "runs", root)) == [f"{root}/a", f"{root}/b"]
    assert [run["path"] for run in ask(capsys, "runs", f"{root}/a")] == [f"{root}/a"]


@pytest.mark.parametrize("words", [["runs", "show"], ["report"], ["train"], ["runs", "compare", "memory://x/y"]], ids="_".join)
def test_an_address_without_a_run(words: list[str], capsys: pytest.CaptureFixture):
    root = f"memory://{uuid4().hex}"
    Store(root).write_text("notes", "no run")
    assert main([*words, f"{root}/none" if "compare" not in words else root]) == 2
    stderr = capsys.readouterr().err
    assert "nothing at memory://" in stderr
    if "compare" not in words:
        assert main([*words, root]) == 2
        stderr = capsys.readouterr().err
        assert f"{root} is not a run directory" in stderr
        assert "it holds no settings.yml" in stderr
    assert "hint: " in stderr
