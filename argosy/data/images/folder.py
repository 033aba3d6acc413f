"""Reads folders of image files, like Hugging Face's `imagefolder` and torchvision. Pillow decodes them (the extra `images`).

    ROOT/CLASS/NAME.png                one folder for each class; classes are sorted by name
    ROOT/NAME.png, ROOT/NAME.txt       a caption beside each image
    ROOT/metadata.jsonl                a line {"file_name": "NAME.png", "text": "a fox", "label": 3} for each image

A key `"conditioning_image": "edges/NAME.png"` in each line names control images, for ControlNets.
"""

import json
from pathlib import Path
from typing import Any

from argosy.core.counts import plural
from argosy.core.errors import BadInput
from argosy.data.images.files import ImageFiles
from argosy.data.images.settings import ImageSettings
from argosy.data.sources.kinds import IMAGE_NAMES as ENDINGS

METADATA = "metadata.jsonl"
# The keys for the path of a control image: that of diffusers, and that of the convention of `datasets` for paths.
CONTROL_KEYS = ("conditioning_image", "conditioning_image_file_name")


class ImageFolder(ImageFiles):
    """A source of the image files below a folder."""

    kind = "images"

    def __init__(self, path: str, settings: ImageSettings, held_out: float = 0.0):
        super().__init__(settings, held_out)
        self.root = Path(path).expanduser()
        self.control_paths = named_controls(self.root)
        controls = set(self.control_paths.values())
        paths = [path for path in image_paths(self.root) if path not in controls]
        if not paths:
            raise BadInput(f"no image files: `{path}`", hint=f"a folder is searched for {' '.join(ENDINGS)}")
        self.class_names, labels, captions = described_files(self.root, paths)
        for path_, label, caption in zip(paths, labels, captions, strict=True):
            self.add(path_.relative_to(self.root).as_posix(), str(path_), path_.read_bytes(), label, caption)
        self.check_added()

    def encoded(self, row: int) -> bytes:
        return (self.root / self.files[row].name).read_bytes()

    def control_places(self) -> list[str]:
        names, controls = [file.name for file in self.files], self.control_paths
        if controls and (lines_without := sorted(set(names) - controls.keys())):
            problem = f"`{CONTROL_KEYS[0]}` is in some lines of {METADATA} and not in others: {lines_without[0]}"
            raise BadInput(problem, where=str(self.root / METADATA))
        if missing := sorted(str(path) for path in controls.values() if not path.is_file()):
            raise BadInput(f"{plural(len(missing), 'control image')} of {METADATA} without a file", where=missing[0])
        return [str(controls[name]) for name in names] if controls else []

    def encoded_control(self, row: int) -> bytes:
        return self.control_paths[self.files[row].name].read_bytes()

    @property
    def where(self) -> str:
        return str(self.root)


def image_paths(root: Path) -> list[Path]:
    """The image files below a folder, sorted by relative path, without hidden files and folders."""
    paths = (path for path in root.rglob("*") if path.suffix.lower() in ENDINGS)
    seen = [path for path in paths if not any(part.startswith(".") for part in path.relative_to(root).parts)]
    return sorted(seen, key=lambda path: path.relative_to(root).as_posix())


def named_controls(root: Path) -> dict[str, Path]:
    """The path of each control image, by the `file_name` of its image in `metadata.jsonl`; empty if there are no control images."""
    rows = _lines(root / METADATA)
    values = {name: next((row[key] for key in CONTROL_KEYS if key in row), None) for name, row in rows.items()}
    return {name: root / str(value) for name, value in values.items() if value is not None}


def _lines(where: Path) -> dict[str, dict[str, Any]]:
    """Reads the lines of a `metadata.jsonl`, by their `file_name`; empty if the file does not exist.

    Raises:
        BadInput: a line is no JSON object with `file_name`.
    """
    rows = dict[str, dict[str, Any]]()
    for number, line in enumerate(where.read_text(encoding="utf-8").splitlines() if where.is_file() else (), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            rows[str(row["file_name"])] = row
        except (ValueError, KeyError, TypeError):
            raise BadInput("not an object with `file_name`", where=f"{where}, line {number}") from None
    return rows


def described_files(root: Path, paths: list[Path]) -> tuple[tuple[str, ...], list[int | None], list[str | None]]:
    """Finds classes and captions. Returns the names of the classes, the class of each file, and the caption of each file.

    Raises:
        BadInput: only some images have a line, caption or folder of a class, or a line or caption has no image.
    """
    nothing: list[Any] = [None] * len(paths)
    if (root / METADATA).is_file():
        return _by_metadata(root, paths)
    caption_files = [path.with_suffix(".txt") for path in paths]
    if any(path.is_file() for path in caption_files):
        images = {path.with_suffix("") for path in paths}
        alone = sorted(path for path in root.rglob("*.txt") if path.with_suffix("") not in images)
        if alone:
            raise BadInput(f"{plural(len(alone), 'caption')} without an image", where=str(alone[0]))
        if missing := [path for path, text in zip(paths, caption_files) if not text.is_file()]:
            raise BadInput(f"{plural(len(missing), 'image')} without a caption", where=str(missing[0]), hint="NAME.txt beside NAME.png")
        return (), nothing, [path.read_text(encoding="utf-8").strip() for path in caption_files]
    folders = [path.relative_to(root).parts[:-1] for path in paths]
    if not any(folders):
        return (), nothing, nothing
    if loose := [path for path, folder in zip(paths, folders) if not folder]:
        problem = f"{plural(len(loose), 'image')} beside the folders of classes"
        raise BadInput(problem, where=str(loose[0]), hint="a folder for each class")
    names = sorted({folder[0] for folder in folders})
    return tuple(names), [names.index(folder[0]) for folder in folders], nothing


def _by_metadata(root: Path, paths: list[Path]) -> tuple[tuple[str, ...], list[int | None], list[str | None]]:
    where = root / METADATA
    rows = _lines(where)
    names = [path.relative_to(root).as_posix() for path in paths]
    if missing := sorted(set(names) - rows.keys()):
        raise BadInput(f"{plural(len(missing), 'image')} without a line in {METADATA}", where=str(root / missing[0]))
    if alone := sorted(rows.keys() - set(names)):
        raise BadInput(f"{plural(len(alone), 'line')} of {METADATA} without an image: {alone[0]}", where=str(where))
    lines = [rows[name] for name in names]
    for key in ("text", "label"):
        if lines_without := [name for name, row in zip(names, lines) if (key in row) != (key in lines[0])]:
            raise BadInput(f"`{key}` is in some lines of {METADATA} and not in others: {lines_without[0]}", where=str(where))
    captions: list[Any] = [row.get("text") for row in lines]
    if "label" not in lines[0]:
        return (), [None] * len(paths), captions
    if all(isinstance(row["label"], int) for row in lines):
        return (), [row["label"] for row in lines], captions
    classes = sorted({str(row["label"]) for row in lines})
    return tuple(classes), [classes.index(str(row["label"])) for row in lines], captions
