"""Plans an evaluation: finds the tasks that the settings name, and reads and checks the file and the rows of each."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path

from argosy.core.counts import plural
from argosy.core.errors import BadInput, UnknownName, UserError, mistakes_of, raise_mistakes
from argosy.data.sources import SourceRecord
from argosy.evals.rows import (
    LAYOUTS,
    Fields,
    answered_format,
    check_task_rows,
    is_rows,
    layout_of,
    no_layout,
    read_records,
    read_rows,
)
from argosy.evals.settings import IMAGES, EvalSettings
from argosy.evals.tasks import ANSWERS, OF_VECTORS, PERPLEXITY, PLAIN, RETRIEVAL, TASKS, Task
from argosy.evals.vectors.corpus import FILES, RetrievalCorpus, find_corpus, read_corpus

LISTED = (*TASKS, IMAGES)
WHERE = "files of JSON lines named by task, such as arc_easy.jsonl; the guide to evaluation says where to get them"


@dataclass(frozen=True)
class PlannedTask:
    """A task with its rows.

    task: the task.
    path: the file of the rows, or the folder of a retrieval set.
    rows: the rows to evaluate; empty for a text for perplexity.
    total: the number of rows in the file.
    pool: the rows from which few-shot examples are drawn.
    shots: the number of examples before each question.
    limit: the largest number of windows of a text; None: all.
    records: the records of the rows, for the loss of answers.
    format: the format of these records; empty for other tasks.
    corpus: the documents of a retrieval set.
    """

    task: Task
    path: Path
    rows: list[Fields]
    total: int
    pool: list[Fields]
    shots: int
    limit: int | None = None
    records: Sequence[SourceRecord] = ()
    format: str = ""
    corpus: RetrievalCorpus = field(default_factory=RetrievalCorpus)

    def __str__(self) -> str:
        """The task as a phrase, such as `arc_easy (the first 100 of 600 rows, 5 shots)`."""
        if self.task.kind == "perplexity" and not self.rows:
            some = f", the first {plural(self.limit, 'window')}" if self.limit else ""
            return f"{self.task.name} of {self.path}{some}"
        many = f"{self.total:,} {'query' if self.total == 1 else 'queries'}" if self.corpus.ids else plural(self.total, "row")
        some = many if len(self.rows) == self.total else f"the first {len(self.rows)} of {many}"
        # The phrase tells which columns are read, because the name of the file does not.
        details = f", answers of `{self.format}` records" if self.format else ", `text`" if self.task.kind == "perplexity" else ""
        details += f", {plural(len(self.corpus.ids), 'document')}" if self.corpus.ids else ""
        shots = f", {plural(self.shots, 'shot')}" if self.shots else ""
        return f"{self.task.name} ({some}{details}{shots})"


def plan(settings: EvalSettings) -> list[PlannedTask]:
    """Finds the tasks that the settings name, and reads and checks their rows.

    Raises:
        UnknownName: there is no such task.
        BadInput: there is no file for a task, or its rows are not what the task needs.
    """
    if settings.data is None and settings.text is not None and names(settings.tasks or PERPLEXITY) == [TASKS[PERPLEXITY]]:
        return [_of_folder(TASKS[PERPLEXITY], Path(), settings)]
    if settings.data is None:
        names(settings.tasks)
        raise BadInput("no task files", where="`data` is not set", hint=f"data=FOLDER holds {WHERE}")
    data = Path(settings.data)
    if data.is_file():
        return _of_file(data, settings)
    if not data.is_dir():
        raise BadInput(f"no file or folder {data}", where="set by data", hint=f"data=FOLDER holds {WHERE}")
    plans: list[PlannedTask] = []
    tasks = names(settings.tasks)
    raise_mistakes(mistakes_of(*(lambda task=task: plans.append(_of_folder(task, data, settings)) for task in tasks)))
    return plans


def names(tasks: str | None) -> list[Task]:
    """The tasks in a list of names that are separated by commas. A beginning such as `bbh` stands for all tasks that start with `bbh_`.

    Raises:
        UnknownName: a name is neither a task nor such a beginning.
        BadInput: there are no names.
    """
    requested = [name for name in (part.strip() for part in (tasks or "").split(",")) if name]
    raise_mistakes([_unknown_task(name) for name in requested if not _match_tasks(name)])
    matches = {task.name: task for name in requested for task in _match_tasks(name)}
    if not matches:
        raise BadInput("no tasks", hint=f"tasks=NAME,...: {', '.join(LISTED)}")
    return list(matches.values())


def _match_tasks(name: str) -> list[Task]:
    name = re.sub(r"_\d+$", "", name.removesuffix(".jsonl"))
    return [TASKS[name]] if name in TASKS else [task for task in TASKS.values() if task.name.startswith(f"{name}_")]


def _unknown_task(name: str) -> UserError:
    if name == IMAGES:
        return BadInput(f"tasks={IMAGES} beside other tasks: it is of models that draw", hint=f"tasks={IMAGES} alone")
    error, close = UnknownName("task", name, LISTED), get_close_matches(name, LISTED, n=1, cutoff=0.6)
    error.where = f"tasks are {', '.join(LISTED)}"
    error.hint = f"did you mean `{close[0]}`?" if close else "`data=FILE.jsonl` evaluates a file of your own"
    return error


def _of_file(path: Path, settings: EvalSettings) -> list[PlannedTask]:
    if not is_rows(path):
        tasks = names(settings.tasks or PERPLEXITY)
        if [task.name for task in tasks] != [PERPLEXITY]:
            problem = f"{path} is not a file of JSON lines, which {tasks[0].name} needs"
            raise BadInput(problem, hint="perplexity takes any text; other tasks take FILE.jsonl or a folder")
        _check_settings(TASKS[PERPLEXITY], settings)
        return [PlannedTask(TASKS[PERPLEXITY], path, [], 0, [], 0, settings.limit)]
    rows = read_rows(path)
    stem = path.name.removesuffix(".gz").rpartition(".")[0]
    if settings.tasks:
        tasks = names(settings.tasks)
        if len(tasks) > 1:
            problem = f"{len(tasks)} tasks and one file"
            raise BadInput(problem, where=f"data={path}", hint="data=FOLDER with a file for each task")
        if tasks[0].kind == RETRIEVAL:
            raise BadInput(f"{path} is a file, and retrieval has several", hint=f"data=FOLDER with {FILES}")
        if tasks[0].name == PERPLEXITY and "text" not in rows[0]:
            if (format := answered_format(path, rows[0])) is None:
                raise no_layout(path, rows[0])
            return [_of_records(replace(ANSWERS, name=PERPLEXITY), path, rows, format, settings)]
        return [_plan_task(tasks[0], path, rows, settings)]
    matches = _match_tasks(stem)
    if len(matches) == 1 and all(field in rows[0] for field in LAYOUTS[matches[0].layout]):
        return [_plan_task(matches[0], path, rows, settings)]
    has_layout = any(all(field in rows[0] for field in fields) for fields in LAYOUTS.values())
    if not has_layout and (format := answered_format(path, rows[0])) is not None:
        return [_of_records(replace(ANSWERS, name=stem), path, rows, format, settings)]
    return [_plan_task(replace(PLAIN[layout_of(path, rows[0])], name=stem), path, rows, settings)]


def _of_records(task: Task, path: Path, rows: list[Fields], format: str, settings: EvalSettings) -> PlannedTask:
    _check_settings(task, settings)
    records = read_records(path, rows, format)[: settings.limit]
    return PlannedTask(task, path, rows[: settings.limit], len(rows), [], 0, records=records, format=format)


def _of_folder(task: Task, folder: Path, settings: EvalSettings) -> PlannedTask:
    if task.kind == RETRIEVAL:
        return _of_corpus(task, find_corpus(folder), settings)
    if task.name != PERPLEXITY:
        path = find_task_file(task, folder)
        return _plan_task(task, path, read_rows(path), settings)
    if settings.text is None:
        raise BadInput("perplexity needs a text", where=f"data={folder} is a folder", hint="text=FILE, or data=FILE")
    if not Path(settings.text).is_file():
        raise BadInput(f"no file {settings.text}", where="set by text")
    return _of_file(Path(settings.text), settings.model_copy(update={"tasks": PERPLEXITY}))[0]


def _of_corpus(task: Task, folder: Path, settings: EvalSettings) -> PlannedTask:
    _check_settings(task, settings)
    rows, corpus = read_corpus(folder)
    return PlannedTask(task, folder, rows[: settings.limit], len(rows), [], 0, corpus=corpus)


def find_task_file(task: Task, folder: Path) -> Path:
    """Finds the file of a task in a folder or its direct subfolders. The name of the file is that of the task, optionally with a number
    of rows: `arc_easy_600.jsonl`.

    Raises:
        BadInput: there is no such file, or there are several.
    """
    paths = list(_files(task.name, folder))
    if not paths:
        problem = f"no file of {task.name} in {folder}"
        raise BadInput(problem, where=f"looked for {task.name}.jsonl, there and one folder below", hint=f"data=FOLDER holds {WHERE}")
    if len(paths) > 1:
        raise BadInput(f"{len(paths)} files of {task.name}", where=", ".join(map(str, paths[:4])), hint="data=FILE names one")
    return paths[0]


def _files(stem: str, folder: Path) -> Iterator[Path]:
    pattern = re.compile(rf"{re.escape(stem)}(_\d+|_test)?\.(jsonl|ndjson)(\.gz)?")
    inside = sorted(path for path in folder.iterdir() if path.is_dir())
    for place in (folder, *inside):
        for path in sorted(place.iterdir()):
            if pattern.fullmatch(path.name) and path.is_file():
                yield path


def _plan_task(task: Task, path: Path, rows: list[Fields], settings: EvalSettings) -> PlannedTask:
    """Checks rows and settings for a task, and returns the planned task.

    Raises:
        BadInput: a row is not what the task needs, a setting does not apply to the task, or all pairs have the same score or label.
    """
    check_task_rows(path, rows, task.layout, task.name, task.fields)
    if task.kind == "ifeval":
        from argosy.evals.instruction_following.checks import check_instructions

        check_instructions(path, rows)
    _check_settings(task, settings)
    for name in ("score", "label") if task.kind in OF_VECTORS else ():
        if name in LAYOUTS[task.layout] and len({row[name] for row in rows[: settings.limit]}) < 2:
            problem = f"every `{name}` of {path} is {rows[0][name]}"
            raise BadInput(problem, hint="rows of different ones; limit= takes the first rows alone")
    shots = task.shots if settings.shots is None else settings.shots
    return PlannedTask(task, path, rows[: settings.limit], len(rows), _pool(task, path, rows) if shots else [], shots)


def _check_settings(task: Task, settings: EvalSettings) -> None:
    if task.kind in OF_VECTORS:
        _check_vectors(task, settings)
    if task.kind == "answers":
        _check_answers(task, settings)
    if settings.chat and (task.kind == "perplexity" or task.layout == "options"):
        raise BadInput(f"chat=true: {task.name} asks no question", hint="leave chat=true out, or name other tasks")
    if settings.shots and task.kind in ("perplexity", "ifeval"):
        raise BadInput(f"shots={settings.shots}: {task.name} takes no examples", hint="leave shots out")


def _check_vectors(task: Task, settings: EvalSettings) -> None:
    """Checks that all settings apply to tasks of vectors.

    Raises:
        BadInput: a setting does not apply.
    """
    for name in ("chat", "shots", "window", "stride", "max_tokens"):
        if value := getattr(settings, name):
            raise BadInput(f"{name}={value}: {task.name} compares vectors", hint=f"leave {name} out")
    if settings.against and task.kind != RETRIEVAL:
        problem = f"against={settings.against}: the figures of {task.name} are of all rows together, not of each"
        raise BadInput(problem, hint="leave it out")
    for name in ("query_prompt", "document_prompt"):
        if getattr(settings, name) is not None and task.kind != RETRIEVAL:
            raise BadInput(f"{name}: {task.name} has neither queries nor documents", hint="tasks=retrieval has both")


def _check_answers(task: Task, settings: EvalSettings) -> None:
    if settings.chat:
        raise BadInput(f"chat=true: {task.name} has answers, and messages go through the chat template", hint="leave chat=true out")
    for name in ("shots", "window", "stride"):
        if (value := getattr(settings, name)) is not None:
            problem = f"{name}={value}: {task.name} has answers, of which each is read whole with its prompt"
            raise BadInput(problem, hint=f"leave {name} out")


def _pool(task: Task, path: Path, rows: list[Fields]) -> list[Fields]:
    """The rows from which few-shot examples are drawn: those of the task's file of examples, if it is in the same folder, else
    `rows`."""
    example_files = [p for p in _files(task.examples, path.parent) if p.parent == path.parent] if task.examples else []
    if not example_files:
        return rows
    examples = read_rows(example_files[0])
    check_task_rows(example_files[0], examples, task.layout, task.name, task.fields)
    return examples


