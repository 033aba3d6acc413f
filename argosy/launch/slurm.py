"""Writes a job script for `sbatch`, which runs a command by `srun` as one or several processes on each machine.

The time limit does not kill the run. `save` seconds before the limit, Slurm sends SIGUSR1 to the script. The script lets Slurm send
SIGTERM to the processes, which save and end with 143. Then the job is queued again under its number. SIGTERM to `srun` itself would
kill the processes at once, so the script never forwards it.

    exit code of srun       result
    0, 2                    The job ends with this code.
    65                      The run would fail again (`core.errors.Final`). The job ends with 1.
    129, 130, 143           The job ends with this code. Shortly before the time limit, it is queued again instead.
    any other               All processes restart within the job, at most `restarts` times in a row without a new checkpoint.

`srun` returns the highest exit code of its processes. A job that wrote no new checkpoint is not queued again. Slurm itself queues the
job again when a machine fails or the job is preempted (`--requeue`). Processes find each other by variables that srun sets
(`launch.cluster`).
"""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from argosy.core.addresses import local_path
from argosy.core.errors import FINAL, SUPERVISED, BadInput
from argosy.core.progress import Say
from argosy.launch.rendered import Command, Devices, ScriptCheck, as_argument, deliver
from argosy.launch.settings import Slurm

# Gives each process of a machine its share of the GPUs, then becomes the command.
SHARE = """
IFS=, read -ra cards <<< "${CUDA_VISIBLE_DEVICES:?is not set by Slurm}"
each=$(( ${#cards[@]} / PER_NODE ))
mine=("${cards[@]:SLURM_LOCALID * each:each}")
export CUDA_VISIBLE_DEVICES=$(IFS=,; echo "${mine[*]}")
exec "$@"
"""

LOOP = """
# The checkpoints that are complete: another text when there is a new one.
saved() { printf '%s\\n' FOLDER/checkpoints/*/manifest.json; }
say() { echo "argosy: $*" >&2; }

at_limit=0 stopped=0 signaled=0 failures=0 attempt=0 begun=$(saved)
trap 'at_limit=1 signaled=1; scancel --signal=TERM "$SLURM_JOB_ID"' USR1
trap 'stopped=1 signaled=1' TERM

while true; do
    before=$(saved)
    export SUPERVISED=1 ARGOSY_ATTEMPT=$(( ${SLURM_RESTART_COUNT:-0} + attempt ))
    SRUN &
    step=$! signaled=1
    # A signal ends `wait` too.
    while (( signaled )); do
        signaled=0
        wait "$step"
        got=$?
        (( got == 127 )) || code=$got
    done
    case $code in 0 | 2) exit "$code" ;; FINAL) exit 1 ;; esac
    if (( at_limit && ! stopped )); then
        if [[ $(saved) == "$begun" ]]; then
            say "the time limit came before a checkpoint; not queued again"
            exit "$code"
        fi
        say "stopped at the time limit; queued again"
        exec scontrol requeue "$SLURM_JOB_ID"
    fi
    case $code in 129 | 130 | 143) exit "$code" ;; esac
    (( stopped )) && exit "$code"
    if [[ $(saved) == "$before" ]]; then failures=$(( failures + 1 )); else failures=1; fi
    if (( failures > RESTARTS )); then
        say "it failed $failures times without a new checkpoint, and restarts=RESTARTS; what is saved stays"
        exit "$code"
    fi
    attempt=$(( attempt + 1 ))
    say "srun ended with exit code $code; all processes start again (restart $attempt)"
done
"""


def launch(command: Command, settings: Slurm, say: Say) -> int:
    """Prints, writes or submits the job script. Returns an exit code.

    Raises:
        BadInput: there is no `sbatch` to submit the script with, or the file to write exists with other content.
    """
    check_sbatch(settings)
    text = render(command, settings, Path.cwd())
    if settings.write is not None or not settings.submit:
        deliver(text, settings.write, say, None if settings.submit else "sbatch FILE")
    if settings.submit:
        return subprocess.run(["sbatch"], input=text, text=True, check=False).returncode
    return 0


