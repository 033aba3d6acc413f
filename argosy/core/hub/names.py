"""Names of models on the Hub in MODEL arguments.

    hf:OWNER/NAME             the newest commit of the branch `main`
    hf:OWNER/NAME@REVISION    a commit, branch or tag
    hf:OWNER/NAME:FILE        one .gguf file or one folder of the repository

`hf://OWNER/NAME` and `https://huggingface.co/OWNER/NAME` mean the same.
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from argosy.core.addresses import HUB, is_hub
from argosy.core.errors import BadInput

_PART = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?"
_NAME = re.compile(rf"(?P<repository>{_PART}(?:/{_PART})?)(?:@(?P<revision>[^:@]+))?(?::(?P<file>[^:]+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
FORM = "hf:OWNER/NAME, hf:OWNER/NAME@REVISION or hf:OWNER/NAME:FILE.gguf"


@dataclass(frozen=True)
class HubName:
    """A model on the Hub.

    repository: OWNER/NAME; some old repositories have no owner.
    revision: a commit, branch or tag; None: the branch `main`.
    file: a file or folder of the repository; None: all of it.
    """

    repository: str
    revision: str | None = None
    file: str | None = None

    @staticmethod
    def parse(text: str) -> "HubName":
        """Parses the name in a MODEL argument.

        Raises:
            BadInput: the text is no name of a model.
        """
        match = _NAME.fullmatch(text.removeprefix(HUB).removeprefix("//"))
        file = match["file"] if match else None
        if match is None or (file is not None and (file.startswith("/") or ".." in file.split("/"))):
            raise BadInput(f"`{text}` names no model of the Hub", hint=FORM)
        return HubName(match["repository"], match["revision"], file)

    @property
    def is_pinned(self) -> bool:
        """Whether the revision is a commit, which never changes."""
        return self.revision is not None and _COMMIT.fullmatch(self.revision) is not None

    @property
    def short(self) -> str:
        """The last part of the name, without the owner."""
        return self.repository.rpartition("/")[2]

    def at(self, commit: str) -> "HubName":
        """The same model at a commit."""
        return replace(self, revision=commit)

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        return f"{HUB}{self.repository}{revision}{f':{self.file}' if self.file else ''}"


_SNAPSHOT = re.compile(r"models--(?P<name>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})(?:/(?P<file>.+))?$")


def name_of_path(path: str | Path) -> HubName | None:
    """The name and the commit of a model in the cache of the Hub; None for other paths."""
    match = _SNAPSHOT.search(Path(path).absolute().as_posix())
    return HubName(match["name"].replace("--", "/"), match["commit"], match["file"]) if match else None


def model_name(model: str | Path) -> str:
    """The default name of a model: the last part of its name on the Hub, or of its path."""
    hub_name = HubName.parse(str(model)) if is_hub(model) else name_of_path(model)
    if hub_name is None:
        return Path(model).resolve().name
    return PurePosixPath(hub_name.file).name if hub_name.file else hub_name.short
