"""The golden of ggml's own K-quants: `python tests/reference/ggml_blocks.py LIBGGML_BASE`, with the path of llama.cpp's shared library
libggml-base.so (npm's package @node-llama-cpp/linux-x64 has one). NumPy alone."""

import ctypes
import sys
from pathlib import Path

import numpy as np

GOLDEN = Path(__file__).parents[1] / "goldens" / "ggml_blocks.npz"
BYTES = {"Q4_K": 144, "Q5_K": 176, "Q6_K": 210}


def inputs() -> np.ndarray:
    """48 blocks of 256: normal, heavy tails, one sign, constant, zeros, an outlier of 1e4, tiny numbers."""
    rng = np.random.default_rng(20)
    w = rng.normal(0, 0.05, (48, 256))
    w[12:24] = rng.standard_t(3, (12, 256)) * 0.02
    w[24:28] = np.abs(w[24:28])
    w[28:32] = -np.abs(w[28:32])
    w[32], w[33], w[34] = 0.25, -0.25, 0
    w[35:40, 77] = 1e4
    w[40:42] *= 1e-6
    w[42, 128:] = 0
    return w.astype(np.float32)


def main(library: str) -> None:
    ggml = ctypes.CDLL(library)
    w, blocks = inputs(), {}
    for name, size in BYTES.items():
        out = np.zeros((len(w), size), np.uint8)
        function = getattr(ggml, f"quantize_row_{name.replace('Q', 'q')}_ref")
        function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64], None
        function(w.ctypes.data, out.ctypes.data, w.size)
        blocks[name] = out
    np.savez_compressed(GOLDEN, **blocks)


if __name__ == "__main__":
    main(sys.argv[1])
