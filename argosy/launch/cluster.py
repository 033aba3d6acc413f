"""Reads this process's rank and the number of processes from the environment, and joins the other processes of a run.

    engine       variables
    argosy       ARGOSY_COORDINATOR, ARGOSY_PROCESSES, ARGOSY_RANK     `argosy launch` sets these; other launchers may, too
    jax          JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID
    slurm        inside srun: SLURM_STEP_NODELIST, SLURM_NTASKS, SLURM_PROCID
    openmpi      under mpirun: OMPI_COMM_WORLD_SIZE, OMPI_COMM_WORLD_RANK; JAX_COORDINATOR_ADDRESS, or OMPI_MCA_orte_hnp_uri
    jobset       indexed pods of a JobSet: JOBSET_NAME, JOB_COMPLETION_INDEX, ARGOSY_PROCESSES; of several Jobs
                 JOB_INDEX, PROCESSES_IN_JOB
    skypilot     SKYPILOT_NODE_IPS, SKYPILOT_NODE_RANK
    tpu          slices of several hosts: TPU_WORKER_HOSTNAMES, TPU_WORKER_ID; of several slices MEGASCALE_COORDINATOR_ADDRESS,
                 MEGASCALE_NUM_SLICES, MEGASCALE_SLICE_ID

The first row whose variables are set decides. Reading the environment imports no jax.
"""

import atexit
import errno
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from argosy.core.errors import ATTEMPT, FINAL, ArgosyError, BadInput
from argosy.core.process import signals
from argosy.launch.ports import is_taken

# A process that cannot be reached for this long counts as dead, and the others end, within 10 s where it is cut off.
HEARTBEAT_S = 8
# How long processes wait for each other at the start, and at a good end.
JOIN_S, LEAVE_S = 300, 20
# After how long a process says that it waits.
QUIET_S = 10
PORT = 8476
# Set by a supervisor: its process, where stacks go (a file for each process), seconds until a process counts as stuck.
PARENT, STACKS, STUCK = "ARGOSY_PARENT", "ARGOSY_STACKS", "ARGOSY_STUCK_S"
# Set by a supervisor: a file for what XLA, Gloo and other libraries print below Python.
NATIVE = "ARGOSY_NATIVE_LOG"


@dataclass(frozen=True)
class ProcessPlace:
    """The place of this process among the processes of a run.

    engine: the engine whose variables were set (a row of the table above).
    coordinator: HOST:PORT of the coordinator, which rank 0 runs.
    processes: the number of processes.
    rank: the rank of this process.
    attempt: the number of earlier starts of the processes.
    """

    engine: str
    coordinator: str
    processes: int
    rank: int
    attempt: int = 0


Environment = Mapping[str, str]


def detect_place(environment: Environment) -> ProcessPlace | None:
    """Reads the place of this process from the environment. Returns None if there is only one process.

    Raises:
        BadInput: the variables are incomplete or contradict each other.
    """
    for engine, read in ENGINES.items():
        place = read(environment)
        if place is None:
            continue
        coordinator, processes, rank = place
        if not 0 <= rank < processes:
            raise BadInput(f"process {rank} of {processes}", where=f"in the variables of {engine}", hint="ranks count from 0")
        attempt = _number(environment, ATTEMPT) if ATTEMPT in environment else 0
        return ProcessPlace(engine, coordinator, processes, rank, attempt) if processes > 1 else None
    return None


def _number(environment: Environment, name: str) -> int:
    """Reads a whole number from an environment variable.

    Raises:
        BadInput: the variable is missing, or is not a whole number.
    """
    value = environment.get(name)
    if value is None or not re.fullmatch(r"\d+", value.strip()):
        problem = "is not set" if value is None else f"is {value!r}, not a whole number"
        raise BadInput(f"{name} {problem}", where="environment of this process", hint="every process of a run needs it")
    return int(value)


