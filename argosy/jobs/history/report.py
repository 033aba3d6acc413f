"""`argosy report RUN`: writes a page about a run into its directory.

This module collects what is on disk; `observe.report.page` draws it. Data that cannot be read, because it is damaged or was never
written, is left out: reports are needed most for runs that went wrong.
"""

import json
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from argosy.checkpoint.run_directory import CHECKPOINTS, REPORT, STORY, RunDirectory
from argosy.core.command import command_name as as_run
from argosy.core.errors import ArgosyError
from argosy.core.settings import COMMAND_LINE, Choice
from argosy.core.settings.explain import value_text
from argosy.core.settings.words import CALL
from argosy.core.storage import Store
from argosy.jobs.history import listing as runs
from argosy.models import FAMILIES
from argosy.observe import environment, metrics
from argosy.observe.life import account
from argosy.observe.profile.capture import captures
from argosy.observe.readable import format_bytes
from argosy.observe.report.page import Evaluated, RunRecord, SavedCheckpoint, render_report

STATES = {runs.CAN_RESUME: "stopped", runs.DAMAGED: "damaged"}


def report(path: str | Path) -> Path | str:
    """Writes report.html into a run directory. Returns the path of the page, or its address in a store.

    Raises:
        BadInput: this is not a run directory.
    """
    path = runs.require(path)
    runs.store_of(path).write_text(REPORT, render_report(record(path)))
    return path / REPORT if isinstance(path, Path) else f"{path}/{REPORT}"


def record(path: Path | str) -> RunRecord:
    """Collects the facts of a run for its report."""
    summary, store = runs.summary(path), runs.store_of(path)
    try:
        values = runs.read_run_settings(path)
        settings = [(key, value, who) for key, value, who in runs.settings(path) if key != "dir"]
    except ArgosyError:
        values, settings = {}, []
    lines = metrics.read(store)
    return RunRecord(
        name=path.resolve().name if isinstance(path, Path) else path.rpartition("/")[2],
        state=STATES.get(summary.state, summary.state),
        lines=lines,
        steps=summary.steps,
        facts=facts(values, lines),
        settings=[(key, value_text(value), who) for key, value, who in settings],
        checkpoints=[saved for step in summary.checkpoints if (saved := _saved_checkpoint(store, step))],
        environment=surroundings(),
        command=command(path, settings, lines),
        story=_story(store),
        evaluations=_evaluations(path),
        answers=metrics.read(store, metrics.ANSWERS),
        images=_images(store, lines),
        life=account(store),
        profile=_profile(store),
        date=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    )


def _profile(store: Store) -> Any:
    """Returns the newest capture by the profiler; None if the run has none. Reading a capture imports jax."""
    if not store.is_local or not captures(store.local_path()):
        return None
    from argosy.jobs.profile import profile_of_run

    return profile_of_run(store)


def _images(store: Any, lines: Sequence[Mapping[str, Any]]) -> list[tuple[int, str, bytes]]:
    """Returns the image grids that a run drew. The last of several grids with the same name counts."""
    by_name = {line["sample_image"]: line for line in lines if "sample_image" in line}
    grids = []
    for name, line in by_name.items():
        if store.exists(name):
            with store.open(name) as file:
                grids.append((int(line["step"]), f"by the {line.get('of', 'weights')}", file.read()))
    return grids


def facts(values: Mapping[str, Any], lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Describes the run, from its settings and from the headers that its starts logged."""
    description = headers(lines)
    try:
        config: Any = Choice(FAMILIES, tag="family").build(values["model"])
        description["model"] = values["model"].get("preset") or values["model"]["family"]
        description["family"], description["vocab"] = values["model"]["family"], getattr(config, "vocab", None)
        description["data"], description["optimizer"] = values["data"]["source"], values["optimizer"]["name"]
        description["parameters"], objective = config.parameters(), values.get("objective") or {}
        description |= {"objective": objective["name"]} if "name" in objective else {}
        # The header of a run of images knows their size.
        if values.get("rollout") is None and config.inputs != "images":
            description["flops_per_step"] = values["data"]["batch"] * config.training_flops(values["data"]["sequence"])
    except (ArgosyError, ValueError, KeyError, TypeError):
        # Settings of another version, or edited by hand: the page omits them.
        pass
    return description


def headers(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merges all logged headers, of which later ones override earlier ones. The oldest versions called a header `facts`."""
    contents: dict[str, Any] = {}
    for line in lines:
        for name in ("facts", "header"):
            contents |= line[name] if isinstance(line.get(name), dict) else {}
    return contents


def surroundings() -> dict[str, str]:
    """Returns the versions and the machine of the process that writes the report, without a host name."""
    versions = {name: v for name, v in environment.versions().items() if v != "not installed"}
    here = environment.machine()
    memory = f", {format_bytes(here['memory_bytes'])}" if here["memory_bytes"] else ""
    cores = f"{here['cores']:g} core{'s' * (here['cores'] != 1)}"
    return versions | {"processor": f"{here['processor']}, {cores}{memory}", "system": here["system"]}


def command(path: Path | str, settings: Sequence[tuple[str, Any, str]], lines: Sequence[Mapping[str, Any]] = ()) -> str:
    """Returns the command that repeats the run from its own settings, and the command as it was typed, if known."""
    again = f"{as_run()} train {path} dir={path}-again"
    typed = str(headers(lines).get("command") or "")
    if typed:
        return f"{again}\n\n# as it was typed\n{typed}"
    recipes = {who for _, _, who in settings if who.startswith("recipes/")}
    if len(recipes) != 1:
        return again
    recipe = recipes.pop().removeprefix("recipes/").removesuffix(".yml")
    words = [f"{key}={value_text(value)}" for key, value, who in settings if who in (COMMAND_LINE, CALL)]
    return f"{again}\n\n# as it was typed\n{as_run()} train {shlex.join([recipe, *words])}"


def _story(store: Store) -> dict[str, Any]:
    try:
        story = json.loads(store.read_text(STORY))
        return story if isinstance(story, dict) else {}
    except (ArgosyError, ValueError):
        return {}


def _evaluations(path: Path | str) -> list[Evaluated]:
    """Returns the last result of each task at each step."""
    results: dict[tuple[str, int | None], Evaluated] = {}
    for line in RunDirectory(path).evaluations():
        step = runs.as_int(line.get("step"))
        tasks = line.get("tasks")
        for name, numbers in tasks.items() if isinstance(tasks, dict) else ():
            if isinstance(numbers, dict):
                results.pop((str(name), step), None)
                results[str(name), step] = Evaluated(str(name), step, numbers)
    return list(results.values())


def _saved_checkpoint(store: Store, step: int) -> SavedCheckpoint | None:
    try:
        loss = json.loads(store.read_text(f"{CHECKPOINTS}/{step}/meta.json")).get("eval_loss")
        return SavedCheckpoint(step, runs.size_bytes(store.root, step), loss if isinstance(loss, int | float) else None)
    except (ArgosyError, OSError, ValueError, AttributeError):
        return None