def checks(command: Command, settings: Slurm) -> list[ScriptCheck]:
    """Returns checks that the script can work."""

    def folder() -> None:
        directory = local_path(command.folder)
        if "://" in directory:
            problem = f"a job script does not see the checkpoints in {directory}, which tell whether the run goes on"
            raise BadInput(problem, hint="dir=FOLDER on a file system of the cluster")

    program = ScriptCheck(("program",), lambda: as_argument(program_of(settings)))
    return [program, ScriptCheck((), folder), ScriptCheck(("submit",), lambda: check_sbatch(settings))]


def check_sbatch(settings: Slurm) -> None:
    """Checks that `sbatch` exists, if the script is to be submitted.

    Raises:
        BadInput: `sbatch` does not exist.
    """
    if settings.submit and shutil.which("sbatch") is None:
        hint = "leave submit out and give write=FILE; on a machine of the cluster, `sbatch FILE` submits it"
        raise BadInput("this machine has no `sbatch` to submit the job with", hint=hint)


def devices(settings: Slurm, between: bool) -> Devices | None:
    """Returns the GPUs of the job; None if it requests none.

    Args:
        between: whether the mesh has axes between groups of devices (`mesh.between`).
    """
    if not settings.gpus:
        return None
    formula = f"nodes = {settings.nodes} x gpus = {settings.gpus}"
    if between and settings.nodes > 1:
        return Devices(settings.gpus, settings.nodes, True, formula)
    if between:
        return Devices(settings.gpus // settings.per_node, settings.per_node, False, formula)
    return Devices(settings.nodes * settings.gpus, 1, False, formula)


def program_of(settings: Slurm) -> str:
    """Returns the command that starts Argosy, in shell syntax."""
    return settings.program or shlex.join([python_for(settings.gpus > 0, Path(sys.executable)), "-m", "argosy"])


def python_for(gpus: bool, python: Path) -> str:
    """Returns the Python of the job. It is this one, or for GPUs that of the environment which `./run --gpu` makes in addition to the
    one for CPUs.

    Args:
        gpus: whether the job has GPUs.
        python: this Python.
    """
    # Not resolved: in an environment it is a link to the system's.
    home = python.parents[1]
    if not gpus or home.name != ".venv":
        return str(python)
    return str(home.with_name(".venv-gpu") / python.relative_to(home))


def render(command: Command, settings: Slurm, folder: Path) -> str:
    """Makes the job script.

    Args:
        folder: the folder in which the job runs, which is the current one.

    Raises:
        BadInput: `program` is no command, or the run directory is no folder.
    """
    for check in checks(command, settings):
        if "submit" not in check.needs:
            check.run()
    program, directory = program_of(settings), local_path(command.folder)
    lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in options(settings)), ""]
    lines += ["# Written by `argosy launch engine=slurm`.", f"cd -- {shlex.quote(str(folder))} || exit 1"]
    lines += [settings.setup] if settings.setup else []
    lines += [f"command=({program} {command.shell})"]
    # No --kill-on-bad-exit: it would kill a process that still saves when another has stopped.
    srun = ["srun", "--kill-on-bad-exit=0", f"--wait={settings.grace}"]
    srun += [f"--cpus-per-task={settings.cpus}"] if settings.cpus is not None else []
    if settings.gpus and settings.per_node > 1:
        lines += [f"share={shlex.quote(SHARE.replace('PER_NODE', str(settings.per_node)))}"]
        srun += ["bash", "-c", '"$share"', "argosy"]
    run = " ".join([*srun, '"${command[@]}"'])
    loop = LOOP.replace("SUPERVISED", SUPERVISED).replace("FINAL", str(FINAL))
    place = shlex.quote(os.path.join(folder, Path(directory).expanduser()))
    return "\n".join(lines) + loop.replace("RESTARTS", str(settings.restarts)).replace("SRUN", run).replace("FOLDER", place)


def options(settings: Slurm) -> list[str]:
    """Returns the options of `sbatch` for the job script."""
    flags = {
        "job-name": settings.name,
        "nodes": settings.nodes,
        "ntasks-per-node": settings.per_node,
        "gpus-per-node": settings.gpus or None,
        "cpus-per-task": settings.cpus,
        "time": settings.time,
        "signal": f"B:USR1@{settings.save}",
        "partition": settings.partition,
        "account": settings.account,
        "qos": settings.qos,
        "constraint": settings.constraint,
        "output": settings.output,
        "open-mode": "append",
    }
    return [*(f"--{name}={value}" for name, value in flags.items() if value is not None), "--requeue", *settings.options]
