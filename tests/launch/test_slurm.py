"""The job script for Slurm, run by bash with programs in the place of srun, scancel and scontrol that behave as their manuals say."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import python_script

from argosy.core.errors import BadInput, SettingsError
from argosy.core.settings import read_settings, words_layer
from argosy.launch import slurm
from argosy.launch.cluster import ProcessPlace, detect_place
from argosy.launch.rendered import Command
from argosy.launch.settings import Slurm, seconds_of

# srun starts the command for each task, tells the highest exit code, and signals are not passed on. It leaves its arguments, its
# number, and what each task had for variables.
SRUN = """
import json, os, subprocess, sys
folder, words = os.environ["TEST_FOLDER"], sys.argv[1:]
options = []
while words[0].startswith("-"):
    options.append(words.pop(0))
count = len([name for name in os.listdir(folder) if name.startswith("srun-")])
json.dump(options, open(f"{folder}/srun-{count}", "w"))
tasks = []
for rank in range(int(os.environ["SLURM_NTASKS"])):
    each = int(os.environ["SLURM_NTASKS_PER_NODE"])
    own = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank % each), "SLURM_STEP_NODELIST": "gpu[03-04]",
           "SLURM_STEP_NUM_TASKS": os.environ["SLURM_NTASKS"], "TEST_START": str(count)}
    tasks.append(subprocess.Popen(words, env=os.environ | own, start_new_session=True))
open(f"{folder}/pids", "w").write(" ".join(str(task.pid) for task in tasks))
codes = [task.wait() for task in tasks]
sys.exit(max(code if code >= 0 else 128 - code for code in codes))
"""
SCANCEL = """#!/bin/bash
echo "$*" >> "$TEST_FOLDER/scancel"
[[ $1 == --signal=TERM ]] && kill -TERM $(cat "$TEST_FOLDER/pids")
"""
SCONTROL = """#!/bin/bash
echo "$*" >> "$TEST_FOLDER/scontrol"
"""
TASK = """
import json, os, signal, sys, time
folder, start, rank = os.environ["TEST_FOLDER"], int(os.environ["TEST_START"]), int(os.environ["SLURM_PROCID"])
json.dump({"words": sys.argv[1:], "variables": dict(os.environ), "folder": os.getcwd()}, open(f"{folder}/task-{start}-{rank}", "w"))
def save(step):
    os.makedirs(f"{folder}/run/checkpoints/{step}", exist_ok=True)
    open(f"{folder}/run/checkpoints/{step}/manifest.json", "w").close()
def until_told(saves):
    def told(*_):
        if saves:
            save(7)
        sys.exit(143)
    signal.signal(signal.SIGTERM, told)
    open(f"{folder}/ready-{rank}", "w").close()
    time.sleep(30)
