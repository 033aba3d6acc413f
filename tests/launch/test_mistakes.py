"""What `argosy launch` says before anything is written: all mistakes at once, meshes that do not fit, and paths of this machine."""

from pathlib import Path

import pytest

from argosy.cli import main
from argosy.core.settings import read_settings, words_layer
from argosy.jobs import launch_paths
from argosy.jobs.launch_paths import kind_of
from argosy.launch import jobset, skypilot, slurm
from argosy.launch.engines import ENGINES
from argosy.launch.rendered import Devices

PODS = ["engine=jobset", "image=a/b", "volume=claim"]
TPU = ["tpu=tpu-v5p-slice", "topology=2x2x4", "nodes=4"]
SKY = ["engine=skypilot", "image=docker:a", "volume=v"]
TINY = ["--", "train", "tiny", "dir=/runs/a"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def stderr_of(capsys: pytest.CaptureFixture, *words: str, code: int = 2) -> str:
    capsys.readouterr()
    assert main(["launch", *words]) == code, capsys.readouterr().err
    out, err = capsys.readouterr()
    assert bool(out) == (not code and "write=job" not in words)
    return err


# ---- all of them


def lines(*problems: str) -> list[str]:
    return sorted(f"error: {problem}" for problem in problems)


@pytest.mark.parametrize(
    ("words", "problems"),
    [
        # Of the engine, of the run, and of how they go together.
        (
            ["engine=jobset", "nodes=x", "imag=a", "--", "train", "own.yml", "stepz=3", "data.batch=-1"],
            ["`nodes` should be a whole number, not `x`", "unknown setting `imag`", "`image` is required", "unknown setting `stepz`",
             "`data.batch` should be greater than 0, not `-1`", "pods do not see own.yml, a file of this machine",
             "the run directory runs/own would be lost with its pods"],
        ),
        # What depends on a setting that is wrong itself is not said.
        (["engine=jobset", "image=a", "volume=[", *TINY], ["not YAML: did not find expected node content"]),
        (["engine=jobset", "image=[", "volume=v", "restarts=-1", *TINY],
         ["not YAML: did not find expected node content", "`restarts` should be at least 0, not `-1`"]),
        ([*PODS, *TPU, "chips=3", *TINY], ["topology = 2x2x4 has 16 chips; nodes x chips = 4 x 3"]),
        (["engine=skypilot", "setup=x", "program=a 'b", "cpuz=3", "--", "train", "own.yml", "steps=none"],
         ["unknown setting `cpuz`", "the machines do not see own.yml, a file of this one",
          "program=\"a 'b\" is no command: No closing quotation",
          "the run directory runs/own would be lost with its machine", "`steps` should be a whole number, not `none`"]),
        (["engine=slurm", "time=never", "program=a 'b", "--", "train", "tiny", "dir=memory://a/b", "data.source=gone.txt"],
         ["time = 'never' is no time limit such as 90, 1:30:00 or 2-12:00:00", "program=\"a 'b\" is no command: No closing quotation",
          "a job script does not see the checkpoints in memory://a/b, which tell whether the run goes on",
          "no such data source: `gone.txt`"]),
        (["engine=slrm", "nodes=2", "--", "serve"], ["unknown engine `slrm`", "several processes cannot run `serve`"]),
        (["processes=0", "logs=own.yml/logs", "--", "train", "tinny"],
         ["`processes` should be greater than 0, not `0`", "logs=own.yml/logs: {here}/own.yml is a file", "unknown recipe `tinny`"]),
        (["procesess=2"], ["unknown setting `procesess`", "launch needs a command"]),
        (["engine=ray", "gpus=-1", "--", "train"], ["`gpus` should be at least 0, not `-1`", "`train` names no recipe"]),
    ],
)  # fmt: skip
def test_all_mistakes_are_said_at_once(words: list[str], problems: list[str], here: Path, capsys: pytest.CaptureFixture):
    Path("own.yml").write_text("extends: tiny\n")
    stderr = stderr_of(capsys, *words)
    assert sorted(line for line in stderr.splitlines() if line.startswith("error: ")) == lines(*(w.format(here=here) for w in problems))


def test_a_recipe_in_the_place_of_the_verb_is_answered(here: Path, capsys: pytest.CaptureFixture):
    assert "hint: `-- train tiny` trains by this recipe" in stderr_of(capsys, "processes=2", "--", "tiny")


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["slices=2", "--", "train", "tiny"], "it is a setting of engine=jobset"),
        ([*PODS, "processes=2", *TINY], "it is a setting of engine=local and engine=ray"),
        (["proceses=2", *TINY], "did you mean `processes`?"),
        (["--", "trian", "tiny"], "did you mean `train`?"),
    ],
)
def test_a_name_of_another_place_is_answered_with_the_place(words: list[str], hint: str, here: Path, capsys: pytest.CaptureFixture):
    assert f"hint: {hint}" in stderr_of(capsys, *words)


