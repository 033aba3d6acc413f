"""A replica of a server of bundles, in a process of Ray Serve."""

import logging
from pathlib import Path
from typing import Any


def replica_app(repository: str, settings: dict[str, Any]) -> Any:
    """Returns the application of a replica, with every model loaded.

    Args:
        repository: the path of the repository.
        settings: the settings of the server, as plain values.

    Raises:
        BadInput: there is no such repository on this machine, or no bundle in it.
        ArgosyError: a model cannot be served.
    """
    from argosy.core.errors import ArgosyError
    from argosy.jobs import machine
    from argosy.ops.programs.store import open_store
    from argosy.predict.metrics import PredictMetrics
    from argosy.predict.repository import Repository, check_repository
    from argosy.predict.run import predict_app
    from argosy.predict.service import PredictService
    from argosy.predict.settings import PredictSettings

    machine.start_jax()
    say = logging.getLogger("ray.serve").info
    server = PredictSettings(**settings)
    check_repository(Path(repository))
    bundles = Repository(Path(repository), server, PredictMetrics(), say, open_store(machine.programs_folder(), say, sources=False))
    bundles.look()
    reasons = [f"{name}: {why}" for name, state in bundles.models.items() if not state.versions for why in state.reasons.values()]
    if reasons:
        raise ArgosyError("; ".join(reasons))
    if server.poll is not None:
        bundles.poll(server.poll)
    return predict_app(PredictService(bundles, replicated=True))
