"""The settings of `argosy launch`, by engine."""

import re

from pydantic import Field, field_validator, model_validator

from argosy.core.settings import Settings


class LocalLaunch(Settings):
    """Several processes on this machine. If one ends, the others are ended too, and all start again from the last checkpoint."""

    processes: int = Field(2, gt=0)
    """Number of processes. GPUs are divided evenly among them."""
    devices: int | None = Field(None, gt=0)
    """On CPUs: devices of each process. None: one."""
    restarts: int = Field(10, ge=0)
    """Largest number of restarts in a row without a new checkpoint. A run that makes progress may restart any number of times."""
    stuck: float = Field(1800, gt=0)
    """Seconds that the first step, an evaluation or a checkpoint may take before a process counts as stuck; all processes then report
    their stacks, and start again. Other steps may take ten times as long as the slowest step so far, at least 30 seconds.
    """
    grace: float = Field(30, gt=0)
    """Seconds that processes have to end by themselves after one of them failed, before they are killed."""
    logs: str | None = None
    """Folder for the output of each process. None: a temporary folder, kept and named if a process fails; the output of rank 0 is
    displayed.
    """


class Ray(LocalLaunch):
    """Processes on the machines of a Ray cluster, one actor each. They end and restart as under `local`. Needs `argosy[ray]`."""

    address: str | None = None
    """Address of the cluster: `auto` (the cluster of this machine), HOST:PORT, or ray://HOST:PORT. None: the address in RAY_ADDRESS, or
    a new Ray on this machine, for the duration of the command.
    """
    cpus: int = Field(1, gt=0)
    """CPU cores that Ray reserves for each process."""
    gpus: int = Field(0, ge=0)
    """GPUs of each process. 0: it runs on CPUs."""
    spread: bool = False
    """Whether every process must be on its own machine. Otherwise as many as fit share one."""
    wait: float = Field(600, gt=0)
    """Seconds to wait, at every start, until enough cores and GPUs are free."""


# Labels of GKE's TPUs, and the numbers of axes of their topologies.
TPUS = {"tpu-v4-podslice": 3, "tpu-v5-lite-podslice": 2, "tpu-v5p-slice": 3, "tpu-v6e-slice": 2}


class ScriptName(Settings):
    """The name of a scheduler's job or service."""

    name: str = "argosy"
    """Name of the job or the service: lower-case letters, digits and dashes."""

    @field_validator("name")
    @classmethod
    def _is_a_name(cls, name: str) -> str:
        # Kubernetes adds -workers-0-0-xxxxx to it, and a host name has 63 characters at most.
        if not re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", name):
            raise ValueError("a name has at most 40 lower-case letters, digits and dashes, and begins with a letter")
        return name


class ScriptSettings(ScriptName):
    """Settings that all engines share which write a file for a scheduler."""

    nodes: int = Field(1, gt=0)
    """Number of machines."""
    restarts: int = Field(10, ge=0)
    """Largest number of restarts after failures."""
    program: str | None = None
    """The command that starts Argosy there, in shell syntax."""
    write: str | None = None
    """File to write. None: it is printed. A file that holds something else is never overwritten."""


