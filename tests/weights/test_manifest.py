"""The manifest: whatever happens to a byte of a folder, it is found out."""

import hashlib
import json
from pathlib import Path

import pytest

from argosy.core.errors import Damaged
from argosy.weights import manifest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    here = tmp_path / "7"
    (here / "weights" / "d").mkdir(parents=True)
    (here / "weights" / "d" / "array").write_bytes(bytes(range(256)) * 3)
    (here / "meta.json").write_text('{"step": 7}')
    (here / "empty").write_bytes(b"")
    manifest.write_manifest(here)
    return here


def test_it_lists_what_sha256sum_would(folder: Path):
    listed = json.loads((folder / "manifest.json").read_text())["files"]
    files = [f for f in folder.rglob("*") if f.is_file() and f.name != "manifest.json"]
    assert {str(f.relative_to(folder)) for f in files} == set(listed)
    for f in files:
        assert listed[str(f.relative_to(folder))] == {
            "bytes": f.stat().st_size,
            "sha256": hashlib.sha256(f.read_bytes()).hexdigest(),
        }
    manifest.verify_folder(folder)


@pytest.mark.parametrize("name", ["weights/d/array", "meta.json", "manifest.json"])
def test_every_bit_of_every_byte_counts(folder: Path, name: str):
    file = folder / name
    good = file.read_bytes()
    for at in range(0, len(good), 1 + len(good) // 60):
        for bit in range(8):
            file.write_bytes(good[:at] + bytes([good[at] ^ 1 << bit]) + good[at + 1 :])
            with pytest.raises(Damaged):
                manifest.verify_folder(folder)
    file.write_bytes(good)
    manifest.verify_folder(folder)


@pytest.mark.parametrize("name", ["weights/d/array", "meta.json", "empty", "manifest.json"])
def test_a_file_that_is_gone_is_named(folder: Path, name: str):
    (folder / name).unlink()
    with pytest.raises(Damaged, match="no manifest" if name == "manifest.json" else f"{Path(name).name} is missing"):
        manifest.verify_folder(folder)


def test_a_longer_file_is_named(folder: Path):
    with (folder / "meta.json").open("ab") as file:
        file.write(b" ")
    with pytest.raises(Damaged, match=r"meta.json has 12 bytes, not 11"):
        manifest.verify_folder(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"files": 3, "sha256": ""}', '{"files": {"a": 1}, "sha256": ""}', "\x00"])
def test_what_is_no_manifest_is_damage(folder: Path, text: str):
    (folder / "manifest.json").write_text(text)
    with pytest.raises(Damaged, match="manifest"):
        manifest.read_manifest(folder)


def test_a_disk_that_cannot_read_is_damage(folder: Path, monkeypatch: pytest.MonkeyPatch):
    def broken(path: Path, sync: bool = False):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(manifest, "hash_file", broken)
    with pytest.raises(Damaged, match="Input/output error"):
        manifest.verify_folder(folder)


def test_a_kill_before_the_rename_commits_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch):
    (folder / "manifest.json").unlink()

    def killed(self: Path, target: Path):
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        manifest.write_manifest(folder)
    with pytest.raises(Damaged, match="never committed"):
        manifest.verify_folder(folder)
