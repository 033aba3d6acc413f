"""The manifest of a JobSet, beside the schema of its custom resource, and what its pods find in their environment."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from jax._src.clusters.cloud_tpu_cluster import GkeTpuCluster

from argosy.core.errors import BadInput, SettingsError
from argosy.core.settings import read_settings, words_layer
from argosy.core.settings.scalars import yaml_document
from argosy.launch import jobset
from argosy.launch.cluster import ProcessPlace, detect_place
from argosy.launch.rendered import Command
from argosy.launch.settings import JobSet

SCHEMA = json.loads(Path(__file__).with_name("jobset_schema.json").read_text())
COMMAND = Command(("train", "tiny", "dir=/runs/x"), "/runs/x")
TPU: dict[str, Any] = {"tpu": "tpu-v5p-slice", "topology": "2x2x4", "nodes": 4, "spot": True, "queue": "q"}
SLICES = TPU | {"slices": 3}
GPU: dict[str, Any] = {"gpus": 8, "gpu": "nvidia-h100-80gb", "cpu": "64", "memory": "512Gi", "namespace": "team"}


def manifest(command: Command = COMMAND, **settings) -> dict[str, Any]:
    """As kubectl reads it."""
    return yaml.safe_load(yaml_document(jobset.render(command, JobSet(**{"image": "a/b:1", "volume": "claim"} | settings))))


def pod_of(job_set: dict[str, Any]) -> dict[str, Any]:
    return job_set["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


@pytest.mark.parametrize("settings", [{}, TPU, SLICES, GPU], ids=["cpu", "tpu", "slices", "gpu"])
def test_the_schema_of_the_resource_takes_it(settings: dict[str, Any]):
    jsonschema.validate(manifest(**settings), SCHEMA)


def test_the_schema_finds_wrong_fields_and_types():
    job_set = manifest(**TPU)
    job_set["spec"]["failurePolicy"]["maxRestart"] = 3
    job_set["spec"]["replicatedJobs"][0]["template"]["spec"]["parallelism"] = "4"
    pod_of(job_set)["containers"][0]["env"][0]["value"] = 4
    assert len(list(jsonschema.Draft7Validator(SCHEMA).iter_errors(job_set))) == 3


@pytest.mark.parametrize("nodes", [2, 4])
def test_pods_find_each_other(nodes: int):
    job_set = manifest(nodes=nodes, name="my-run")
    job = job_set["spec"]["replicatedJobs"][0]
    assert job["template"]["spec"]["completionMode"] == "Indexed"
    assert job["template"]["spec"]["completions"] == job["template"]["spec"]["parallelism"] == nodes
    for index in range(nodes):
        variables = variables_of(job_set, 0, index)
        # Pods are named JOBSET-REPLICATEDJOB-JOBINDEX-PODINDEX, in the service named as the JobSet.
        assert detect_place(variables) == ProcessPlace("jobset", f"my-run-{job['name']}-0-0.my-run:8476", nodes, index, 2)
    assert job_set["spec"]["network"] == {"enableDNSHostnames": True, "publishNotReadyAddresses": True}


def variables_of(job_set: dict[str, Any], job: int, index: int) -> dict[str, str]:
    """The environment of a pod. JobSet's controller sets the annotations, and Kubernetes the index of an indexed Job's pod."""
    annotations = {"jobset.sigs.k8s.io/restart-attempt": "2", "jobset.sigs.k8s.io/job-index": str(job)}
    variables = {"JOB_COMPLETION_INDEX": str(index)}
    for variable in pod_of(job_set)["containers"][0]["env"]:
        path = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", "")
        variables[variable["name"]] = variable["value"] if "value" in variable else annotations[path.split("'")[1]]
    return variables


def test_pods_of_several_slices_find_each_other(monkeypatch: pytest.MonkeyPatch):
    """Ranks count slice by slice, as jax itself counts them from what GKE sets."""
    job_set = manifest(**SLICES, name="my-run")
    (job,) = job_set["spec"]["replicatedJobs"]
    assert (job["replicas"], job["template"]["spec"]["completions"]) == (3, 4)
    places = [
        (detect_place(variables_of(job_set, job, index)), variables_of(job_set, job, index)) for job in range(3) for index in range(4)
    ]
    leader = "my-run-workers-0-0.my-run:8476"
    assert [place for place, _ in places] == [ProcessPlace("jobset", leader, 12, rank, 2) for rank in range(12)]
    for place, variables in places:
        mega = {name: value for name, value in variables.items() if name.startswith("MEGASCALE_")}
        gke = mega | {"TPU_WORKER_HOSTNAMES": "a,b,c,d", "TPU_WORKER_ID": variables["JOB_COMPLETION_INDEX"]}
        for name, value in gke.items():
            monkeypatch.setenv(name, value)
        assert place is not None
        assert (GkeTpuCluster.get_process_id(), GkeTpuCluster.get_process_count()) == (place.rank, 12)
        assert detect_place(gke) == ProcessPlace("tpu", place.coordinator, 12, place.rank)
    assert job_set["metadata"]["annotations"] == {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}


def test_a_users_mistake_ends_it_and_anything_else_starts_all_again():
    job_set = manifest(restarts=4)
    job = job_set["spec"]["replicatedJobs"][0]["template"]["spec"]
    # A pod that fails must not be started again alone.
    assert (job["backoffLimit"], pod_of(job_set)["restartPolicy"]) == (0, "Never")
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule == {"action": "FailJob", "onExitCodes": {"containerName": "argosy", "operator": "In", "values": [2, 65]}}
    assert rule["onExitCodes"]["containerName"] == pod_of(job_set)["containers"][0]["name"]
    policy = job_set["spec"]["failurePolicy"]
    assert policy["maxRestarts"] == 4
    assert policy["rules"] == [{"name": "mistakes", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}]


def test_tpus_and_gpus_as_gke_asks_for_them():
    pod = pod_of(manifest(**TPU))
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v5p-slice",
        "cloud.google.com/gke-tpu-topology": "2x2x4",
        "cloud.google.com/gke-spot": "true",
    }
    assert pod["containers"][0]["resources"] == {"limits": {"google.com/tpu": 4}}
    pod = pod_of(manifest(**GPU))
    resources = {"requests": {"cpu": "64", "memory": "512Gi"}, "limits": {"nvidia.com/gpu": 8}}
    assert pod["containers"][0]["resources"] == resources
    assert {"name": "shared-memory", "emptyDir": {"medium": "Memory"}} in pod["volumes"]


def test_words_arrive_as_they_were_typed():
    """Also numbers, switches and what Kubernetes would replace in a command."""
    odd = ("train", "tiny", "dir=/runs/x", "data.source=/d/it's a \"b\" #: {x}", "1e5", "yes", "a: b", "~", "a\nb", "x=\u0085 é")
    job_set = manifest(Command(odd, "/runs/x"), program="env 'A=1 2' argosy")
    assert pod_of(job_set)["containers"][0]["command"] == ["env", "A=1 2", "argosy", *odd]
    job_set = manifest(Command(("train", "tiny", "a=$(HOME) $HOME"), "/runs/x"))
    assert pod_of(job_set)["containers"][0]["command"][-1] == "a=$$(HOME) $HOME"


def test_a_run_directory_in_an_object_store_needs_no_volume():
    job_set = manifest(Command(("train", "tiny", "dir=gs://mine/x"), "gs://mine/x"), volume=None)
    jsonschema.validate(job_set, SCHEMA)
    assert (pod_of(job_set)["volumes"], pod_of(job_set)["containers"][0]["volumeMounts"]) == ([], [])
    with pytest.raises(BadInput, match="would be lost with its pods"):
        manifest(volume=None)
    assert pod_of(manifest(Command(("train", "tiny", "dir=gs://mine/x"), "gs://mine/x")))["volumes"], "for the data"


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        (Command(("train", "tiny"), "runs/tiny"), "runs/tiny is not in /runs"),
        (Command(("train", "tiny"), "/runs/../x"), "is not in /runs"),
        (Command(("train", "a.yml"), "/runs/x", Path("a.yml")), "pods do not see a.yml"),
    ],
)
def test_what_pods_would_not_see(command: Command, problem: str):
    with pytest.raises(BadInput, match=problem):
        manifest(command)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["tpu=tpu-v5p-slice"], "tpu and topology go together"),
        (["tpu=tpu-v5p-slice", "topology=2x2x2", "nodes=4"], "has 8 chips; nodes x chips = 4 x 4"),
        (["tpu=tpu-v5p-slice", "topology=2x", "nodes=4"], "is none such as 2x4"),
        (["tpu=tpu-v5p-slice", "topology=2x2x4", "nodes=8", "slices=2"], "nodes x chips of each slice = 8 x 4"),
        (["slices=2"], "is for TPUs"),
        (["tpu=tpu-v5p-slice", "topology=2x2x4", "nodes=3"], "nodes=4 fits it"),
        (["tpu=tpu-v5p-slice", "topology=4x4", "nodes=4"], "tpu-v5p-slice has 3 numbers, such as 2x2x2"),
        (["tpu=v5p", "topology=2x2x4", "nodes=4"], "'v5p' is no label of GKE's, such as tpu-v4-podslice"),
        (["tpu=tpu-v6e-slice", "topology=2x4", "gpus=1"], "not both"),
        (["gpu=nvidia-h100-80gb"], "gpus = 0"),
        (["mount=runs"], "no absolute path"),
    ],
)
def test_wrong_settings(words: list[str], problem: str):
    with pytest.raises(SettingsError, match=problem):
        read_settings(JobSet, words_layer(["image=a", "volume=v", *words]))
