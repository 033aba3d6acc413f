"""Checks that all processes of a run see the same files."""

from uuid import uuid4

from argosy.core.errors import BadInput
from argosy.core.storage import Missing, Store
from argosy.parallel import processes

# The file is hidden, so that a directory with no other files counts as empty.
PROBE = ".shared"


def check_shared(store: Store) -> None:
    """Checks that all processes see a file that the leader writes.

    Raises:
        BadInput: this process does not see the file.
        FailedElsewhere: another process does not see the file.
    """
    token = processes.broadcast("shared files", lambda: _write_probe(store))

    def look() -> None:
        try:
            same = store.read_text(PROBE) == token
        except Missing:
            same = False
        if not same:
            problem = f"process {processes.rank()} does not see the files that process 0 writes in {store.root}"
            hint = "dir= must be a folder that all machines of the run share, or an address such as gs://BUCKET/RUN"
            raise BadInput(problem, hint=hint)

    try:
        processes.run_together("shared files seen", look)
    finally:
        if processes.leads():
            store.remove(PROBE)


def _write_probe(store: Store) -> str:
    token = uuid4().hex
    store.write_text(PROBE, token)
    return token