def _from_argosy(environment: Environment) -> tuple[str, int, int] | None:
    if "ARGOSY_COORDINATOR" not in environment:
        # Indexed pods have the number of processes alone.
        if "ARGOSY_RANK" in environment or ("ARGOSY_PROCESSES" in environment and "JOBSET_NAME" not in environment):
            hint = "every process of a run needs ARGOSY_COORDINATOR=HOST:PORT, ARGOSY_PROCESSES and ARGOSY_RANK"
            raise BadInput("ARGOSY_COORDINATOR is not set", where="environment of this process", hint=hint)
        return None
    address = with_port(environment["ARGOSY_COORDINATOR"])
    return address, _number(environment, "ARGOSY_PROCESSES"), _number(environment, "ARGOSY_RANK")


def _from_jax(environment: Environment) -> tuple[str, int, int] | None:
    if not {"JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES"} <= set(environment):
        return None
    address = with_port(environment["JAX_COORDINATOR_ADDRESS"])
    return address, _number(environment, "JAX_NUM_PROCESSES"), _number(environment, "JAX_PROCESS_ID")


def _from_slurm(environment: Environment) -> tuple[str, int, int] | None:
    # sbatch and salloc set the others for their own shell too; only srun sets this one.
    if "SLURM_STEP_NODELIST" not in environment or "SLURM_PROCID" not in environment:
        return None
    # The same on all nodes, and another one for each job on a shared node.
    port = 61440 + _number(environment, "SLURM_JOB_ID") % 4096
    address = f"{first_host(environment['SLURM_STEP_NODELIST'])}:{port}"
    processes = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environment else "SLURM_NTASKS"
    return address, _number(environment, processes), _number(environment, "SLURM_PROCID")


def _from_openmpi(environment: Environment) -> tuple[str, int, int] | None:
    if "OMPI_COMM_WORLD_SIZE" not in environment:
        return None
    sizes = _number(environment, "OMPI_COMM_WORLD_SIZE"), _number(environment, "OMPI_COMM_WORLD_RANK")
    if address := environment.get("JAX_COORDINATOR_ADDRESS"):
        return with_port(address), *sizes
    launcher = re.search(r"tcp6?://\[?([^,:\]]+)", environment.get("OMPI_MCA_orte_hnp_uri", ""))
    if launcher is None:
        hint = "mpirun -x JAX_COORDINATOR_ADDRESS=HOST:PORT, with the host of rank 0"
        raise BadInput("mpirun does not say where rank 0 is", where="environment of this process", hint=hint)
    return with_port(launcher[1]), *sizes


def _from_jobset(environment: Environment) -> tuple[str, int, int] | None:
    if not {"JOBSET_NAME", "JOB_COMPLETION_INDEX"} <= set(environment):
        return None
    # A headless service names each pod: JOBSET-REPLICATEDJOB-JOB-POD.SUBDOMAIN.
    name, job = environment["JOBSET_NAME"], environment.get("REPLICATED_JOB_NAME", "workers")
    address = environment.get("JOBSET_COORDINATOR") or f"{name}-{job}-0-0.{name}"
    rank = _number(environment, "JOB_COMPLETION_INDEX")
    if "JOB_INDEX" in environment:
        rank += _number(environment, "JOB_INDEX") * _number(environment, "PROCESSES_IN_JOB")
    return with_port(address), _number(environment, "ARGOSY_PROCESSES"), rank


def _from_skypilot(environment: Environment) -> tuple[str, int, int] | None:
    if "SKYPILOT_NODE_IPS" not in environment:
        return None
    hosts = environment["SKYPILOT_NODE_IPS"].split()
    return with_port(hosts[0]), len(hosts), _number(environment, "SKYPILOT_NODE_RANK")


