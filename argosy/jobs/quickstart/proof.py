"""Proves that a kill changes nothing: one run left alone and one killed with SIGKILL and resumed are compared bit for bit."""

import hashlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from argosy.checkpoint.run_directory import CHECKPOINTS, RunDirectory
from argosy.checkpoint.step.load import load_weights
from argosy.core.counts import plural
from argosy.core.errors import ArgosyError
from argosy.core.process.signals import before_leaving
from argosy.core.progress import Say
from argosy.core.storage import Store
from argosy.jobs.train import Quiet, train
from argosy.observe.metrics import by_step, read

PATIENCE_S = 120


@dataclass(frozen=True)
class Proof:
    """The result of the proof.

    steps: the number of steps of both runs.
    killed_at: the last logged step before the kill.
    resumed_from: the step of the checkpoint that the killed run resumed from.
    same_losses: whether the losses are equal bit for bit.
    same_weights: whether the weights are equal bit for bit.
    """

    steps: int
    killed_at: int
    resumed_from: int
    same_losses: bool
    same_weights: bool

    @property
    def holds(self) -> bool:
        return self.same_losses and self.same_weights


def prove(folder: Path, recipe: str, words: list[str], say: Say, steps: int = 40, every: int = 10) -> Proof:
    """Runs the recipe twice for `steps` steps under `folder`. The second run is a separate process, which is killed and then resumed.

    Args:
        words: settings of both runs.
        say: called with a message before each part.
        every: the number of steps between checkpoints.
    """
    common = [
        *words,
        f"steps={steps}",
        f"checkpoint.every={every}",
        "log.every=1",
        "eval.batches=0",
        "sample.every=none",
    ]
    alone, killed = folder / "alone", folder / "killed"
    last = steps * 5 // 8
    say(f"training {plural(steps, 'step')}, undisturbed ...")
    _trained(recipe, [*common, f"dir={alone}"])
    say(f"training the same {plural(steps, 'step')} in another process, to be killed after step {last} ...")
    killed_at = kill_at(killed, recipe, [*common, f"dir={killed}"], last)
    resumed_from = max(RunDirectory(killed).steps(), default=0)
    say(f"killed at step {killed_at}; resuming from step {resumed_from} ...")
    _trained(recipe, [*common, f"dir={killed}"])
    losses = [by_step(read(Store(d)), "loss") for d in (alone, killed)]
    return Proof(
        steps,
        killed_at,
        resumed_from,
        losses[0] == losses[1] and len(losses[0]) == steps,
        digest(alone, steps) == digest(killed, steps),
    )


def _trained(recipe: str, words: list[str]) -> None:
    """Trains silently. Raises SystemExit if a signal stopped it, because an incomplete run proves nothing."""
    if code := train(recipe, words, Quiet()).exit_code:
        raise SystemExit(code)


def kill_at(run: Path, recipe: str, words: list[str], step: int) -> int:
    """Starts a run in a separate process and kills it with SIGKILL once it has logged `step`. Returns the last step it logged."""
    environment = os.environ | {"ARGOSY_HUGE_PAGES": os.environ.get("ARGOSY_HUGE_PAGES", "1")}
    process = subprocess.Popen(
        [sys.executable, "-m", "argosy", "train", recipe, *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=environment,
    )
    limit = time.monotonic() + PATIENCE_S
    with before_leaving(process.kill):
        return _kill(process, run, step, limit)


def _kill(process: subprocess.Popen[bytes], run: Path, step: int, limit: float) -> int:
    try:
        while (seen := max(by_step(read(Store(run)), "loss"), default=0)) < step:
            if process.poll() is not None:
                stderr = (process.stderr.read() if process.stderr else b"").decode(errors="replace")[-500:]
                raise ArgosyError(f"the run to be killed ended by itself: {stderr}", where=str(run))
            if time.monotonic() > limit:
                raise ArgosyError(f"the run to be killed was at step {seen} after {PATIENCE_S} s", where=str(run))
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
        if process.stderr:
            process.stderr.close()
    return max(by_step(read(Store(run)), "loss"), default=0)


def digest(run: Path, step: int) -> str:
    """Returns the SHA-256 of the names and bytes of all weights of a checkpoint."""
    total = hashlib.sha256()
    weights: dict[str, Any] = load_weights(run / CHECKPOINTS / str(step))
    for name, array in sorted(weights.items()):
        total.update(name.encode())
        total.update(np.ascontiguousarray(array).tobytes())
    return total.hexdigest()
