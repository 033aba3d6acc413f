"""The commands that hints name."""

from pathlib import Path

import pytest

from argosy.core import command


@pytest.mark.parametrize(
    ("typed", "checkout", "here", "line"),
    [
        (None, False, False, "pip install 'argosy[grpc]'"),
        (None, True, True, "pip install -e '.[grpc]'"),
        (None, True, False, "pip install -e '{root}[grpc]'"),
        ("./run", True, True, "./run python -m pip install -e '.[grpc]'"),
        ("./run --gpu", True, True, "./run --gpu python -m pip install -e '.[grpc]'"),
    ],
)
def test_an_extra_is_installed_where_argosy_is(monkeypatch, tmp_path, typed, checkout, here, line):
    monkeypatch.setattr(command, "ROOT", tmp_path)
    monkeypatch.delenv(command.COMMAND, raising=False)
    if typed:
        monkeypatch.setenv(command.COMMAND, typed)
    if checkout:
        (tmp_path / "pyproject.toml").touch()
    monkeypatch.chdir(tmp_path if here else Path("/"))
    assert command.install_extra("grpc") == line.format(root=tmp_path)


def test_this_is_a_checkout():
    assert (command.ROOT / "argosy" / "core" / "command.py").samefile(command.__file__)
