"""Folders of image files, as Hugging Face's `imagefolder` and torchvision read them. Pillow decodes them (the extra `images`).

    ROOT/CLASS/NAME.png                a class for each folder, in the order of their names
    ROOT/NAME.png, ROOT/NAME.txt       a caption beside each image
    ROOT/metadata.jsonl                {"file_name": "NAME.png", "text": "a fox", "label": 3} for each image

Images are turned as their camera says (EXIF), resized so that the shorter side is `data.image.size`, and cropped. Every file is read
and decoded once before the first step, so that what is damaged is known by name: it ends the run, or with `data.image.invalid=drop` is
left out and counted. Small images then stay in memory; of a larger set, each is decoded when it is needed.
"""

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from argosy.core.counts import plural
from argosy.core.errors import BadInput
from argosy.core.formats.image_files import read_image, resized
from argosy.data.images.settings import ImageSettings
from argosy.data.images.table import ImageSource, ImageTable, held_out_rows
from argosy.data.sources.kinds import IMAGE_NAMES as ENDINGS

if TYPE_CHECKING:
    from argosy.data.settings import DataSettings

METADATA = "metadata.jsonl"
# Decoded images that are kept in memory.
KEPT_BYTES = 1 << 28


class ImageFile(NamedTuple):
    """One image file.

    path: of the file.
    label: its class; None: there are no classes.
    caption: its text; None: there are no texts.
    digest: SHA-256 of its bytes.
    """

    path: Path
    label: int | None
    caption: str | None
    digest: bytes


class ImageFolder(ImageSource):
    """The image files below a folder."""

    def __init__(self, path: str, settings: ImageSettings, held_out: float = 0.0):
        self.root, self.settings, self.held_out = Path(path).expanduser(), settings, held_out
        paths = image_paths(self.root)
        if not paths:
            raise BadInput(f"no image files: `{path}`", hint=f"a folder is searched for {' '.join(ENDINGS)}")
        self.class_names, labels, captions = described_files(self.root, paths)
        # Images that were left out because they cannot be read.
        self.unreadable: list[str] = []
        self.decoded, self.kept_bytes = dict[int, np.ndarray](), 0
        self.files: list[ImageFile] = []
        self.sizes = set[tuple[int, int]]()
        for path_, label, caption in zip(paths, labels, captions, strict=True):
            self._add(path_, label, caption)
        if not self.files:
            raise BadInput("no image can be read", where=str(self.root))
        if settings.size is None and len(self.sizes) > 1:
            some = ", ".join(f"{h} x {w}" for h, w in sorted(self.sizes)[:3])
            raise BadInput(f"images are of {len(self.sizes)} sizes: {some} ...", where=str(self.root), hint="data.image.size=64")

    @classmethod
    def from_settings(cls, argument: str, settings: "DataSettings") -> Self:
        return cls(argument, settings.image, settings.held_out)

    def _add(self, path: Path, label: int | None, caption: str | None) -> None:
        data = path.read_bytes()
        try:
            image = self._prepared(read_image(data))
        except BadInput as error:
            if self.settings.invalid == "error" or "pillow" in error.what:
                hint = error.hint or "mend or remove it; data.image.invalid=drop leaves such files out and counts them"
                raise BadInput(error.what, where=str(path), hint=hint) from None
            self.unreadable.append(str(path.relative_to(self.root)))
            return
        self.sizes.add((image.shape[0], image.shape[1]))
        if self.kept_bytes + image.nbytes <= KEPT_BYTES:
            self.decoded[len(self.files)], self.kept_bytes = image, self.kept_bytes + image.nbytes
        self.files.append(ImageFile(path, label, caption, hashlib.sha256(data).digest()))

    def _prepared(self, image: np.ndarray) -> np.ndarray:
        """The image with its shorter side as the settings say."""
        if (size := self.settings.size) is None:
            return image
        height, width = image.shape[:2]
        scale = size / min(height, width)
        return resized(image, max(size, round(height * scale)), max(size, round(width * scale)))

    def __len__(self) -> int:
        return len(self.files)

    def picture(self, row: int) -> np.ndarray:
        """The decoded image of a row."""
        kept = self.decoded.get(row)
        return self._prepared(read_image(self.files[row].path.read_bytes())) if kept is None else kept

    @property
    def where(self) -> str:
        return str(self.root)

    def split(self, held_out: bool, channels: int) -> tuple[ImageTable, np.ndarray]:
        size = self.settings.size
        labels = [file.label for file in self.files]
        captions = [file.caption for file in self.files]
        table = ImageTable(
            ChannelsOf(self, channels),
            None if labels[0] is None else np.array(labels, np.int32),
            None if captions[0] is None else [str(text) for text in captions],
            self.class_names,
            np.array([int.from_bytes(file.digest[:8], "big") for file in self.files], np.uint64),
            min(self.sizes) if size is None else (size, size),
            channels,
            255.0,
        )
        mask = held_out_rows(table.identities, self.held_out)
        return table, np.flatnonzero(mask == held_out)

    def fingerprint(self) -> dict[str, Any]:
        """Paths below the folder count, because they set the order; the folder's own place does not."""
        digest = hashlib.sha256()
        for file in self.files:
            name = file.path.relative_to(self.root).as_posix()
            digest.update(json.dumps([name, file.label, file.caption, file.digest.hex()]).encode())
        made = {"source": "images", "source.files": len(self.files), "source.sha256": digest.hexdigest(), "held_out": self.held_out}
        return made | {f"image.{name}": value for name, value in self.settings.model_dump().items()}


