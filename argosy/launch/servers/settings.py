"""The settings of the engines of `argosy launch` that run servers."""

from pydantic import Field, model_validator

from argosy.core.settings import Settings
from argosy.launch.settings import ScriptName


class ServerPods(ScriptName):
    """Settings that all engines share which run a server in pods."""

    image: str
    """Image of the container, which has Argosy installed."""
    program: str = "argosy"
    """The command that starts Argosy in the image, in shell syntax."""
    write: str | None = None
    """File to write. None: it is printed. A file that holds something else is never overwritten."""
    namespace: str | None = None
    """Namespace. None: that of kubectl's context."""
    secret: str | None = None
    """Secret whose entry `api-key` clients must send. None: the command says open=true, and anybody who can reach the service may use
    it.
    """
    gpu: str | None = None
    """GPU as GKE's label `cloud.google.com/gke-accelerator` names it, such as nvidia-l4. None: any."""
    gpus: int = Field(0, ge=0)
    """GPUs of each pod."""
    cpu: str | None = None
    """CPU cores that each pod requests, in Kubernetes' notation, such as 8 or 500m."""
    memory: str | None = None
    """Memory limit of each pod, such as 8Gi."""

    @model_validator(mode="after")
    def _gpus_are_counted(self) -> "ServerPods":
        if self.gpu is not None and not self.gpus:
            raise ValueError("gpu names a kind of GPU, and gpus = 0")
        return self


class Kubernetes(ServerPods):
    """A manifest for `kubectl apply`: a Deployment of servers that share no state, and a Service before them."""

    replicas: int = Field(1, gt=0)
    """Number of pods."""
    volume: str | None = None
    """PersistentVolumeClaim with the repository, which pods read. None: it is in the image."""
    mount: str = "/models"
    """Path of the volume in the pods."""

    @model_validator(mode="after")
    def _mount_is_absolute(self) -> "Kubernetes":
        if not self.mount.startswith("/"):
            raise ValueError(f"mount = {self.mount!r} is no absolute path")
        return self


class KServe(ServerPods):
    """A manifest for `kubectl apply`: a ServingRuntime of KServe, and an InferenceService that runs it on a repository in a store."""

    storage: str
    """Address of the repository or of one bundle: gs://, s3://, pvc://CLAIM/PATH, as KServe's storage initializer reads it."""
    min_replicas: int = Field(1, ge=0)
    """Smallest number of pods. 0: no pod runs while there are no requests."""
    max_replicas: int = Field(1, gt=0)
    """Largest number of pods."""

    @model_validator(mode="after")
    def _fits(self) -> "KServe":
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"min_replicas = {self.min_replicas} is more than max_replicas = {self.max_replicas}")
        if "://" not in self.storage:
            raise ValueError(f"storage = {self.storage!r} is no address such as gs://BUCKET/models or pvc://CLAIM/models")
        return self


class RayServe(Settings):
    """Replicas of a server of bundles on Ray Serve, behind its HTTP proxy, for as long as the command runs. Needs `ray[serve]`."""

    address: str | None = None
    """Address of the cluster: `auto` (the cluster of this machine), HOST:PORT, or ray://HOST:PORT. None: the address in RAY_ADDRESS, or
    a new Ray on this machine.
    """
    name: str = "argosy"
    """Name of the application. A running application of this name is replaced."""
    replicas: int = Field(1, gt=0)
    """Number of replicas, each with all models."""
    cpus: float = Field(1, gt=0)
    """CPU cores that Ray reserves for each replica."""
    gpus: float = Field(0, ge=0)
    """GPUs of each replica. 0: it runs on CPUs."""
    ongoing: int = Field(256, gt=0)
    """Requests that a replica processes at once, from which batches are formed."""
