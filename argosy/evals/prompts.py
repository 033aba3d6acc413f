"""Makes the prompts of tasks: the examples, and then a row as text."""

import random
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

from argosy.core.errors import BadInput
from argosy.evals.plan import PlannedTask
from argosy.evals.rows import Fields
from argosy.evals.tasks import Task

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
BETWEEN = "\n\n"


def question(task: Task, row: Mapping[str, Any]) -> str:
    """The prompt of a row without examples. Blanks at the end of a field are dropped, because they would become separate tokens."""
    text = task.prompt.format(**{name: value.rstrip() if isinstance(value, str) else value for name, value in row.items()})
    if task.layout != "letters":
        return text
    choices = "".join(f"\n{letter}. {choice}" for letter, choice in zip(LETTERS, row["choices"]))
    return f"{text}{choices}\nAnswer:"


def choices(task: Task, row: Mapping[str, Any]) -> list[str]:
    """The continuations to score for a question of multiple choice, each with a blank before it."""
    if task.layout == "letters":
        return [f" {letter}" for letter in LETTERS[: len(row["choices"])]]
    return [after_blank(choice) for choice in row["choices"]]


def after_blank(text: str) -> str:
    """A text with one space before it and none after it, as a continuation of a prompt."""
    return f" {text.strip()}"


def few_shot_example(task: Task, row: Mapping[str, Any]) -> str:
    """A row as text, with its right answer."""
    if task.layout == "options":
        return row["context_options"][row["gold"]].rstrip() + after_blank(row["continuation"])
    if task.kind == "choice":
        return question(task, row) + choices(task, row)[row["gold"]]
    return question(task, row) + after_blank(row[task.answer or "continuation"])


def examples(planned: PlannedTask, seed: int) -> Callable[[int], str]:
    """Returns a function: index of a row -> the text before its question, which is the introduction of the task and the examples.

    Examples are drawn once, and all rows get the same ones, so that the engine computes them once. If the row is one of the examples,
    or has the same question, the next drawn example replaces it.

    Raises:
        BadInput: (by the function) there are fewer rows to draw from than examples.
    """
    task, shots = planned.task, planned.shots
    candidates: dict[Any, list[tuple[Any, Fields]]] = {}
    for i in random.Random(seed).sample(range(len(planned.pool)), len(planned.pool)):
        candidates.setdefault(planned.pool[i].get(task.alike), []).append((_identity(task, planned.pool[i]), planned.pool[i]))

    def before(number: int) -> str:
        row = planned.rows[number]
        intro = task.before.format(**row) if task.before else ""
        if not shots:
            return intro
        identity = _identity(task, row)
        others = (example for text, example in candidates.get(row.get(task.alike), []) if text != identity)
        some = list(islice(others, shots))
        if len(some) < shots:
            among = f" of {task.alike} `{row.get(task.alike)}`" if task.alike else ""
            raise BadInput(f"shots={shots}, and there are {len(some)} other rows{among}", where=str(planned.path))
        return intro + "".join(few_shot_example(task, example) + BETWEEN for example in some)

    return before


def _identity(task: Task, row: Mapping[str, Any]) -> Any:
    """A value that is equal for rows with the same question. A row is no example for a row with the same identity."""
    return tuple(row["context_options"]) if task.layout == "options" else question(task, row)
