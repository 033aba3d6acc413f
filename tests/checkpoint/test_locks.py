"""A checkpoint that is read is not removed, and one that is being removed is not read."""

import threading
from pathlib import Path
from typing import Any

import pytest

from argosy.checkpoint.step.locks import ReadLock, exclusive
from argosy.weights import manifest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    step = tmp_path / "7"
    step.mkdir()
    (step / "meta.json").write_text('{"step": 7}')
    manifest.write_manifest(step)
    return step


def test_a_reader_that_comes_while_a_checkpoint_is_removed_finds_it_gone(folder: Path):
    """It does not read a folder that is being emptied."""
    came, results = threading.Event(), list[Any]()

    def read() -> None:
        came.set()
        try:
            results.append(ReadLock(folder))
        except FileNotFoundError as error:
            results.append(error)

    reader = threading.Thread(target=read)
    with exclusive(folder) as free:
        assert free
        reader.start()
        came.wait()
        reader.join(0.2)
        assert not results, "it waits until the manifest is gone"
        (folder / manifest.NAME).unlink()
    reader.join()
    assert isinstance(results[0], FileNotFoundError)


def test_a_checkpoint_that_is_read_is_not_free(folder: Path):
    reader = ReadLock(folder)
    with exclusive(folder) as free:
        assert not free
    reader.release()
    with exclusive(folder) as free:
        assert free
    ReadLock(folder).release()