class Slurm(ScriptSettings):
    """A job script for `sbatch`. Before the time limit the run saves and stops, and the job is queued again, until the run is done."""

    restarts: int = Field(10, ge=0)
    """Largest number of restarts in a row without a new checkpoint, within a job."""
    program: str | None = None
    """The command that starts Argosy there, in shell syntax. None: this Python, whose path all machines must share; with `gpus`, the
    Python of `.venv-gpu` beside its `.venv`, which `./run --gpu` makes.
    """
    per_node: int = Field(1, gt=0)
    """Processes on each machine. GPUs are divided evenly among them."""
    gpus: int = Field(0, ge=0)
    """GPUs of each machine. 0: none is requested."""
    cpus: int | None = Field(None, gt=0)
    """CPU cores of each process. None: the cluster's default."""
    time: str | None = None
    """Time limit in the notation of `sbatch`: MINUTES, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS. None: the partition's."""
    save: int = Field(300, gt=0)
    """Seconds before the time limit at which the run is asked to save and stop."""
    grace: int = Field(60, gt=0)
    """Seconds that processes have to end by themselves after the first of them ended, before they are killed."""
    partition: str | None = None
    """Partition to submit to."""
    account: str | None = None
    """Account to charge."""
    qos: str | None = None
    """Quality of service."""
    constraint: str | None = None
    """Features that the machines must have."""
    options: tuple[str, ...] = ()
    """Further options of `sbatch`, such as `--mem=0`."""
    setup: str | None = None
    """Shell commands before the run, such as `module load cuda`."""
    output: str = "%x-%j.log"
    """File for the output of the job; %x stands for its name and %j for its number."""
    submit: bool = False
    """Whether to submit the job with `sbatch`. Otherwise the script is printed or written."""

    @model_validator(mode="after")
    def _fits(self) -> "Slurm":
        if self.time is not None:
            seconds = seconds_of(self.time)
            if seconds <= self.save:
                raise ValueError(f"save = {self.save} s leaves nothing of time = {self.time}, which is {seconds} s")
        if self.gpus % self.per_node:
            raise ValueError(f"gpus = {self.gpus} of a machine do not divide among per_node = {self.per_node} processes")
        if bad := [word for word in self.options if not re.fullmatch(r"--?[^\s\"'\\]+", word)]:
            raise ValueError(f"options holds {bad[0]!r}, which is no option of sbatch such as --mem=0")
        for key in ("partition", "account", "qos", "constraint", "output"):
            if re.search(r"[\s\"'\\]", getattr(self, key) or ""):
                raise ValueError(f"{key} = {getattr(self, key)!r} holds blanks, quotes or backslashes")
        return self


class JobSet(ScriptSettings):
    """A manifest for `kubectl apply`: a JobSet whose pods run one process each. All pods restart when one fails."""

    nodes: int = Field(2, gt=0)
    """Number of pods, one per machine; with several slices, the number per slice."""
    slices: int = Field(1, gt=0)
    """TPU slices of this topology in one run, joined by the data center's network."""
    restarts: int = Field(10, ge=0)
    """Largest number of restarts of the pods. JobSet counts all of them, even those after a new checkpoint."""
    program: str = "argosy"
    """The command that starts Argosy in the image, in shell syntax."""
    image: str
    """Image of the container, which has Argosy installed."""
    namespace: str | None = None
    """Namespace. None: that of kubectl's context."""
    volume: str | None = None
    """PersistentVolumeClaim for the run directory, writable by all pods (ReadWriteMany). None: dir= is in an object store."""
    mount: str = "/runs"
    """Path of the volume in the pods; dir= must be in it, or in an object store."""
    tpu: str | None = None
    """TPU as GKE's label `cloud.google.com/gke-tpu-accelerator` names it, such as tpu-v5p-slice."""
    topology: str | None = None
    """Topology of a TPU slice, such as 2x2x4; the number of its chips is `nodes` times `chips`."""
    chips: int = Field(4, gt=0)
    """TPU chips of each pod."""
    gpu: str | None = None
    """GPU as GKE's label `cloud.google.com/gke-accelerator` names it, such as nvidia-h100-80gb. None: any."""
    gpus: int = Field(0, ge=0)
    """GPUs of each pod."""
    cpu: str | None = None
    """CPU cores that each pod requests, in Kubernetes' notation, such as 8 or 500m."""
    memory: str | None = None
    """Memory that each pod requests, such as 64Gi."""
    spot: bool = False
    """Whether pods run on spot machines of GKE."""
    grace: int = Field(300, gt=0)
    """Seconds that a pod has to save and end when Kubernetes stops it."""
    queue: str | None = None
    """Local queue of Kueue. None: no queue."""

    @model_validator(mode="after")
    def _fits(self) -> "JobSet":
        if (self.tpu is None) != (self.topology is None):
            raise ValueError("tpu and topology go together: tpu=tpu-v5p-slice topology=2x2x2")
        if self.tpu is not None and (self.gpus or self.gpu):
            raise ValueError("a pod has TPUs or GPUs, not both")
        if self.tpu is None and self.slices > 1:
            raise ValueError(f"slices = {self.slices} is for TPUs: tpu=tpu-v5p-slice topology=2x2x2; nodes counts other machines")
        if self.gpu is not None and not self.gpus:
            raise ValueError("gpu names a kind of GPU, and gpus = 0")
        if self.topology is not None:
            if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){1,2}", self.topology):
                raise ValueError(f"topology = {self.topology!r} is none such as 2x4 or 2x2x4")
            self._check_tpu()
            chips = 1
            for size in self.topology.split("x"):
                chips *= int(size)
            if chips != self.nodes * self.chips:
                each = " of each slice" if self.slices > 1 else ""
                problem = f"topology = {self.topology} has {chips} chips; nodes x chips{each} = {self.nodes} x {self.chips}"
                raise ValueError(f"{problem}; nodes={chips // self.chips} fits it" if chips % self.chips == 0 else problem)
        if not self.mount.startswith("/"):
            raise ValueError(f"mount = {self.mount!r} is no absolute path")
        return self

    def _check_tpu(self) -> None:
        """Raises ValueError if GKE has no such TPU, because pods would wait for it forever. TPUs that are newer than this table
        pass."""
        if not str(self.tpu).startswith("tpu"):
            raise ValueError(f"tpu = {self.tpu!r} is no label of GKE's, such as {', '.join(TPUS)}")
        axes = TPUS.get(str(self.tpu))
        if axes is not None and str(self.topology).count("x") + 1 != axes:
            shape = "x".join("2" * axes)
            raise ValueError(f"topology = {self.topology}: that of {self.tpu} has {axes} numbers, such as {shape}")