"""


class Job:
    """A job script in bash, in an allocation of two machines."""

    def __init__(self, folder: Path, task: str, *words: str, per_node: int = 1, **settings):
        for name, text in (("srun", python_script(SRUN)), ("scancel", SCANCEL), ("scontrol", SCONTROL)):
            path = folder / "bin" / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
            path.chmod(0o755)
        (folder / "task.py").write_text(TASK + task)
        self.folder = folder
        slurm_settings = Slurm(program=shlex.join([sys.executable, str(folder / "task.py")]), nodes=2, per_node=per_node, **settings)
        self.text = slurm.render(Command(("train", "tiny", *words), "run"), slurm_settings, folder)
        (folder / "job.sh").write_text(self.text)

    def start(self, **variables: str) -> subprocess.Popen[str]:
        each = 2 if "--ntasks-per-node=2" in self.text else 1
        variables_of_job = {"TEST_FOLDER": str(self.folder), "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}"}
        variables_of_job |= {"SLURM_JOB_ID": "4097", "SLURM_NTASKS": str(2 * each), "SLURM_NTASKS_PER_NODE": str(each)}
        words = ["bash", str(self.folder / "job.sh")]
        return subprocess.Popen(words, env=os.environ | variables_of_job | variables, stderr=subprocess.PIPE, text=True)

    def run(self, **variables: str) -> tuple[int, str]:
        process = self.start(**variables)
        _, stderr = process.communicate(timeout=60)
        return process.returncode, stderr

    def wait_for(self, *names: str) -> None:
        until = time.monotonic() + 20
        while not all((self.folder / name).exists() for name in names):
            assert time.monotonic() < until
            time.sleep(0.02)

    def told(self, name: str) -> list[str]:
        path = self.folder / name
        return path.read_text().splitlines() if path.exists() else []

    def task(self, start: int, rank: int) -> dict:
        return json.loads((self.folder / f"task-{start}-{rank}").read_text())

    def starts(self) -> int:
        return len(list(self.folder.glob("srun-*")))


ODD = ["data.source=it's a \"file\" $HOME `x` \\n.txt", "sample.prompt=*", "a=$(touch pwned)", "tab=\t|"]


def test_words_arrive_as_they_were_typed_and_the_processes_find_each_other(tmp_path: Path):
    folder = tmp_path / "it's a folder"
    folder.mkdir()
    job = Job(folder, "", *ODD)
    code, stderr = job.run()
    assert (code, stderr) == (0, "")
    for rank in range(2):
        task = job.task(0, rank)
        assert task["words"] == ["train", "tiny", *ODD]
        assert task["folder"] == str(folder)
        assert detect_place(task["variables"]) == ProcessPlace("slurm", "gpu03:61441", 2, rank)
    assert not (folder / "pwned").exists()


def test_gpus_of_a_machine_are_shared_out(tmp_path: Path):
    job = Job(tmp_path, "", *ODD, per_node=2, gpus=8)
    assert job.run(CUDA_VISIBLE_DEVICES="0,1,2,3,4,5,6,7")[0] == 0
    seen = [job.task(0, rank)["variables"]["CUDA_VISIBLE_DEVICES"] for rank in range(4)]
    assert seen == ["0,1,2,3", "4,5,6,7", "0,1,2,3", "4,5,6,7"]
    assert job.task(0, 3)["words"] == ["train", "tiny", *ODD]
    assert detect_place(job.task(0, 3)["variables"]) == ProcessPlace("slurm", "gpu03:61441", 4, 3)


@pytest.mark.parametrize(("code", "its"), [(2, 2), (130, 130), (143, 143), (65, 1)])
def test_a_mistake_a_stop_or_what_would_fail_again_starts_nothing_again(tmp_path: Path, code: int, its: int):
    job = Job(tmp_path, f"sys.exit({code})")
    assert job.run()[0] == its
    assert job.starts() == 1
    assert job.told("scontrol") == []


def test_a_failure_starts_all_again_and_restarts_without_progress_end(tmp_path: Path):
    job = Job(tmp_path, "sys.exit(1 if rank else 75)", restarts=2)
    code, stderr = job.run(SLURM_RESTART_COUNT="4")
    assert code == 75
    assert job.starts() == 3
    assert "it failed 3 times without a new checkpoint, and restarts=2" in stderr
    assert [detect_place(job.task(start, 1)["variables"]).attempt for start in range(3)] == [4, 5, 6]


def test_restarts_with_progress_go_on(tmp_path: Path):
    job = Job(tmp_path, "save(start) if rank == 0 else None\nsys.exit(1 if start < 4 else 0)", restarts=1)
    assert job.run()[0] == 0
    assert job.starts() == 5


def test_at_the_time_limit_the_run_saves_and_is_queued_again(tmp_path: Path):
    job = Job(tmp_path, "until_told(rank == 0)")
    process = job.start()
    job.wait_for("pids", "ready-0", "ready-1")
    process.send_signal(signal.SIGUSR1)
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == 0, stderr
    assert job.told("scancel") == ["--signal=TERM 4097"]
    assert job.told("scontrol") == ["requeue 4097"]
    assert job.starts() == 1


def test_a_job_that_saved_nothing_is_not_queued_again(tmp_path: Path):
    """It would be told to stop at the same place for ever."""
    job = Job(tmp_path, "until_told(False)")
    process = job.start()
    job.wait_for("pids", "ready-0", "ready-1")
    process.send_signal(signal.SIGUSR1)
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == 143
    assert "not queued again" in stderr
    assert job.told("scontrol") == []


def test_a_job_that_is_canceled_waits_for_the_run_and_is_not_queued_again(tmp_path: Path):
    """Slurm sends SIGTERM to the shell and to the processes; the job is over when the shell ends, so it waits until they have."""
    job = Job(tmp_path, "until_told(True)")
    process = job.start()
    job.wait_for("pids", "ready-0", "ready-1")
    process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    assert process.poll() is None
    for pid in job.told("pids")[0].split():
        os.kill(int(pid), signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == 143
    assert job.told("scontrol") == []
    assert job.starts() == 1


def test_a_run_that_is_done_at_the_limit_is_not_queued_again(tmp_path: Path):
    job = Job(tmp_path, "signal.signal(15, lambda *_: sys.exit(0)); open(f'{folder}/ready-{rank}', 'w'); time.sleep(30)")
    process = job.start()
    job.wait_for("pids", "ready-0", "ready-1")
    process.send_signal(signal.SIGUSR1)
    process.communicate(timeout=20)
    assert process.returncode == 0
    assert job.told("scontrol") == []


def test_a_remote_run_directory_is_refused():
    with pytest.raises(BadInput, match="does not see the checkpoints in gs://a/b"):
        slurm.render(Command(("train", "tiny"), "gs://a/b"), Slurm(), Path.cwd())


def test_options_of_sbatch():
    settings = Slurm(
        nodes=4, per_node=8, gpus=8, cpus=6, time="1-12", save=600, partition="gpu", account="me", qos="high", constraint="a100",
        options=("--mem=0",),
    )  # fmt: skip
    assert slurm.options(settings) == [
        "--job-name=argosy", "--nodes=4", "--ntasks-per-node=8", "--gpus-per-node=8", "--cpus-per-task=6", "--time=1-12",
        "--signal=B:USR1@600", "--partition=gpu", "--account=me", "--qos=high", "--constraint=a100", "--output=%x-%j.log",
        "--open-mode=append", "--requeue", "--mem=0",
    ]  # fmt: skip


# sbatch(1): minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes, days-hours:minutes:seconds.
@pytest.mark.parametrize(
    ("time", "seconds"),
    [("90", 5400), ("5:30", 330), ("1:30:00", 5400), ("2-12", 216000), ("1-0:30", 88200), ("1-01:00:05", 90005)],
)
def test_time_limits(time: str, seconds: int):
    assert seconds_of(time) == seconds


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["time=5"], "leaves nothing of time"),
        (["time=soon"], "is no time limit"),
        (["gpus=8", "per_node=3"], "do not divide among per_node = 3"),
        (["options=['mem=0']"], "is no option of sbatch"),
        (["options=['--comment=a b']"], "is no option of sbatch"),
        (["partition=a b"], "holds blanks"),
        (["name=A_b"], "lower-case letters"),
    ],
)
def test_wrong_settings(words: list[str], problem: str):
    with pytest.raises(SettingsError, match=problem):
        read_settings(Slurm, words_layer(words))


def test_submit_needs_sbatch_and_hands_the_script_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    command = Command(("train", "tiny"), "runs/tiny")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BadInput, match="no `sbatch`"):
        slurm.launch(command, Slurm(submit=True), print)
    write = f"open({str(tmp_path / 'got')!r}, 'w').write(sys.stdin.read())"
    (tmp_path / "sbatch").write_text(python_script(f"import sys\n{write}\nsys.exit(3)\n"))
    (tmp_path / "sbatch").chmod(0o755)
    assert slurm.launch(command, Slurm(submit=True), print) == 3
    assert (tmp_path / "got").read_text() == slurm.render(command, Slurm(submit=True), Path.cwd())
    assert capsys.readouterr().out == ""


def test_a_job_with_gpus_names_the_environment_for_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """That of `./run --gpu`, beside the one for CPUs that writes the script."""
    monkeypatch.setattr(sys, "executable", f"{tmp_path}/a b/.venv/bin/python")
    command = Command(("train", "tiny"), "run")
    assert f"command=('{tmp_path}/a b/.venv-gpu/bin/python' -m argosy train tiny" in slurm.render(command, Slurm(gpus=8), tmp_path)
    assert f"command=('{tmp_path}/a b/.venv/bin/python' -m argosy train tiny" in slurm.render(command, Slurm(), tmp_path)
    monkeypatch.setattr(sys, "executable", "/opt/python/bin/python")
    assert "command=(/opt/python/bin/python -m argosy train tiny" in slurm.render(command, Slurm(gpus=8), tmp_path)
