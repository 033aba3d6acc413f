"""Downloads the necessary files of models on the Hub to the cache that all programs of the Hub share (`HF_HOME`).

A file in the cache is not transferred again. After a broken connection, the download resumes inside the file. After a kill, it resumes
with the incomplete files. Without a network, or with HF_HUB_OFFLINE=1, the cached snapshot is used, if it is complete.
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

# The number of seconds between two lines of progress, if stderr is no terminal.
SAY_S = 10.0
# A partial file that was not written to for this long belongs to a process that was killed.
STALE_S = 3600.0
_LOG_IN = "set HF_TOKEN or log in with `hf auth login`"


def local_model(place: str | Path, say: Say = lambda _: None, *, small: bool = False) -> str:
    """The local path of a MODEL argument. A model of the Hub is downloaded first. Anything else is returned unchanged.

    Args:
        place: a name of the Hub, or a path.
        say: called with progress messages.
        small: whether only the files beside the weights are downloaded, such as the config and the tokenizer.

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
    """Downloads a model of the Hub, and returns its name with the current commit. Anything else is returned unchanged.

    Raises:
        BadInput: as in `local_model`.
    """
    if not is_hub(place) or (name := HubName.parse(place)).is_pinned:
        return place
    return str(name.at(_downloaded(name, False, say).name))


def _only_gguf(folder: Path) -> Path | None:
    """The .gguf file of a snapshot without a config; None if there is a config, or not exactly one .gguf file."""
    files = [] if any(folder.glob("*.json")) else sorted(folder.rglob("*.gguf"))
    return files[0] if len(files) == 1 else None


# The snapshots that this process has opened. A command opens a model several times, and a branch may move in between.
_SNAPSHOTS: dict[tuple[str, str | None, str | None, bool, str, str], Path] = {}


def _downloaded(name: HubName, small: bool, say: Say) -> Path:
    """Downloads a model if necessary, and returns the folder of its snapshot. The name of the folder is the commit."""
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
        # The revision is passed by name, so that the cache stores which commit it is.
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
    """The folder of the snapshot in the cache, for use when the Hub cannot be reached. `error` says why it cannot.

    Raises:
        BadInput: the cache does not have the complete snapshot.
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
    """The classes of the errors that the client raises, about transfers, files and invalid names."""
    return (_http_error(), OSError, ValueError)


def is_unreachable(error: Exception) -> bool:
    """Whether an error means that the Hub does not answer. False if it has answered with an error below 500."""
    from huggingface_hub import errors

    if isinstance(error, errors.HfHubHTTPError):
        return error.response is not None and error.response.status_code >= 500
    # Errors of the HTTP client itself have its base class, and no response.
    return isinstance(error, (_http_error(), ConnectionError, errors.LocalEntryNotFoundError))


def hub_error(error: Exception, name: HubName) -> ArgosyError:
    """The error to report for an error that the Hub answered."""
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
    """The names of the branches and tags of a model; empty if they cannot be listed."""
    from huggingface_hub import HfApi

    try:
        refs = HfApi(library_name="argosy").list_repo_refs(name.repository)
    except Exception:
        # Another error is being reported already.
        return []
    return [ref.name for ref in (*refs.branches, *refs.tags)]


def _remove_stale(blobs: Path) -> None:
    """Removes partial files of killed processes. They would stay forever, because the client gives each transfer a new name."""
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
    """The class of progress bars for the client: its own bar on a terminal, and elsewhere one that says a line every SAY_S seconds."""
    from huggingface_hub.utils import tqdm

    if sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb":
        return tqdm

    class Lines(tqdm):
        """Says progress as lines. The client has a bar for bytes on disk and one for transferred bytes. Only the first is used."""

        monitor_interval = 0

        def __init__(self, *args: Any, **about: Any):
            is_shown = about.get("unit") == "B" and str(about.get("desc")).startswith("Reconstructing")
            self.begun = time.monotonic()
            super().__init__(*args, **about | {"disable": not is_shown, "mininterval": SAY_S, "file": StringIO()})

        def display(self, *_: Any, **__: Any) -> None:
            if time.monotonic() - self.begun >= SAY_S:
                say(f"{name}: {self.n / 1e9:.2f} of {self.total / 1e9:.2f} GB")

    return Lines
