"""Names of devices: how many chips they stand for, and in which shape. Compared with Google Cloud's table of TPU slices."""

import pytest

from argosy.core.errors import BadInput
from argosy.observe.hardware import CHIPS, hardware


@pytest.mark.parametrize(
    ("name", "shape", "devices", "hosts"),
    [
        ("v4-8", (2, 2, 1), 8, 1),
        ("v5p-8", (2, 2, 1), 4, 1),
        ("v5p-128", (4, 4, 4), 64, 16),
        ("v5p-256", (4, 4, 8), 128, 32),
        ("v5p-1024", (8, 8, 8), 512, 128),
        ("v5p-8192", (16, 16, 16), 4096, 1024),
        ("v5e-8", (2, 4), 8, 1),
        ("v5e-16", (4, 4), 16, 4),
        ("v5litepod-32", (4, 8), 32, 8),
        ("v6e-256", (16, 16), 256, 64),
        ("tpu7x-128", (4, 4, 4), 128, 16),
        ("h100-8", (8,), 8, 1),
        ("h200-16", (16,), 16, 2),
    ],
)
def test_a_name_stands_for_a_slice(name: str, shape: tuple[int, ...], devices: int, hosts: int):
    target = hardware(name)
    assert (target.shape, target.devices, target.hosts) == (shape, devices, hosts)


@pytest.mark.parametrize(
    ("name", "problem"),
    [("v9-8", "no device"), ("v5p", "no device"), ("v5p-7", "number is even"), ("v5e-24", "no slice"), ("v5e-512", "no slice")],
)
def test_what_is_no_slice_is_said(name: str, problem: str):
    with pytest.raises(BadInput, match=problem):
        hardware(name)


def test_large_slices_are_closed_tori():
    assert hardware("v5p-128").wraps == (True, True, True)
    assert hardware("v5p-16").wraps == (False, False, False)
    assert hardware("v5e-256").wraps == (True, True)


def test_a_product_is_faster_than_its_bytes_everywhere():
    """A table with a wrong unit would say otherwise: every one of these needs between 100 and 700 FLOPs a byte to be busy."""
    for chip in CHIPS.values():
        assert 100 < chip.flops_per_s / chip.memory_bytes_per_s < 700
        assert 5 < chip.memory_bytes / 2**30 < 200
        assert chip.platform == "gpu" or 0.9e9 < chip.clock_hz < 2.5e9
