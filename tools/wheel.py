"""Builds the wheel and the source archive, installs the wheel into a fresh environment outside of the checkout, and runs it there.

    ./run python tools/wheel.py                      the Python of the checkout
    ./run python tools/wheel.py python=3.13          another; uv finds it
    ./run python tools/wheel.py quickstart=no        without training: contents, metadata, help

Packages come as pip and uv are configured, by the ranges of pyproject.toml and not by the lock: what a user of the wheel gets.
"""

import os
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).parents[1]
UV = [sys.executable, "-m", "uv"]


def build(folder: Path) -> tuple[Path, Path]:
    """The wheel and the source archive of this checkout."""
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-d", str(folder)], cwd=ROOT, check=True, capture_output=True)
    [wheel], [archive] = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, archive


def faults(wheel: Path, archive: Path) -> list[str]:
    """What is wrong with the files in them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
        about = next(name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(file.read(about).decode("utf-8"))
    listed = subprocess.run(["git", "ls-files", "argosy"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    out = [f"the wheel has no {name}" for name in sorted(set(listed) - names)]
    out += [f"the wheel has {name}, which is no part of the package" for name in sorted(names) if not name.startswith("argosy")]
    out += [f"the wheel's version is {metadata['Version']}, not {project['version']}"] * (metadata["Version"] != project["version"])
    if not any(name.endswith("licenses/LICENSE") for name in names):
        out.append("the wheel has no license")
    declared = {requirement.split(">")[0].lower().replace("_", "-") for requirement in project["dependencies"]}
    required = [requirement for requirement in metadata.get_all("Requires-Dist", []) if "extra ==" not in requirement]
    stated = {requirement.split(">")[0].split("<")[0].lower().replace("_", "-") for requirement in required}
    out += [f"the wheel does not require {name}" for name in sorted(declared - stated)]
    with tarfile.open(archive) as file:
        inside = {name.partition("/")[2] for name in file.getnames()}
    out += [f"the source archive has no {name}" for name in ("pyproject.toml", "LICENSE", "README.md", "run") if name not in inside]
    return out


def trial(wheel: Path, python: str, folder: Path, quickstart: bool) -> None:
    """Installs the wheel into a fresh environment and runs it, with nothing of the checkout in reach."""
    subprocess.run([*UV, "venv", "--quiet", "--python", python, str(folder / "venv")], check=True)
    home = folder / "venv" / ("Scripts" if os.name == "nt" else "bin")
    subprocess.run([*UV, "pip", "install", "--quiet", "--python", str(home / "python"), str(wheel)], check=True)
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    env |= {"XDG_CACHE_HOME": str(folder / "cache"), "JAX_PLATFORMS": "cpu"}
    code = "import argosy, jax, sys; print(argosy.__file__, 'jax', jax.__version__, 'Python', sys.version.split()[0])"
    output = subprocess.run([home / "python", "-c", code], cwd=folder, env=env, check=True, capture_output=True, text=True).stdout
    if str(ROOT) in output:
        raise SystemExit(f"error: the checkout is used, not the wheel: {output}")
    print(output.strip())
    words = [["--version"], ["models"], ["train", "--help"], *([["quickstart", f"dir={folder / 'first'}"]] if quickstart else [])]
    for command in words:
        stdout = subprocess.DEVNULL if command != words[0] else None
        subprocess.run([home / "argosy", *command], cwd=folder, env=env, check=True, stdout=stdout)


def main() -> int:
    options = dict(word.partition("=")[::2] for word in sys.argv[1:])
    if unknown := set(options) - {"python", "quickstart"}:
        print(f"error: no setting `{min(unknown)}`\n\nhint: python=3.13, quickstart=no", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wheel, archive = build(folder)
        print(f"{wheel.name}, {wheel.stat().st_size / 1e6:.1f} MB; {archive.name}, {archive.stat().st_size / 1e6:.1f} MB")
        if problems := faults(wheel, archive):
            print("\n".join(f"error: {problem}" for problem in problems), file=sys.stderr)
            return 1
        trial(wheel, options.get("python", f"{sys.version_info[0]}.{sys.version_info[1]}"), folder, options.get("quickstart") != "no")
    print("the wheel works")
    return 0


if __name__ == "__main__":
    sys.exit(main())
