"""Evaluates a model on planned tasks, one after the other."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from argosy.core.errors import BadInput
from argosy.evals import choice, generation, perplexity
from argosy.evals import completion_loss as answers
from argosy.evals.plan import PlannedTask
from argosy.evals.settings import EvalSettings
from argosy.evals.statistics import MeanWithError, RowScores, means
from argosy.evals.tasks import OF_VECTORS
from argosy.evals.vectors import measures
from argosy.infer.embed import check_embeds

MEASURES: dict[str, Callable[..., tuple[list[RowScores], int]]] = {
    "perplexity": perplexity.measure_perplexity,
    "answers": answers.measure_completion_loss,
    "choice": choice.evaluate_multiple_choice,
    "continuation": choice.evaluate_continuation,
    "generation": generation.evaluate_generation,
    "ifeval": generation.evaluate_instructions,
    "similarity": measures.evaluate_text_pairs,
    "pairs": measures.evaluate_text_pairs,
    "retrieval": measures.evaluate_retrieval,
}
# The functions that compute the metrics of a task from all rows together, for tasks whose metrics are no means over rows.
FIGURES: dict[str, Callable[[Sequence[RowScores]], dict[str, MeanWithError]]] = {
    "similarity": measures.correlations,
    "pairs": measures.separations,
}
# Called with a task, the number of its rows that are done, and the number of all its rows (0: unknown).
Progress = Callable[[PlannedTask, int, int], None]


class EvaluationStopped(Exception):
    """Raised if `stopped` returned True."""


@dataclass(frozen=True)
class TaskResult:
    """The result of one task.

    planned: the task.
    rows: the scores of each row.
    truncated: the number of sequences that lost tokens at their beginning to fit into the context.
    seconds: the time of the evaluation.
    numbers: the metrics by name.
    """

    planned: PlannedTask
    rows: Sequence[RowScores]
    truncated: int
    seconds: float
    numbers: Mapping[str, MeanWithError] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """The result as a JSON object. `stderr` is the standard error of the first metric. The standard errors of other metrics are
        `NAME_stderr`."""
        out: dict[str, Any] = {}
        for name, mean in self.numbers.items():
            out |= {name: mean.value, ("stderr" if not out else f"{name}_stderr"): mean.stderr}
        if self.planned.task.kind in ("perplexity", "answers"):
            out["tokens"] = int(sum(row.weight("loss") for row in self.rows))
        if self.rows and (kind := self.rows[0].answer.get("kind")):
            out["rows"] = kind
        out |= {"n": len(self.rows), "truncated": self.truncated, "shots": self.planned.shots}
        return out | {"seconds": round(self.seconds, 3)}


def evaluate_tasks(
    lm: Any,
    plan: Sequence[PlannedTask],
    settings: EvalSettings,
    progress: Progress = lambda planned, done, of: None,
    stopped: Callable[[], bool] = lambda: False,
) -> Iterator[TaskResult]:
    """Evaluates the planned tasks, and yields the result of each.

    Args:
        progress: called after each batch or token.
        stopped: called after each batch or token. If it returns True, the current task is aborted.

    Raises:
        EvaluationStopped: `stopped` returned True.
        BadInput: as in `check_evaluable`, or the settings do not apply to this model.
    """
    check_evaluable(lm, settings, plan)
    for planned in plan:
        def tick(done: int, planned: PlannedTask = planned) -> None:
            if stopped():
                raise EvaluationStopped
            progress(planned, done, len(planned.rows))

        tick(0)
        start = time.monotonic()
        rows, truncated = MEASURES[planned.task.kind](lm, planned, settings, tick)
        numbers = FIGURES[planned.task.kind](rows) if planned.task.kind in FIGURES else with_perplexity(means(rows))
        yield TaskResult(planned, rows, truncated, time.monotonic() - start, numbers)


def check_evaluable(lm: Any, settings: EvalSettings, plan: Sequence[PlannedTask]) -> None:
    """Checks that a model can be evaluated on these tasks.

    Raises:
        BadInput: a task needs a model that predicts tokens, or that makes vectors of texts, and this model does not; the model has no
            tokenizer; or chat=true, and it has no chat template.
    """
    for planned in plan:
        if planned.task.kind in OF_VECTORS:
            check_embeds(lm)
        else:
            lm.check_predicts()
    if lm.tokenizer is None:
        raise BadInput("this model came without a tokenizer", hint="put its tokenizer files into the model's folder")
    if settings.chat and not getattr(lm.tokenizer, "chat_templates", None):
        raise BadInput("chat=true: this model has no chat template", hint="leave chat=true out")


def with_perplexity(numbers: Mapping[str, MeanWithError]) -> dict[str, MeanWithError]:
    """Adds the perplexity, exp(loss), after the loss. Its standard error is that of the loss times the perplexity (to first order)."""
    from math import exp, inf

    out: dict[str, MeanWithError] = {}
    for name, mean in numbers.items():
        out[name] = mean
        if name == "loss":
            value = exp(mean.value) if mean.value < 700 else inf
            out["perplexity"] = MeanWithError(value, None if mean.stderr is None else mean.stderr * value)
    return out
