"""Models of the Hub on this machine: the files that are needed, in the cache that all programs of the Hub share (`HF_HOME`).

A file that is there is not transferred again. A connection that breaks resumes inside the file; a process that was killed resumes with
the files that are not complete. Without a network, or with HF_HUB_OFFLINE=1, the cached snapshot is used, if it is complete.
"""

import os
import sys
import time
from collections.abc import Callable
from functools import lru_cache
from glob import escape
from io import StringIO
from pathlib import Path
from typing import Any

from argosy.core.addresses import is_hub
from argosy.core.errors import ArgosyError, BadInput, nearest
from argosy.core.hub.names import HubName
from argosy.core.progress import Say

# Seconds between two lines of progress, where stderr is no terminal.
SAY_S = 10.0
# A partial file that nobody wrote to for so long belongs to a process that was killed.
STALE_S = 3600.0
_LOG_IN = "set HF_TOKEN or log in with `hf auth login`"


def local_model(place: str | Path, say: Say = lambda _: None, *, small: bool = False) -> str:
    """The path on this machine of a MODEL argument: the name of a model of the Hub is downloaded, anything else is returned as it is.

    Args:
        small: only the files beside the weights: settings, tokenizer.

    Raises:
        BadInput: there is no such model or revision, it has no weights that are read here, it needs a permission, or it is not in the
            cache and the Hub cannot be reached.
    """
    if not is_hub(place):
        return str(place)
    name = HubName.parse(str(place))
    folder = _downloaded(name, small, say)
    return str(folder / name.file if name.file else _only_gguf(folder) or folder)


def pin_revision(place: str, say: Say = lambda _: None) -> str:
    """The name of a model of the Hub with the commit that it has now; anything else is returned as it is. The model is downloaded.

    Raises:
        BadInput: as `local_model`.
    """
    if not is_hub(place) or (name := HubName.parse(place)).is_pinned:
        return place
    return str(name.at(_downloaded(name, False, say).name))


def _only_gguf(folder: Path) -> Path | None:
    """The .gguf file of a repository that has nothing else to read a model from."""
    files = [] if any(folder.glob("*.json")) else sorted(folder.rglob("*.gguf"))
    return files[0] if len(files) == 1 else None


# A command opens a model several times, and a branch may move in between.
_SNAPSHOTS: dict[tuple[str, str | None, str | None, bool, str, str], Path] = {}


def _downloaded(name: HubName, small: bool, say: Say) -> Path:
    """The folder of a snapshot, whose name is the commit."""
    from huggingface_hub import constants

    key = (name.repository, name.revision, name.file, small, constants.ENDPOINT, constants.HF_HUB_CACHE)
    if key not in _SNAPSHOTS or not _SNAPSHOTS[key].is_dir():
        _SNAPSHOTS[key] = _download(name, small, say)
    return _SNAPSHOTS[key]


def _download(name: HubName, small: bool, say: Say) -> Path:
    from huggingface_hub import HfApi, constants, snapshot_download

    # It imports numpy.
    from argosy.core.hub.selection import model_files

    api = HfApi(library_name="argosy")
    try:
        info = api.model_info(name.repository, revision=name.revision)
    except client_errors() as error:
        if is_unreachable(error):
            return _cached(name, small, error)
        raise hub_error(error, name) from None
    commit, files = str(info.sha), [sibling.rfilename for sibling in info.siblings or []]
    selection = model_files(files, str(name), name.file, small=small)
    patterns = [escape(path) for path in selection]
    revision = name.revision or constants.DEFAULT_REVISION
    try:
        # By the name of the revision, so that the cache remembers which commit it is.
        folder = snapshot_download(name.repository, revision=revision, allow_patterns=patterns, tqdm_class=_progress(name, say))
        if Path(folder).name != commit:
            # The branch moved between the two calls.
            folder = snapshot_download(name.repository, revision=commit, allow_patterns=patterns, tqdm_class=_progress(name, say))
    except client_errors() as error:
        if is_unreachable(error):
            problem = f"the connection to the Hub broke while {name} was downloaded"
            raise ArgosyError(problem, where=_first_line(error), hint="the same command resumes: complete files are kept") from None
        raise hub_error(error, name) from None
    _remove_stale(Path(folder).parents[1] / "blobs")
    return Path(folder)