def _from_tpu(environment: Environment) -> tuple[str, int, int] | None:
    hosts = [host for host in environment.get("TPU_WORKER_HOSTNAMES", "").split(",") if host]
    if leader := environment.get("MEGASCALE_COORDINATOR_ADDRESS"):
        # The host of rank 0, with a port of libtpu's own.
        host = leader if leader.count(":") > 1 and not leader.startswith("[") else re.sub(r":\d+$", "", leader)
        slices, slice_id = (_number(environment, f"MEGASCALE_{name}") for name in ("NUM_SLICES", "SLICE_ID"))
        each, worker = max(len(hosts), 1), _number(environment, "TPU_WORKER_ID") if hosts else 0
        return with_port(host), slices * each, slice_id * each + worker
    if len(hosts) < 2:
        return None
    return with_port(hosts[0]), len(hosts), _number(environment, "TPU_WORKER_ID")


ENGINES: dict[str, Callable[[Environment], tuple[str, int, int] | None]] = {
    "argosy": _from_argosy,
    "jax": _from_jax,
    "slurm": _from_slurm,
    "openmpi": _from_openmpi,
    "jobset": _from_jobset,
    "skypilot": _from_skypilot,
    "tpu": _from_tpu,
}


def with_port(address: str) -> str:
    """Returns an address as HOST:PORT. A host without a port gets the default port, and an IPv6 address gets brackets."""
    if re.fullmatch(r"(\[.*\]|[^:]+):\d+", address):
        return address
    return f"[{address}]:{PORT}" if address.count(":") > 1 and not address.startswith("[") else f"{address}:{PORT}"


def first_host(hosts: str) -> str:
    """Returns the first host of a Slurm list such as `node[003-007,9],other1`."""
    match = re.match(r"([^,\[]+)(?:\[([^\]]+)\]([^,\[]*))?", hosts)
    if match is None:
        raise BadInput(f"{hosts!r} is no list of hosts", where="SLURM_STEP_NODELIST")
    name, numbers, rest = match.groups()
    return name if numbers is None else name + re.split(r"[,-]", numbers)[0] + rest


# ---------------------------------------------------------------- joining


def join(place: ProcessPlace) -> None:
    """Joins the processes of a run. It must be called before anything else asks jax for devices.

    Raises:
        ArgosyError: the other processes do not arrive, or the coordinator cannot be reached.
    """
    import jax

    # Its handler of SIGTERM would replace ours: `parallel.processes.Stopping` does its work for every signal.
    jax.config.update("jax_enable_preemption_service", False)
    atexit.register(_leave_at_once)
    if NATIVE in os.environ:
        keep_apart(Path(os.environ[NATIVE]))
    if PARENT in os.environ:
        threading.Thread(target=_end_with, args=(int(os.environ[PARENT]),), name="parent", daemon=True).start()
    wait = int(os.environ.get("ARGOSY_JOIN_S", JOIN_S))
    host = place.coordinator.rpartition(":")[0]
    bind = place.coordinator if host in ("127.0.0.1", "localhost") else None
    if place.rank == 0:
        check_free(place, host if bind else "")
    joined = threading.Event()
    threading.Thread(target=_wait, args=(place, host, wait, joined), name="join", daemon=True).start()
    try:
        jax.distributed.initialize(
            place.coordinator,
            place.processes,
            place.rank,
            # After it XLA aborts the process; `_wait` ends it before.
            initialization_timeout=wait + 60,
            heartbeat_timeout_seconds=HEARTBEAT_S,
            shutdown_timeout_seconds=LEAVE_S,
            coordinator_bind_address=bind,
        )
    except Exception as error:
        raise _not_joined(place, error) from None
    finally:
        joined.set()


def keep_apart(path: Path) -> None:
    """Redirects the output of native libraries (file descriptors 1 and 2) to a file. Python's output still goes where it went
    before."""
    with suppress(OSError):
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        for name, number in (("stdout", 1), ("stderr", 2)):
            before = getattr(sys, name)
            before.flush()
            setattr(sys, name, os.fdopen(os.dup(number), "w", 1, encoding=before.encoding, errors=before.errors))
            os.dup2(file, number)
        os.close(file)