def test_options_may_come_before_the_recipe(here: Path, capsys: pytest.CaptureFixture):
    assert "unknown setting `stepz`" in stderr_of(capsys, *PODS, "--", "train", "--json", "tiny", "stepz=3", "dir=/runs/a")
    assert stderr_of(capsys, *PODS, "write=job", "--", "train", "--json", "tiny", "dir=/runs/a", code=0)
    assert '"--json"' in Path("job").read_text()


# ---- meshes


SLICES = [*PODS, *TPU, "slices=2", "write=job"]


@pytest.mark.parametrize(
    ("words", "problem", "where"),
    [
        # All chips, where a slice has half of them.
        ([*SLICES, *TINY, "data.batch=32", "mesh.fsdp=32"], "fsdp 32 x tensor 1 does not make 16 devices of each slice",
         "slices = 2 x nodes = 4 x chips = 4 makes 32 devices"),
        ([*SLICES, *TINY, "data.batch=32", "mesh.tensor=3"], "3 does not divide 16 devices of each slice", "makes 32 devices"),
        ([*SLICES, *TINY, "data.batch=32", "mesh.between.fsdp=3"], "fsdp 3 x tensor 1", "makes 32 devices"),
        ([*SLICES, *TINY, "data.batch=16", "mesh.fsdp=16"], "data.batch = 16 does not divide over the 32 devices", "makes 32 devices"),
        ([*SLICES, *TINY, "data.batch=48", "accumulate=3", "mesh.fsdp=16"], "the 32 devices that split its rows, accumulate = 3", "32"),
        # What needs no devices to be known.
        ([*PODS, *TINY, "mesh.fsdp=3"], "data.batch = 8 does not divide over mesh.fsdp = 3", ""),
        ([*PODS, *TINY, "mesh.expert=2"], "mesh.expert = 2: the model has no experts", ""),
        ([*PODS, "gpus=8", "nodes=2", *TINY, "mesh.tensor=3"], "3 does not divide 16 devices", "nodes = 2 x gpus = 8 makes 16 devices"),
        ([*SKY, "accelerators=H100:8", "nodes=2", *TINY, "mesh.fsdp=8"], "does not make 16 devices", "accelerators = H100:8 makes 16"),
        (["engine=slurm", "gpus=4", "nodes=2", "--", "train", "tiny", "mesh.between.data=3"], "mesh.between data 3", "makes 8 devices"),
    ],
)  # fmt: skip
def test_a_mesh_that_does_not_fit(words: list[str], problem: str, where: str, here: Path, capsys: pytest.CaptureFixture):
    text = stderr_of(capsys, *words)
    assert problem in text
    assert where in text
    assert "hint: " in text
    assert not Path("job").exists()


