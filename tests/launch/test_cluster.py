"""Who this process is, from the environments that engines make."""

import pytest

from argosy.core.errors import BadInput
from argosy.launch.cluster import ProcessPlace, detect_place, first_host, with_port

# Slurm's own names and values: srun(1), "output environment variables". JobSet's: the labels of its pods. SkyPilot's: its docs on
# distributed jobs. TPU's: what GKE and Cloud TPU set on every host.
ENVIRONMENTS = [
    ({}, None),
    ({"PATH": "/bin"}, None),
    (
        {"ARGOSY_COORDINATOR": "10.0.0.1:99", "ARGOSY_PROCESSES": "4", "ARGOSY_RANK": "3", "ARGOSY_ATTEMPT": "2"},
        ProcessPlace("argosy", "10.0.0.1:99", 4, 3, 2),
    ),
    ({"ARGOSY_COORDINATOR": "10.0.0.1:99", "ARGOSY_PROCESSES": "1", "ARGOSY_RANK": "0"}, None),
    (
        {"JAX_COORDINATOR_ADDRESS": "h:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"},
        ProcessPlace("jax", "h:1", 2, 0),
    ),
    (
        {
            "SLURM_JOB_ID": "4097", "SLURM_STEP_NODELIST": "gpu[003-007,9],other1", "SLURM_STEP_NUM_TASKS": "6", "SLURM_NTASKS": "12",
            "SLURM_PROCID": "5", "SLURM_LOCALID": "0",
        },
        ProcessPlace("slurm", "gpu003:61441", 6, 5),
    ),
    # In the shell of salloc, or in the script of sbatch, outside srun: one process.
    ({"SLURM_JOB_ID": "7", "SLURM_NODELIST": "a[1-2]", "SLURM_NTASKS": "2", "SLURM_PROCID": "0"}, None),
    (
        {
            "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1",
            "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
        },
        ProcessPlace("openmpi", "10.96.0.1:8476", 2, 1),
    ),
    (
        {
            "JOBSET_NAME": "train", "REPLICATED_JOB_NAME": "workers", "JOB_COMPLETION_INDEX": "2", "ARGOSY_PROCESSES": "4",
        },
        ProcessPlace("jobset", "train-workers-0-0.train:8476", 4, 2),
    ),
    (
        {
            "JOBSET_NAME": "train", "REPLICATED_JOB_NAME": "workers", "JOB_COMPLETION_INDEX": "2", "JOB_INDEX": "1",
            "PROCESSES_IN_JOB": "4", "ARGOSY_PROCESSES": "8",
        },
        ProcessPlace("jobset", "train-workers-0-0.train:8476", 8, 6),
    ),
    (
        {"SKYPILOT_NODE_IPS": "10.1.0.4\n10.1.0.5", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "2"},
        ProcessPlace("skypilot", "10.1.0.4:8476", 2, 1),
    ),
    ({"TPU_WORKER_HOSTNAMES": "t-0,t-1,t-2,t-3", "TPU_WORKER_ID": "3"}, ProcessPlace("tpu", "t-0:8476", 4, 3)),
    ({"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}, None),
    (
        {
            "TPU_WORKER_HOSTNAMES": "b-0,b-1", "TPU_WORKER_ID": "1", "MEGASCALE_COORDINATOR_ADDRESS": "a-0:8080",
            "MEGASCALE_NUM_SLICES": "3", "MEGASCALE_SLICE_ID": "2",
        },
        ProcessPlace("tpu", "a-0:8476", 6, 5),
    ),
    (
        {
            "TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0", "MEGASCALE_COORDINATOR_ADDRESS": "10.0.0.7",
            "MEGASCALE_NUM_SLICES": "2", "MEGASCALE_SLICE_ID": "1",
        },
        ProcessPlace("tpu", "10.0.0.7:8476", 2, 1),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("environment", "place"), ENVIRONMENTS)
def test_the_environment_says_which_process_this_is(environment: dict[str, str], place: ProcessPlace | None):
    assert detect_place(environment) == place


def test_what_argosy_launch_sets_goes_before_what_is_around_it():
    outer = ENVIRONMENTS[5][0]
    assert detect_place(outer | ENVIRONMENTS[2][0]) == ENVIRONMENTS[2][1]


@pytest.mark.parametrize(
    ("environment", "problem"),
    [
        ({"ARGOSY_COORDINATOR": "h:1", "ARGOSY_PROCESSES": "2"}, "ARGOSY_RANK is not set"),
        ({"ARGOSY_PROCESSES": "2", "ARGOSY_RANK": "0"}, "ARGOSY_COORDINATOR is not set"),
        ({"ARGOSY_PROCESSES": "2"}, "ARGOSY_COORDINATOR is not set"),
        ({"ARGOSY_COORDINATOR": "h:1", "ARGOSY_PROCESSES": "two", "ARGOSY_RANK": "0"}, "ARGOSY_PROCESSES is 'two'"),
        ({"ARGOSY_COORDINATOR": "h:1", "ARGOSY_PROCESSES": "2", "ARGOSY_RANK": "2"}, "process 2 of 2"),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}, "does not say where rank 0 is"),
        ({"JOBSET_NAME": "a", "JOB_COMPLETION_INDEX": "0"}, "ARGOSY_PROCESSES is not set"),
        ({"JOBSET_NAME": "a", "JOB_COMPLETION_INDEX": "0", "JOB_INDEX": "1", "ARGOSY_PROCESSES": "8"}, "PROCESSES_IN_JOB is not set"),
        ({"TPU_WORKER_HOSTNAMES": "a", "TPU_WORKER_ID": "0", "MEGASCALE_COORDINATOR_ADDRESS": "a"}, "MEGASCALE_NUM_SLICES is not set"),
    ],
)
def test_half_an_environment_is_an_error(environment: dict[str, str], problem: str):
    with pytest.raises(BadInput, match=problem):
        detect_place(environment)


@pytest.mark.parametrize(
    ("hosts", "first"),
    [("node1", "node1"), ("node[1-4]", "node1"), ("node[07,9]-ib,x", "node07-ib"), ("a-b3,a-b4", "a-b3"), ("r2n[010-020]", "r2n010")],
)
def test_the_first_host_of_slurms_list(hosts: str, first: str):
    assert first_host(hosts) == first


@pytest.mark.parametrize(
    ("address", "whole"), [("h", "h:8476"), ("h:1", "h:1"), ("fe80::1", "[fe80::1]:8476"), ("[fe80::1]:7", "[fe80::1]:7")]
)
def test_an_address_has_a_port(address: str, whole: str):
    assert with_port(address) == whole
