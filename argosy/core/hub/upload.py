"""Uploads a model to the Hub: all files in one commit, so that nobody can load half of a model.

Large files are uploaded first, one after the other, and become part of the repository with the commit. After a kill, the same command
sends only the missing files. Weights of an earlier model that the new one does not have are removed in the same commit, because readers
prefer `model.safetensors` to shards.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from argosy.core.errors import ArgosyError, BadInput, complaint
from argosy.core.hub.download import client_errors, hub_error, is_unreachable
from argosy.core.hub.names import HubName
from argosy.core.progress import Say

CARD = "README.md"
# A comment that marks a card that `argosy push` has written. A user who edits the card removes it.
MARK = "<!-- Written by argosy push. Without this line, the card is kept when the model is pushed again. -->"
WEIGHTS = ("model*.safetensors", "model*.safetensors.index.json", "adapter_model*.safetensors", "pytorch_model*.bin")


@dataclass(frozen=True)
class Pushed:
    """The result of a push.

    commit: the id of the new commit; None: nothing changed, or nothing was sent.
    url: the URL of the repository.
    kept_card: whether a card that was written by hand was kept.
    removed: the names of removed weights of an earlier model.
    """

    commit: str | None
    url: str
    kept_card: bool
    removed: list[str]


def push_files(
    files: Mapping[str, Path | bytes],
    name: HubName,
    message: str,
    *,
    private: bool = False,
    replaces_card: bool = False,
    dry: bool = False,
    say: Say = lambda _: None,
) -> Pushed:
    """Uploads files in one commit. The repository and the branch are created if necessary.

    Args:
        files: the path or the content of each file, by its name in the repository.
        name: the repository, and the branch as its revision.
        message: the commit message.
        private: whether a new repository is private.
        replaces_card: whether a card that was written by hand is replaced too.
        dry: whether nothing is written, and only the existing files are compared.
        say: called with progress messages.

    Raises:
        BadInput: there is no permission, or no such branch.
        ArgosyError: the connection broke.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants

    api, url = HfApi(library_name="argosy"), f"{constants.ENDPOINT}/{name.repository}"
    try:
        if not dry:
            api.create_repo(name.repository, private=private, exist_ok=True)
            if name.revision:
                api.create_branch(name.repository, branch=name.revision, exist_ok=True)
        present = _remote_files(api, name)
        removed = [path for path in present if path not in files and any(fnmatchcase(path, pattern) for pattern in WEIGHTS)]
        kept_card = CARD in present and CARD in files and not replaces_card and not _is_written(api, name)
        if kept_card:
            say(f"{url} has a card that was written by hand, which stays; card=replace replaces it")
        if dry:
            return Pushed(None, url, kept_card, removed)
        additions: list[Any] = [
            CommitOperationAdd(path_in_repo=file, path_or_fileobj=content if isinstance(content, bytes) else str(content))
            for file, content in sorted(files.items())
            if file != CARD or not kept_card
        ]
        for number, addition in enumerate(additions, 1):
            # Small files, which are stored in git, are uploaded with the commit.
            api.preupload_lfs_files(name.repository, additions=[addition], revision=name.revision)
            if addition._upload_mode == "lfs":
                say(f"{addition.path_in_repo}: uploaded, {number} of {len(additions)} files")
        operations = [*additions, *(CommitOperationDelete(path_in_repo=path) for path in removed)]
        info = api.create_commit(name.repository, operations, commit_message=message, revision=name.revision)
    except client_errors() as error:
        raise _upload_error(error, name, dry) from None
    except RuntimeError as error:
        # The client raises this for a failed upload of a large file. The cause has the actual error.
        raise _upload_error(error.__cause__ if isinstance(error.__cause__, Exception) else error, name, dry) from None
    return Pushed(info.oid, url, kept_card, removed)


def _remote_files(api: Any, name: HubName) -> list[str]:
    """The files of the repository; empty if the repository or branch does not exist yet."""
    from huggingface_hub import errors

    try:
        return api.list_repo_files(name.repository, revision=name.revision)
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError):
        return []


def _is_written(api: Any, name: HubName) -> bool:
    """Whether `argosy push` has written the card in the repository."""
    from huggingface_hub import hf_hub_download

    path = hf_hub_download(name.repository, CARD, revision=name.revision)
    return MARK in Path(path).read_text(encoding="utf-8", errors="replace")


def _upload_error(error: Exception, name: HubName, dry: bool) -> ArgosyError:
    from huggingface_hub import errors

    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403) or isinstance(error, errors.LocalTokenNotFoundError):
        hint = "set HF_TOKEN to a token that may write, or log in with `hf auth login`"
        return BadInput(f"the Hub does not let you write to {name.repository}", where=complaint(error), hint=hint)
    if is_unreachable(error) and dry:
        hint = "a dry run sends nothing, and asks the Hub what is there; HF_ENDPOINT names another"
        return ArgosyError("the Hub cannot be reached", where=complaint(error), hint=hint)
    if is_unreachable(error):
        problem = f"the connection to the Hub broke while {name.repository} was uploaded"
        hint = "the same command resumes: large files that arrived are not sent again"
        return ArgosyError(problem, where=complaint(error), hint=hint)
    failure = hub_error(error, name)
    return failure if isinstance(failure, BadInput) else ArgosyError(f"{name.repository} could not be uploaded", where=complaint(error))
