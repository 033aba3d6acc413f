"""Writes a task of SkyPilot, with one process on each machine. Processes find each other by variables that SkyPilot sets
(`launch.cluster`).

    sky jobs launch FILE     A managed job. Preempted machines are replaced, and the run continues from its last checkpoint.
    sky launch FILE          A single try, on machines that stay until they are stopped.

SkyPilot counts every exit code other than 0 as a failure of the program, and restarts the program `restarts` times. That includes a
mistake of the user (2), because SkyPilot has no setting for codes that end a job at once. Its `recover_on_exit_codes` would restart the
program without counting.
"""

import re
from pathlib import Path
from typing import Any

from argosy.core.errors import BadInput
from argosy.core.progress import Say
from argosy.core.settings.scalars import yaml_document
from argosy.launch.rendered import Command, Devices, ScriptCheck, as_argument, check_inside, deliver
from argosy.launch.settings import SkyPilot


def launch(command: Command, settings: SkyPilot, say: Say) -> int:
    """Prints or writes the task. Returns an exit code.

    Raises:
        BadInput: the machines cannot read the recipe, the run directory would be lost, or the file to write holds something else.
    """
    deliver(yaml_document(render(command, settings)), settings.write, say, "sky jobs launch FILE")
    return 0


def checks(command: Command, settings: SkyPilot) -> list[ScriptCheck]:
    """Returns checks for files that the machines would not see or would lose."""

    def folder() -> None:
        mounted = settings.bucket is not None or settings.volume is not None
        if command.is_local and mounted:
            check_inside(command, settings.mount, "where the machines have the bucket or volume")
        elif command.is_local:
            hint = "give dir= in a bucket, such as dir=gs://NAME/runs; or bucket=gs://NAME or volume=NAME, and dir= in mount="
            raise BadInput(f"the run directory {command.folder} would be lost with its machine", hint=hint)

    program = ScriptCheck(("program",), lambda: as_argument(settings.program))
    recipe = ScriptCheck(("workdir",), lambda: check_recipe(command, settings))
    return [recipe, ScriptCheck(("bucket", "volume", "mount"), folder), program]


def devices(settings: SkyPilot, between: bool) -> Devices | None:
    """Returns the devices of the machines. Returns None if the settings do not determine them, as for CPUs, TPUs, or a choice of
    several kinds.

    Args:
        between: whether the mesh has axes between groups of devices (`mesh.between`).
    """
    match = re.fullmatch(r"(?!tpu)[\w-]+(?::(\d+))?", settings.accelerators or "", re.IGNORECASE)
    if match is None:
        return None
    gpus = int(match[1] or 1)
    each, groups = (gpus, settings.nodes) if between else (settings.nodes * gpus, 1)
    return Devices(each, groups, settings.nodes > 1, f"nodes = {settings.nodes} x accelerators = {settings.accelerators}")


def render(command: Command, settings: SkyPilot) -> dict[str, Any]:
    """Makes the task.

    Raises:
        BadInput: the machines cannot read the recipe, the run directory would be lost, or `program` is no command.
    """
    for check in checks(command, settings):
        check.run()
    resources: dict[str, Any] = {
        "infra": settings.infra,
        "accelerators": settings.accelerators,
        "cpus": settings.cpus,
        "memory": settings.memory,
        "image_id": settings.image,
        "use_spot": settings.spot or None,
        "job_recovery": {"max_restarts_on_errors": settings.restarts},
    }
    task: dict[str, Any] = {
        "name": settings.name,
        "num_nodes": settings.nodes,
        "resources": {name: value for name, value in resources.items() if value is not None},
        "workdir": settings.workdir,
        "file_mounts": {settings.mount: {"source": settings.bucket, "mode": "MOUNT"}} if settings.bucket else None,
        "volumes": {settings.mount: settings.volume} if settings.volume else None,
        "setup": settings.setup,
        # Signals reach it, and its exit code is that of the task.
        "run": f"exec {settings.program} {command.shell}\n",
    }
    return {name: value for name, value in task.items() if value is not None}


def check_recipe(command: Command, settings: SkyPilot) -> None:
    """Checks that the file of the recipe is copied to the machines.

    Raises:
        BadInput: the file is not copied.
    """
    recipe, folder = command.recipe, settings.workdir
    if recipe is None:
        return
    # Commands start in the copy, so that only a path relative to it names the same file here and there.
    starts_here = folder is not None and Path(folder).resolve() == Path.cwd()
    if not starts_here or recipe.is_absolute() or ".." in recipe.parts:
        hint = "give workdir=. and a path in this folder, or name a recipe of the package"
        raise BadInput(f"the machines do not see {recipe}, a file of this one", hint=hint)
