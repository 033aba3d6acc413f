"""Whether the Hub answers, found by one request, and a time without it: its clients try again for half a minute."""

from collections.abc import Iterator
from contextlib import contextmanager

from argosy.core.errors import complaint
from argosy.core.hub.download import client_errors, is_unreachable

# Seconds that the Hub has for its answer.
ANSWER_S = 10.0


def unreachable_dataset(repository: str, revision: str | None) -> str | None:
    """Why the Hub cannot be asked for a data set; None: it answers, if only that there is none."""
    from huggingface_hub import HfApi

    try:
        HfApi(library_name="argosy").dataset_info(repository, revision=revision, timeout=ANSWER_S)
    except client_errors() as error:
        return complaint(error) if is_unreachable(error) else None
    return None


@contextmanager
def without_hub() -> Iterator[None]:
    """Inside, the client asks the Hub for nothing, as with HF_HUB_OFFLINE=1."""
    from huggingface_hub import constants

    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before
