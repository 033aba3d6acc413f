"""Reads encoded images (PNG, JPEG, WebP ...) with a class or caption each, from files or archives. Pillow decodes them (the extra
`images`).

Images are rotated as their EXIF data says, resized so that they cover `data.image.size` or their bucket, and cropped. Every image is
read and decoded once before the first step, so that a damaged image is found early. It ends the run, or, with
`data.image.invalid=drop`, is left out and counted. Decoded images stay in memory up to KEPT_BYTES. Others are decoded on each use.
"""

import hashlib
import json
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import numpy as np

from argosy.core.errors import BadInput
from argosy.core.formats.image_files import is_stretched, read_image, resize_image
from argosy.data.images.buckets import bucket_sizes, nearest_bucket
from argosy.data.images.settings import ImageSettings
from argosy.data.images.table import ImageSource, ImageTable, SplitImages, held_out_mask

if TYPE_CHECKING:
    from argosy.data.settings import DataSettings

# The largest total size of decoded images that are kept in memory.
KEPT_BYTES = 1 << 28


class ImageFile(NamedTuple):
    """One encoded image.

    name: the path of the image below the folder, or its name in an archive.
    label: the class of the image; None: there are no classes.
    caption: the caption of the image; None: there are no captions.
    digest: the SHA-256 of the image's bytes, or of those of the image and its control image if control images are read.
    size: the height and width after resizing and before cropping.
    """

    name: str
    label: int | None
    caption: str | None
    digest: bytes
    size: tuple[int, int]


