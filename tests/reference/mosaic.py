"""Shards that MosaicML's library writes, for tests/data/test_mosaic.py. By hand, in an environment with torch and mosaicml-streaming:

    python tests/reference/mosaic.py

It writes tests/goldens/mosaic/: plain shards with hashes, and compressed ones.
"""

import shutil
from pathlib import Path

import numpy as np
from streaming.base.format.mds.writer import MDSWriter  # type: ignore[import-not-found]

GOLDENS = Path(__file__).parents[1] / "goldens" / "mosaic"
COLUMNS = {"text": "str", "id": "int", "raw": "bytes", "words": "bytes", "meta": "json", "dyn": "ndarray", "row": "ndarray:float32:2",
           "some": "ndarray:int64", "u": "uint16", "f": "float64", "big": "str_int"}  # fmt: skip
WAYS = {"plain": {"hashes": ["sha1"]}, "zstd": {"compression": "zstd:3"}, "gz": {"compression": "gz"}}


def row(i: int) -> dict:
    return {
        "text": f"Zeile {i} äöü 漢字 " * (i % 5 + 1), "id": i, "raw": b"\xff\x00%d" % i, "words": f"bytes {i}".encode(),
        "meta": {"a": [i, None], "b": "x"}, "dyn": np.arange(i % 3 + 1, dtype=np.int16) * i, "row": np.array([i, i + 0.5], np.float32),
        "some": np.full((2, i % 2 + 1), i, np.int64), "u": np.uint16(i), "f": np.float64(i / 7), "big": 10**30 + i,
    }  # fmt: skip


def main() -> None:
    for name, options in WAYS.items():
        shutil.rmtree(GOLDENS / name, ignore_errors=True)
        with MDSWriter(out=str(GOLDENS / name), columns=COLUMNS, size_limit=3000, **options) as writer:
            for i in range(40):
                writer.write(row(i))


if __name__ == "__main__":
    main()
