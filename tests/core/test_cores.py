"""The share of a container, from files as the kernel writes them."""

import os
from pathlib import Path

import pytest

from argosy.core.process import cores


@pytest.mark.parametrize(
    ("files", "share"),
    [
        ({}, 8),
        ({"cpu.max": "max 100000\n"}, 8),
        ({"cpu.max": "250000 100000\n"}, 2.5),
        ({"cpu.max": "1600000 100000\n"}, 8),
        ({"cpu/cpu.cfs_quota_us": "150000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1.5),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
        ({"cpu.max": "10000 100000\n"}, 0.1),
    ],
)
def test_the_share_of_a_control_group(files: dict[str, str], share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(cores, "GROUPS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert cores.cores() == share
    assert cores.core_count() == max(1, -(-share // 1))


def test_nothing_counts_the_machines_cores():
    package = Path(cores.__file__).parents[2]
    files = [path.name for path in package.rglob("*.py") if "cpu_count()" in path.read_text(encoding="utf-8")]
    assert sorted(files) == ["cores.py", "fingerprint.py"], "programs that are kept belong to the machine"