@pytest.mark.parametrize(
    "words",
    [
        [*SLICES, *TINY, "data.batch=32", "mesh.fsdp=16"],
        [*SLICES, *TINY, "data.batch=32"],
        [*SLICES, *TINY, "data.batch=32", "mesh.between.fsdp=2"],
        [*SLICES, *TINY, "data.batch=8", "mesh.fsdp=4", "mesh.tensor=4"],
        [*PODS, *TPU, "write=job", *TINY, "data.batch=16"],
        # CPUs, TPUs that are not known here, several kinds of GPUs: nobody knows how many devices there will be.
        [*PODS, "write=job", *TINY, "mesh.fsdp=8"],
        [*PODS, "tpu=tpu7x", "topology=2x2x4", "nodes=4", "write=job", *TINY, "mesh.fsdp=8"],
        [*SKY, "accelerators=tpu-v5e-8", "write=job", *TINY, "mesh.fsdp=8"],
        [*SKY, "accelerators='{H100:8, A100:4}'", "write=job", *TINY, "mesh.fsdp=8"],
        ["engine=slurm", "gpus=4", "nodes=2", "write=job", "--", "train", "tiny", "mesh.fsdp=4", "mesh.between.data=2"],
    ],
)
def test_a_mesh_that_fits_or_that_nobody_can_judge(words: list[str], here: Path, capsys: pytest.CaptureFixture):
    assert "job is written" in stderr_of(capsys, *words, code=0)


@pytest.mark.parametrize(
    ("module", "words", "alone", "between"),
    [
        (jobset, ["image=a", *TPU], (16, 1, False), (4, 4, False)),
        (jobset, ["image=a", *TPU, "slices=3"], (16, 3, True), (16, 3, True)),
        (jobset, ["image=a", "gpus=8", "nodes=2"], (16, 1, True), (8, 2, True)),
        (skypilot, ["image=a", "accelerators=H100", "nodes=3"], (3, 1, True), (1, 3, True)),
        (slurm, ["gpus=8", "nodes=1", "per_node=4"], (8, 1, False), (2, 4, False)),
        (slurm, ["gpus=8", "nodes=2", "per_node=4"], (16, 1, False), (8, 2, True)),
    ],
)
def test_devices_in_groups_as_jax_calls_them(module, words: list[str], alone: tuple, between: tuple):
    """TPU slices, and every host of GPUs; without sizes between groups, only several slices of TPUs are groups."""
    settings = read_settings(ENGINES[module.__name__.rpartition(".")[2]], words_layer(words)).value
    for between_slices, expected in ((False, alone), (True, between)):
        topology = module.devices(settings, between_slices)
        assert isinstance(topology, Devices)
        assert topology[:2] == expected[:2]
        assert topology.groups == 1 or topology.slices == expected[2]


# ---- paths


def test_paths_that_pods_may_not_see_are_remarked(here: Path, capsys: pytest.CaptureFixture):
    (here / "corpus").mkdir()
    (here / "corpus/a.txt").write_text("words")
    stderr = stderr_of(capsys, *PODS, *TINY, "data.source=corpus/a.txt", code=0)
    assert "warning: data.source=corpus/a.txt is from this folder, and pods start in a folder of their own" in stderr
    assert "hint: put it on the volume or in the image" in stderr
    stderr = stderr_of(capsys, *PODS, *TINY, f"data.source={here}/corpus", "data.tokenizer=tok.json", code=0)
    assert f"warning: data.source={here}/corpus is on this machine, which pods do not see" in stderr
    assert "warning: data.tokenizer=tok.json is from this folder" in stderr
    grpo = ["--", "train", "tiny", "dir=/runs/a", "objective=grpo", "data.source=text:more.txt", "reward=own.py:right", "reward=exact"]
    stderr = stderr_of(capsys, *PODS, *grpo, code=0)
    assert "warning: data.source=more.txt, reward=own.py are from this folder" in stderr
    assert "hint: put them on the volume" in stderr


