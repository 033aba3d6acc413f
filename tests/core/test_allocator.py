"""Memory that malloc keeps. In processes of their own, because malloc's options last as long as the process."""

import os
import subprocess
import sys

import pytest

from argosy.core.process import allocator

BLOCK = 64 * 2**20
# Allocates, touches and frees blocks above glibc's threshold for mmap, in a thread, as XLA does; prints faults of the last ones.
PROGRAM = f"""
import resource, sys, threading
from argosy.core.process import allocator
done = [getattr(allocator, name)() for name in sys.argv[1:]]

n_bytes = {BLOCK}

def turn():
    for n in range(6):
        if n == 2:
            began = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        b"x" * n_bytes
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - began, all(done))

thread = threading.Thread(target=turn)
thread.start()
thread.join()
"""
PAGES = BLOCK // 4096
BOTH = ("share_one_arena", "keep_freed_memory")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="malloc of glibc")


def faults(*calls: str, **environment: str) -> tuple[int, bool]:
    """Minor faults of four blocks, and whether the calls did something."""
    variables = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES" and not name.startswith("MALLOC_")}
    command = [sys.executable, "-c", PROGRAM, *calls]
    done = subprocess.run(command, env=variables | environment, capture_output=True, text=True, check=True)
    count, did = done.stdout.split()
    return int(count), did == "True"


def test_freed_memory_is_used_again_without_a_fault():
    fresh, _ = faults()
    fault_count, did = faults(*BOTH)
    assert did
    assert fresh >= 4 * PAGES  # as it is without: every page of every block
    assert fault_count < PAGES / 10


def test_huge_pages_are_no_reason_to_leave_it():
    fault_count, did = faults(*BOTH, GLIBC_TUNABLES="glibc.malloc.hugetlb=1")
    assert did
    assert fault_count < PAGES / 10


@pytest.mark.parametrize(
    "environment", [{"GLIBC_TUNABLES": "glibc.malloc.mmap_max=65536"}, {"MALLOC_ARENA_MAX": "4"}, {"MALLOC_TRIM_THRESHOLD_": "131072"}]
)
def test_the_environment_comes_first(environment: dict[str, str]):
    count, did = faults(*BOTH, **environment)
    assert not did
    assert count >= 4 * PAGES


def test_another_system_is_left_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(allocator.sys, "platform", "darwin")
    assert not allocator.share_one_arena()
    assert not allocator.keep_freed_memory()


ARENAS = """
import ctypes, sys
from argosy.cli import main

code = main()
libc = ctypes.CDLL(None)
libc.fopen.restype = ctypes.c_void_p
file = ctypes.c_void_p(libc.fopen(b"/dev/stdout", b"a"))
libc.malloc_info(0, file)
libc.fclose(file)
"""


@pytest.mark.parametrize(("verb", "arenas"), [("train", 1), ("models", 2)])
def test_training_has_one_arena_from_its_first_thread_on(verb: str, arenas: int):
    """A second one would hold half of a step's memory, and give it back (`share_one_arena`). Its own thread waits for signals."""
    variables = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES" and not name.startswith("MALLOC_")}
    done = subprocess.run([sys.executable, "-c", ARENAS, verb, "--help"], env=variables, capture_output=True, text=True, check=True)
    assert done.stdout.count("<heap nr=") == arenas
