"""Data that is read by processes which are killed again and again must give the rows of one that was never stopped.

    ./run python tests/campaign_data.py [n=20] [seed=0] [only=PART OF A NAME]

Every kind of file of docs/reference/files.md, sources that are not files, and mixtures. A life is 1, 2 or 4 processes, drawn anew
for each, which are killed with SIGKILL together at a random moment: some while the corpus is tokenized, the rest within 0.15 s of
their first batch. The next life goes on from the last state that all of them wrote. Every batch that any life wrote must hold the
rows of the process that was left alone, byte for byte, and every process the same state. Prints a line for each source; exit code 1
where a row differed. `online` keeps its number of processes, as its guide says.
"""

import hashlib
import json
import os
import pickle
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent / "data"))
import data_files
import datasets
import grain.experimental  # noqa: F401  # once, and not in every life
from file_table import WAYS
from test_file_kinds import Bytes, rows_of

from argosy.data.pipeline import build
from argosy.data.settings import DataSettings

BATCH, SEQUENCE, VOCAB = 8, 64, 258
# Batches of the uninterrupted reading: several epochs.
BATCHES = 400
LIFE_S = 0.15
PAUSE_S = 0.002
COUNTS = (1, 2, 4)
PAIRS = {"rows_per_group": 2}
OWN = """
from argosy.data.sources import Document, Source

class Numbers(Source):
    def documents(self):
        for number in range(500):
            yield Document(f"number {number} " * (number % 7 + 1))

    def fingerprint(self):
        return {"source": "numbers"}

def upper(row):
    return None if row["id"] % 5 == 0 else {"text": row["text"].upper()}
"""


@dataclass(frozen=True)
class DataCase:
    """A source: what `data.source` is, further settings, arguments of `build`, and whether its number of processes may change."""

    source: Any
    settings: dict[str, Any] = field(default_factory=dict)
    build: dict[str, Any] = field(default_factory=dict)
    moves: bool = True


def cases(folder: Path) -> dict[str, Callable[[], DataCase]]:
    """Every source by name; calling one writes its files."""

    def files(name: str) -> Callable[[], DataCase]:
        def make() -> DataCase:
            path = folder / "files" / name
            WAYS[name][0](path, rows_of())
            return DataCase(str(path))

        return make

    def jsonl(name: str, rows: list[dict]) -> str:
        (folder / "files" / name).write_bytes(data_files.jsonl(rows))
        return str(folder / "files" / name)

    def text() -> DataCase:
        path = folder / "files" / "text.txt"
        path.write_text("\n\n".join(row["text"].replace("\n", " ") for row in rows_of()))
        return DataCase(str(path), {"documents": "paragraphs"})

    def several() -> DataCase:
        for name in ("rows.parquet", "rows.jsonl.gz", "rows.csv"):
            files(name)()
        return DataCase(str(folder / "files"))

    def hub() -> DataCase:
        datasets.Dataset.from_list(rows_of()).save_to_disk(str(folder / "files" / "set"))
        return DataCase(f"hf:{folder}/files/set")

    def mix_case() -> DataCase:
        (folder / "own.py").write_text(OWN)
        return DataCase(f"{folder}/own.py:Numbers")

    def steps() -> DataCase:
        mix_case()
        return DataCase(jsonl("steps.jsonl", rows_of() * 2), {"map": f"{folder}/own.py:upper", "deduplicate": "minhash"})

    def chats() -> DataCase:
        rows = [{"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": row["text"]}]}
                for n, row in enumerate(rows_of())]  # fmt: skip
        return DataCase(jsonl("chats.jsonl", rows), {"template": "chatml", "packing": "fit"})

    def pairs() -> DataCase:
        rows = [{"prompt": f"{n}?", "chosen": row["text"], "rejected": "no"} for n, row in enumerate(rows_of())]
        return DataCase(jsonl("pairs.jsonl", rows), {}, PAIRS)

    def mixture(weights: tuple[Any, ...] | None, **settings: Any) -> Callable[[], DataCase]:
        def make() -> DataCase:
            paths = [str(files(name)().source) for name in ("rows.parquet", "rows.tfrecord.gz")] + [jsonl("c.jsonl", rows_of(90))]
            ways = [{}, {"epochs": 2}, {}] if weights is None else [{"weight": weight} for weight in weights]
            return DataCase([{"path": path} | way for path, way in zip(paths, ways)], settings)

        return make

    mixtures = {
        "by size": (None, {}),
        "by weight": ((3, 1, 0.5), {}),
        "by tokens": ((3, 1, 0.5), {"weight_unit": "tokens"}),
        "by temperature": (None, {"mixture_temperature": 2}),
        "by schedule": (({0: 1, 60: 0.2}, {0: 0, 60: 1}, {0: 1, 200: 0}), {}),
        "by size, best fit": (None, {"packing": "fit"}),
    }
    return {
        **{name: files(name) for name in WAYS},
        "text.txt": text, "a folder": several, "hf:FOLDER": hub, "FILE.py:SOURCE": mix_case, "map, minhash": steps, "chats": chats,
        "pairs": pairs, "synthetic": lambda: DataCase("synthetic"),
        "unshuffled": lambda: DataCase(files("rows.parquet")().source, {"shuffle": False}),
        "shuffled blocks": lambda: DataCase(files("rows.parquet")().source, {"shuffle_block": 8, "shuffle_window": 4}),
        "online": lambda: DataCase(files("rows.jsonl")().source, {"online": True}, moves=False),
        **{f"mixture {name}": mixture(*mix_arguments[:1], **mix_arguments[1]) for name, mix_arguments in mixtures.items()},
    }  # fmt: skip


