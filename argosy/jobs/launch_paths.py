"""Remarks about paths of this machine in the settings of a run that a scheduler starts elsewhere: why they may be missing there, and
what to do.

    pods of a JobSet      have their image, and the volume at `mount`; they start in the image's folder
    machines of SkyPilot  have a copy of `workdir`, in which they start, and what is mounted at `mount`
    machines of Slurm     start in the folder of the command, and see what lies on file systems that they share with this machine

These are remarks and no mistakes: an image may hold a file of the same path, and a disk may be shared out from here.
"""

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from argosy.core.addresses import is_address, is_hub
from argosy.core.errors import some
from argosy.core.settings.plain import dump, flatten
from argosy.data.sources import CORPORA, SOURCES
from argosy.jobs.launch import Launch
from argosy.run.code_files import named_code
from argosy.run.distillation.address import is_endpoint

# Settings that name a file or a folder of any model.
MODELS = ("init.weights", "init.state", "objective.teacher", "objective.perceptual.net", "objective.perceptual.linear")
# File systems of one machine, as /proc/mounts names them.
LOCAL = frozenset(("tmpfs", "ramfs", "overlay", "ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "apfs", "hfs"))


def remarks(launch: Launch) -> list[str]:
    """Returns the remarks to the user before the file is written. A remark lists all paths that it concerns."""
    paths_by_key = dict(paths(launch.run.value))
    if launch.engine == "slurm":
        return of_slurm(launch, paths_by_key)
    if launch.engine == "jobset":
        mounted, copied = launch.settings.volume is not None, None
        who, way = "pods", "put it on the volume or in the image, and name it as pods see it"
    else:
        mounted = launch.settings.bucket is not None or launch.settings.volume is not None
        copied = None if launch.settings.workdir is None else Path(launch.settings.workdir).expanduser()
        who, way = "the machines", "give workdir=. and a path in this folder, or a path in mount="
    mount = launch.settings.mount if mounted else None
    near, here = [], []
    for key, path in paths_by_key.items():
        if PurePosixPath(path).is_absolute():
            if Path(path).exists() and not (mount is not None and PurePosixPath(path).is_relative_to(mount)):
                here.append(f"{key}={path}")
        elif path.startswith("~") or not is_copied(path, copied):
            near.append(f"{key}={path}")
    notes = []
    if near:
        start = "in the copy of workdir" if copied is not None else "in a folder of their own"
        notes.append(remark(near, f"from this folder, and {who} start {start}", way))
    if here:
        notes.append(remark(here, f"on this machine, which {who} do not see", way))
    return notes


def is_copied(path: str, copied: Path | None) -> bool:
    """Whether a relative path is in the folder that is copied to the machines."""
    return copied is not None and ".." not in PurePosixPath(path).parts and any_file(copied / path)


def any_file(path: Path) -> bool:
    """Whether the file, the folder, or a match of the glob exists."""
    if any(c in str(path) for c in "*?["):
        return next(Path(path.anchor or ".").glob(str(path.relative_to(path.anchor))), None) is not None
    return path.exists()


def of_slurm(launch: Launch, paths_by_key: dict[str, str]) -> list[str]:
    """Returns remarks about paths on local disks of this machine, which the machines of the job may lack."""
    paths_by_key = {"the folder of this command": os.getcwd(), "dir": launch.command.folder} | paths_by_key
    if launch.command.recipe is not None:
        paths_by_key |= {"the recipe": str(launch.command.recipe)}
    mounts, local_paths = mount_types(), []
    for key, path in paths_by_key.items():
        kind = kind_of(Path(path), mounts)
        if kind in LOCAL:
            local_paths.append(f"{key} {path} ({kind})" if " " in key else f"{key}={path} ({kind})")
    if not local_paths:
        return []
    way = "put it on a file system of the cluster; if this disk is shared out from here, nothing is to be done"
    return [remark(local_paths, "on a disk of this machine, which others of the job may not see", way)]


def remark(paths: list[str], why: str, way: str) -> str:
    verb, it = ("is", way) if len(paths) == 1 else ("are", way.replace("put it", "put them").replace("name it", "name them"))
    return f"warning: {some(paths, 6)} {verb} {why}\n\nhint: {it}"


def paths(run: Any) -> Iterator[tuple[str, str]]:
    """Yields (setting, path) for every file and folder of this machine that the settings of a run name."""
    flat: dict[str, Any] = flatten(dump(run))
    places = [run.data.source] if isinstance(run.data.source, str) else [mixed.path for mixed in run.data.source]
    for place in places:
        reader, _, argument = place.partition(":")
        source = argument if reader in SOURCES and not argument.startswith("//") else place
        if source and reader not in CORPORA and not is_address(source):
            yield "data.source", source
    if (tokenizer := flat.get("data.tokenizer")) not in (None, "byte") and not is_hub(tokenizer):
        yield "data.tokenizer", tokenizer
    if (template := flat.get("data.template")) and Path(template).is_file():
        yield "data.template", template
    for key in MODELS:
        if (model := flat.get(key)) and not is_hub(model) and not is_address(model) and not is_endpoint(model):
            yield key, model
    for reward in run.reward:
        if path := of_code(reward.of):
            yield "reward", path
    for key, name in named_code(run):
        if not key.startswith("reward."):
            yield key.removesuffix(".of").removesuffix(".name"), name.rpartition(":")[0]


def of_code(name: str) -> str | None:
    """Returns the file of FILE.py:FUNCTION, or the folder of a reward model; None if the name is that of an installed module."""
    file, colon, _ = name.rpartition(":")
    if colon:
        return file if file.endswith(".py") else None
    return name if name and Path(name).is_dir() else None


def mount_types() -> dict[str, str]:
    """Returns the type of the file system at each mount point; empty if it cannot be determined."""
    try:
        rows = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return {}
    # The last one at a place covers those before it.
    return {row[1].replace("\\040", " "): row[2] for row in rows if len(row) > 2}


def kind_of(path: Path, mounts: dict[str, str]) -> str:
    """Returns the type of the file system of a path, which need not exist yet."""
    path = path.expanduser().resolve()
    return next((mounts[str(place)] for place in (path, *path.parents) if str(place) in mounts), "")
