"""What a release is made of: the wheel and the source archive, versions that agree, and the container's file."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from tools import wheel

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def version() -> str:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]


def test_the_wheel_has_the_package_and_nothing_else(tmp_path: Path):
    built = wheel.build(tmp_path)
    assert wheel.faults(*built) == []


def test_a_wheel_without_a_file_is_found(tmp_path: Path):
    import zipfile

    whole, archive = wheel.build(tmp_path)
    broken = tmp_path / f"broken-{whole.name}"
    with zipfile.ZipFile(whole) as source, zipfile.ZipFile(broken, "w") as target:
        for name in source.namelist():
            if not name.endswith("configs/base.yml"):
                target.writestr(name, source.read(name))
        target.writestr("tests/x.py", "")
    assert wheel.faults(broken, archive) == [
        "the wheel has no argosy/configs/base.yml",
        "the wheel has tests/x.py, which is no part of the package",
    ]


def test_versions_agree(version: str):
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == version
    assert citation["license"] == "Apache-2.0"
    first = re.search(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert first is not None
    assert first[1] == version


def test_the_container_is_built_from_what_is_there():
    text = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8")
    copied = [name for line in re.findall(r"^COPY (?!--)(.+)$", text, re.MULTILINE) for name in line.split()[:-1]]
    assert copied
    assert all((ROOT / name).exists() for name in copied)
    ignored = (ROOT / "docker" / "Dockerfile.dockerignore").read_text(encoding="utf-8")
    assert {line[1:] for line in ignored.splitlines() if line.startswith("!")} == set(copied)
    devices = re.findall(r"DEVICE=(\w+)", text)
    assert {"base", "gpu", "tpu"} == set(devices)
    assert all((ROOT / "requirements" / f"{device}.lock").is_file() for device in devices)


@pytest.mark.slow
def test_the_wheel_runs_outside_of_the_checkout():
    subprocess.run([*wheel.UV[:1], str(ROOT / "tools" / "wheel.py"), "quickstart=no"], check=True)
