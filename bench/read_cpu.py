"""Rows read a CPU second, beside the libraries that others read the same files with: `./run python bench/read_cpu.py [--rows 50000]`.

JSON lines beside `datasets` (which converts the file to Arrow first, once: both are counted, and its second reading alone), ArrayRecord
beside Grain's own source, one record and a thousand at a time. Rows are texts of about 500 characters. CPU time of this process, its
children and threads; the best of three, alternating. Needs `datasets` (`argosy[hub]`) and array_record.
"""

import argparse
import json
import random
import resource
import tempfile
from collections.abc import Callable
from pathlib import Path

import datasets
import grain
from array_record.python.array_record_module import ArrayRecordWriter

from argosy.data.settings import DataSettings
from argosy.data.sources import Source
from argosy.data.sources.find import find_source

ROUNDS = 3


def cpu_seconds() -> float:
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def texts(count: int) -> list[str]:
    draw = random.Random(0)
    words = ["the", "of", "reading", "rows", "quickly", "naïve", "data", "\n", "and", "a"]
    return [" ".join(draw.choices(words, k=100)) for _ in range(count)]


def ours(path: Path) -> int:
    source = find_source(DataSettings(source=str(path)))
    assert isinstance(source, Source)
    return sum(len(document.text) for document in source.documents())


def by_datasets(path: Path, cache: Path) -> int:
    rows = datasets.load_dataset("json", data_files=str(path), split="train", cache_dir=str(cache))
    return sum(len(row["text"]) for row in rows)  # type: ignore[index]


def by_grain(path: Path, together: int) -> int:
    source = grain.sources.ArrayRecordDataSource(str(path))
    if together == 1:
        return sum(len(source[number].decode()) for number in range(len(source)))
    places = (range(first, min(first + together, len(source))) for first in range(0, len(source), together))
    return sum(len(record.decode()) for some in places for record in source.__getitems__(list(some)))


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--rows", type=int, default=50_000)
    count = words.parse_args().rows
    datasets.disable_progress_bars()
    rows = texts(count)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
        writer = ArrayRecordWriter(str(folder / "a.array_record"), "group_size:64")
        for text in rows:
            writer.write(text.encode())
        writer.close()
        caches = iter(range(1000))
        ways: dict[str, Callable[[], int]] = {
            "JSON lines, Argosy": lambda: ours(folder / "a.jsonl"),
            "JSON lines, datasets, first time": lambda: by_datasets(folder / "a.jsonl", folder / str(next(caches))),
            "JSON lines, datasets, from its cache": lambda: by_datasets(folder / "a.jsonl", folder / "0"),
            "ArrayRecord, Argosy": lambda: ours(folder / "a.array_record"),
            "ArrayRecord, Grain, one at a time": lambda: by_grain(folder / "a.array_record", 1),
            "ArrayRecord, Grain, 1,024 at a time": lambda: by_grain(folder / "a.array_record", 1024),
        }
        best: dict[str, float] = {}
        for _ in range(ROUNDS):
            for way, run in ways.items():
                begin = cpu_seconds()
                assert run() == sum(map(len, rows)), way
                best[way] = min(best.get(way, 1e9), cpu_seconds() - begin)
    print(f"{count:,} rows of {sum(map(len, rows)) / count:.0f} characters\n\n| way | CPU s | rows a CPU second |\n|---|---|---|")
    for way, seconds in best.items():
        print(f"| {way} | {seconds:.2f} | {count / seconds:,.0f} |")


if __name__ == "__main__":
    main()