def _cached(name: HubName, small: bool, error: Exception) -> Path:
    """The complete snapshot in the cache, where the Hub cannot be reached.

    Raises:
        BadInput: there is none.
    """
    import huggingface_hub
    from huggingface_hub import constants, errors, snapshot_download

    from argosy.core.hub.selection import model_files

    reason = "HF_HUB_OFFLINE=1" if constants.HF_HUB_OFFLINE else f"{constants.ENDPOINT} cannot be reached: {_first_line(error)}"
    hint = f"with a network, `argosy models show {name}` downloads it; HF_HOME says where the cache is"
    listed = getattr(huggingface_hub, "get_cached_repo_tree", None)
    patterns = None
    try:
        if listed is not None:
            files = [entry.path for entry in listed(name.repository, revision=name.revision)]
            patterns = [escape(path) for path in model_files(files, str(name), name.file, small=small)]
        return Path(
            snapshot_download(name.repository, revision=name.revision, allow_patterns=patterns, local_files_only=True)
        )
    except errors.LocalEntryNotFoundError as missing:
        part = type(missing).__name__ == "IncompleteSnapshotError"
        problem = f"{name} is {'only in part' if part else 'not'} in the cache, and the Hub cannot be asked"
        raise BadInput(problem, where=reason, hint=hint) from None
    except BadInput:
        raise
    except Exception as unknown:
        if type(unknown).__name__ != "CachedRepoTreeNotFoundError":
            raise
        raise BadInput(f"{name} is not in the cache, and the Hub cannot be asked", where=reason, hint=hint) from None


def _http_error() -> type[Exception]:
    """The base class of the errors of the client's HTTP library, which differs between its versions."""
    from huggingface_hub import errors

    return errors.HfHubHTTPError.__bases__[0]


def client_errors() -> tuple[type[Exception], ...]:
    """What the client raises: about transfers, about files, and about names that are none."""
    return (_http_error(), OSError, ValueError)


def is_unreachable(error: Exception) -> bool:
    """Whether an error says that the Hub does not answer, rather than what it answered."""
    from huggingface_hub import errors

    if isinstance(error, errors.HfHubHTTPError):
        return error.response is not None and error.response.status_code >= 500
    # What its HTTP client raises has that client's base class, without an answer.
    return isinstance(error, (_http_error(), ConnectionError, errors.LocalEntryNotFoundError))


def hub_error(error: Exception, name: HubName) -> ArgosyError:
    """What the Hub answered, in our words."""
    from huggingface_hub import constants, errors

    page = f"{constants.ENDPOINT}/{name.repository}"
    if isinstance(error, errors.GatedRepoError):
        problem = f"{name} is gated: its owner must allow you to download it"
        return BadInput(problem, where=page, hint=f"accept its terms on that page, then {_LOG_IN}")
    if isinstance(error, errors.RevisionNotFoundError):
        revisions = _revisions(name)
        return BadInput(f"{name.repository} has no revision `{name.revision}`", where=page, hint=nearest(str(name.revision), revisions))
    if isinstance(error, errors.RepositoryNotFoundError):
        problem = f"no model `{name.repository}` on the Hub, or it is private"
        return BadInput(problem, where=page, hint=f"the spelling is OWNER/NAME; for a private one, {_LOG_IN}")
    if isinstance(error, errors.HFValidationError):
        return BadInput(f"`{name}` names no model of the Hub", where=_first_line(error))
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403):
        return BadInput(f"the Hub does not let you use {name}", where=_first_line(error), hint=_LOG_IN)
    hint = "the Hub limits requests: wait, or set HF_TOKEN" if status == 429 else None
    return ArgosyError(f"{name} could not be downloaded", where=_first_line(error), hint=hint)


def _revisions(name: HubName) -> list[str]:
    """Branches and tags of a model; none where they cannot be listed."""
    from huggingface_hub import HfApi

    try:
        refs = HfApi(library_name="argosy").list_repo_refs(name.repository)
    except Exception:
        # The error is already about something else.
        return []
    return [ref.name for ref in (*refs.branches, *refs.tags)]


def _remove_stale(blobs: Path) -> None:
    """Removes partial files that killed processes left: the client gives each transfer a new name."""
    for path in blobs.glob("*.incomplete"):
        try:
            if time.time() - path.stat().st_mtime > STALE_S:
                path.unlink()
        except OSError:
            continue


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


@lru_cache
def _progress(name: HubName, say: Callable[[str], None]) -> Any:
    """The client's progress bar on a terminal, and elsewhere a line every few seconds."""
    from huggingface_hub.utils import tqdm

    if sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb":
        return tqdm

    class Lines(tqdm):
        """Says what a bar would show. The bar for bytes on disk is shown, not that for bytes sent."""

        monitor_interval = 0

        def __init__(self, *args: Any, **about: Any):
            is_shown = about.get("unit") == "B" and str(about.get("desc")).startswith("Reconstructing")
            self.begun = time.monotonic()
            super().__init__(*args, **about | {"disable": not is_shown, "mininterval": SAY_S, "file": StringIO()})

        def display(self, *_: Any, **__: Any) -> None:
            if time.monotonic() - self.begun >= SAY_S:
                say(f"{name}: {self.n / 1e9:.2f} of {self.total / 1e9:.2f} GB")

    return Lines
