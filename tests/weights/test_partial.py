"""A folder in the making, killed at every line of the code that makes it."""

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from argosy.core.errors import ArgosyError, BadInput, Busy
from argosy.core.formats.files import File, of_text
from argosy.weights.staging import JOURNAL, StagedFolder

IDENTITY = {"source": "hub 0123", "dtype": "kept"}


def file_of(name: str, seed: int, slabs: int = 3) -> File:
    data = np.random.default_rng(seed).integers(0, 256, (slabs, 1000), np.uint8)
    return File(name, data.size, lambda order: iter(data))


def some() -> list[File]:
    return [file_of("a", 1), file_of("deep/er/b", 2), of_text("c.json", "{}")]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def expected() -> dict[str, bytes]:
    return {file.name: b"".join(slab.tobytes() for slab in file.slabs(np.asarray)) for file in some()}


def write_part(target: Path, files: list[File] | None = None, identity: dict | None = IDENTITY) -> int:
    files = some() if files is None else files
    with StagedFolder(target, identity) as part:
        kept_bytes = part.plan(files)
        part.write(files)
        part.commit()
    return kept_bytes


def left_over(target: Path, **changes: object) -> Path:
    """Two of three files are whole."""
    files = some()
    with StagedFolder(target, IDENTITY | changes) as part:
        part.plan(files)
        part.write(files[:2])
    return part.folder


def test_what_is_written_is_there_and_nothing_else(tmp_path):
    assert write_part(tmp_path / "sub" / "target") == 0
    assert contents(tmp_path / "sub" / "target") == expected()
    assert [path.name for path in (tmp_path / "sub").iterdir()] == ["target"]


KILLED = """
import os, signal, sys, threading
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_partial import contents, expected, write_part
import argosy.weights.output as output
import argosy.weights.staging as module

def run(target, last):
    lines = [0]
    def trace(frame, event, arg):
        if frame.f_code.co_filename not in (module.__file__, output.__file__):
            return None
        if event == "line":
            lines[0] += 1
            if lines[0] == last:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace
    threading.settrace(trace)
    sys.settrace(trace)
    write_part(target)
    os._exit(0)

folder, last, killed, resumed = Path(sys.argv[1]), 1, 0, 0
while True:
    target = folder / str(last)
    if (child := os.fork()) == 0:
        run(target, last)
    if os.waitpid(child, 0)[1] == 0:
        break
    killed += 1
    if (target / "a").exists():
        assert {{k: v for k, v in contents(target).items() if not k.startswith(".")}} == expected(), "a torn target"
    try:
        resumed += write_part(target) > 0
    except module.BadInput as error:
        assert "not empty" in error.what and contents(target) == expected(), "the rename was done before"
    assert contents(target) == expected(), last
    assert not target.with_name(target.name + ".part").exists()
    last += {step}
print(killed, resumed)
"""


def test_killed_at_any_line_the_same_call_resumes(tmp_path):
    program = KILLED.format(tests=str(Path(__file__).parent), step=5)
    done = subprocess.run([sys.executable, "-c", program, tmp_path], check=True, capture_output=True, text=True)
    killed, resumed = map(int, done.stdout.split())
    assert killed > 30
    assert resumed > 5, "something was kept"


def test_whole_files_are_kept_and_not_made_again(tmp_path):
    left_over(tmp_path / "target")

    def fails(order):
        raise AssertionError("made again")

    files = [file._replace(slabs=fails) for file in some()[:2]] + some()[2:]
    assert write_part(tmp_path / "target", files) == 6000
    assert contents(tmp_path / "target") == expected()


@pytest.mark.parametrize("harm", ["flipped", "short", "gone"])
def test_a_left_over_that_is_damaged_is_written_again(tmp_path, harm):
    part = left_over(tmp_path / "target")
    data = bytearray((part / "a").read_bytes())
    data[500] ^= 1
    if harm == "gone":
        (part / "a").unlink()
    else:
        (part / "a").write_bytes(data if harm == "flipped" else data[:-1])
    assert write_part(tmp_path / "target") == 3000
    assert contents(tmp_path / "target") == expected()


def test_a_torn_line_of_the_journal_ends_it(tmp_path):
    part = left_over(tmp_path / "target")
    text = (part / JOURNAL).read_text()
    (part / JOURNAL).write_text(text[: len(text) - 20])
    assert write_part(tmp_path / "target") == 3000
    assert contents(tmp_path / "target") == expected()


