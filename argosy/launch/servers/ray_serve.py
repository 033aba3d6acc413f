"""Runs replicas of a server of bundles on Ray Serve, whose HTTP proxy sends each request to the replica with the fewest requests.

Each replica is an actor with all models of the repository, which its machine must be able to read. Ray restarts a lost replica. API
requests that change the repository are refused, because they would reach only one replica. With `poll=SECONDS` each replica scans the
repository itself. This command stays in the foreground. When it ends, the application finishes its running requests and ends.
"""

import logging
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

from argosy.core.command import install_package
from argosy.core.errors import ArgosyError, BadInput, Unsupported
from argosy.core.progress import Say
from argosy.launch.ray import connect_ray
from argosy.launch.rendered import Command
from argosy.launch.servers.settings import RayServe

# Settings of the server that Ray's proxy, or a single process, would need.
ALONE = ("tls_certificate", "tls_key", "grpc", "log_requests")
LOOK_S = 0.2


class Replica:
    """The class of the Ray deployment. An ASGI application inside the replica serves the requests."""


def check_replicated(command: Command, server: Any) -> None:
    """Checks that a server can run as replicas.

    Raises:
        BadInput: the verb of the command is not `predict`, or the command has a setting that replicas do not support.
    """
    if command.words[0] != "predict":
        raise BadInput(f"Ray Serve runs `predict`, and not `{command.words[0]}`")
    if alone := [name for name in ALONE if getattr(server, name, None)]:
        raise BadInput(f"{alone[0]} with engine=rayserve: Ray's proxy answers, and has none", hint="leave it out")
    if not server.port:
        raise BadInput("port=0 with engine=rayserve", hint="name the port of Ray's proxy")


def launch(command: Command, settings: RayServe, server: Any, build: Callable[[], Any], say: Say, stop: Callable[[], Any]) -> None:
    """Runs replicas until `stop()` is true.

    Args:
        server: the settings of the server.
        build: builds the application of a replica, in the process of the replica.

    Raises:
        ArgosyError: there is no Ray, the cluster has no room, or the models cannot be served.
    """
    begin = time.monotonic()
    slots, install = int(settings.replicas * settings.cpus) + 1, install_package("ray[serve]")
    with connect_ray(settings.address, slots=slots, needs="engine=rayserve", install=install):
        serve = serve_library()
        # It tells of every step, and warns of options that it was given before.
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        say(f"connected to Ray after {time.monotonic() - begin:.0f} s; starting {settings.replicas} replicas")
        options: dict[str, Any] = {"num_replicas": settings.replicas, "max_ongoing_requests": settings.ongoing}
        options["ray_actor_options"] = {"num_cpus": settings.cpus, "num_gpus": settings.gpus}
        options["graceful_shutdown_timeout_s"] = server.drain
        deployment = serve.deployment(name="predict", **options)(serve.ingress(build)(Replica))
        try:
            serve.start(http_options={"host": server.host, "port": server.port})
            try:
                serve.run(deployment.bind(), name=settings.name, route_prefix="/")
            except Exception as error:
                raise ArgosyError(f"the replicas did not start: {last_line(error)}") from None
            say(f"ready on http://{server.host}:{server.port}")
            while not stop():
                time.sleep(LOOK_S)
            serve.delete(settings.name)
        finally:
            serve.shutdown()


def serve_library() -> Any:
    """Returns the Ray Serve library.

    Raises:
        Unsupported: Ray Serve is not installed.
    """
    try:
        return import_module("ray.serve")
    except ImportError:
        problem = "engine=rayserve needs Ray Serve, which is not installed"
        raise Unsupported(problem, hint=install_package("ray[serve]")) from None


def last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines or [type(error).__name__])[-1][:300]
