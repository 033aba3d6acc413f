"""Hooks that run between two steps: evaluation, checkpoints, samples."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from argosy.checkpoint.checkpoints import Checkpoints
from argosy.checkpoint.tiers.tiered import TieredCheckpoints
from argosy.core.settings import Reading, dump
from argosy.observe.goodput import Clock
from argosy.observe.metrics import Metrics
from argosy.parallel import processes
from argosy.run.assembly.assembly import Assembly
from argosy.run.assembly.updates import compile_evaluation
from argosy.run.settings import Run
from argosy.run.view import View


@dataclass(frozen=True)
class Every:
    """A hook that runs every `every` steps, and at the last step."""

    name: str
    every: int
    do: Callable[[Any], None]

    def due(self, step: int, last: bool) -> bool:
        return last or step % self.every == 0

    def __call__(self, now: Any) -> None:
        self.do(now)


@dataclass(frozen=True)
class Between(Every):
    """As `Every`, but not at the last step."""

    def due(self, step: int, last: bool) -> bool:
        return not last and step % self.every == 0


def is_stopping(now: Any, steps: int) -> bool:
    """Whether a signal asked the run to stop; then it only saves."""
    return now.last and now.step < steps


class Saver:
    """Saves checkpoints, each step once.

    Args:
        reading: the run's settings and who set each.
        hub: the config.json of the model that the weights came from.
        base: what identifies the base model under adapters (`checkpoint.base`); empty without any.
        saved: called with a step when its checkpoint is under way. before: called before a checkpoint is begun.
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
        # The step that went last to each tier.
        self.newest: dict[bool, int] = {}
        # Those that led to the state.
        self.rollbacks: list[dict[str, Any]] = []

    def __call__(self, now: Any) -> None:
        self._save(now)

    def local(self, now: Any) -> None:
        """Saves to the local tier, unless this step is in the persistent one already."""
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
        weights, state = self.assembly.packed(now.state)
        self.before()
        if local:
            assert isinstance(self.checkpoints, TieredCheckpoints)
            self.checkpoints.save_local(now.step, weights, state, meta, now.batches.arrays())
        else:
            self.checkpoints.save(now.step, weights, state, meta, now.batches.arrays())
        self.saved(now.step)

    def evaluated(self, now: Any, loss: float) -> None:
        """Records an evaluation, and saves at once if it is among the best that are kept; not the first weights, which came from
        somewhere."""
        if not now.step:
            return
        best = sorted(kept for step, kept in self.eval_losses.items() if step != now.step)
        most = self.reading.value.checkpoint.keep_best
        self.eval_losses[now.step] = loss
        if most and math.isfinite(loss) and (len(best) < most or loss < best[most - 1]):
            self(now)


class Evaluation:
    """Evaluates the loss on held-out data: of text its perplexity and bits per byte, with the metrics that the objective
    names (`evaluated`); of anything else all of the objective's metrics.

    A signal to stop is not kept waiting until all batches are through: the evaluation is given up, except that of the last step,
    which nothing would make up for.
    """

    def __init__(
        self,
        assembly: Assembly,
        steps: int,
        saver: Saver,
        metrics: Metrics,
        view: View,
        clock: Clock,
        interrupted: Callable[[], bool] = lambda: False,
    ):
        self.assembly, self.steps, self.saver, self.interrupted = assembly, steps, saver, interrupted
        self.metrics, self.view, self.clock = metrics, view, clock
        self._program: Any = None

    def __call__(self, now: Any) -> None:
        if is_stopping(now, self.steps):
            return
        if self._program is None:
            program = processes.together("evaluation compiled", partial(compile_evaluation, self.assembly))
            self._program = self.assembly.with_frozen(program)
        numbers = self.evaluate(now.state, (lambda: False) if now.last else self.interrupted)
        if numbers is None:
            return
        self.metrics.write({"step": now.step} | numbers)
        self.view.evaluation(now.step, numbers)
        with self.clock("checkpoint"):
            self.saver.evaluated(now, numbers["eval_loss"])

    def evaluate(self, state: Any, interrupted: Callable[[], bool] = lambda: False) -> dict[str, float] | None:
        """The numbers of one evaluation; None if it was interrupted."""
        evals = self.assembly.evals
        assert evals is not None
        evals.rewind()
        sums: list[Any] = []
        for batch in evals:
            if interrupted():
                return None
            sums.append(self._program(state, self.assembly.place(batch)))
            # One batch is under way and one is queued: a signal would wait for all that are queued.
            jax.block_until_ready(sums[-2:-1])
        weights = {name: sum(float(one[name].weight) for one in sums) for name in sums[0]}
        totals = {name: sum(float(one[name].total) for one in sums) for name in sums[0]}
        found = {f"eval_{name}": totals[name] / max(weight, 1e-30) for name, weight in weights.items()}
        loss = found["eval_loss"]
        if "eval_cross_entropy" not in found:
            return {"eval_loss": loss} | found
        numbers = {"eval_loss": loss, "eval_perplexity": math.exp(min(loss, 700.0))}
        if evals.bytes_per_token:
            numbers["eval_bits_per_byte"] = loss / math.log(2) / evals.bytes_per_token
        more = self.assembly.run.objective.needs.metrics
        return numbers | {f"eval_{name}": found[f"eval_{name}"] for name in more}


class SamplingHook:
    """Generates text from the current weights, and logs it with its prompt. Given up at a signal to stop, as an evaluation is."""

    def __init__(
        self,
        assembly: Assembly,
        settings: Run,
        metrics: Metrics,
        view: View,
        interrupted: Callable[[], bool] = lambda: False,
    ):
        from argosy.run.samples import Sampler

        self.assembly, self.sampler = assembly, Sampler(assembly, settings)
        self.settings, self.metrics, self.view = settings, metrics, view
        self.interrupted = interrupted

    def __call__(self, now: Any) -> None:
        if is_stopping(now, self.assembly.steps):
            return
        prompt, text = self.settings.sample.prompt, self.sampler(now.state, self.interrupted)
        if text is None:
            return
        self.metrics.write({"step": now.step, "sample": text, "prompt": prompt})
        self.view.sample(now.step, prompt, text)
