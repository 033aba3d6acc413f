"""What `argosy launch` knows of the command that it runs: that its settings are right, and how far it is."""

from collections.abc import Callable, Sequence

from argosy.checkpoint.run_directory import RunDirectory
from argosy.core.errors import UserError
from argosy.jobs.preflight import directory_of, settled


def check(words: Sequence[str]) -> None:
    """Finds mistakes in the settings of a run before any process is started.

    Raises:
        UserError: there are some.
    """
    if len(words) > 1 and not words[1].startswith("-"):
        settled(words[1], list(words[2:]))


def progress_of(words: Sequence[str]) -> Callable[[], object]:
    """The newest checkpoint of the run."""

    def progress() -> object:
        try:
            directory = RunDirectory(directory_of(settled(words[1], list(words[2:])), words[1]))
            return max(directory.steps(), default=None)
        except (UserError, IndexError):
            return None

    return progress
