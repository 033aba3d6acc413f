"""`argosy report RUN`: everything a run directory tells, as one page in it.

Gathers what is on disk; `observe.report` draws it. What cannot be read, because it is damaged or was never written, is left
out: a report is most wanted of the run that went wrong.
"""

import json
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from argosy.core.errors import ArgosyError
from argosy.core.explain import value_text
from argosy.core.settings import COMMAND_LINE, Choice, yaml_layer
from argosy.core.storage import Store
from argosy.jobs import runs
from argosy.models import FAMILIES
from argosy.observe import environment, metrics
from argosy.observe.readable import sized
from argosy.observe.report import Record, Saved, render

FILE = "report.html"
STATES = {runs.GOES_ON: "stopped", runs.DAMAGED: "damaged"}


def report(path: str | Path) -> Path:
    """Writes report.html into a run directory.

    Raises:
        BadInput: it is no run directory.
    """
    path = runs.require(path)
    Store(path).write_text(FILE, render(record(path)))
    return path / FILE


def record(path: Path) -> Record:
    """What a run directory tells of its run."""
    found = runs.summary(path)
    try:
        values = dict(yaml_layer(path / runs.SETTINGS).values)
        settings = [(key, value, who) for key, value, who in runs.settings(path) if key != "dir"]
    except ArgosyError:
        values, settings = {}, []
    lines = metrics.read(Store(path))
    return Record(
        name=path.resolve().name,
        state=STATES.get(found.state, found.state),
        lines=lines,
        steps=found.steps,
        facts=facts(values, lines),
        settings=[(key, value_text(value), who) for key, value, who in settings],
        checkpoints=[saved for step in found.checkpoints if (saved := _saved(path, step))],
        environment=surroundings(),
        command=command(path, settings),
        made=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    )


def facts(values: Mapping[str, Any], lines: list[dict[str, Any]]) -> dict[str, Any]:
    """What a run is: from its settings, and from the facts that sessions wrote among their lines."""
    told: dict[str, Any] = {}
    for line in lines:
        told |= line["facts"] if isinstance(line.get("facts"), dict) else {}
    try:
        config: Any = Choice(FAMILIES, tag="family").build(values["model"])
        told["model"] = values["model"].get("preset") or values["model"]["family"]
        told["data"], told["optimizer"] = values["data"]["source"], values["optimizer"]["name"]
        told["parameters"] = config.parameters()
        told["flops_per_step"] = values["data"]["batch"] * config.training_flops(values["data"]["sequence"])
    except (ArgosyError, ValueError, KeyError, TypeError):
        pass  # settings of another version, or edited by hand: the page does without
    return told


def surroundings() -> dict[str, str]:
    """Versions and machine of the process that makes the report; no host name."""
    told = {name: v for name, v in environment.versions().items() if v != "not installed"}
    here = environment.machine()
    memory = f", {sized(here['memory_bytes'])}" if here["memory_bytes"] else ""
    return told | {"processor": f"{here['processor']}, {here['cores']:g} cores{memory}", "system": here["system"]}


def command(path: Path, settings: Sequence[tuple[str, Any, str]]) -> str:
    """What runs it again: from its own settings; and as it was typed, where they tell."""
    again = f"argosy train {path} dir={path}-again"
    recipes = {who for _, _, who in settings if who.startswith("recipes/")}
    if len(recipes) != 1:
        return again
    recipe = recipes.pop().removeprefix("recipes/").removesuffix(".yml")
    words = [f"{key}={value_text(value)}" for key, value, who in settings if who == COMMAND_LINE]
    return f"{again}\n\n# as it was typed\nargosy train {shlex.join([recipe, *words])}"


def _saved(path: Path, step: int) -> Saved | None:
    try:
        loss = json.loads((path / runs.CHECKPOINTS / str(step) / "meta.json").read_text()).get("eval_loss")
        return Saved(step, runs.size_bytes(path, step), loss if isinstance(loss, int | float) else None)
    except (ArgosyError, OSError, ValueError, AttributeError):
        return None
