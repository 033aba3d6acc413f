"""Stores the measurements of a running search in a file beside its target, so that the same command continues after a kill.

    {"source": "hub 1f...", "data": "9c..."}                          the identity of the model and of the data
    {"name": "layers.0.attn.q", "preset": "w4", "divergence": 0.0012} one measurement

A divergence depends neither on the budget nor on the other candidates, so a search with another budget continues with the same file. If
the process is killed, the last line may be incomplete. It is then removed and measured again.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from argosy.core.errors import BadInput


class MeasuredDivergences:
    """The divergences in a file.

    Args:
        path: a file that does not exist, or that a search with the same identity left.
        identity: everything that affects the divergences, as a JSON object.

    Raises:
        BadInput: the file belongs to another search, or is no file of a search.
    """

    def __init__(self, path: Path, identity: Mapping[str, str]):
        self.path, self._found = path, dict[tuple[str, str], float]()
        lines = path.read_bytes().split(b"\n") if path.exists() else []
        # Text after the last line break is an incomplete line.
        whole = lines[:-1]
        try:
            before, *rows = (json.loads(line) for line in whole) if whole else (dict(identity),)
            self._found = {(row["name"], row["preset"]): float(row["divergence"]) for row in rows}
        except (ValueError, TypeError, KeyError):
            raise BadInput(f"{path} is in the way", hint="move it: a search keeps there what it has measured") from None
        if before != dict(identity):
            problem = f"{path} is an unfinished search with another model or other data"
            raise BadInput(problem, hint="finish that with the same command, remove the file, or name another target")
        path.write_bytes(b"".join(line + b"\n" for line in whole) or json.dumps(dict(identity)).encode() + b"\n")

    def __len__(self) -> int:
        return len(self._found)

    def get(self, name: str, preset: str) -> float | None:
        """Returns the divergence of a matrix that is rounded by a preset; None if it has not been measured."""
        return self._found.get((name, preset))

    def add(self, name: str, preset: str, divergence: float) -> None:
        """Stores the divergence of a matrix that is rounded by a preset."""
        self._found[name, preset] = divergence
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"name": name, "preset": preset, "divergence": divergence}) + "\n")

    def remove(self) -> None:
        """Removes the file, after the search is complete."""
        self.path.unlink(missing_ok=True)
