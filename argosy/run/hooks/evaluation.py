"""A hook that evaluates the loss on held-out data."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from argosy.observe.goodput import Clock
from argosy.observe.metrics import Metrics
from argosy.parallel import processes
from argosy.run.assembly.assembly import Assembly
from argosy.run.assembly.updates import compile_evaluation
from argosy.run.hooks.periodic import is_stopping
from argosy.run.hooks.saver import Saver
from argosy.run.view import View


class Evaluation:
    """Evaluates the loss on held-out data. For text it logs perplexity, bits per byte and the metrics that the objective names. For
    other data it logs all metrics of the objective.

    A signal to stop ends an evaluation early. The evaluation after the last step is finished, since no later one would replace it.
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
            program = processes.run_together("evaluation compiled", partial(compile_evaluation, self.assembly))
            self._program = self.assembly.with_frozen(program)
        numbers = self.evaluate(now.state, (lambda: False) if now.last else self.interrupted)
        if numbers is None:
            return
        self.metrics.write({"step": now.step} | numbers)
        self.view.evaluation(now.step, numbers)
        with self.clock("checkpoint"):
            self.saver.evaluated(now, numbers["eval_loss"])

    def evaluate(self, state: Any, interrupted: Callable[[], bool] = lambda: False) -> dict[str, float] | None:
        """Runs one evaluation. Returns its metrics; None if it was interrupted.

        Args:
            interrupted: asked between batches whether to stop.
        """
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
        weights = {name: sum(float(batch_sums[name].weight) for batch_sums in sums) for name in sums[0]}
        totals = {name: sum(float(batch_sums[name].total) for batch_sums in sums) for name in sums[0]}
        metrics = {f"eval_{name}": totals[name] / max(weight, 1e-30) for name, weight in weights.items()}
        loss = metrics["eval_loss"]
        if "eval_cross_entropy" not in metrics:
            figures = {name.removeprefix("eval_"): value for name, value in metrics.items()}
            more = self.assembly.run.objective.derived(figures)
            return {"eval_loss": loss} | metrics | {f"eval_{name}": value for name, value in more.items()}
        numbers = {"eval_loss": loss, "eval_perplexity": math.exp(min(loss, 700.0))}
        if evals.bytes_per_token:
            numbers["eval_bits_per_byte"] = loss / math.log(2) / evals.bytes_per_token
        more = self.assembly.run.objective.needs.metrics
        return numbers | {f"eval_{name}": metrics[f"eval_{name}"] for name in more}
