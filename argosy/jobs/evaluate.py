"""`argosy eval`: evaluates a model, stores the results with its run, and compares them with another model's.

Mistakes in settings, tasks, files, rows and the file `against` are found before jax is imported.
"""

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from argosy.checkpoint.run_directory import CHECKPOINTS, RunDirectory
from argosy.core.addresses import is_missing
from argosy.core.errors import BadInput
from argosy.core.settings import dump
from argosy.evals.plan import PlannedTask, plan
from argosy.evals.prompts import examples
from argosy.evals.rows import read_rows
from argosy.evals.settings import EvalSettings
from argosy.evals.statistics import RowScores, paired_difference
from argosy.jobs.history import listing as runs
from argosy.run.settings.recipe_files import no_model

Others = Mapping[str, Sequence[RowScores]]


def prepare_tasks(model: str, settings: EvalSettings) -> tuple[list[PlannedTask], Others]:
    """Loads the tasks with their rows, and checks that there are enough few-shot examples for every row. Also returns the per-row
    scores in the file `against`, by task; empty if it is not set.

    Raises:
        UserError: there is no such model, task or file, or a file holds something else.
    """
    if is_missing(model):
        raise no_model(model)
    if image_settings := sorted({"clip", "guidance", "steps"} & settings.model_fields_set):
        raise BadInput(f"{', '.join(image_settings)}: only tasks=images reads this", hint="tasks=images, or leave it out")
    planned = plan(settings)
    for planned_task in planned:
        before = examples(planned_task, settings.seed)
        for number in range(len(planned_task.rows)):
            before(number)
    if settings.rows and not Path(settings.rows).resolve().parent.is_dir():
        raise BadInput(f"no folder for {settings.rows}", where="set by rows")
    if not settings.against:
        return planned, {}
    others = read_against(Path(settings.against))
    if missing := [planned_task.task.name for planned_task in planned if planned_task.task.name not in others]:
        where = f"it has {', '.join(others)}"
        raise BadInput(f"{settings.against} has no rows of {missing[0]}", where=where, hint="evaluate both models on the same tasks")
    return planned, others


def read_against(path: Path) -> dict[str, list[RowScores]]:
    """Reads the rows that `rows=FILE` wrote, by task.

    Raises:
        BadInput: the file is of another kind.
    """
    by_task: dict[str, list[RowScores]] = {}
    for number, line in enumerate(read_rows(path), 1):
        try:
            row = RowScores(int(line["row"]), dict(line["values"]), dict(line["weights"]))
            by_task.setdefault(str(line["task"]), []).append(row)
        except (KeyError, TypeError, ValueError):
            hint = "against=FILE takes a file that `rows=FILE` wrote"
            raise BadInput(f"{path} holds no rows of an evaluation", where=f"line {number}", hint=hint) from None
    return by_task


def evaluate(
    lm: Any,
    planned: Sequence[PlannedTask],
    settings: EvalSettings,
    others: Others,
    progress: Callable[[PlannedTask, int, int], None],
    stopped: Callable[[], bool],
) -> tuple[dict[str, Any], bool]:
    """Evaluates a model. Returns the results as a JSON object, and whether the evaluation was stopped before its last task.

    Writes the file of `settings.rows` task by task.
    """
    from argosy.evals.run import EvaluationStopped
    from argosy.evals.run import evaluate_tasks as results

    tasks: dict[str, Any] = {}
    if settings.rows:
        Path(settings.rows).write_text("", encoding="utf-8")
    try:
        for result in results(lm, planned, settings, progress, stopped):
            name = result.planned.task.name
            tasks[name] = result.document()
            if settings.rows:
                write_rows(Path(settings.rows), name, result.rows)
            if settings.against:
                metrics = [metric for metric in result.numbers if metric != "perplexity"]
                tasks[name]["against"] = {m: paired_difference(result.rows, others[name], m) for m in metrics}
    except EvaluationStopped:
        return {"tasks": tasks}, True
    return {"tasks": tasks}, False


def write_rows(path: Path, task: str, rows: Iterable[RowScores]) -> None:
    """Adds rows to a file, each as a JSON line."""
    with path.open("a", encoding="utf-8") as file:
        for row in rows:
            line = {"task": task, "row": row.number, "values": row.values, "weights": row.weights, **row.answer}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


def run_of(model: str) -> tuple[Path, int | None] | None:
    """Returns the run directory that a MODEL argument belongs to, and the step of its weights; None if there is no such run here."""
    path = Path(model)
    if path.parent.name == CHECKPOINTS and path.name.isdecimal() and runs.is_run(path.parent.parent):
        return path.parent.parent, int(path.name)
    if not runs.is_run(path):
        return None
    # Loading takes the last one that is whole.
    whole = [step for step in reversed(runs.checkpoints(path)) if runs.trouble(path, step) is None]
    return path, whole[0] if whole else None


def keep(model: str, settings: EvalSettings, document: Mapping[str, Any]) -> Path | None:
    """Adds the results to the model's run, and rewrites its report. Returns the run directory, if there is one."""
    run = run_of(model)
    if run is None or not document["tasks"]:
        return None
    from argosy.jobs.history.report import report

    path, step = run
    overrides = {name: value for name, value in dump(settings).items() if name in settings.model_fields_set}
    RunDirectory(path).add_evaluation({"time": time.time(), "step": step, "settings": overrides, **document})
    report(path)
    return path