class SkyPilot(ScriptSettings):
    """A task for `sky jobs launch` (or `sky launch`), which finds machines in any cloud, and replaces preempted ones."""

    nodes: int = Field(1, gt=0)
    """Number of machines, with one process each."""
    restarts: int = Field(10, ge=0)
    """Largest number of restarts after failures, counted by SkyPilot: every exit code other than 0 is one. Preempted machines are not
    counted.
    """
    program: str = "argosy"
    """The command that starts Argosy there, in shell syntax."""
    accelerators: str | None = None
    """Accelerators of each machine, as `sky show-gpus` lists them, such as H100:8. None: CPUs."""
    cpus: str | None = None
    """CPU cores of each machine: 8 is exactly 8, 8+ at least 8."""
    memory: str | None = None
    """Memory of each machine in GB: 64 is exactly 64, 64+ at least 64."""
    infra: str | None = None
    """Where to run: CLOUD, CLOUD/REGION, CLOUD/REGION/ZONE, or kubernetes/CONTEXT. None: the cheapest."""
    image: str | None = None
    """Image of the machines, such as docker:NAME."""
    spot: bool = False
    """Whether to use spot machines."""
    workdir: str | None = None
    """Folder of this machine that is copied to all machines; setup and the run start in it."""
    setup: str | None = None
    """Shell commands on each new machine, such as `pip install .`, which installs Argosy from workdir."""
    bucket: str | None = None
    """Bucket (gs://NAME, s3://NAME) that is mounted on all machines for the run directory."""
    volume: str | None = None
    """Volume of SkyPilot that is mounted on all machines for the run directory, writable by all."""
    mount: str = "/runs"
    """Path of the bucket or the volume; dir= must be in it, or in an object store."""

    @model_validator(mode="after")
    def _fits(self) -> "SkyPilot":
        if self.bucket is not None and self.volume is not None:
            raise ValueError("bucket and volume are both mounted at mount: choose one")
        if self.setup is None and self.image is None:
            raise ValueError("the machines need Argosy: setup='pip install .' workdir=. installs it, image=docker:NAME has it")
        if not self.mount.startswith("/"):
            raise ValueError(f"mount = {self.mount!r} is no absolute path")
        return self


def seconds_of(time: str) -> int:
    """Converts a time limit in the format of `sbatch` to seconds.

    Raises:
        ValueError: the text is no time limit.
    """
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time.strip())
    if match is None:
        raise ValueError(f"time = {time!r} is no time limit such as 90, 1:30:00 or 2-12:00:00")
    days, *rest = match.groups()
    numbers = [int(part) for part in rest if part is not None]
    # After days come hours; otherwise one or two numbers begin with minutes.
    units = (3600, 60, 1) if days is not None or len(numbers) == 3 else (60, 1)
    return int(days or 0) * 86400 + sum(number * unit for number, unit in zip(numbers, units))
