"""The memory of a machine, and of a container on it."""

import pytest

from argosy.observe import environment

GB = 10**9
MEMINFO = "MemTotal:       65536000 kB\nMemFree:        1000 kB\nMemAvailable:   31250000 kB\n"
GROUP = "/sys/fs/cgroup/memory."


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, (65_536_000 * 1024, 32 * GB)),
        ({"max": "max\n", "current": "5000000000\n"}, (65_536_000 * 1024, 32 * GB)),
        ({"max": f"{16 * GB}\n", "current": f"{4 * GB}\n"}, (16 * GB, 12 * GB)),
        # A data set that was read, and a checkpoint that was written: the system drops them where it needs room.
        (
            {"max": f"{16 * GB}\n", "current": f"{15 * GB}\n", "stat": f"anon {2 * GB}\ninactive_file {12 * GB}\nactive_file {GB}\n"},
            (16 * GB, 13 * GB),
        ),
        # The machine has less than the container may take.
        ({"max": f"{60 * GB}\n", "current": f"{4 * GB}\n"}, (60 * GB, 32 * GB)),
        ({"max": f"{900 * GB}\n", "current": f"{4 * GB}\n"}, (65_536_000 * 1024, 32 * GB)),
    ],
)
def test_memory_of_a_container(monkeypatch: pytest.MonkeyPatch, files: dict[str, str], expected: tuple[int, int]):
    texts = {"/proc/meminfo": MEMINFO} | {GROUP + name: text for name, text in files.items()}
    monkeypatch.setattr(environment, "_read", lambda path: texts.get(path, ""))
    assert environment.memory_bytes() == expected