def read(case: DataCase, folder: Path, cache: Path, state: dict[str, Any] | None, process: int, processes: int, count: int) -> None:
    """A process: writes a line for each batch, of its number, the hashes of its rows and the state after it, until `count` batches."""
    fields = {"source": case.source, "batch": BATCH, "sequence": SEQUENCE, "held_out": 0.1, "cache": str(cache)} | case.settings
    stream = build(DataSettings(**fields), Bytes(), vocab=VOCAB, seed=3, process=process, processes=processes, **case.build)
    first = 0
    if state is not None:
        stream.restore(state["data"][process % len(state["data"])])
        first = state["batches"]
    with (folder / f"{process}.jsonl").open("w") as out:
        for number in range(first, count):
            batch = next(stream)
            rows = [hashlib.sha256(b"".join(array[row].tobytes() for array in batch.values())).hexdigest()[:16]
                    for row in range(len(batch["tokens"]))]  # fmt: skip
            out.write(json.dumps([number, rows, stream.state()]) + "\n")
            out.flush()
            if count > BATCHES:
                time.sleep(PAUSE_S)


def fork(work: Callable[[], None], words: Path) -> int:
    """A process that does something, and writes what it says to a file. This one only forks, since threads do not survive that."""
    child = os.fork()
    if child:
        return child
    try:
        sys.stdout = sys.stderr = words.open("w")
        work()
        os._exit(0)
    except BaseException:
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def start_reader(case: DataCase, folder: Path, cache: Path, state: Any, process: int, processes: int, count: int) -> int:
    """The process that reads."""
    return fork(lambda: read(case, folder, cache, state, process, processes, count), folder / f"words {process}.txt")


def wait_for(child: int, words: Path) -> None:
    """Waits for a process, which must not fail."""
    _, status = os.waitpid(child, 0)
    if status:
        raise RuntimeError(f"exit status {status}: {words.read_text()[-2000:]}")


def write_case(name: str, folder: Path) -> DataCase:
    """A source whose files were written by a process of their own."""
    case, words = folder / "case.pickle", folder / "words.txt"
    wait_for(fork(lambda: (case.write_bytes(pickle.dumps(cases(folder)[name]())), None)[1], words), words)
    return pickle.loads(case.read_bytes())


def lines(folder: Path, process: int) -> list[list[Any]]:
    """The whole lines that a process wrote."""
    path = folder / f"{process}.jsonl"
    data = path.read_bytes() if path.exists() else b""
    return [json.loads(line) for line in data.splitlines(keepends=True) if line.endswith(b"\n")]


def alone(case: DataCase, folder: Path, processes: int) -> list[list[str]]:
    """The rows of each batch, of processes that nobody stops, each process's after the others'."""
    shards = []
    for process in range(processes):
        wait_for(start_reader(case, folder, folder / "cache alone", None, process, processes, BATCHES), folder / f"words {process}.txt")
        shards.append(lines(folder, process))
    return [[row for shard in shards for row in shard[number][1]] for number in range(BATCHES)]


