"""Damage to any file of a checkpoint, in any tier, must be found, and the step before it restored as it was saved.

    ./run python tests/campaign_flips.py [n=1000] [seed=0]

Two steps are saved in each tier: in a folder, in an object store, and in the local tier, with a position in the data. n times one file
of the newest step is damaged in a copy: a bit flipped, cut short at a random byte, or deleted, over every tier and kind of file in
turn. The step that is found good must then be the one before, with every array bit for bit and its metadata. Prints a line for each
tier and kind of file; exit code 1 where one came through. `campaign_flip` trains on after each damage, which takes longer.
"""

import random
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import jax.numpy as jnp
import numpy as np
from campaign_flip import cut_file, delete, flip

from argosy.checkpoint.checkpoints import Checkpoints
from argosy.checkpoint.settings import CheckpointSettings
from argosy.checkpoint.step.layout import STATE
from argosy.checkpoint.step.load import load_data, load_item, load_weights
from argosy.checkpoint.tiers.local import LocalCheckpoints
from argosy.core.storage import Store

BEFORE, NEWEST = 4, 6
WAYS = (flip, cut_file, delete)
OBJECTS = "memory://flips"


@dataclass(frozen=True)
class Blow:
    """A damage: where, and whether it was found and the step before it restored."""

    tier: str
    kind: str
    how: str
    good: bool


def arrays(step: int) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    draw = np.random.default_rng(step)
    shapes = {"layers.wide": (3, 40, 50), "embed.w": (60, 16)}
    weights = {name: jnp.asarray(draw.normal(size=shape).astype(np.float32)) for name, shape in shapes.items()}
    weights["half"] = jnp.ones((7, 5), jnp.bfloat16) * step
    return weights, {"step": jnp.int32(step), "key": jnp.arange(2, dtype=jnp.uint32)}, {"seen": np.arange(step, dtype=np.int32)}


def _objects(folder: Path) -> Checkpoints:
    """Of an object store in memory, into which a copy of the saved folder is put."""
    files = fsspec.filesystem("memory")
    if files.exists("/flips"):
        files.rm("/flips", recursive=True)
    if folder.exists():
        files.put(f"{folder}/", "/flips/", recursive=True)
    return Checkpoints(Store(OBJECTS), CheckpointSettings())


TIERS: dict[str, Callable[[Path], Any]] = {
    "folder": lambda folder: Checkpoints(folder, CheckpointSettings()),
    "object store": _objects,
    "local": LocalCheckpoints,
}


def prepare(folder: Path) -> None:
    for tier, of in TIERS.items():
        # An object store holds the same files as a folder.
        checkpoints = (TIERS["folder"] if tier == "object store" else of)(folder / tier)
        for step in (BEFORE, NEWEST):
            weights, state, data = arrays(step)
            checkpoints.save(step, weights, state, {"step": step, "settings": {"seed": 0}}, data)
            checkpoints.join()
            assert checkpoints._failure is None, checkpoints._failure


def newest_of(tier: str, folder: Path) -> Path:
    return folder / "0" / str(NEWEST) if tier == "local" else folder / str(NEWEST)


def kinds(step: Path) -> dict[str, list[Path]]:
    """{kind: files}. What is named by a random number, and the shards of all arrays, are a kind each."""
    files: dict[str, list[Path]] = {}
    for file in sorted(f for f in step.rglob("*") if f.is_file() and f.stat().st_size):
        inside = str(file.relative_to(step))
        kind = re.sub(r"[0-9a-f]{32}", "<data>", inside)
        kind = re.sub(r"/[^/]+/c(/\d+)*$", "/<array>/<shard>", re.sub(r"/[^/]+/zarr\.json$", "/<array>/zarr.json", kind))
        files.setdefault(kind, []).append(file.relative_to(step))
    return files


def strike(folder: Path, tier: str, kind: str, damage: Callable[[Path, random.Random], None], draw: random.Random) -> Blow:
    copy = folder / "copy"
    shutil.copytree(folder / tier, copy)
    step = newest_of(tier, copy)
    try:
        damage(step / draw.choice(kinds(step)[kind]), draw)
        return Blow(tier, kind, damage.__name__, is_restored(TIERS[tier](copy)))
    finally:
        shutil.rmtree(copy)


def is_restored(checkpoints: Any) -> bool:
    """Whether the step before is found, and everything in it is what was saved."""
    if checkpoints.latest_good() != BEFORE:
        return False
    checkpoints.prepare(BEFORE, {})
    path = checkpoints.path(BEFORE)
    weights, state, data = arrays(BEFORE)
    back = [load_weights(path), load_item(path, STATE), load_data(path)]
    same = all(
        set(array) == set(there) and all(np.asarray(array[n]).tobytes() == np.asarray(there[n]).tobytes() for n in array)
        for array, there in zip((weights, state, data), back, strict=True)
    )
    return same and checkpoints.meta(BEFORE) == {"step": BEFORE, "settings": {"seed": 0}}


def campaign(folder: Path, n: int, seed: int = 0) -> list[Blow]:
    draw = random.Random(seed)
    prepare(folder)
    every = [(tier, kind, damage) for tier in TIERS for kind in kinds(newest_of(tier, folder / tier)) for damage in WAYS]
    # Each once before any twice, whatever n is.
    draw.shuffle(every)
    return [strike(folder, *every[i % len(every)], draw) for i in range(n)]


def table(blows: list[Blow]) -> str:
    lines = [f"{'tier':18} {'file':40}" + "".join(f"{way.__name__:>9}" for way in WAYS)]
    for tier, kind in sorted({(blow.tier, blow.kind) for blow in blows}):
        cells = []
        for way in WAYS:
            of = [blow.good for blow in blows if (blow.tier, blow.kind, blow.how) == (tier, kind, way.__name__)]
            cells.append(f"{f'{sum(of)}/{len(of)}' if of else '-':>9}")
        lines.append(f"{tier:18} {kind:40}" + "".join(cells))
    return "\n".join(lines)


def main(words: list[str]) -> int:
    options = {key: int(value) for key, value in (word.split("=") for word in words)}
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        blows = campaign(Path(folder), options.get("n", 1000), options.get("seed", 0))
    bad = [blow for blow in blows if not blow.good]
    print(table(blows))
    print(f"{len(blows)} damages in {time.monotonic() - begin:.0f} s: {len(bad)} not found, or not gone back from")
    for blow in bad[:10]:
        print(f"  {blow}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
