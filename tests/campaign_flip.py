"""A checkpoint with one wrong bit must be found out, whichever file the bit is in.

    ./run python tests/campaign_flip.py [n=40] [seed=0]

A run with two checkpoints is copied n times. In each copy one bit of one file of the newest checkpoint is flipped, over
every kind of file in turn; further copies have a file cut short, or without it. Each copy then trains on: it must set the
damaged step aside, go on from the one before, and end with the weights and losses of the run that was left alone. Prints a
line for each kind of file; exit code 1 where one came through.
"""

import random
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import jax
from campaign_kill import SMALL
from helpers import Heard
from jax.experimental.compilation_cache import compilation_cache

import argosy
from argosy.core.storage import Store
from argosy.jobs.quickstart.proof import digest
from argosy.observe.metrics import by_step, read

STEPS, STOP, EVERY = 6, 4, 2
WORDS = [*SMALL, f"checkpoint.every={EVERY}"]


@dataclass(frozen=True)
class Blow:
    """One damage and what became of the run: the step it went on from, and whether it ended as if nothing had been."""

    how: str
    kind: str
    went_on_from: int
    same: bool

    @property
    def good(self) -> bool:
        return self.same and self.went_on_from == STOP - EVERY


@contextmanager
def compiled_once(folder: Path) -> Iterator[None]:
    """Programs of this process are kept in a folder meanwhile: the step of eight devices takes XLA 4 s, and is always the same."""
    settings = {
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    try:
        for name, value in settings.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


def kinds(checkpoint: Path) -> dict[str, list[Path]]:
    """{kind: files}, as paths inside the checkpoint; files that are named by a random number are one kind."""
    files: dict[str, list[Path]] = {}
    for file in sorted(f for f in checkpoint.rglob("*") if f.is_file() and f.stat().st_size):
        inside = file.relative_to(checkpoint)
        files.setdefault(re.sub(r"[0-9a-f]{32}", "<data>", str(inside)), []).append(inside)
    return files


def flip(file: Path, draw: random.Random) -> None:
    data = bytearray(file.read_bytes())
    bit = draw.randrange(8 * len(data))
    data[bit // 8] ^= 1 << bit % 8
    file.write_bytes(data)


def cut_file(file: Path, draw: random.Random) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: draw.randrange(len(data))])


def delete(file: Path, draw: random.Random) -> None:
    file.unlink()


def prepare(folder: Path) -> tuple[Path, Path]:
    """The run that was left alone, and the one that stopped with two checkpoints."""
    alone, stopped = folder / "alone", folder / "stopped"
    argosy.fit("tiny", *WORDS, f"steps={STEPS}", f"dir={alone}")
    argosy.fit("tiny", *WORDS, f"steps={STOP}", f"dir={stopped}")
    return alone, stopped


def strike(folder: Path, kind: str, damage: Callable[[Path, random.Random], None], draw: random.Random) -> Blow:
    """Damages a copy of the stopped run, and lets it go on."""
    alone, copy, heard = folder / "alone", folder / "copy", Heard()
    shutil.copytree(folder / "stopped", copy)
    checkpoint = copy / "checkpoints" / str(STOP)
    damage(checkpoint / draw.choice(kinds(checkpoint)[kind]), draw)
    try:
        argosy.fit("tiny", *WORDS, f"steps={STEPS}", f"dir={copy}", view=heard)
        match = re.search(r"resuming from step (\d+)", heard.words)
        losses = [by_step(read(Store(run)), "loss") for run in (alone, copy)]
        same = losses[0] == losses[1] and digest(alone, STEPS) == digest(copy, STEPS)
        return Blow(damage.__name__, kind, int(match[1]) if match else 0, same)
    finally:
        shutil.rmtree(copy)


def campaign(folder: Path, n: int, seed: int = 0, others: bool = True) -> list[Blow]:
    """n flips, every kind of file in turn; with `others`, each kind cut short and deleted once as well."""
    draw = random.Random(seed)
    _, stopped = prepare(folder)
    names = list(kinds(stopped / "checkpoints" / str(STOP)))
    blows = [strike(folder, names[i % len(names)], flip, draw) for i in range(n)]
    if others:
        blows += [strike(folder, name, damage, draw) for damage in (cut_file, delete) for name in names]
    return blows


def table(blows: list[Blow]) -> str:
    """Good over all, for each kind of file and of damage."""
    ways = [damage.__name__ for damage in (flip, cut_file, delete)]
    lines = [f"{'file':40}" + "".join(f"{way:>9}" for way in ways)]
    for kind in dict.fromkeys(blow.kind for blow in blows):
        cells = []
        for way in ways:
            of = [blow.good for blow in blows if (blow.kind, blow.how) == (kind, way)]
            cells.append(f"{f'{sum(of)}/{len(of)}' if of else '-':>9}")
        lines.append(f"{kind:40}" + "".join(cells))
    return "\n".join(lines)


def main(words: list[str]) -> int:
    options = {key: int(value) for key, value in (word.split("=") for word in words)}
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, compiled_once(Path(folder) / "cache"):
        blows = campaign(Path(folder), options.get("n", 40), options.get("seed", 0))
    bad = [blow for blow in blows if not blow.good]
    print(table(blows))
    print(f"{len(blows)} damaged runs in {time.monotonic() - begin:.0f} s: {len(bad)} did not go on as they should")
    for blow in bad[:10]:
        print(f"  {blow}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
