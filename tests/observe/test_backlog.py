"""Lines that a full disk refuses: none is lost, none is doubled, their order stays."""

from pathlib import Path
from uuid import uuid4

import pytest

from argosy.core.errors import ArgosyError
from argosy.core.storage import Store
from argosy.observe.backlog import Backlog
from argosy.observe.metrics import Metrics, read


def full(name: str, line: str) -> None:
    raise ArgosyError(f"`{name}`: no space left on device")


def test_lines_wait_and_come_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    messages: list[str] = []
    lines = Backlog(Store(tmp_path), "file", messages.append)
    lines.append("a")
    with monkeypatch.context() as patch:
        patch.setattr(lines.store, "append_line", full)
        lines.append("b")
        lines.append("c")
    assert (tmp_path / "file").read_text() == "a\n"
    assert messages == ["file cannot be written: `file`: no space left on device; the run goes on, and its lines wait in memory"]
    lines.append("d")
    assert (tmp_path / "file").read_text() == "a\nb\nc\nd\n"
    assert messages[1:] == ["file can be written again; 2 lines were waiting"]
    lines.append("e")
    lines.close()
    assert (tmp_path / "file").read_text() == "a\nb\nc\nd\ne\n"
    assert len(messages) == 2


def test_flush_writes_what_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    messages: list[str] = []
    lines = Backlog(Store(tmp_path), "file", messages.append)
    with monkeypatch.context() as patch:
        patch.setattr(lines.store, "append_line", full)
        lines.append("a")
        lines.flush()
        assert len(messages) == 1, "that it cannot is said once"
    lines.flush()
    assert (tmp_path / "file").read_text() == "a\n"
    assert messages[1:] == ["file can be written again; 1 line was waiting"]
    lines.flush()
    assert len(messages) == 2


def test_what_cannot_be_written_at_the_end_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    messages: list[str] = []
    lines = Backlog(Store(tmp_path), "file", messages.append)
    with monkeypatch.context() as patch:
        patch.setattr(lines.store, "append_line", full)
        lines.append("a")
        lines.append("b")
        lines.close()
    assert messages[1:] == ["2 lines of file could not be written, and are lost: `file`: no space left on device"]
    lines.close()
    assert len(messages) == 2


def test_metrics_go_through_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    messages: list[str] = []
    metrics = Metrics(Store(tmp_path), say=messages.append)
    with monkeypatch.context() as patch:
        patch.setattr(Store, "append_line", lambda self, name, line: full(name, line))
        metrics.write({"step": 1})
    metrics.close()
    assert read(Store(tmp_path)) == [{"step": 1}]
    assert len(messages) == 1


def test_lines_of_an_object_store_that_is_away_wait(monkeypatch: pytest.MonkeyPatch):
    """They come in their order, none twice, and each attempt is seconds after the one before."""
    store, messages, tried = Store(f"memory://{uuid4().hex}"), list[str](), list[str]()
    lines = Backlog(store, "file", messages.append)
    lines.append("a")
    assert store.read_text("file") == "a\n"

    def away(address: str, data: bytes) -> None:
        tried.append(address)
        raise RuntimeError("503: try again later\nand more of it")

    with monkeypatch.context() as patch:
        patch.setattr(store._files, "pipe_file", away)
        patch.setattr("argosy.core.storage.REWRITE_S", 0.0)
        lines.append("b")
        patch.setattr("argosy.core.storage.REWRITE_S", 1000.0)
        lines.append("c")
        assert len(tried) == 1
        lines.flush()
        assert len(tried) == 2
    assert messages == ["file cannot be written: `file`: 503: try again later; the run goes on, and its lines wait in memory"]
    lines.append("d")
    assert len(messages) == 1
    lines.flush()
    assert messages[1:] == ["file can be written again"]
    assert store.read_text("file") == "a\nb\nc\nd\n"


def test_lines_that_come_before_the_store_can_be_read_wait_too(monkeypatch: pytest.MonkeyPatch):
    """As after a restart; and what is left at the end is said."""
    store, messages = Store(f"memory://{uuid4().hex}"), list[str]()
    store.append_line("file", "first")
    again = Store(store.root)
    lines = Backlog(again, "file", messages.append)

    def away(*_: object) -> None:
        raise RuntimeError("503")

    with monkeypatch.context() as patch:
        patch.setattr(again._files, "cat_file", away)
        lines.append("second")
        lines.append("third")
        lines.close()
    assert messages[1:] == ["the last 2 lines of file could not be written"]
    lines.flush()
    assert store.read_text("file") == "first\nsecond\nthird\n"
