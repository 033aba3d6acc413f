"""Reads the settings of a run and checks them against the files they name. All mistakes that can be found without jax are reported at
once, before anything heavy is imported.

Some mistakes appear only later: too few devices, a vocabulary that does not fit, bad records further down in the data.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from argosy.checkpoint.run_directory import RunDirectory, is_run_directory
from argosy.core.addresses import is_address, is_missing, local_path
from argosy.core.errors import BadInput, SettingsError, UserError, mistakes_of, problems_of, raise_mistakes
from argosy.core.settings import COMMAND_LINE, Reading
from argosy.core.settings.words import CALL
from argosy.data.settings import DataSettings
from argosy.data.sources.find import check_readable
from argosy.data.tokenizers.load import check_tokenizer
from argosy.parallel.mesh import MeshSettings
from argosy.run.distillation.address import check_address, is_endpoint
from argosy.run.settings.combinations import Situation, violations
from argosy.run.settings.compose import compose
from argosy.run.settings.recipe_files import check_start, no_model, run_folder
from argosy.run.settings.run import Init, Run
from argosy.train.objectives.distillation.teacher import TeacherObjective

Checks = Iterator[Callable[[], object]]


def checked_settings(recipe: str, words: Iterable[str] = (), origin: str = COMMAND_LINE) -> Reading[Run]:
    """Reads and checks the settings of a run.

    Args:
        recipe: the recipe, as in `compose`.
        words: `key=value` settings.
        origin: the source of the words, for provenance.

    Raises:
        UserError: there are mistakes in the settings, the data, the weights to start from, or the run directory. All are reported.
    """
    try:
        reading = compose(Run, recipe, words, origin=origin)
    except UserError as error:
        # What is wrong beside the settings themselves.
        good = error.good
        others = mistakes_of(*inputs(good), lambda: check_place(good, recipe))
        if others:
            raise SettingsError([*problems_of(error), *others]) from None
        raise
    values = {name: getattr(reading.value, name) for name in type(reading.value).model_fields}
    done_steps = steps_made(reading, recipe)
    if done_steps:
        # What a run starts from may be gone when it resumes.
        del values["init"]
    checks = inputs(values) if done_steps < reading.value.steps else []
    mistakes = mistakes_of(*checks, lambda: RunDirectory(directory_of(reading, recipe)).admit(reading))
    raise_mistakes([*violations(Situation(reading.value)), *mistakes])
    return reading


def steps_made(reading: Reading[Run], recipe: str) -> int:
    """Returns the step of the newest checkpoint of a run; 0 if there is none."""
    try:
        directory = RunDirectory(directory_of(reading, recipe))
    except BadInput:
        return 0
    return max(directory.steps(), default=0) if directory.has_run else 0


def check_place(values: Mapping[str, Any], recipe: str) -> None:
    """Checks that the run directory can be written, unless the settings that name it have a mistake.

    Raises:
        BadInput: the directory cannot be written.
    """
    directory = values.get("dir") or run_folder(recipe)
    if values and directory.strip() and not is_run_directory(recipe):
        RunDirectory(directory).check_place()


def inputs(values: Mapping[str, Any]) -> Checks:
    """Returns the checks of a run's input files and of its numbers of rows.

    Args:
        values: the settings of the root without mistakes, by name.
    """
    data, init, mesh = values.get("data"), values.get("init"), values.get("mesh", MeshSettings())
    if isinstance(data, DataSettings):
        if data.format == "auto" and (values.get("reward") or getattr(values.get("environment"), "played", False)):
            # As `Run` has it where nothing else is wrong.
            data = data.model_copy(update={"format": "prompt"})
        if getattr(values.get("model"), "inputs", None) == "images":
            # Imported here: it needs numpy.
            from argosy.data.images.shards import image_data

            yield lambda: check_readable(image_data(data))
        else:
            yield lambda: check_readable(data)
        if data.source_name.partition(":")[0] != "synthetic":
            yield lambda: check_tokenizer(data.tokenizer)
        if isinstance(mesh, MeshSettings):
            yield lambda: check_rows(data.batch, values.get("accumulate", 1), mesh)
    if isinstance(mesh, MeshSettings) and "model" in values:
        yield lambda: check_experts(values["model"], mesh.shares("expert"))
    if isinstance(init, Init):
        yield lambda: check_start(init.weights, init.state)
    for tracker in values.get("track") or ():
        yield tracker.check
    objective = values.get("objective")
    if isinstance(objective, TeacherObjective):
        yield lambda: check_teacher(objective.teacher, objective.may_be_server)


def check_teacher(teacher: str, may_be_served: bool = False) -> None:
    """Checks that the teacher exists.

    Args:
        may_be_served: whether a server is allowed.

    Raises:
        BadInput: the teacher does not exist, is the name of a preset, or is an invalid or unsuitable address of a server.
    """
    if is_endpoint(teacher):
        check_address(teacher)
        if not may_be_served:
            problem = "a teacher that is a server gives its likeliest tokens on given text, which objective=distill learns from"
            raise BadInput(problem, where=f"objective.teacher={teacher}", hint="name the folder or file of its weights")
        return
    if is_missing(teacher):
        raise no_model(teacher, "set by objective.teacher")


def check_rows(batch: int, accumulate: int, mesh: MeshSettings) -> None:
    """Checks that the batch is divisible by the mesh axes whose sizes are set.

    Raises:
        BadInput: the batch is not divisible, whatever the number of devices.
    """
    sizes = mesh.rows()
    parts = accumulate
    for size in sizes.values():
        parts *= size
    # Without a mesh, `Run` itself compares the two.
    if sizes and batch % parts:
        product = " x ".join(f"{name} = {size}" for name, size in sizes.items())
        product += f" x accumulate = {accumulate}" if accumulate > 1 else ""
        raise BadInput(f"data.batch = {batch} does not divide over {product}", hint=f"make it a multiple of {parts}")


def check_experts(model: Any, shares: int) -> None:
    """Checks that the experts of a model can be split into `shares`.

    Raises:
        BadInput: the model has no experts, or their number is not divisible.
    """
    if shares <= 1:
        return
    moe = getattr(model, "moe", None)
    if moe is None:
        hint = "leave mesh.expert at 1; mesh.fsdp and mesh.tensor split the weights of every model"
        raise BadInput(f"mesh.expert = {shares}: the model has no experts", hint=hint)
    if moe.count % shares:
        fits = ", ".join(str(n) for n in range(2, moe.count + 1) if moe.count % n == 0)
        problem = f"mesh.expert = {shares} does not divide the {moe.count} experts of the model"
        raise BadInput(problem, hint=f"mesh.expert may be {fits}" if fits else "leave mesh.expert at 1")


def directory_of(reading: Reading[Run], recipe: str) -> str:
    """Returns the directory of a run: `dir`, the run directory or address that was given as the recipe, or `runs/<recipe>`.

    Raises:
        BadInput: `dir` is empty.
    """
    directory = reading.value.dir
    if is_run_directory(recipe) and reading.origin["dir"] not in (COMMAND_LINE, CALL):
        return recipe.rstrip("/") if is_address(recipe) else str(Path(local_path(recipe)))
    if directory is None:
        return run_folder(recipe)
    if not directory.strip():
        where = f"set by {reading.origin['dir']}"
        raise BadInput("`dir` is empty", where=where, hint="name a directory; without `dir` it is runs/<recipe>")
    return directory
