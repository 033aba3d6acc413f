"""Shared parts of engines that write a file for a scheduler instead of starting processes."""

import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from argosy.core.addresses import is_address
from argosy.core.errors import BadInput
from argosy.core.progress import Say


@dataclass(frozen=True)
class Command:
    """The command to run.

    words: the verb with its words, such as `train tiny steps=100`.
    folder: the run directory; empty if it cannot be determined because of mistakes in the settings.
    recipe: the file of the recipe, if the user wrote it; otherwise None.
    """

    words: tuple[str, ...]
    folder: str
    recipe: Path | None = None

    @property
    def is_local(self) -> bool:
        """Whether the run directory is a folder and not an address in an object store."""
        return bool(self.folder) and not is_address(self.folder)

    @property
    def shell(self) -> str:
        """The words as one text, quoted for a shell."""
        return shlex.join(self.words)


class ScriptCheck(NamedTuple):
    """A check of an engine's settings together with the command.

    needs: the settings that the check reads. It is only run if they have no mistakes.
    run: performs the check, and raises if it fails.
    """

    needs: tuple[str, ...]
    run: Callable[[], object]


class Devices(NamedTuple):
    """The devices that an engine's settings request.

    each: the number of devices in each group.
    groups: the number of groups. Groups are connected by a slower network.
    slices: whether groups are TPU slices; otherwise they are whole machines.
    shown: the formula by which the numbers follow from the settings, for messages.
    """

    each: int
    groups: int
    slices: bool
    shown: str


def as_argument(program: str) -> list[str]:
    """Splits the setting `program` into words.

    Raises:
        BadInput: a quote is not closed, or `program` is empty.
    """
    try:
        words = shlex.split(program)
    except ValueError as error:
        raise BadInput(f"program={program!r} is no command: {error}") from None
    if not words:
        raise BadInput("`program` is empty", hint="name what starts Argosy, such as program=argosy")
    return words


def check_inside(command: Command, mount: str, label: str) -> None:
    """Checks that the run directory is inside a folder that all machines share.

    Args:
        mount: the shared folder.
        label: a description of the shared folder, for the error.

    Raises:
        BadInput: the run directory is elsewhere.
    """
    folder = PurePosixPath(command.folder)
    if ".." in folder.parts or not folder.is_relative_to(mount):
        raise BadInput(f"the run directory {command.folder} is not in {mount}, {label}", hint=f"add dir={mount}/NAME to the command")


def deliver(text: str, path: str | None, say: Say, then: str | None = None) -> None:
    """Prints a text, or writes it to a file.

    Args:
        path: the path of the file; None: the text is printed.
        then: the command that submits the file, which is shown to the user. FILE in it stands for the name of the file.

    Raises:
        BadInput: the file exists with other content, or cannot be written.
    """
    if path is None:
        sys.stdout.write(text)
        return
    file = Path(path)
    try:
        before = file.read_text(encoding="utf-8") if file.exists() else None
        if before is not None and before != text:
            raise BadInput(f"{path} holds something else", hint="name another file, or remove this one")
        if before is None:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"cannot write {path}: {error}") from None
    start = f"; `{then.replace('FILE', shlex.quote(path))}` starts it" if then else ""
    say(f"{path} is {'as it was' if before is not None else 'written'}{start}")
