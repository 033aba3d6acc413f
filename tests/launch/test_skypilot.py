"""The task of SkyPilot. Its own parser reads it where `ARGOSY_SKYPILOT` names the Python of an environment that has SkyPilot."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from argosy.core.errors import BadInput, SettingsError
from argosy.core.settings import read_settings, words_layer
from argosy.core.settings.scalars import yaml_document
from argosy.launch import skypilot
from argosy.launch.cluster import ProcessPlace, detect_place
from argosy.launch.rendered import Command
from argosy.launch.settings import SkyPilot

ODD = ("train", "tiny", "dir=/runs/x", "data.source=/d/it's a \"b\" $HOME `x` #: {x}", "1e5", "yes")
COMMAND = Command(ODD, "/runs/x")
# The fields of a task and of its resources that are used here: SkyPilot's YAML reference.
TASK = {"name", "num_nodes", "resources", "workdir", "file_mounts", "volumes", "setup", "run"}
RESOURCES = {"infra", "accelerators", "cpus", "memory", "image_id", "use_spot", "job_recovery"}
FULL: dict[str, Any] = {
    "nodes": 2, "accelerators": "H100:8", "cpus": "32+", "memory": "256+", "infra": "gcp/us-central1", "image": "docker:a/b:1",
    "spot": True, "workdir": ".", "setup": "pip install .\necho 'done'", "restarts": 3,
}  # fmt: skip
ENOUGH: dict[str, Any] = {"image": "docker:a/b"}


def task(command: Command = COMMAND, **settings) -> dict[str, Any]:
    return yaml.safe_load(yaml_document(skypilot.render(command, SkyPilot(**settings))))


def test_a_task_with_everything():
    document = task(bucket="gs://mine", **FULL)
    assert set(document) <= TASK
    assert set(document["resources"]) == RESOURCES
    assert document["num_nodes"] == 2
    assert document["resources"]["job_recovery"] == {"max_restarts_on_errors": 3}
    assert document["resources"]["use_spot"] is True
    assert document["file_mounts"] == {"/runs": {"source": "gs://mine", "mode": "MOUNT"}}
    assert document["setup"] == FULL["setup"]
    assert task(volume="disk", **ENOUGH)["volumes"] == {"/runs": "disk"}


def test_words_arrive_as_they_were_typed_and_the_processes_find_each_other(tmp_path: Path):
    """SkyPilot runs the text by bash on each machine, with these variables."""
    program = tmp_path / "it"
    program.write_text("#!/bin/bash\n(printf '%s\\0' \"$@\"; env -0) > \"$OUT-$SKYPILOT_NODE_RANK\"\nexit 75\n")
    program.chmod(0o755)
    document = task(bucket="gs://mine", program=str(program), **FULL)
    for rank in range(2):
        variables_of_node = {"SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5", "SKYPILOT_NODE_RANK": str(rank), "SKYPILOT_NUM_NODES": "2"}
        done = subprocess.run(
            ["bash", "-c", document["run"]], env=os.environ | variables_of_node | {"OUT": str(tmp_path / "out")}, check=False
        )
        assert done.returncode == 75
        seen = (tmp_path / f"out-{rank}").read_text().split("\0")
        assert tuple(seen[: len(ODD)]) == ODD
        variables = dict(line.split("=", 1) for line in seen[len(ODD) :] if "=" in line)
        assert detect_place(variables) == ProcessPlace("skypilot", "10.0.0.4:8476", 2, rank)


@pytest.mark.parametrize(
    ("command", "settings", "problem"),
    [
        (Command(ODD, "runs/x"), ENOUGH, "would be lost with its machine"),
        (Command(ODD, "runs/x"), {**ENOUGH, "volume": "v"}, "is not in /runs"),
        (Command(ODD, "/runs/x", Path("a.yml")), {**ENOUGH, "volume": "v"}, "do not see a.yml"),
        (Command(ODD, "/runs/x", Path("/etc/a.yml")), {**ENOUGH, "volume": "v", "workdir": "."}, "do not see /etc/a.yml"),
    ],
)
def test_what_the_machines_would_not_see(command: Command, settings: dict[str, Any], problem: str):
    with pytest.raises(BadInput, match=problem):
        task(command, **settings)


def test_what_is_enough():
    assert "file_mounts" not in task(Command(ODD, "gs://mine/x"), **ENOUGH, nodes=2)
    assert task(Command(ODD, "gs://mine/x"), **ENOUGH, volume="v")["volumes"] == {"/runs": "v"}, "for the data"
    assert task(Command(ODD, "/runs/x", Path("a.yml")), volume="v", workdir=".", setup="true")["workdir"] == "."


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([], "the machines need Argosy"),
        (["image=a", "bucket=gs://a", "volume=b"], "choose one"),
        (["image=a", "mount=runs"], "no absolute path"),
    ],
)
def test_wrong_settings(words: list[str], problem: str):
    with pytest.raises(SettingsError, match=problem):
        read_settings(SkyPilot, words_layer(words))


READ = """
import sys, sky
task = sky.Task.from_yaml(sys.argv[1])
(resources,) = task.resources
print(repr((task.num_nodes, task.run, resources.accelerators, resources.use_spot, resources.job_recovery)))
"""


@pytest.mark.slow
@pytest.mark.skipif("ARGOSY_SKYPILOT" not in os.environ, reason="ARGOSY_SKYPILOT names no Python that has SkyPilot")
def test_skypilots_own_parser_reads_it(tmp_path: Path):
    document = skypilot.render(COMMAND, SkyPilot(volume="disk", **{**FULL, "infra": "kubernetes"}))
    (tmp_path / "task.yml").write_text(yaml_document(document))
    words = [os.environ["ARGOSY_SKYPILOT"], "-c", READ, str(tmp_path / "task.yml")]
    done = subprocess.run(words, capture_output=True, text=True, env=os.environ | {"HOME": str(tmp_path)}, check=False, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    nodes, run, accelerators, spot, recovery = eval(done.stdout.splitlines()[-1])
    assert (nodes, run, accelerators, spot) == (2, document["run"], {"H100": 8}, True)
    assert recovery["max_restarts_on_errors"] == 3
