"""Distinguishes local paths, URLs that fsspec knows, such as gs://BUCKET/RUN, and names of models on the Hub, hf:OWNER/NAME."""

from pathlib import Path

from argosy.core.errors import BadInput

LOCAL, HUB = "file://", "hf:"


def is_address(place: str | Path) -> bool:
    """Whether this is a URL that is read through fsspec, and not a local path."""
    return "://" in str(place) and not str(place).startswith(LOCAL)


def is_hub(place: str | Path | None) -> bool:
    """Whether this is the name of a model on the Hub (`core.hub.names`)."""
    return str(place).startswith(HUB)


def is_missing(place: str | Path) -> bool:
    """Whether this is a local path that does not exist. False for URLs and names of the Hub, which are checked when they are opened."""
    return not is_hub(place) and not is_address(place) and not Path(local_path(place)).exists()


def local_path(place: str | Path) -> str:
    """The path in `file:///PATH` or `file://localhost/PATH` (RFC 8089). Anything else is returned as it is.

    Raises:
        BadInput: after `file://` stands the name of another machine, or nothing.
    """
    if not str(place).startswith(LOCAL):
        return str(place)
    machine, _, path = str(place).removeprefix(LOCAL).partition("/")
    if machine in ("", "localhost") and path:
        return f"/{path}"
    problem = f"{place} names the machine `{machine}`" if machine else f"{place} names no path"
    raise BadInput(problem, hint=f"three slashes for a path of this machine: {LOCAL}/{machine or 'PATH'}{path and '/'}{path}")
