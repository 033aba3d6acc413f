"""Saving and restoring 480 MB of state on a CPU, against reading and hashing the bytes.

    ./run python bench/checkpoint_cpu.py [turns=5] [folder=/tmp]

A step of matrix products goes on while a save is written behind it: how long the longest step took, the call of save() counted with the
step that follows, and the median without a save. Memory for the copies was taken before, as a run does while its step compiles.
Restoring is `latest_good` (every byte is hashed) and `load_weights`. The floor reads each file once and hashes it with SHA-256 in one
thread. Each tier, medians; a warm page cache; machines are shared, so CPU seconds stand beside.
"""

import hashlib
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from argosy.checkpoint.checkpoints import Checkpoints
from argosy.checkpoint.settings import CheckpointSettings
from argosy.checkpoint.step.layout import WEIGHTS
from argosy.checkpoint.step.load import load_weights
from argosy.checkpoint.tiers.local import LocalCheckpoints

ARRAYS, SIDE = 30, 2000


def timed(do: Callable[[], Any]) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    do()
    return time.perf_counter() - wall, time.process_time() - cpu


def floor(folder: Path) -> None:
    for file in sorted(f for f in folder.rglob("*") if f.is_file()):
        digest, buffer = hashlib.sha256(), bytearray(1 << 20)
        with file.open("rb", buffering=0) as opened:
            while count := opened.readinto(buffer):
                digest.update(memoryview(buffer)[:count])


def steps(update: Any, x: Any, until: Callable[[], bool]) -> list[float]:
    took = []
    while not until():
        begun = time.perf_counter()
        x = jax.block_until_ready(update(x))
        took.append(time.perf_counter() - begun)
    return took


def measure(name: str, make: Callable[[], Any], turns: int) -> None:
    draw = np.random.default_rng(0)
    weights = {f"w{i}": jax.device_put(draw.standard_normal((SIDE, SIDE), np.float32)) for i in range(ARRAYS)}
    state, place = {"step": np.asarray(1, np.int32)}, SingleDeviceSharding(jax.devices()[0])
    places = dict.fromkeys(weights, place)
    update = jax.jit(lambda x: x @ x / 40)
    x = jax.block_until_ready(update(weights["w0"]))
    remaining = iter(range(12))
    alone = steps(update, x, lambda: next(remaining, None) is None)
    stalls, saves, restores, floors, longest = [], [], [], [], []
    checkpoints = make()
    checkpoints.reserve(weights, state).join()
    for turn in range(1, turns + 1):
        stalls.append(timed(lambda c=checkpoints, s=turn: c.save(s, weights, state, {}))[0])
        begun = time.perf_counter()
        took = steps(update, x, lambda c=checkpoints: not c._writing.is_alive())
        longest.append(max(stalls[-1] + took[0], *took))
        checkpoints.join()
        saves.append(time.perf_counter() - begun)
        again = make()

        def restore(c: Any = again) -> None:
            step = c.latest_good()
            c.prepare(step, {WEIGHTS: places})
            jax.block_until_ready(load_weights(c.path(step), places))

        # One that is not counted: imports, and files that are in memory.
        restore()
        restores.append(timed(restore))
        floors.append(timed(lambda c=again, s=turn: floor(c.path(s))))

    def median(values: Any) -> str:
        return f"{statistics.median(values):.2f}"

    restored, hashed = [statistics.median(w for w, _ in times) for times in (restores, floors)]
    cpu = [median(c for _, c in times) for times in (restores, floors)]
    saved = " | ".join(map(median, (alone, stalls, longest, saves)))
    print(f"| {name} | {saved} | {restored:.2f} ({cpu[0]}) | {hashed:.2f} ({cpu[1]}) | {restored / hashed:.2f} |", flush=True)


def main(words: list[str]) -> None:
    options = {"turns": "5", "folder": tempfile.gettempdir()} | dict(word.split("=") for word in words)
    folder = Path(tempfile.mkdtemp(dir=options["folder"]))
    print("| tier | step alone, s | save() returns after | longest step of a save | written after | restored in (CPU) | "
          "read and hashed in (CPU) | ratio |\n| --- | --- | --- | --- | --- | --- | --- | --- |")  # fmt: skip
    try:
        keep = CheckpointSettings(keep=1, keep_best=0)
        measure("persistent", lambda: Checkpoints(folder / "run", keep), int(options["turns"]))
        measure("local", lambda: LocalCheckpoints(folder / "local"), int(options["turns"]))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main(sys.argv[1:])