@pytest.mark.parametrize(
    "words",
    [
        ["data.source=/data/corpus"],
        ["data.source={here}/corpus", "mount={here}", "dir={here}/run"],
        ["data.source=text:/data/corpus", "data.tokenizer=byte"],
        ["data.source=synthetic"],
        ["reward=exact", "objective=grpo", "data.source=/data/x", "reward=package.module:function"],
        [],
    ],
)
def test_paths_that_pods_may_see_are_not(words: list[str], here: Path, capsys: pytest.CaptureFixture):
    (here / "corpus").mkdir()
    launch_words = [word.format(here=here) for word in words]
    engine = [word for word in launch_words if word.startswith("mount=")]
    assert stderr_of(capsys, *PODS, *engine, *TINY, *(word for word in launch_words if word not in engine), code=0) == ""


def test_skypilot_copies_a_folder(here: Path, capsys: pytest.CaptureFixture):
    (here / "a.txt").write_text("words")
    for source in ("a.txt", "*.txt"):
        words = [*TINY, f"data.source={source}"]
        assert stderr_of(capsys, *SKY, "workdir=.", *words, code=0) == ""
        assert f"data.source={source} is from this folder" in stderr_of(capsys, *SKY, *words, code=0)
    for source in ("b.txt", "../a.txt", "~/a.txt"):
        stderr = stderr_of(capsys, *SKY, "workdir=.", *TINY, f"data.source={source}", code=0)
        assert f"warning: data.source={source} is from this folder, and the machines start in the copy of workdir" in stderr


MOUNTS = {"/": "ext4", "/dev/shm": "tmpfs", "/shared": "nfs4", "/shared/scratch": "lustre", "/mnt": "fuse.sshfs"}


def test_slurm_remarks_what_lies_on_disks_of_this_machine(here: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    (here / "own.yml").write_text("extends: tiny\n")
    (here / "a.txt").write_text("words " * 99)
    words = ["engine=slurm", "--", "train", "own.yml", "data.source=a.txt", "dir=run"]
    monkeypatch.setattr(launch_paths, "mount_types", lambda: MOUNTS)
    stderr = stderr_of(capsys, *words, code=0)
    paths = [f"the folder of this command {here}", "dir=run", "data.source=a.txt", "the recipe own.yml"]
    assert all(f"{path} (ext4)" in stderr for path in paths)
    assert "are on a disk of this machine, which others of the job may not see" in stderr
    monkeypatch.setattr(launch_paths, "mount_types", lambda: MOUNTS | {str(here): "nfs4"})
    assert stderr_of(capsys, *words, code=0) == ""
    stderr = stderr_of(capsys, *words[:-1], "dir=/dev/shm/run", code=0)
    assert "warning: dir=/dev/shm/run (tmpfs) is on a disk of this machine" in stderr
    monkeypatch.setattr(launch_paths, "mount_types", dict)
    assert stderr_of(capsys, *words, code=0) == "", "nobody knows"


def test_kinds_of_file_systems():
    kinds = {"/a": "ext4", "/shared/a/b": "nfs4", "/shared/scratch/x": "lustre", "/sharedx": "ext4", "/dev/shm": "tmpfs"}
    assert {path: kind_of(Path(path), MOUNTS) for path in kinds} == kinds
    assert kind_of(Path("/dev/shm"), launch_paths.mount_types()) in ("tmpfs", ""), "as this machine has it"


def test_a_run_in_a_store_is_a_recipe_for_pods_too(here: Path, capsys: pytest.CaptureFixture):
    from argosy.checkpoint.run_directory import RunDirectory
    from argosy.run.settings.compose import compose
    from argosy.run.settings.run import Run

    address = f"memory://{here.name}/run"
    RunDirectory(address).write_settings(compose(Run, "tiny", [f"dir={address}", "data.source=/data/x"]))
    assert stderr_of(capsys, "engine=jobset", "image=a/b", "--", "train", address, "steps=9", code=0) == ""
    # No word of a run directory that would be lost.
    assert stderr_of(capsys, "engine=jobset", "image=a/b", "--", "train", address, "steps=none").count("error: ") == 1
