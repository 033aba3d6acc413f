"""Tests run strict: shapes checked at every boundary, no implicit promotion, warnings as errors, eight fake devices, no network."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = (os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8").strip()
os.environ.setdefault("JAX_NUMPY_DTYPE_PROMOTION", "strict")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
