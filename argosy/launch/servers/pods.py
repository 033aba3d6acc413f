"""Makes the pods of servers: command, address, key, probes and requested resources."""

from collections.abc import Mapping
from typing import Any

from argosy.core.errors import BadInput
from argosy.launch.rendered import as_argument
from argosy.launch.servers.settings import ServerPods

CONTAINER = "argosy"
PORT = 8000
KEY = "ARGOSY_API_KEY"
# Where a verb answers that it lives, and that it is ready.
PROBES = {"predict": ("/v2/health/live", "/v2/health/ready"), "serve": ("/health", "/health")}
# Seconds of `drain` unless the command says otherwise, and those that a pod has beyond them.
DRAIN, MARGIN = 30, 10


def server_container(words: tuple[str, ...], settings: ServerPods, port: int = PORT) -> dict[str, Any]:
    """Makes the container of a server.

    Args:
        words: the verb and its words.
        port: the port of HTTP.

    Raises:
        BadInput: the command has a setting that the manifest sets itself, or the server would be open to anybody.
    """
    server_settings = settings_of(words)
    for name in ("host", "port", "api_key"):
        if name in server_settings:
            hint = "secret=NAME holds the key" if name == "api_key" else "leave it out: pods listen on their own address"
            raise BadInput(f"{name}= in the command", hint=hint)
    if (settings.secret is None) == (server_settings.get("open", "false") != "true"):
        problem = "anybody in the cluster could use the servers" if settings.secret is None else "secret= and open=true"
        raise BadInput(problem, hint="secret=NAME, a Secret with the entry api-key; or open=true in the command")
    ports = [{"name": "http", "containerPort": port, "protocol": "TCP"}]
    if (grpc := grpc_port(words)) is not None:
        if grpc in (0, port):
            raise BadInput(f"grpc={grpc} in the command", hint=f"a port of its own, such as 8001; {port} is that of HTTP")
        ports.append({"name": "grpc", "containerPort": grpc, "protocol": "TCP"})
    live, ready = ({"path": path, "port": port} for path in PROBES[words[0]])
    if "tls_certificate" in server_settings:
        # The kubelet does not check certificates.
        live, ready = live | {"scheme": "HTTPS"}, ready | {"scheme": "HTTPS"}
    command = [*as_argument(settings.program), *words, "host=0.0.0.0", f"port={port}"]
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": settings.image,
        # Without a shell, so that SIGTERM reaches it. Kubernetes would put variables for $(NAME).
        "command": [word.replace("$(", "$$(") for word in command],
        "ports": ports,
        # Compiling may take minutes: until it is ready, nothing is asked whether it lives.
        "startupProbe": probe(live, periodSeconds=5, failureThreshold=240),
        "livenessProbe": probe(live, periodSeconds=10, failureThreshold=6),
        "readinessProbe": probe(ready, periodSeconds=2, failureThreshold=2),
    }
    if settings.secret is not None:
        container["env"] = [{"name": KEY, "valueFrom": {"secretKeyRef": {"name": settings.secret, "key": "api-key"}}}]
    requests = {name: value for name, value in (("cpu", settings.cpu), ("memory", settings.memory)) if value}
    limits: dict[str, Any] = {"memory": settings.memory} if settings.memory else {}
    limits |= {"nvidia.com/gpu": settings.gpus} if settings.gpus else {}
    resources = {name: value for name, value in (("requests", requests), ("limits", limits)) if value}
    return container | ({"resources": resources} if resources else {})


def probe(get: Mapping[str, Any], **fields: int) -> dict[str, Any]:
    # Servers with a key answer probes without one; the Host header is that of a pod's address.
    return {"httpGet": dict(get), "timeoutSeconds": 5, **fields}


def grpc_port(words: tuple[str, ...]) -> int | None:
    """Returns the port of gRPC that a command names; None if it names none."""
    port = settings_of(words).get("grpc", "null")
    return None if port in ("null", "none", "") else int(port)


def node_selector(settings: ServerPods) -> dict[str, Any]:
    return {"nodeSelector": {"cloud.google.com/gke-accelerator": settings.gpu}} if settings.gpu else {}


def grace(words: tuple[str, ...]) -> int:
    """Returns the seconds that a pod has to end: the server's time to finish requests, plus a margin."""
    return int(float(settings_of(words).get("drain", DRAIN))) + MARGIN


def settings_of(words: tuple[str, ...]) -> Mapping[str, str]:
    """Returns the settings (`key=value`) among the words of a command."""
    return dict(word.split("=", 1) for word in words[1:] if "=" in word)
