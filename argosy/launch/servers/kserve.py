"""Writes a ServingRuntime of KServe that runs `argosy predict`, and an InferenceService that uses it.

KServe mounts the repository, or a single bundle, at `/mnt/models` before the container starts. It calls the container by the Open
Inference Protocol v2.
Format: serving.kserve.io/v1alpha1 and v1beta1 (github.com/kserve/kserve, config/crd).
"""

from typing import Any

from argosy.core.errors import BadInput
from argosy.core.progress import Say
from argosy.core.settings.scalars import yaml_documents
from argosy.launch.rendered import Command, deliver
from argosy.launch.servers.pods import grace, node_selector, server_container, settings_of
from argosy.launch.servers.settings import KServe

MODELS, FORMAT = "/mnt/models", "argosy-bundle"
# The port that KServe's proxies ask.
KSERVE_PORT = 8080


def launch(command: Command, settings: KServe, say: Say) -> int:
    """Prints or writes the manifest. Returns an exit code.

    Raises:
        BadInput: the command names other models, the servers would be open to anybody, or the file to write holds something else.
    """
    deliver(yaml_documents(render_runtime(command, settings)), settings.write, say, "kubectl apply -f FILE")
    return 0


def render_runtime(command: Command, settings: KServe) -> list[dict[str, Any]]:
    """Makes the ServingRuntime and the InferenceService.

    Raises:
        BadInput: the verb of the command is not `predict`, the command names other models, or the servers would be open to anybody.
    """
    if command.words[0] != "predict":
        raise BadInput(f"KServe runs `predict`, and not `{command.words[0]}`", hint="engine=kubernetes runs both")
    if command.words[1] != MODELS:
        raise BadInput(f"KServe puts models at {MODELS}, and the command names {command.words[1]}", hint=f"-- predict {MODELS}")
    for name in ("grpc", "tls_certificate", "tls_key"):
        if name in settings_of(command.words):
            raise BadInput(f"{name}= in the command", hint="KServe's proxies ask one port, over HTTP; engine=kubernetes has both")
    # KServe puts the service's name for this, and asks for a model of that name.
    words = command.words if any(word.startswith("name=") for word in command.words) else (*command.words, "name={{.Name}}")
    container = server_container(words, settings, KSERVE_PORT) | {"name": "kserve-container"}
    # KServe mounts what it fetched into this container by its name, and Knative allows ports without names of their own only.
    container["ports"] = [{"containerPort": KSERVE_PORT, "protocol": "TCP"}]
    place = {"namespace": settings.namespace} if settings.namespace else {}
    runtime = {
        "apiVersion": "serving.kserve.io/v1alpha1",
        "kind": "ServingRuntime",
        "metadata": {"name": f"{settings.name}-runtime", **place},
        "spec": {
            "supportedModelFormats": [{"name": FORMAT, "version": "1", "autoSelect": True}],
            "protocolVersions": ["v2"],
            "multiModel": False,
            "containers": [container],
            **node_selector(settings),
        },
    }
    model = {"modelFormat": {"name": FORMAT}, "runtime": f"{settings.name}-runtime", "protocolVersion": "v2"}
    service = {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "metadata": {"name": settings.name, **place},
        "spec": {
            "predictor": {
                "minReplicas": settings.min_replicas,
                "maxReplicas": settings.max_replicas,
                "terminationGracePeriodSeconds": grace(command.words),
                "model": model | {"storageUri": settings.storage},
            }
        },
    }
    return [runtime, service]