@dataclass
class DataCampaign:
    """What came of one source: kills, those before the first batch, batches that lives wrote, and what was wrong."""

    kills: int = 0
    early: int = 0
    batches: int = 0
    processes: list[int] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def kill_lives(case: DataCase, folder: Path, n: int, draw: random.Random) -> DataCampaign:
    """Lives of a source, each killed, until n were."""
    result, state = DataCampaign(), None
    fixed = None if case.moves else draw.choice(COUNTS)
    whole = alone(case, folder, fixed or 1)
    while result.kills < n:
        processes = fixed or draw.choice(COUNTS)
        for process in range(max(COUNTS)):
            (folder / f"{process}.jsonl").unlink(missing_ok=True)
        # Every fifth life is killed while it starts, the first ones while the corpus is tokenized.
        early, begin = result.kills % 5 == 0, time.monotonic()
        children = [start_reader(case, folder, folder / "cache", state, process, processes, 1 << 20) for process in range(processes)]
        try:
            while not early and not all(lines(folder, process) for process in range(processes)):
                if time.monotonic() - begin > 60:
                    raise RuntimeError("\n".join((folder / f"words {process}.txt").read_text()[-1500:] for process in range(processes)))
                time.sleep(PAUSE_S)
            time.sleep(draw.uniform(0, LIFE_S))
        finally:
            for child in children:
                os.kill(child, signal.SIGKILL)
            for child in children:
                os.waitpid(child, 0)
        shards = [lines(folder, process) for process in range(processes)]
        done = min(map(len, shards))
        result.kills, result.early = result.kills + 1, result.early + (done == 0)
        result.processes.append(processes)
        for parts in zip(*shards):
            number, states = parts[0][0], [part[2] for part in parts]
            rows = [row for part in parts for row in part[1]]
            result.batches += 1
            if number < BATCHES and rows != whole[number]:
                result.wrong.append(f"batch {number} of life {result.kills}, {processes} processes: other rows")
            if case.moves and any(state != states[0] for state in states):
                result.wrong.append(f"batch {number} of life {result.kills}: the processes' states differ")
        first = 0 if state is None else state["batches"]
        if done and [part[0] for part in shards[0][:done]] != list(range(first, first + done)):
            result.wrong.append(f"life {result.kills} did not begin at batch {first}")
        if done:
            # Online, each process has a position of its own.
            state = {"data": [shard[done - 1][2] for shard in shards], "batches": first + done}
            if state["batches"] > BATCHES - 100:
                state = None
    return result


def campaign(folder: Path, n: int, seed: int = 0, only: str = "") -> dict[str, DataCampaign]:
    """n kills for each source whose name holds `only`."""
    results = {}
    for name in [name for name in cases(folder) if only in name]:
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "files").mkdir(parents=True)
        begin = time.monotonic()
        result = results[name] = kill_lives(write_case(name, folder), folder, n, random.Random(f"{seed} {name}"))
        sizes = ", ".join(f"{result.processes.count(count)} x {count}" for count in COUNTS if count in result.processes)
        counts = f"{result.kills:5} {result.early:6} {result.batches:8}  {sizes:22} {len(result.wrong):6}"
        print(f"{name:26} {counts} {time.monotonic() - begin:8.1f}", flush=True)
    return results


def main(words: list[str]) -> int:
    options = dict(word.split("=", 1) for word in words)
    begin = time.monotonic()
    print(f"{'source':26} kills  early  batches  lives x processes       wrong  seconds")
    with tempfile.TemporaryDirectory() as folder:
        results = campaign(Path(folder) / "data", int(options.get("n", 20)), int(options.get("seed", 0)), options.get("only", ""))
    wrong = [f"{name}: {line}" for name, result in results.items() for line in result.wrong]
    kills, batches = (sum(getattr(result, name) for result in results.values()) for name in ("kills", "batches"))
    print(f"{len(results)} sources, {kills} kills, {batches:,} batches in {time.monotonic() - begin:.0f} s: {len(wrong)} differences")
    for line in wrong[:10]:
        print(f"  {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
