"""The checks of `argosy launch`: reads the settings of the engine and of the command, and finds all mistakes in both before anything
starts or is written.

The machines of a scheduler may not share files with this one. Whether they have a path of the settings cannot be known here, so it
leads to a remark (`jobs.launch_paths`), unless the run would be lost.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from argosy.checkpoint.run_directory import ID, RunDirectory, is_run_directory
from argosy.core.addresses import is_address
from argosy.core.command import command_name as as_run
from argosy.core.counts import plural
from argosy.core.errors import BadInput, UserError, mistakes_of, problems_of, raise_mistakes
from argosy.core.settings import Reading, read_settings, words_layer
from argosy.launch import jobset, local, skypilot, slurm
from argosy.launch.engines import ENGINES, SERVING, named_engine
from argosy.launch.rendered import Command, Devices
from argosy.parallel.mesh import MeshSettings
from argosy.parallel.rules import DEFAULT
from argosy.run.settings.compose import compose
from argosy.run.settings.recipe_files import recipes, run_folder
from argosy.run.settings.run import Run
from argosy.run.start.preflight import check_experts, check_rows, checked_settings, directory_of

# The verbs that several processes can run together.
LAUNCHED = ("train",)
SCHEDULERS: dict[str, Any] = {"slurm": slurm, "jobset": jobset, "skypilot": skypilot}
# The engines whose machines do not see the files of this one.
BLIND = ("jobset", "skypilot")


@dataclass(frozen=True)
class Launch:
    """A launch without mistakes.

    engine: the name of the engine.
    settings: the settings of the engine.
    command: the command to run.
    run: the settings of the run.
    """

    engine: str
    settings: Any
    command: Command
    run: Reading[Run]


@dataclass
class Verb:
    """The command to launch, as far as it could be read.

    command: the command.
    run: the settings of the run, if they have no mistakes.
    good: the top-level settings without mistakes, by name.
    """

    command: Command | None = None
    run: Reading[Run] | None = None
    good: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class KnownEngine:
    """The engine, as far as it could be read.

    name: the name of the engine.
    settings: all settings, if they have no mistakes.
    good: the settings without mistakes.
    known: the names of the settings without mistakes.
    """

    name: str
    settings: Any = None
    good: Any = None
    known: frozenset[str] = frozenset()


def prepare_launch(words: Sequence[str], verb: Sequence[str]) -> Launch:
    """Reads the settings of an engine and the command that it runs.

    Args:
        words: `engine=NAME key=value`.
        verb: the verb, the recipe and its settings.

    Raises:
        UserError: every mistake in both, and in their combination.
    """
    engine, parsed, mistakes = KnownEngine(named_engine(words)), Verb(), list[UserError]()
    mistakes += mistakes_of(lambda: read_engine(engine, words))
    mistakes += mistakes_of(lambda: read_verb(parsed, verb, sees_files=engine.name not in BLIND))
    mistakes += mistakes_of(*_checks(engine, parsed))
    raise_mistakes(mistakes)
    assert parsed.command is not None
    assert parsed.run is not None
    return Launch(engine.name, engine.settings, parsed.command, parsed.run)


def read_engine(engine: KnownEngine, words: Sequence[str]) -> None:
    """Reads the settings of an engine.

    Raises:
        UserError: there is no such engine, or its settings have mistakes; all are reported.
    """
    schema, setting_words = ENGINES[engine.name], [word for word in words if not word.startswith("engine=")]
    mistakes = mistakes_of(lambda: words_layer(setting_words))
    broken = [word for word in setting_words if mistakes_of(partial(words_layer, [word]))] if mistakes else []
    keys = {word.partition("=")[0].strip() for word in setting_words}
    good: dict[str, Any] = {}
    try:
        engine.settings = read_settings(schema, words_layer(word for word in setting_words if word not in broken)).value
    except UserError as error:
        # A word that cannot be read is no missing one.
        required = {f"`{word.partition('=')[0].strip()}` is required" for word in broken}
        mistakes += [mistake for mistake in problems_of(error) if mistake.what not in required]
        good = error.good
    if not mistakes:
        engine.good, engine.known = engine.settings, frozenset(schema.model_fields)
        return
    if engine.settings is not None:
        good = {name: getattr(engine.settings, name) for name in engine.settings.model_fields_set}
    engine.settings, engine.good = None, schema.model_construct(**good)
    defaults = {name for name in schema.model_fields if name not in keys and hasattr(engine.good, name)}
    engine.known = frozenset(defaults | set(good))
    raise_mistakes(mistakes)


def read_verb(verb: Verb, words: Sequence[str], sees_files: bool) -> None:
    """Reads a verb with the settings of its run.

    Args:
        sees_files: whether the machines share the files of this one; then the files in the settings are checked too.

    Raises:
        UserError: there is no such verb, it names no recipe, or its settings have mistakes; all are reported.
    """
    if not words:
        raise BadInput("launch needs a command", hint=f"`{as_run()} launch processes=2 -- train tiny`")
    if words[0] not in LAUNCHED:
        is_recipe = words[0] in recipes() or words[0].endswith((".yml", ".yaml"))
        matches = get_close_matches(words[0], LAUNCHED, n=1)
        hint = f"did you mean `{matches[0]}`?" if matches else f"they run {', '.join(LAUNCHED)}"
        if words[0] in ("predict", "serve"):
            hint = f"engine={', '.join(SERVING[:-1])} or {SERVING[-1]} runs servers"
        if is_recipe:
            hint = f"`-- train {words[0]}` trains by this recipe"
        raise BadInput(f"several processes cannot run `{words[0]}`", hint=hint)
    rest = [word for word in words[1:] if not word.startswith("-")]
    if not rest:
        raise BadInput(f"`{' '.join(words)}` names no recipe", hint=f"`{as_run()} launch processes=2 -- train tiny`")
    recipe, settings = rest[0], rest[1:]
    is_file = recipe not in recipes() and not is_address(recipe) and Path(recipe).exists()
    recipe_file = Path(recipe) if is_file else None
    try:
        verb.run = checked_settings(recipe, settings) if sees_files else compose(Run, recipe, settings)
    except UserError as error:
        verb.good = error.good
        if sees_files and not verb.good:
            # The settings may be right, and what they name is not.
            with suppress(UserError):
                verb.good = values_of(compose(Run, recipe, settings))
        folders = [word.partition("=")[2] for word in settings if word.startswith("dir=")]
        if not folders and is_run_directory(recipe):
            folders = [recipe]
        # Where not even the recipe can be read, it may be the recipe that names the directory.
        folder = folders[-1] if folders else (verb.good.get("dir") or run_folder(recipe)) if verb.good else ""
        verb.command = Command(tuple(words), folder, recipe_file)
        raise
    verb.good = values_of(verb.run)
    verb.command = Command(tuple(words), directory_of(verb.run, recipe), recipe_file)


def values_of(reading: Reading[Run]) -> dict[str, Any]:
    return {name: getattr(reading.value, name) for name in type(reading.value).model_fields}


def _checks(engine: KnownEngine, verb: Verb) -> list[Callable[[], object]]:
    """Returns the checks that an engine and a command fit together, as far as both are known."""
    if engine.good is None:
        return []
    checks, module = list[Callable[[], object]](), SCHEDULERS.get(engine.name)
    if module is None:
        engine_checks = local.checks(engine.good) if engine.name == "local" else []
    else:
        engine_checks = module.checks(verb.command, engine.good) if verb.command is not None else []
    checks += [check.run for check in engine_checks if engine.known.issuperset(check.needs)]
    if module is not None and isinstance(mesh := verb.good.get("mesh"), MeshSettings):
        # Where the machines see the files, this was checked with them.
        if engine.name in BLIND:
            checks += blind(verb.good, mesh)
        if engine.settings is not None and verb.good.get("rollout") is None:
            devices = module.devices(engine.settings, mesh.is_between)
            checks += [] if devices is None else [lambda: check_mesh(verb.good, mesh, devices)]
    return checks


def blind(good: Mapping[str, Any], mesh: MeshSettings) -> list[Callable[[], object]]:
    """Checks that need none of the files in the settings: the rows and experts of a run must divide over the mesh axes whose sizes are
    set, whatever the devices.
    """
    checks: list[Callable[[], object]] = []
    if (data := good.get("data")) is not None:
        checks.append(lambda: check_rows(data.batch, good.get("accumulate", 1), mesh))
    if (model := good.get("model")) is not None:
        checks.append(lambda: check_experts(model, mesh.shares("expert")))
    return checks


def check_mesh(good: Mapping[str, Any], mesh: MeshSettings, devices: Devices) -> None:
    """Checks that a mesh fits the devices that an engine requests, and that the batch's rows divide over it.

    Raises:
        BadInput: the mesh or the rows do not fit.
    """
    where = f"{devices.shown} makes {plural(devices.groups * devices.each, 'device')}"
    try:
        inside, between = mesh.resolve(devices.each, devices.groups, devices.slices)
    except BadInput as error:
        hint = f"sizes whose product is {devices.each}, or -1 for one of them"
        if devices.groups > 1:
            group = "slice" if devices.slices else "machine"
            hint = f"within each {group}: {hint}; between the {devices.groups} of them: mesh.between.*"
        raise BadInput(error.what, where=where, hint=hint) from None
    data, accumulate, objective = good.get("data"), good.get("accumulate", 1), good.get("objective")
    together = objective.rows_per_group if objective is not None else 1
    shares = math.prod(inside[axis] * between[axis] for axis in DEFAULT.activations["batch"] if axis != "stage")
    parts = shares * accumulate * together
    # Where the sizes that are set do not divide it, that is said already.
    if data is not None and not mistakes_of(lambda: check_rows(data.batch, accumulate, mesh)) and data.batch % parts:
        more = f", accumulate = {accumulate}" * (accumulate > 1) + f" and groups of {together} rows" * (together > 1)
        problem = f"data.batch = {data.batch} does not divide over the {plural(shares, 'device')} that split its rows{more}"
        raise BadInput(problem, where=where, hint=f"make it a multiple of {parts}, or split less over rows: mesh.tensor, mesh.stage")


def progress_of(launch: Launch) -> Callable[[], object]:
    """Returns a function that returns the newest checkpoints of the run, in its directory and on the local disk of this host."""
    local = launch.run.value.checkpoint.local

    def progress() -> object:
        try:
            directory, local_steps = RunDirectory(launch.command.folder), list[int]()
            if local is not None and directory.store.exists(ID):
                local_steps = [int(p.parent.name) for p in Path(local).expanduser().glob(f"{directory.id}/*/*/manifest.json")]
            return max(directory.steps(), default=None), max(local_steps, default=None)
        except UserError:
            return None

    return progress
