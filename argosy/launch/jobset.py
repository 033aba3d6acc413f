"""Writes a manifest of a JobSet (jobset.x-k8s.io/v1alpha2): one Job, or one per TPU slice, whose indexed pods run one process each.

    exit code of a container    result
    0                           The JobSet is complete when all containers have ended with 0.
    2, 65                       The user made a mistake, or the failure would occur again (`core.errors.Final`). The Job fails by its
                                podFailurePolicy, and the JobSet fails at once.
    any other                   The Job fails (backoffLimit 0), and the JobSet restarts all pods, at most `restarts` times.

Pods find each other by the headless service of the JobSet, which names the first pod NAME-workers-0-0.NAME (`launch.cluster`). TPUs are
requested as on GKE, by node labels and `google.com/tpu`. The pods of a slice share one node pool, which no other slice uses. Slices
find each other by the MEGASCALE_ variables, which libtpu reads.
"""

from typing import Any

from argosy.core.errors import ATTEMPT, FINAL, SUPERVISED, BadInput
from argosy.core.progress import Say
from argosy.core.settings.scalars import yaml_document
from argosy.launch.cluster import PORT
from argosy.launch.rendered import Command, Devices, ScriptCheck, as_argument, check_inside, deliver
from argosy.launch.settings import TPUS, JobSet

# The Job's name in the JobSet, and the container's in a pod.
WORKERS, CONTAINER = "workers", "argosy"


def launch(command: Command, settings: JobSet, say: Say) -> int:
    """Prints or writes the manifest. Returns an exit code.

    Raises:
        BadInput: pods cannot read the recipe, the run directory would be lost, or the file to write holds something else.
    """
    deliver(yaml_document(render(command, settings)), settings.write, say, "kubectl apply -f FILE")
    return 0


def checks(command: Command, settings: JobSet) -> list[ScriptCheck]:
    """Returns checks for files that pods would not see or would lose."""

    def recipe() -> None:
        if command.recipe is not None:
            hint = "name a recipe of the package, and give its settings as words: train tiny steps=100"
            raise BadInput(f"pods do not see {command.recipe}, a file of this machine", hint=hint)

    def folder() -> None:
        if command.is_local and settings.volume is None:
            hint = "give volume=CLAIM, and dir= in mount=; or a run directory in an object store: dir=gs://BUCKET/RUN"
            raise BadInput(f"the run directory {command.folder} would be lost with its pods", hint=hint)
        if command.is_local:
            check_inside(command, settings.mount, "where pods have the volume")

    program = ScriptCheck(("program",), lambda: as_argument(settings.program))
    return [ScriptCheck((), recipe), ScriptCheck(("volume", "mount"), folder), program]


def devices(settings: JobSet, between: bool) -> Devices | None:
    """Returns the devices of the pods. Returns None if the settings do not determine them, as for CPUs and for TPUs whose chips may
    have two devices.

    Args:
        between: whether the mesh has axes between groups of devices (`mesh.between`).
    """
    if settings.gpus:
        each, groups = (settings.gpus, settings.nodes) if between else (settings.nodes * settings.gpus, 1)
        return Devices(each, groups, settings.nodes > 1, f"nodes = {settings.nodes} x gpus = {settings.gpus}")
    if settings.tpu not in TPUS:
        return None
    formula = f"nodes = {settings.nodes} x chips = {settings.chips}"
    if settings.slices > 1:
        formula = f"slices = {settings.slices} x {formula}"
        return Devices(settings.nodes * settings.chips, settings.slices, True, formula)
    if between:
        return Devices(settings.chips, settings.nodes, False, formula)
    return Devices(settings.nodes * settings.chips, 1, False, formula)