def test_a_left_over_of_something_else_is_refused_and_stays(tmp_path):
    part = left_over(tmp_path / "target", dtype="float32")
    before = contents(part)
    with pytest.raises(BadInput, match="is an unfinished folder of another conversion") as caught:
        write_part(tmp_path / "target")
    assert caught.value.where == "dtype was float32, is kept"
    assert contents(part) == before
    assert not (tmp_path / "target").exists()


def test_a_folder_of_that_name_that_is_no_left_over_is_refused(tmp_path):
    (tmp_path / "target.part").mkdir()
    (tmp_path / "target.part" / "thesis.tex").write_text("mine")
    with pytest.raises(BadInput, match="in the way"):
        write_part(tmp_path / "target")
    assert contents(tmp_path / "target.part") == {"thesis.tex": b"mine"}


@pytest.mark.parametrize("there", ["file", "folder", "link"])
def test_nothing_is_overwritten(tmp_path, there):
    target = tmp_path / "target"
    if there == "file":
        target.write_text("mine")
    elif there == "folder":
        target.mkdir()
        (target / "mine").touch()
    else:
        target.symlink_to(tmp_path / "nowhere")
    with pytest.raises(BadInput, match="not empty"):
        write_part(target)
    assert not (tmp_path / "target.part").exists()


def test_an_empty_folder_is_taken(tmp_path):
    (tmp_path / "target").mkdir()
    write_part(tmp_path / "target")
    assert contents(tmp_path / "target") == expected()


def test_a_second_writer_is_refused(tmp_path):
    with StagedFolder(tmp_path / "target", IDENTITY) as part:
        part.plan(some())
        with pytest.raises(Busy, match="another process"):
            write_part(tmp_path / "target")
        part.write(some())
        part.commit()
    assert contents(tmp_path / "target") == expected()


def test_too_little_space_is_reported_before_anything_is_written(tmp_path):
    with pytest.raises(BadInput, match="GB free"):
        write_part(tmp_path / "target", [File("a", 2**60, lambda order: iter([]))])
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_keeps_complete_files(tmp_path):
    def fails(order):
        yield np.zeros(1000, np.uint8)
        raise OSError(28, "No space left on device")

    files = some()
    with pytest.raises(ArgosyError, match="no space left") as caught:
        write_part(tmp_path / "target", [*files[:2], file_of("c", 3)._replace(slabs=fails)])
    assert "the same command continues" in (caught.value.hint or "")
    assert not (tmp_path / "target").exists()
    assert {name for name in contents(tmp_path / "target.part") if name != JOURNAL} == {"a", "deep/er/b", "c"}


def test_what_fails_in_the_writing_thread_is_raised(tmp_path):
    with StagedFolder(tmp_path / "target", IDENTITY) as part:
        part.plan(some())
        (part.folder / "a").mkdir()
        with pytest.raises(ArgosyError, match="is a directory"):
            part.write(some())
    short = file_of("a", 1)._replace(bytes=2999)
    with pytest.raises(ValueError, match="announced as 2999"):
        write_part(tmp_path / "other", [short])


def test_without_an_identity_nothing_is_kept(tmp_path):
    def fails(order):
        raise RuntimeError("no")

    bad = [*some()[:1], File("x", 1, fails)]
    with pytest.raises(RuntimeError, match="no"):
        write_part(tmp_path / "target", bad, None)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "target.part").mkdir()  # what a kill leaves
    (tmp_path / "target.part" / JOURNAL).write_text(json.dumps({"facts": None}) + "\n")
    (tmp_path / "target.part" / "old").touch()
    write_part(tmp_path / "target", identity=None)
    assert contents(tmp_path / "target") == expected()


def test_slabs_do_not_pile_up(tmp_path):
    """The writer is slower than the maker: at most two slabs wait, one is being written, one was just made."""
    alive: list[int] = []

    class Slab(np.ndarray):
        pass

    import weakref

    def slabs(order):
        for _ in range(20):
            slab = np.zeros(1000, np.uint8).view(Slab)
            alive.append(1)
            weakref.finalize(slab, alive.pop)
            most[0] = max(most[0], len(alive))
            yield slab
            del slab

    most = [0]
    slow = pytest.MonkeyPatch()
    slow.setattr("argosy.weights.output.write_all", lambda out, slab: (time.sleep(0.002), out.write(slab)))
    try:
        write_part(tmp_path / "target", [File("a", 20_000, slabs)])
    finally:
        slow.undo()
    assert 2 <= most[0] <= 6
