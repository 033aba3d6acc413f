"""Paths and addresses."""

from pathlib import Path

import pytest

from argosy.cli import main
from argosy.core.addresses import is_address, local_path
from argosy.core.errors import BadInput


def test_addresses_are_told_from_paths():
    assert all(map(is_address, ("gs://bucket/run", "memory://a")))
    assert not any(map(is_address, ("file:///data/run", "/data/run", "run", Path("run"), "C:/run")))
    assert local_path("file:///data/a run") == "/data/a run"
    assert local_path("file://localhost/data/run") == "/data/run"
    for place in ("runs/one", "gs://bucket/run"):
        assert local_path(place) == place


@pytest.mark.parametrize("place", ["file://data/run", "file://localhost", "file://"])
def test_a_machines_name_is_no_path(place: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(BadInput, match="names") as caught:
        local_path(place)
    assert "three slashes" in str(caught.value)
    for words in (["runs", "show", place], ["train", place], ["generate", place, "prompt=a"]):
        assert main(words) == 2
        assert f"{place} names" in capsys.readouterr().err, words