def check_free(place: ProcessPlace, host: str) -> None:
    """Checks that the coordinator's port is free, because jaxlib 0.10.2 crashes if another program listens on it.

    Args:
        host: the host to listen on. Empty: all addresses of this machine.

    Raises:
        ArgosyError: the port is taken.
    """
    if is_taken(host, int(place.coordinator.rpartition(":")[2])):
        raise _not_joined(place, OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE)))


def _wait(place: ProcessPlace, host: str, wait: int, joined: threading.Event) -> None:
    """Reports that this process waits for the others, and ends it with an error if they do not arrive in time.

    Args:
        host: the host to listen on, as in `check_free`.
        wait: the time to wait, in seconds.
        joined: is set when all processes have joined.
    """
    if joined.wait(min(QUIET_S, wait)):
        return
    who, remark = f"process {place.rank} of {place.processes}", ""
    try:
        socket.getaddrinfo(host.strip("[]"), None)
    except OSError as error:
        remark = f"; no address of {host} is known ({error.strerror})"
    print(f"{who} waits for the others at {place.coordinator}, {wait} s at most{remark}", file=sys.stderr, flush=True)
    if joined.wait(wait - min(QUIET_S, wait)):
        return
    problem, hint = f"{who} waited {wait} s for the others at {place.coordinator}{remark}", "ARGOSY_JOIN_S waits longer"
    print(ArgosyError(problem, hint=f"start all of them with the same coordinator; {hint}"), file=sys.stderr, flush=True)
    os._exit(ArgosyError.exit_code)


def _end_with(parent: int) -> None:
    """Stops this process as SIGTERM does, with its state saved, as soon as its supervisor (the process `parent`) is gone. Nobody could
    restart or end the process any more."""
    while os.getppid() == parent:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGTERM)


def _not_joined(place: ProcessPlace, error: Exception) -> ArgosyError:
    message = (str(error).splitlines() or [type(error).__name__])[0][:200]
    who = f"process {place.rank} of {place.processes}"
    if "in use" in message or "bind" in message.lower():
        return ArgosyError(f"{who} cannot listen on {place.coordinator}: {message}", hint="another program uses the port")
    return ArgosyError(f"{who} could not join at {place.coordinator}", where=message)


def _leave_at_once() -> None:
    """Ends a failed process without jax's exit function. In that function the process would wait for the others, which wait for it in a
    step."""
    from argosy.parallel import processes

    if signals.ended_with() in (1, 2, FINAL, LOST) and not processes.failed_together():
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(signals.ended_with() or 1)


# The exit code of a process that ends because another one did (EX_TEMPFAIL).
LOST = 75
# What XLA prints when it ends a process because another one no longer answers.
ABORTED = "JAX distributed service detected fatal errors"
_LOST = re.compile(r"gloo|connection (reset|closed|refused)|peer|unavailable|heartbeat|coordination service|nccl|socket", re.IGNORECASE)


class PeerLost(ArgosyError):
    """Another process of the run ended, or cannot be reached."""

    exit_code = LOST


@contextmanager
def as_peer_lost() -> Iterator[None]:
    """A context in which jax's errors about a lost process are raised as `PeerLost`."""
    try:
        yield
    except Exception as error:
        message = (str(error).splitlines() or [""])[0]
        if type(error).__name__ not in ("JaxRuntimeError", "XlaRuntimeError") or not _LOST.search(message):
            raise
        problem = "another process of this run ended or cannot be reached"
        hint = "its own messages say why; the same command resumes from the last checkpoint"
        if NATIVE in os.environ:
            # The supervisor says who and where.
            with suppress(OSError):
                os.write(2, f"{message}\n".encode())
            raise PeerLost(problem) from None
        raise PeerLost(problem, where=message[:200], hint=hint) from None
