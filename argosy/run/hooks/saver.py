"""Saves checkpoints between two steps."""

import math
from collections.abc import Callable
from typing import Any

from argosy.checkpoint.checkpoints import Checkpoints
from argosy.checkpoint.tiers.tiered import TieredCheckpoints
from argosy.core.settings import Reading, dump
from argosy.run.assembly.assembly import Assembly
from argosy.run.code_files import code_hashes
from argosy.run.settings.run import Run


class Saver:
    """Saves checkpoints. A step is saved only once.

    Args:
        reading: the settings of the run, with the provenance of each.
        hub: the config.json of the initial model.
        base: the identity of the base model under adapters (`checkpoint.base`); empty without adapters.
        saved: called with a step as soon as its checkpoint is being written.
        before: called before a checkpoint is begun.
    """

    def __init__(
        self,
        assembly: Assembly,
        reading: Reading[Run],
        checkpoints: Checkpoints | TieredCheckpoints,
        hub: dict[str, Any],
        base: dict[str, Any] | None = None,
        saved: Callable[[int], None] = lambda step: None,
        before: Callable[[], None] = lambda: None,
    ):
        self.saved, self.before = saved, before
        self.assembly, self.reading, self.checkpoints, self.hub = assembly, reading, checkpoints, hub
        self.base = {"base": base} if base else {}
        self.eval_losses = checkpoints.eval_losses()
        # As the files were when the run began: it was read then.
        self.code = code_hashes(reading.value)
        # The step that went last to each tier.
        self.newest: dict[bool, int] = {}
        # Those that led to the state.
        self.rollbacks: list[dict[str, Any]] = []

    def __call__(self, now: Any) -> None:
        self._save(now)

    def local(self, now: Any) -> None:
        """Saves a checkpoint to the local tier, unless this step is in the persistent tier already."""
        self._save(now, local=True)

    def _save(self, now: Any, local: bool = False) -> None:
        if now.step == self.newest.get(False) or (local and now.step == self.newest.get(True)):
            return
        self.newest[local] = now.step
        settings = dump(self.reading.value)
        meta = {
            "step": now.step,
            "decided": vars(self.assembly.decided),
            "data": now.batches.state(),
            "eval_loss": self.eval_losses.get(now.step),
            "model": settings["model"],
            "hub": self.hub,
            "settings": settings,
            "origin": self.reading.origin,
        } | self.base
        meta |= {"rollbacks": self.rollbacks} if self.rollbacks else {}
        meta |= {"code": self.code} if self.code else {}
        weights, state = self.assembly.packed(now.state)
        self.before()
        if local:
            assert isinstance(self.checkpoints, TieredCheckpoints)
            self.checkpoints.save_local(now.step, weights, state, meta, now.batches.arrays())
        else:
            self.checkpoints.save(now.step, weights, state, meta, now.batches.arrays())
        self.saved(now.step)

    def evaluated(self, now: Any, loss: float) -> None:
        """Records an evaluation loss, and saves a checkpoint at once if the loss is among the best that are kept. The initial weights
        are not saved for this, since their source still has them.
        """
        if not now.step:
            return
        best = sorted(eval_loss for step, eval_loss in self.eval_losses.items() if step != now.step)
        most = self.reading.value.checkpoint.keep_best
        self.eval_losses[now.step] = loss
        if most and math.isfinite(loss) and (len(best) < most or loss < best[most - 1]):
            self(now)