class ImageFiles(ImageSource):
    """The base of sources of encoded images. The constructor of a subclass calls `add` for each image, in the order of the rows. Later,
    `encoded` reads an image again by its row.

    kind: the name of the source, which is part of the fingerprint.
    """

    kind: ClassVar[str]

    def __init__(self, settings: ImageSettings, held_out: float):
        self.settings, self.held_out = settings, held_out
        self.class_names: tuple[str, ...] = ()
        # The names of images that were left out because they cannot be read.
        self.unreadable: list[str] = []
        # The names of images whose control image has another aspect ratio.
        self.stretched: list[str] = []
        # The height and width of each image before it was resized.
        self.original_sizes: list[tuple[int, int]] = []
        self.decoded, self.kept_bytes = dict[int, np.ndarray](), 0
        self.files: list[ImageFile] = []
        self.sizes = set[tuple[int, int]]()
        if settings.buckets is not None and settings.size is None:
            raise BadInput("data.image.buckets needs the size of a square image", hint="data.image.size=512")
        self.bucket_sizes = [] if settings.buckets is None else bucket_sizes(settings.size or 0, settings.buckets)
        # The number of each image's bucket.
        self.bucket_of: list[int] = []
        self.has_controls = False

    @classmethod
    def from_settings(cls, argument: str, settings: "DataSettings") -> Self:
        return cls(argument, settings.image, settings.held_out)  # type: ignore[arg-type, call-arg]

    @abstractmethod
    def encoded(self, row: int) -> bytes:
        """Reads the encoded image of a row."""

    @abstractmethod
    def control_places(self) -> list[str]:
        """The place of each row's control image as a phrase, for error messages; empty if there are no control images.

        Raises:
            BadInput: some images have a control image and others have none, or an image has several.
        """

    @abstractmethod
    def encoded_control(self, row: int) -> bytes:
        """Reads the encoded control image of a row."""

    def add(self, name: str, where: str, data: bytes, label: int | None, caption: str | None) -> bool:
        """Adds an image. Returns False if it is damaged and left out.

        Args:
            name: the name of the image in the source.
            where: the place of the image, for errors.
            data: the encoded image.

        Raises:
            BadInput: the image cannot be read, and `data.image.invalid` is `error`.
        """
        if (original := self._read(name, where, data)) is None:
            return False
        image = self._prepared(original)
        self.sizes.add((image.shape[0], image.shape[1]))
        if self.bucket_sizes:
            self.bucket_of.append(nearest_bucket(original.shape[0], original.shape[1], self.bucket_sizes))
        if self.kept_bytes + image.nbytes <= KEPT_BYTES:
            self.decoded[len(self.files)], self.kept_bytes = image, self.kept_bytes + image.nbytes
        self.original_sizes.append((original.shape[0], original.shape[1]))
        self.files.append(ImageFile(name, label, caption, hashlib.sha256(data).digest(), (image.shape[0], image.shape[1])))
        return True

    def _read(self, name: str, where: str, data: bytes) -> np.ndarray | None:
        """Decodes an image. Returns None, and counts the image in `unreadable`, if it is damaged and left out.

        Raises:
            BadInput: the image cannot be read, and `data.image.invalid` is `error`.
        """
        try:
            return read_image(data)
        except BadInput as error:
            if self.settings.invalid == "error" or "pillow" in error.what:
                hint = error.hint or "mend or remove it; data.image.invalid=drop leaves such files out and counts them"
                raise BadInput(error.what, where=where, hint=hint) from None
            self.unreadable.append(name)
            return None

    def read_controls(self) -> None:
        kept = list[int]()
        for row, where in enumerate(self.control_places()):
            data, file = self.encoded_control(row), self.files[row]
            if (control := self._read(file.name, where, data)) is None:
                continue
            if is_stretched(control.shape, self.original_sizes[row]):
                self.stretched.append(file.name)
            self.files[row] = file._replace(digest=hashlib.sha256(file.digest + data).digest())
            self.has_controls = True
            kept.append(row)
        if self.has_controls and len(kept) < len(self.files):
            self.keep(kept)

    def keep(self, rows: list[int]) -> None:
        """Keeps only the images with these row numbers."""
        self.files = [self.files[row] for row in rows]
        self.original_sizes = [self.original_sizes[row] for row in rows]
        self.bucket_of = [self.bucket_of[row] for row in rows] if self.bucket_of else []
        self.decoded = {i: self.decoded[row] for i, row in enumerate(rows) if row in self.decoded}

    def check_added(self) -> None:
        """Checks the images after all were added.

        Raises:
            BadInput: no image can be read, or images have several sizes and `data.image.size` is not set.
        """
        if not self.files:
            raise BadInput("no image can be read", where=self.where)
        if self.settings.size is None and len(self.sizes) > 1:
            some = ", ".join(f"{h} x {w}" for h, w in sorted(self.sizes)[:3])
            raise BadInput(f"images are of {len(self.sizes)} sizes: {some} ...", where=self.where, hint="data.image.size=64")

    def _prepared(self, image: np.ndarray) -> np.ndarray:
        """Resizes an image to the smallest size that covers `data.image.size` or its bucket, with the same aspect ratio."""
        if (size := self.settings.size) is None:
            return image
        height, width = image.shape[:2]
        target = self.bucket_sizes[nearest_bucket(height, width, self.bucket_sizes)] if self.bucket_sizes else (size, size)
        scale = max(target[0] / height, target[1] / width)
        return resize_image(image, max(target[0], round(height * scale)), max(target[1], round(width * scale)))

    def __len__(self) -> int:
        return len(self.files)

    def picture(self, row: int) -> np.ndarray:
        """The decoded and resized image of a row."""
        cached = self.decoded.get(row)
        return self._prepared(read_image(self.encoded(row))) if cached is None else cached

    def control(self, row: int) -> np.ndarray:
        """The decoded control image of a row, resized to the size of its image."""
        return with_channels(resize_image(read_image(self.encoded_control(row)), *self.files[row].size), 3)

    def table(self, channels: int, size: tuple[int, int]) -> ImageTable:
        """The table of all images, with this number of channels, and cropped to this (height, width)."""
        labels = [file.label for file in self.files]
        captions = [file.caption for file in self.files]
        return ImageTable(
            ChannelsOf(self, channels),
            None if labels[0] is None else np.array(labels, np.int32),
            None if captions[0] is None else [str(text) for text in captions],
            self.class_names,
            np.array([int.from_bytes(file.digest[:8], "big") for file in self.files], np.uint64),
            size,
            channels,
            255.0,
            ControlsOf(self) if self.has_controls else None,
        )

    def stored_splits(self, held_out: bool, channels: int) -> list[SplitImages]:
        size = self.settings.size
        square = self.table(channels, min(self.sizes) if size is None else (size, size))
        indexes = np.flatnonzero(held_out_mask(square.identities, self.held_out) == held_out)
        if not self.bucket_sizes:
            return [SplitImages(square, indexes)]
        buckets = np.array(self.bucket_of)[indexes]
        # A split without images has the bucket of the square.
        numbers = np.unique(buckets).tolist() or [nearest_bucket(1, 1, self.bucket_sizes)]
        return [SplitImages(self.table(channels, self.bucket_sizes[b]), indexes[buckets == b]) for b in numbers]

    def fingerprint(self) -> dict[str, Any]:
        """The fingerprint includes the names of images, because they decide the order. It does not include the path of the folder."""
        digest = hashlib.sha256()
        for file in self.files:
            digest.update(json.dumps([file.name, file.label, file.caption, file.digest.hex()]).encode())
        fingerprint = {"source": self.kind, "source.files": len(self.files), "source.sha256": digest.hexdigest()}
        fingerprint |= {"held_out": self.held_out}
        return fingerprint | self.settings.fingerprint()


class ChannelsOf:
    """The images of a source, converted to this number of channels: 1 is gray, 3 is RGB on white, 4 is RGBA."""

    def __init__(self, files: ImageFiles, channels: int):
        self.files, self.channels = files, channels

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, row: Any, /) -> Any:
        return with_channels(self.files.picture(row), self.channels)


class ControlsOf:
    """The control images of a source, as RGB on white."""

    def __init__(self, files: ImageFiles):
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, row: Any, /) -> Any:
        return self.files.control(row)


def with_channels(image: np.ndarray, channels: int) -> np.ndarray:
    """Converts an RGB or RGBA image to 1, 3 or 4 channels. Transparent pixels become white. Gray is the luma of ITU-R BT.601."""
    if channels == 4:
        return image if image.shape[-1] == 4 else np.concatenate([image, np.full_like(image[..., :1], 255)], -1)
    if image.shape[-1] == 4:
        share = image[..., 3:].astype(np.float32) / 255
        image = np.rint(image[..., :3] * share + 255 * (1 - share)).astype(np.uint8)
    if channels == 1:
        return np.rint(image @ np.array([0.299, 0.587, 0.114], np.float32)).astype(np.uint8)[..., None]
    return image
