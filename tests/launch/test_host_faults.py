"""Faults of one host, made with the kernel's own means: a network that is cut, a directory that becomes read-only, disks that are full.

They need root and namespaces (`ip netns`, `unshare`, `mount`), and are left out where those are not.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from helpers import Clock, free_port
from test_gangs import SMALL, environment

LONG = ["steps=100000", "eval.batches=0", "checkpoint.every=10"]


def run_command(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True, timeout=30).stdout


def works(*words: str) -> bool:
    try:
        return subprocess.run(words, check=False, capture_output=True, timeout=30).returncode == 0
    except OSError:
        return False


MOUNTS = pytest.mark.skipif(not works("unshare", "-m", "true"), reason="no mount namespaces here")


class Started:
    """Processes of one run, and what they said."""

    def __init__(self, folder: Path, run: Path, words: list[str], count: int = 1, **more: str):
        self.folder, self.run, self.count, self.more = folder, run, count, more
        self.words = ["train", "tiny", "data.source=synthetic", f"dir={run}", *SMALL, *LONG, *words]
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, inside: Callable[[int], list[str]] = lambda rank: [], address: str = "127.0.0.1") -> None:
        """inside: the words before a process's own."""
        gang = {"ARGOSY_COORDINATOR": f"{address}:{free_port()}", "ARGOSY_PROCESSES": str(self.count)} if self.count > 1 else {}
        self.processes = []
        for rank in range(self.count):
            variables = environment(**gang, **self.more, **({"ARGOSY_RANK": str(rank)} if gang else {}))
            words = [*inside(rank), sys.executable, "-m", "argosy", *self.words]
            with self._file(rank).open("wb") as log:
                self.processes.append(subprocess.Popen(words, env=variables, stdout=log, stderr=log))

    def _file(self, rank: int) -> Path:
        return self.folder / f"said-{rank}"

    def said(self, rank: int = 0) -> str:
        return self._file(rank).read_text(errors="replace")

    def steps(self) -> list[int]:
        path = self.run / "metrics.jsonl"
        lines = [line for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []
        return [line["step"] for line in map(json.loads, lines) if "loss" in line]

    def saved(self) -> list[int]:
        return sorted(int(path.parent.name) for path in self.run.glob("checkpoints/*/manifest.json") if path.parent.name.isdecimal())

    def until(self, condition: Callable[[], bool], seconds: float = 60, alive: bool = True) -> float:
        begun = time.monotonic()
        while not condition():
            assert time.monotonic() - begun < seconds, [self.said(rank)[-3000:] for rank in range(self.count)]
            assert not alive or all(process.poll() is None for process in self.processes), self.said()[-3000:]
            time.sleep(0.05)
        return time.monotonic() - begun

    def stop(self) -> list[int]:
        self.processes[0].send_signal(signal.SIGTERM)
        return [process.wait(60) for process in self.processes]

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture
def two_hosts() -> Iterator[tuple[list[str], Callable[[str], str]]]:
    """Two network namespaces with a cable between them: their names, and a function that sets the cable up or down."""
    tag = uuid4().hex[:6]
    names, ends = [f"argosy-{tag}-{i}" for i in range(2)], [f"v{tag}{i}" for i in range(2)]
    if not works("ip", "netns", "add", names[0]):
        pytest.skip("no network namespaces here")
    try:
        run_command("ip", "netns", "add", names[1])
        run_command("ip", "link", "add", ends[0], "netns", names[0], "type", "veth", "peer", "name", ends[1], "netns", names[1])
        for i, (name, end) in enumerate(zip(names, ends, strict=True)):
            run_command("ip", "-n", name, "addr", "add", f"10.99.0.{i + 1}/24", "dev", end)
            for link in ("lo", end):
                run_command("ip", "-n", name, "link", "set", link, "up")
        yield names, lambda state: run_command("ip", "-n", names[0], "link", "set", ends[0], state)
    finally:
        for name in names:
            works("ip", "netns", "del", name)


@pytest.mark.slow
def test_a_network_that_is_cut_ends_both_sides_and_the_run_goes_on_afterwards(tmp_path: Path, two_hosts: tuple, clock: Clock):
    names, cable = two_hosts
    for i in range(2):
        # The host's own name leads to its address on the cable, as it does between real hosts.
        (tmp_path / f"hosts-{i}").write_text(f"10.99.0.{i + 1} {os.uname().nodename}\n127.0.0.1 localhost\n")

    def inside(rank: int) -> list[str]:
        hosts = f'mount --bind {tmp_path}/hosts-{rank} /etc/hosts && exec "$@"'
        return ["ip", "netns", "exec", names[rank], "sh", "-c", hosts, "sh"]

    gang = Started(tmp_path, tmp_path / "run", [], count=2)
    try:
        gang.start(inside, "10.99.0.1")
        gang.until(lambda: len(gang.saved()) > 1)
        cable("down")
        with clock("noticed"):
            took = gang.until(lambda: all(process.poll() is not None for process in gang.processes), alive=False)
        assert took < 10
        assert 0 not in [process.returncode for process in gang.processes]
        newest = max(gang.saved())
        cable("up")
        with clock("over"):
            gang.start(inside, "10.99.0.1")
            gang.until(lambda: bool(gang.saved()) and max(gang.saved()) > newest)
        assert f"resuming from step {newest} of" in gang.said()
        assert gang.stop() == [143, 143], gang.said()
    finally:
        gang.kill()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    if not works("mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(disk)):
        pytest.skip("no mounts here")
    try:
        yield disk
    finally:
        works("umount", "-l", str(disk))


def fill(file: Path) -> None:
    """Writes until the disk is full."""
    assert not works("dd", "if=/dev/zero", f"of={file}", "bs=4096")


@pytest.mark.slow
def test_a_full_disk_loses_no_line_and_no_later_checkpoint(tmp_path: Path, small_disk: Path, clock: Clock):
    """All of the run directory is on it: its numbers and its log are refused before a checkpoint is."""
    gang = Started(tmp_path, small_disk / "run", ["checkpoint.keep=2"])
    try:
        gang.start()
        gang.until(lambda: bool(gang.saved()))
        fill(small_disk / "fill")
        with clock("noticed"):
            gang.until(lambda: "a checkpoint could not be written: [Errno 28] No space left on device; trying" in gang.said())
        # Once the pages that they have are full too.
        gang.until(lambda: "metrics.jsonl cannot be written: `metrics.jsonl`: no space left on device; the run goes on" in gang.said())
        gang.until(lambda: "log.txt cannot be written" in gang.said())
        before = gang.saved()
        (small_disk / "fill").unlink()
        with clock("over"):
            gang.until(lambda: bool(gang.saved()) and max(gang.saved()) > max(before))
        gang.until(lambda: "metrics.jsonl can be written again" in gang.said())
        assert gang.stop() == [143], gang.said()[-2000:]
        steps = gang.steps()
        assert steps == list(range(1, max(steps) + 1))
        assert max(gang.saved()) == max(steps)
    finally:
        gang.kill()


@MOUNTS
@pytest.mark.slow
def test_a_directory_that_becomes_read_only(tmp_path: Path, clock: Clock):
    folder = tmp_path / "run" / "checkpoints"
    gang = Started(tmp_path, tmp_path / "run", ["checkpoint.every=2"], count=2)
    try:
        gang.start()
        gang.until(lambda: bool(gang.saved()))
        if not works("mount", "--bind", str(folder), str(folder)):
            pytest.skip("no mounts here")
        # Refused while a file is open for writing: the first that succeeds falls between two files, or between two saves.
        gang.until(lambda: works("mount", "-o", "remount,ro,bind", str(folder)))
        before = gang.saved()
        with clock("noticed"):
            gang.until(lambda: "a checkpoint could not be written: " in gang.said())
        logged = len(gang.steps())
        gang.until(lambda: len(gang.steps()) > logged + 3)
        run_command("mount", "-o", "remount,rw,bind", str(folder))
        with clock("over"):
            gang.until(lambda: bool(gang.saved()) and max(gang.saved()) > max(before))
        assert gang.stop() == [143, 143], gang.said()[-2000:]
        assert "Read-only file system" in gang.said()
        assert "Traceback" not in gang.said(0) + gang.said(1)
        assert max(gang.saved()) == max(gang.steps())
    finally:
        gang.kill()
        works("umount", "-l", str(folder))


@MOUNTS
@pytest.mark.slow
def test_a_disk_that_is_full_on_one_host_only(tmp_path: Path, clock: Clock):
    """Each process has a disk of its own under one path; that of rank 1 is full for some steps."""
    disk = tmp_path / "disk"
    disk.mkdir()
    local = [f"checkpoint.local={disk}", "checkpoint.local_every=2"]
    gang = Started(tmp_path, tmp_path / "run", local, count=2)
    command = f'mount -t tmpfs -o size=24m tmpfs {disk} && exec "$@"'

    def there(*words: str) -> str:
        return run_command("nsenter", "-t", str(gang.processes[1].pid), "-m", *words)

    def steps() -> list[int]:
        paths = there("sh", "-c", f"ls -d {disk}/*/1/*/manifest.json 2>/dev/null || true").split()
        return sorted(int(Path(path).parent.name) for path in paths)

    try:
        gang.start(lambda rank: ["unshare", "-m", "sh", "-c", command, "sh"])
        gang.until(lambda: bool(gang.saved()) and bool(steps()))
        there("sh", "-c", f"cat /dev/zero > {disk}/fill 2>/dev/null || true")
        with clock("noticed"):
            gang.until(lambda: "a local checkpoint could not be written: " in gang.said())
        assert "No space left on device (in process 1)" in gang.said()
        saved = max(gang.saved())
        # The persistent ones go on meanwhile.
        gang.until(lambda: max(gang.saved()) > saved)
        full = max(steps(), default=0)
        there("rm", f"{disk}/fill")
        with clock("over"):
            gang.until(lambda: max(steps(), default=0) > full)
        assert gang.stop() == [143, 143], gang.said()[-2000:]
        assert "Traceback" not in gang.said() + gang.said(1)
    finally:
        gang.kill()
