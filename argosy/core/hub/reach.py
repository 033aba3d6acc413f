"""Finds out with one request whether the Hub answers, and switches the client offline. The client itself would retry for half a
minute."""

from collections.abc import Iterator
from contextlib import contextmanager

from argosy.core.errors import complaint
from argosy.core.hub.download import client_errors, is_unreachable

# The number of seconds that the Hub has for its answer.
ANSWER_S = 10.0


def unreachable_dataset(repository: str, revision: str | None) -> str | None:
    """Asks the Hub for a data set. Returns the reason why the Hub cannot be reached; None: it answers, even if there is no such data
    set."""
    from huggingface_hub import HfApi

    try:
        HfApi(library_name="argosy").dataset_info(repository, revision=revision, timeout=ANSWER_S)
    except client_errors() as error:
        return complaint(error) if is_unreachable(error) else None
    return None


@contextmanager
def without_hub() -> Iterator[None]:
    """A context manager inside which the client makes no requests, as with HF_HUB_OFFLINE=1."""
    from huggingface_hub import constants

    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before
