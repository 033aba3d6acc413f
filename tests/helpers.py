"""Where tests find the shared data, and how they compare."""

import os
from pathlib import Path

import numpy as np
import pytest

DATA = Path(os.environ.get("ARGOSY_TEST_DATA") or Path(__file__).parents[2] / "shared" / "data")


def shared(name: str) -> Path:
    """A file of the shared test data. Missing: the test is skipped by name, and fails under CI=true."""
    path = DATA / name
    if not path.exists():
        if os.environ.get("CI") == "true":
            pytest.fail(f"shared test data missing: {name} (looked in {DATA})")
        pytest.skip(f"shared test data missing: {name}")
    return path


def relative(a, b) -> float:
    """Largest difference as a share of the largest magnitude of `b`."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert a.shape == b.shape, (a.shape, b.shape)
    assert np.isfinite(a).all()
    assert np.isfinite(b).all()
    return float(np.abs(a - b).max() / np.abs(b).max())
