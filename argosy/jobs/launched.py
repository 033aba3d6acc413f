"""What `argosy launch` knows of the command that it runs: that its settings are right, where its files are, and how far it is."""

from collections.abc import Callable, Sequence
from pathlib import Path

from argosy.checkpoint.run_directory import ID, RunDirectory
from argosy.core.errors import BadInput, UserError
from argosy.jobs.compose import compose, recipes
from argosy.jobs.preflight import directory_of, settled
from argosy.jobs.run import Run
from argosy.launch.rendered import Command


def check(words: Sequence[str]) -> None:
    """Finds mistakes in the settings of a run before any process is started.

    Raises:
        UserError: there are some.
    """
    if len(words) > 1 and not words[1].startswith("-"):
        settled(words[1], list(words[2:]))


def command_of(words: Sequence[str], same_files: bool) -> Command:
    """The command that a scheduler is given.

    Args:
        words: the verb, the recipe and the settings.
        same_files: whether the machines see the files of this one; then those that the settings name are checked too.

    Raises:
        UserError: every mistake in the settings, or there is no recipe.
    """
    if len(words) < 2 or words[1].startswith("-"):
        raise BadInput(f"`{' '.join(words)}` names no recipe", hint="`argosy launch engine=slurm -- train tiny dir=runs/tiny`")
    recipe, settings = words[1], list(words[2:])
    reading = settled(recipe, settings) if same_files else compose(Run, recipe, settings)
    own = None if recipe in recipes() else Path(recipe)
    return Command(tuple(words), directory_of(reading, recipe), own)


def progress_of(words: Sequence[str]) -> Callable[[], object]:
    """The newest checkpoints of the run, in its directory and on the local disk of this host."""

    def progress() -> object:
        try:
            reading = settled(words[1], list(words[2:]))
            directory = RunDirectory(directory_of(reading, words[1]))
            local, found = reading.value.checkpoint.local, []
            if local is not None and directory.store.exists(ID):
                found = [int(p.parent.name) for p in Path(local).expanduser().glob(f"{directory.id}/*/*/manifest.json")]
            return max(directory.steps(), default=None), max(found, default=None)
        except (UserError, IndexError):
            return None

    return progress
