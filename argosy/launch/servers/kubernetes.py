"""Writes a Deployment of servers that share no state, and a Service, which spreads connections over the servers that are ready.

A new pod is ready before an old pod is asked to end (`maxUnavailable: 0`). SIGTERM lets a pod finish its requests. Pods read the
repository from the image, or from a volume that all of them mount read-only.
"""

from typing import Any

from argosy.core.errors import BadInput
from argosy.core.progress import Say
from argosy.core.settings.scalars import yaml_documents
from argosy.launch.rendered import Command, deliver
from argosy.launch.servers.pods import PORT, grace, grpc_port, node_selector, server_container
from argosy.launch.servers.settings import Kubernetes


def launch(command: Command, settings: Kubernetes, say: Say) -> int:
    """Prints or writes the manifest. Returns an exit code.

    Raises:
        BadInput: pods cannot read the models, the servers would be open to anybody, or the file to write holds something else.
    """
    deliver(yaml_documents(render_deployment(command, settings)), settings.write, say, "kubectl apply -f FILE")
    return 0


def render_deployment(command: Command, settings: Kubernetes) -> list[dict[str, Any]]:
    """Makes the Deployment and the Service.

    Raises:
        BadInput: pods cannot read the models, or the servers would be open to anybody.
    """
    container = server_container(command.words, settings)
    models, volumes = command.words[1], []
    if settings.volume is not None:
        if not models.startswith(settings.mount.rstrip("/") + "/") and models.rstrip("/") != settings.mount.rstrip("/"):
            raise BadInput(f"{models} is not in mount={settings.mount}, where pods have the volume", hint=f"{settings.mount}/NAME")
        container["volumeMounts"] = [{"name": "models", "mountPath": settings.mount, "readOnly": True}]
        volumes = [{"name": "models", "persistentVolumeClaim": {"claimName": settings.volume, "readOnly": True}}]
    elif not models.startswith("/"):
        raise BadInput(f"{models} is a folder of this machine", hint="its path in the image; or volume=CLAIM and a path in mount=")
    labels = {"app.kubernetes.io/name": settings.name}
    metadata = {"name": settings.name} | ({"namespace": settings.namespace} if settings.namespace else {}) | {"labels": labels}
    pod = {
        **node_selector(settings),
        "terminationGracePeriodSeconds": grace(command.words),
        "containers": [container],
        **({"volumes": volumes} if volumes else {}),
    }
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata,
        "spec": {
            "replicas": settings.replicas,
            "selector": {"matchLabels": labels},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }
    ports = [{"name": "http", "port": PORT, "targetPort": "http", "protocol": "TCP"}]
    if (grpc := grpc_port(command.words)) is not None:
        ports.append({"name": "grpc", "port": grpc, "targetPort": "grpc", "protocol": "TCP"})
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        "spec": {"selector": labels, "ports": ports},
    }
    return [deployment, service]
