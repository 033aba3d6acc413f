"""Files of every kind to tokens on disk, beside `tokenizers` alone: `./run python bench/prepare_cpu.py [--megabytes 16] [--runs 3]`.

The text is the source of Python's standard library, cut into records of about 2 kB, with the tokenizer of SmolLM2. `tokenizers alone`
encodes the same texts, in lists of a thousand, and keeps nothing: the floor. Each other row is all of `argosy data prepare`: reading,
tokenizing, writing, hashing. The best of some runs, alternating. Needs pyarrow (`argosy[data]`).
"""

import argparse
import csv
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import tokenizers

from argosy.data.encoding import Encoding
from argosy.data.prepare import prepare
from argosy.data.settings import DataSettings
from argosy.data.sources.find import find_source
from argosy.data.sources.stdlib import StandardLibrary
from argosy.data.tokenizers.load import load_tokenizer

FOLDER = Path(__file__).parents[2] / "shared" / "data" / "tokenizers" / "smollm2"
RECORD_CHARACTERS = 2000


def records(size_bytes: int) -> list[str]:
    """Texts of about RECORD_CHARACTERS, cut at line breaks."""
    texts, part, total = [], "", 0
    for document in StandardLibrary().documents():
        for line in document.text.splitlines(keepends=True):
            part += line
            if len(part) >= RECORD_CHARACTERS:
                texts.append(part)
                total, part = total + len(part), ""
                if total >= size_bytes:
                    return texts
    return texts


def written(folder: Path, texts: list[str]) -> dict[str, Path]:
    table = pyarrow.table({"text": texts})
    pyarrow.parquet.write_table(table, folder / "a.parquet", compression="zstd")
    with pyarrow.ipc.new_file(str(folder / "a.arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=1000)
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    with (folder / "a.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["text"], *([text] for text in texts)])
    return {"Parquet (zstd)": folder / "a.parquet", "Arrow": folder / "a.arrow",
            "JSON lines": folder / "a.jsonl", "CSV": folder / "a.csv"}  # fmt: skip


def alone(texts: list[str]) -> Callable[[], int]:
    encoder = tokenizers.Tokenizer.from_file(str(FOLDER / "tokenizer.json"))

    def run() -> int:
        parts = (texts[at : at + 1000] for at in range(0, len(texts), 1000))
        return sum(len(encoded.ids) for part in parts for encoded in encoder.encode_batch_fast(part, add_special_tokens=False))

    return run


def prepared(path: Path, folder: Path) -> Callable[[], int]:
    encoding, number = Encoding(load_tokenizer(FOLDER)), iter(range(1000))

    def run() -> int:
        source = find_source(DataSettings(source=str(path)))
        prepared = prepare(source, encoding, folder / f"{path.suffix[1:]}{next(number)}")  # type: ignore[arg-type]
        return len(prepared.train.tokens) + len(prepared.held_out.tokens)

    return run


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--megabytes", type=int, default=16)
    words.add_argument("--runs", type=int, default=3)
    options = words.parse_args()
    texts = records(options.megabytes * 10**6)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ways = {"tokenizers alone": alone(texts)} | {kind: prepared(path, folder) for kind, path in written(folder, texts).items()}
        best: dict[str, tuple[float, int]] = {}
        for _ in range(options.runs):
            for way, run in ways.items():
                start = time.perf_counter()
                tokens = run()
                best[way] = min(best.get(way, (1e9, 0)), (time.perf_counter() - start, tokens))
    floor = best["tokenizers alone"][0]
    print(f"{len(texts):,} records, {sum(len(text.encode()) for text in texts) / 1e6:.1f} MB of text\n")
    print("| way | seconds | tokens/s | of `tokenizers` alone |\n|---|---|---|---|")
    for way, (seconds, tokens) in best.items():
        print(f"| {way} | {seconds:.2f} | {tokens / seconds:,.0f} | {100 * floor / seconds:.0f} % |")


if __name__ == "__main__":
    main()