def render(command: Command, settings: JobSet) -> dict[str, Any]:
    """Makes the manifest.

    Raises:
        BadInput: pods cannot read the recipe, the run directory would be lost with them, or `program` is no command.
    """
    for check in checks(command, settings):
        check.run()
    job: dict[str, Any] = {
        "completionMode": "Indexed",
        "parallelism": settings.nodes,
        "completions": settings.nodes,
        "backoffLimit": 0,
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": [2, FINAL]}},
            ]
        },
        "template": {"spec": pod(command, settings)},
    }
    metadata: dict[str, Any] = {"name": settings.name}
    metadata |= {"namespace": settings.namespace} if settings.namespace else {}
    metadata |= {"labels": {"kueue.x-k8s.io/queue-name": settings.queue}} if settings.queue else {}
    if settings.tpu:
        metadata["annotations"] = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
    rule = {"name": "mistakes", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": {"maxRestarts": settings.restarts, "rules": [rule]},
            "replicatedJobs": [{"name": WORKERS, "replicas": settings.slices, "template": {"spec": job}}],
        },
    }


def pod(command: Command, settings: JobSet) -> dict[str, Any]:
    """Makes the specification of each pod."""
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": settings.image,
        # Without a shell, so that SIGTERM reaches it. Kubernetes would put variables for $(NAME).
        "command": [word.replace("$(", "$$(") for word in (*as_argument(settings.program), *command.words)],
        "env": environment(settings),
        "ports": [{"containerPort": PORT}],
        "volumeMounts": [],
    }
    volumes: list[dict[str, Any]] = []
    if settings.volume is not None:
        container["volumeMounts"].append({"name": "runs", "mountPath": settings.mount})
        volumes.append({"name": "runs", "persistentVolumeClaim": {"claimName": settings.volume}})
    limits: dict[str, Any] = {"google.com/tpu": settings.chips} if settings.tpu else {}
    if settings.gpus:
        limits["nvidia.com/gpu"] = settings.gpus
        # NCCL shares memory between processes in it; containers have 64 MB by default.
        container["volumeMounts"].append({"name": "shared-memory", "mountPath": "/dev/shm"})
        volumes.append({"name": "shared-memory", "emptyDir": {"medium": "Memory"}})
    requests = {name: value for name, value in (("cpu", settings.cpu), ("memory", settings.memory)) if value}
    resources = {name: value for name, value in (("requests", requests), ("limits", limits)) if value}
    container |= {"resources": resources} if resources else {}
    where = {
        "cloud.google.com/gke-tpu-accelerator": settings.tpu,
        "cloud.google.com/gke-tpu-topology": settings.topology,
        "cloud.google.com/gke-accelerator": settings.gpu,
        "cloud.google.com/gke-spot": "true" if settings.spot else None,
    }
    labels = {name: value for name, value in where.items() if value is not None}
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": settings.grace,
        **({"nodeSelector": labels} if labels else {}),
        "containers": [container],
        "volumes": volumes,
    }


def environment(settings: JobSet) -> list[dict[str, Any]]:
    """Makes the environment variables from which a process reads its place (`launch.cluster`). Kubernetes itself sets
    JOB_COMPLETION_INDEX.
    """
    variables = [
        {"name": "JOBSET_NAME", "value": settings.name},
        {"name": "REPLICATED_JOB_NAME", "value": WORKERS},
        {"name": "ARGOSY_PROCESSES", "value": str(settings.slices * settings.nodes)},
        {"name": ATTEMPT, "valueFrom": annotation("restart-attempt")},
        {"name": SUPERVISED, "value": "1"},
    ]
    if settings.slices == 1:
        return variables
    return [
        *variables,
        {"name": "JOB_INDEX", "valueFrom": annotation("job-index")},
        {"name": "PROCESSES_IN_JOB", "value": str(settings.nodes)},
        {"name": "MEGASCALE_COORDINATOR_ADDRESS", "value": f"{settings.name}-{WORKERS}-0-0.{settings.name}"},
        {"name": "MEGASCALE_NUM_SLICES", "value": str(settings.slices)},
        {"name": "MEGASCALE_SLICE_ID", "valueFrom": annotation("job-index")},
    ]


def annotation(name: str) -> dict[str, Any]:
    """Makes the source of an environment variable: the annotation of this name that JobSet's controller writes on each pod."""
    return {"fieldRef": {"fieldPath": f"metadata.annotations['jobset.sigs.k8s.io/{name}']"}}
