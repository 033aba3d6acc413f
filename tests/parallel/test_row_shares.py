"""Rows of a batch over processes whose devices are blocks of a torus."""

import os
import socket
import subprocess
import sys
import textwrap
from dataclasses import dataclass

import numpy as np
import pytest

from argosy.parallel.row_shares import row_positions


@dataclass(frozen=True)
class Chip:
    process_index: int


def chips(processes: list) -> np.ndarray:
    grid = np.empty(np.shape(processes), dtype=object)
    for at in np.ndindex(grid.shape):
        grid[at] = Chip(int(np.asarray(processes)[at]))
    return grid


def test_blocks_of_a_torus_are_shares():
    """Hosts of 2 x 2 chips on a torus of 4 x 4, snaked: each has four of sixteen positions."""
    hosts = [[2 * (row // 2) + column // 2 for column in range(4)] for row in range(4)]
    positions = row_positions(chips(np.ravel(hosts)), ["fsdp"], ["fsdp"])
    assert positions.of == {0: (0, 1, 4, 5), 1: (2, 3, 6, 7), 2: (8, 9, 12, 13), 3: (10, 11, 14, 15)}
    assert positions.divide
    assert positions.shares.index(positions.of[2]) == 2


def test_processes_that_split_other_axes_read_the_same_rows():
    positions = row_positions(chips([[0, 1], [2, 3]]), ["fsdp", "tensor"], ["fsdp"])
    assert positions.of == {0: (0,), 1: (0,), 2: (1,), 3: (1,)}
    assert positions.divide
    assert positions.shares == [(0,), (1,)]


@pytest.mark.parametrize("processes", [[[0, 1], [1, 2]], [[0, 0], [0, 1], [1, 1]]], ids=["some rows in common", "unequal"])
def test_other_processes_read_no_share(processes):
    assert not row_positions(chips(processes), ["fsdp", "tensor"], ["fsdp"]).divide


PROGRAM = """
    import sys
    import jax, numpy as np
    jax.distributed.initialize(f"127.0.0.1:{sys.argv[2]}", 2, int(sys.argv[1]))
    from jax.sharding import Mesh
    from argosy.parallel.place import place_batch, rows_here
    here = [[d for d in jax.devices() if d.process_index == p] for p in range(2)]
    grid = np.array([one for pair in zip(*here) for one in pair]).reshape(1, 4)  # positions of one and the other in turn
    mesh = Mesh(grid, ("data", "fsdp"))
    share, shares = rows_here(mesh, 8)
    assert (share, shares) == (jax.process_index(), 2), (share, shares)
    data = np.arange(8)[share * 4 : share * 4 + 4]
    array = place_batch({"x": data}, mesh)["x"]
    found = {s.index[0].start or 0: s.data.tolist() for s in array.addressable_shards}
    assert found == {2 * share: [4 * share, 4 * share + 1], 2 * share + 4: [4 * share + 2, 4 * share + 3]}, found
    total = jax.jit(lambda x: (x.astype("float32") ** 2).sum())(array)
    assert float(total) == 140.0, total
"""


@pytest.mark.slow
def test_interleaved_devices_of_two_processes_take_the_rows_of_their_share():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM)]
    running = [
        subprocess.Popen([*command, str(i), str(port)], env=os.environ | flags, stderr=subprocess.PIPE, text=True) for i in range(2)
    ]
    for process in running:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
