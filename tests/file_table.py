"""The table of docs/reference/files.md: the same 500 rows in a file of every kind, whole, empty, cut and with one wrong bit.

    ./run python tests/file_table.py [flips=40]

`./run docs` prints it there. Each file was written by the library that others write such files with (`tests/data/data_files.py`).
Exit code 1 where the tokens of a whole file differ, or an empty or a cut one is not named.
"""

import random
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent / "data"))
import data_files
import numpy as np
from test_file_kinds import Bytes, rows_of, source_of, tokens_of

from argosy.core.errors import ArgosyError

# Where documents are told apart by a token.
EOS = Bytes().eos


def megatron(path: Path, rows: list[dict]) -> None:
    data_files.megatron(path, [list(row["text"].encode()) for row in rows])


def nano(path: Path, rows: list[dict]) -> None:
    path.write_bytes(np.array([token for row in rows for token in (*row["text"].encode(), EOS)], "<u2").tobytes())


def in_bytes(make: Callable[[list[dict]], bytes]) -> Callable[[Path, list[dict]], None]:
    return lambda path, rows: (path.write_bytes(make(rows)), None)[1]


# What is written, and the file in it that is damaged ("": itself).
WAYS: dict[str, tuple[Callable[[Path, list[dict]], None], str]] = {
    **{name: (in_bytes(make), "") for name, make in data_files.KINDS.items()},
    "mds": (data_files.mds, "shard.00001.mds"),
    "mds.zstd": (lambda path, rows: data_files.mds(path, rows, packed=True), "shard.00001.mds.zstd"),
    "megatron.bin": (megatron, ""),
    "nanogpt.bin": (nano, ""),
}
# Files that say nowhere how long they are.
WITHOUT_LENGTH = ("nanogpt.bin",)


def read(path: Path, folder: Path) -> tuple | str:
    """The tokens of a file, or the error's first line and whether it names the file."""
    shutil.rmtree(folder, ignore_errors=True)
    try:
        return tokens_of(source_of(path), folder, 0)
    except ArgosyError as error:
        is_named = any(part in str(error) for part in (str(path), str(path.with_suffix(".idx"))))
        at = str(error.where).removeprefix(str(path)).lstrip(":, ")
        place = "" if "/" in at or not at else f" ({'line ' if at.isdecimal() else ''}{at})"
        return f"{error.what.splitlines()[0][:90]}{place}" if is_named else f"UNNAMED: {error.what[:80]}"


def row(name: str, scratch: Path, flips: int) -> str:
    write, part = WAYS[name]
    folder = scratch / name.replace(".", "-")
    folder.mkdir()
    path = folder / name
    write(path, rows_of())
    reference = folder / "reference.jsonl"
    reference.write_bytes(data_files.jsonl(rows_of()))
    whole, place = read(reference, folder / "made"), path / part if part else path
    data, cells = place.read_bytes(), ["yes" if read(path, folder / "made") == whole else "DIFFER"]
    for wrong in (b"", data[: len(data) // 2]):
        place.write_bytes(wrong)
        outcome = read(path, folder / "made")
        unknowable = "read: nothing says how long it was" if wrong and name in WITHOUT_LENGTH else "READ"
        cells.append(outcome if isinstance(outcome, str) else unknowable)
    # Padding, which some formats have a lot of, is zeros.
    nonzero = [at for at in range(len(data) // 10, len(data)) if data[at]]
    draw, ends = random.Random(1), dict.fromkeys(("named", "the same", "other text"), 0)
    for _ in range(flips):
        bits = bytearray(data)
        bits[draw.choice(nonzero)] ^= 1 << draw.randrange(8)
        place.write_bytes(bits)
        outcome = read(path, folder / "made")
        ends["named" if isinstance(outcome, str) else "the same" if outcome == whole else "other text"] += 1
    cells.append(", ".join(f"{count} {end}" for end, count in ends.items() if count))
    return "| " + " | ".join([f"`{name}`", *cells]) + " |"


def main(words: list[str]) -> int:
    flips = int(dict(word.split("=") for word in words).get("flips", 40))
    with tempfile.TemporaryDirectory() as scratch:
        rows = [row(name, Path(scratch), flips) for name in WAYS]
    print(f"| file | same tokens | empty | cut in the middle | one wrong bit, {flips} times |\n| --- | --- | --- | --- | --- |")
    print("\n".join(rows))
    return int(any(word in line for line in rows for word in ("DIFFER", "READ", "UNNAMED")))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
