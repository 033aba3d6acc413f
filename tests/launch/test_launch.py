"""The verb `launch` for the engines that write a file: its help, what it checks first, and where the file goes."""

from pathlib import Path

import pytest
import yaml

from argosy.cli import main
from argosy.core.settings.scalars import yaml_document
from argosy.core.settings.schema import documented_fields
from argosy.launch.engines import ENGINES

TEXT = Path(__file__)
SLURM = ["launch", "engine=slurm", "time=60"]
PODS = ["launch", "engine=jobset", "image=a/b", "volume=claim"]


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_help_lists_every_setting_with_its_meaning(engine: str, capsys: pytest.CaptureFixture):
    assert main(["launch", f"engine={engine}", "--help"]) == 0
    out = capsys.readouterr().out
    words = " ".join(out.split())
    for key, info in documented_fields(ENGINES[engine]).items():
        assert f"\n  {key}  <" in out
        assert info.description, f"{key} is not documented"
        assert " ".join(info.description.split()) in words


def test_the_help_of_the_verb_names_every_engine(capsys: pytest.CaptureFixture):
    assert main(["launch", "--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"\n    {engine} " in out for engine in ENGINES)


def test_the_file_is_printed_or_written_and_never_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    monkeypatch.chdir(tmp_path)
    words = ["--", "train", "tiny", f"data.source={TEXT}"]
    assert main([*SLURM, *words]) == 0
    text = capsys.readouterr().out
    assert text.startswith("#!/bin/bash\n#SBATCH")
    for _ in range(2):
        assert main([*SLURM, "write=jobs/job.sh", *words]) == 0
        out, stderr = capsys.readouterr()
        assert out == ""
        assert "`sbatch jobs/job.sh` starts it" in stderr
        assert Path("jobs/job.sh").read_text() == text
    assert main([*SLURM, "nodes=2", "write=jobs/job.sh", *words]) == 2
    assert "holds something else" in capsys.readouterr().err
    assert Path("jobs/job.sh").read_text() == text
    Path("binary").write_bytes(b"\xff")
    assert main([*SLURM, "write=binary", *words]) == 2
    assert main([*SLURM, "write=.", *words]) == 2


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([*SLURM, "write=job", "--", "train", "tiny", "data.batch=-1"], "data.batch"),
        ([*SLURM, "write=job", "--", "train", "tiny", "data.source=/none"], "/none"),
        ([*SLURM, "write=job", "--", "train", "nothing"], "nothing"),
        ([*SLURM, "write=job", "--", "train"], "names no recipe"),
        ([*SLURM, "write=job", "--", "train", "--json"], "names no recipe"),
        ([*SLURM, "write=job", "--", "serve", "tiny"], "cannot run `serve`"),
        ([*SLURM, "write=job", "program=a 'b", "--", "train", "tiny"], "is no command"),
        ([*PODS, "write=job", "--", "train", "tiny", "dir=/runs/a", "stepz=3"], "stepz"),
        ([*PODS, "write=job", "--", "train", "own.yml", "dir=/runs/a"], "pods do not see own.yml"),
        (["launch", "engine=slurmy", "write=job", "--", "train", "tiny"], "did you mean `slurm`"),
    ],
)
def test_mistakes_are_found_before_anything_is_written(
    words: list[str], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    monkeypatch.chdir(tmp_path)
    Path("own.yml").write_text("extends: tiny\n")
    assert main(words) == 2
    assert problem in capsys.readouterr().err
    assert not Path("job").exists()


def test_files_that_only_pods_see_are_not_looked_for_here(tmp_path: Path, capsys: pytest.CaptureFixture):
    assert main([*PODS, "--", "train", "tiny", "dir=/runs/a", "data.source=/data/corpus"]) == 0
    job_set = yaml.safe_load(capsys.readouterr().out)
    container = job_set["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]
    assert container["command"] == ["argosy", "train", "tiny", "dir=/runs/a", "data.source=/data/corpus"]


ODD = ["1e5", "010", "1:30", "yes", "~", "", "2026-11-21", "a: b", "#", "- a", "a\n b\n", " a", "\u0085", "é", "a:", "=", "0x1"]


@pytest.mark.parametrize("text", ODD)
def test_documents_read_back_the_same(text: str):
    """By PyYAML, which reads YAML 1.1; what YAML 1.2 reads otherwise is quoted."""
    assert yaml.safe_load(yaml_document({"key": [text, {text: 1}]})) == {"key": [text, {text: 1}]}
    if text in ("1e5", "010", "0x1"):
        assert f'"{text}"' in yaml_document([text])
