"""The errors that users see. Each says what is wrong, where, and how to fix it.

    ArgosyError                 it failed                                     exit code 1
    ├── UserError               a mistake found before any work began         exit code 2
    │   ├── SettingsError       one or more wrong settings, reported together
    │   ├── UnknownName         a name that is not in a registry
    │   └── BadInput            a file, folder or value that cannot be used
    ├── Damaged                 bytes that differ from what was written: truncated, flipped, hostile
    ├── Unsupported             well-formed input that Argosy cannot handle
    ├── Busy                    another process holds the run
    ├── Final                   it failed, and would fail again from the same checkpoint
    └── FailedElsewhere         it failed in another process of the same run, which reports it

An error is printed as `error: WHAT`, an indented line with the place, a blank line, and `hint: FIX`: at most five lines each.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import SequenceMatcher, get_close_matches
from typing import Any


class ArgosyError(Exception):
    """An error that says what is wrong, where (a file, or a setting and who set it), and how to fix it."""

    exit_code = 1

    def __init__(self, what: str, *, where: str | None = None, hint: str | None = None):
        self.what, self.where, self.hint = what, where, hint
        super().__init__(what)

    def __str__(self) -> str:
        where = f"\n  {self.where}" if self.where else ""
        hint = f"\n\nhint: {self.hint}" if self.hint else ""
        return f"error: {self.what}{where}{hint}"


class UserError(ArgosyError):
    """A mistake of the user, found before any work began.

    good: the top-level settings that have no mistakes, by name, if settings were read.
    """

    exit_code = 2

    def __init__(
        self, what: str, *, where: str | None = None, hint: str | None = None, good: Mapping[str, Any] | None = None
    ):
        super().__init__(what, where=where, hint=hint)
        self.good = dict(good or {})


class BadInput(UserError):
    """A file, folder or value that cannot be used."""


class Damaged(ArgosyError):
    """Bytes that differ from what was written."""


# The environment variable that a supervisor sets if it restarts failed processes, and the exit code that tells it not to restart
# (EX_DATAERR).
SUPERVISED, FINAL = "ARGOSY_SUPERVISED", 65
# The environment variable with the number of earlier starts of this process.
ATTEMPT = "ARGOSY_ATTEMPT"


class Final(ArgosyError):
    """A failure that would occur again after a restart from the same checkpoint."""

    @property
    def exit_code(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return FINAL if os.environ.get(SUPERVISED) else 1


class Unsupported(ArgosyError):
    """Well-formed input that Argosy cannot handle."""


class Busy(ArgosyError):
    """Another process holds a file or directory that this one needs.

    A restarted command keeps trying, because the process that holds the file may be an earlier start of this command, which is about to
    end.
    """

    @property
    def exit_code(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return FINAL if os.environ.get(SUPERVISED) and os.environ.get(ATTEMPT, "0") == "0" else 1


class FailedElsewhere(ArgosyError):
    """A failure in another process of the same run. The other process reports it. This process only ends, with the same exit code."""

    def __init__(self, what: str, exit_code: int = 1):
        super().__init__(what)
        self.exit_code = exit_code


class UnknownName(UserError, KeyError):
    """A name that is not in a registry. The hint gives the nearest registered name."""

    def __init__(
        self, noun: str, name: str, known: Iterable[str], *, where: str | None = None, all_names: str | None = None
    ):
        self.noun, self.name = noun, name
        super().__init__(f"unknown {noun} `{name}`", where=where, hint=nearest(name, known, all_names=all_names))


class SettingsError(UserError):
    """All mistakes in the settings, reported together."""

    def __init__(self, problems: Sequence[UserError], good: Mapping[str, Any] | None = None):
        self.problems = list(problems)
        problem = f"{len(self.problems)} wrong settings" if len(self.problems) > 1 else self.problems[0].what
        super().__init__(problem, good=good)

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.problems))


def problems_of(error: UserError) -> list[UserError]:
    """The mistakes that an error reports: those that a SettingsError lists, or the error itself."""
    return error.problems if isinstance(error, SettingsError) else [error]


def mistakes_of(*checks: Callable[[], object]) -> list[UserError]:
    """Runs every check, also after one has failed, and returns all mistakes."""
    problems: list[UserError] = []
    for check in checks:
        try:
            check()
        except UserError as error:
            problems += problems_of(error)
    return problems


def raise_mistakes(mistakes: Sequence[UserError]) -> None:
    """Raises all mistakes as one error, or a single mistake unchanged. Does nothing if there are none.

    Raises:
        UserError: there are mistakes.
    """
    if mistakes:
        raise mistakes[0] if len(mistakes) == 1 else SettingsError(mistakes)


def complaint(error: Exception) -> str:
    """The first line of an exception's message, to be quoted in an `ArgosyError`."""
    if isinstance(error, ArgosyError):
        return error.what.splitlines()[0]
    if (errors := getattr(error, "errors", None)) is not None:  # a validation's
        first_error = errors()[0]
        return f"{'.'.join(map(str, first_error['loc']))}: {first_error['msg']}"
    return (str(error) or type(error).__name__).splitlines()[0][:200]


def some(names: Iterable[str], most: int = 4, between: str = ", ") -> str:
    """The first `most` names of a list as text, and the number of further names."""
    listed = list(names)
    return between.join(listed[:most]) + (f" and {len(listed) - most} more" if len(listed) > most else "")


def close_name(name: str, known: Iterable[str]) -> str | None:
    """A hint with the known name that is similar to a wrong one; None if no name is similar."""
    close = get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"did you mean `{close[0]}`?" if close else None


def nearest(name: str, known: Iterable[str], most: int = 12, all_names: str | None = None) -> str | None:
    """A hint with the known name that is similar to a wrong one. If no name is similar, the hint lists known names, or the `most` most
    similar of them. None: there are no known names.

    Args:
        most: the largest number of names to list.
        all_names: a command that lists all names, to be mentioned in the hint.
    """
    known = list(dict.fromkeys(known))
    if close := close_name(name, known):
        return close
    if not known:
        return None
    if len(known) <= most:
        return f"known names are {', '.join(known)}"
    similar = sorted(known, key=lambda other: -SequenceMatcher(None, name, other).ratio())
    rest = f"; {all_names} lists all" if all_names else ""
    return f"known names are {', '.join(similar[:most])} and {len(known) - most} more{rest}"