class ChannelsOf:
    """The images of a folder with so many channels: gray, RGB on white, or RGBA."""

    def __init__(self, folder: ImageFolder, channels: int):
        self.folder, self.channels = folder, channels

    def __len__(self) -> int:
        return len(self.folder)

    def __getitem__(self, row: Any, /) -> Any:
        return with_channels(self.folder.picture(row), self.channels)


def with_channels(image: np.ndarray, channels: int) -> np.ndarray:
    """An RGB or RGBA image with other channels; transparent pixels are white. Gray is the luma of ITU-R BT.601."""
    if channels == 4:
        return image if image.shape[-1] == 4 else np.concatenate([image, np.full_like(image[..., :1], 255)], -1)
    if image.shape[-1] == 4:
        share = image[..., 3:].astype(np.float32) / 255
        image = np.rint(image[..., :3] * share + 255 * (1 - share)).astype(np.uint8)
    if channels == 1:
        return np.rint(image @ np.array([0.299, 0.587, 0.114], np.float32)).astype(np.uint8)[..., None]
    return image


def image_paths(root: Path) -> list[Path]:
    """The image files below a folder, in the order of their relative paths; hidden ones are not among them."""
    found = (path for path in root.rglob("*") if path.suffix.lower() in ENDINGS)
    seen = [path for path in found if not any(part.startswith(".") for part in path.relative_to(root).parts)]
    return sorted(seen, key=lambda path: path.relative_to(root).as_posix())


def described_files(root: Path, paths: list[Path]) -> tuple[tuple[str, ...], list[int | None], list[str | None]]:
    """Names of classes, and the class and caption of each file.

    Raises:
        BadInput: an image without a line or caption where others have one, or a line or caption without an image.
    """
    nothing: list[Any] = [None] * len(paths)
    if (root / METADATA).is_file():
        return _by_metadata(root, paths)
    beside = [path.with_suffix(".txt") for path in paths]
    if any(path.is_file() for path in beside):
        images = {path.with_suffix("") for path in paths}
        alone = sorted(path for path in root.rglob("*.txt") if path.with_suffix("") not in images)
        if alone:
            raise BadInput(f"{plural(len(alone), 'caption')} without an image", where=str(alone[0]))
        if missing := [path for path, text in zip(paths, beside) if not text.is_file()]:
            raise BadInput(f"{plural(len(missing), 'image')} without a caption", where=str(missing[0]), hint="NAME.txt beside NAME.png")
        return (), nothing, [path.read_text(encoding="utf-8").strip() for path in beside]
    folders = [path.relative_to(root).parts[:-1] for path in paths]
    if not any(folders):
        return (), nothing, nothing
    if loose := [path for path, folder in zip(paths, folders) if not folder]:
        what = f"{plural(len(loose), 'image')} beside the folders of classes"
        raise BadInput(what, where=str(loose[0]), hint="a folder for each class")
    names = sorted({folder[0] for folder in folders})
    return tuple(names), [names.index(folder[0]) for folder in folders], nothing


def _by_metadata(root: Path, paths: list[Path]) -> tuple[tuple[str, ...], list[int | None], list[str | None]]:
    where, rows = root / METADATA, dict[str, dict[str, Any]]()
    for number, line in enumerate(where.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            rows[str(row["file_name"])] = row
        except (ValueError, KeyError, TypeError):
            raise BadInput("not an object with `file_name`", where=f"{where}, line {number}") from None
    names = [path.relative_to(root).as_posix() for path in paths]
    if missing := sorted(set(names) - rows.keys()):
        raise BadInput(f"{plural(len(missing), 'image')} without a line in {METADATA}", where=str(root / missing[0]))
    if alone := sorted(rows.keys() - set(names)):
        raise BadInput(f"{plural(len(alone), 'line')} of {METADATA} without an image: {alone[0]}", where=str(where))
    told = [rows[name] for name in names]
    for key in ("text", "label"):
        if lacking := [name for name, row in zip(names, told) if (key in row) != (key in told[0])]:
            raise BadInput(f"`{key}` is in some lines of {METADATA} and not in others: {lacking[0]}", where=str(where))
    captions: list[Any] = [row.get("text") for row in told]
    if "label" not in told[0]:
        return (), [None] * len(paths), captions
    if all(isinstance(row["label"], int) for row in told):
        return (), [row["label"] for row in told], captions
    classes = sorted({str(row["label"]) for row in told})
    return tuple(classes), [classes.index(str(row["label"])) for row in told], captions
