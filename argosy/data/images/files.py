"""Encoded images (PNG, JPEG, WebP ...), each with its class or caption, wherever their bytes are. Pillow decodes them (the extra
`images`).

Images are turned as their camera says (EXIF), resized so that they cover `data.image.size` or their bucket, and cropped. Every image is
read and decoded once before the first step, so that what is damaged is known by name: it ends the run, or with
`data.image.invalid=drop` is left out and counted. Small images then stay in memory; of a larger set, each is decoded when it is needed.
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

# Decoded images that are kept in memory.
KEPT_BYTES = 1 << 28


class ImageFile(NamedTuple):
    """One encoded image.

    name: its path below the folder, or its name in an archive.
    label: its class; None: there are no classes.
    caption: its text; None: there are no texts.
    digest: SHA-256 of its bytes; of both where control images are read.
    size: height and width as it is prepared, before it is cropped.
    """

    name: str
    label: int | None
    caption: str | None
    digest: bytes
    size: tuple[int, int]


class ImageFiles(ImageSource):
    """Encoded images. A subclass adds each in its constructor, in the order of the rows, and reads it again by its row.

    kind: the name of the source, which is part of the fingerprint.
    """

    kind: ClassVar[str]

    def __init__(self, settings: ImageSettings, held_out: float):
        self.settings, self.held_out = settings, held_out
        self.class_names: tuple[str, ...] = ()
        # Images that were left out because they cannot be read.
        self.unreadable: list[str] = []
        # Images whose control image has another ratio of its sides.
        self.stretched: list[str] = []
        # Height and width of each image before it was prepared.
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
        """The bytes of an image's file."""

    @abstractmethod
    def control_places(self) -> list[str]:
        """Where the control image of each row is, for error messages; empty if there are none.

        Raises:
            BadInput: some images have one and others have none, or an image has several.
        """

    @abstractmethod
    def encoded_control(self, row: int) -> bytes:
        """The bytes of the control image's file."""

    def add(self, name: str, where: str, data: bytes, label: int | None, caption: str | None) -> bool:
        """Adds an image, unless it is damaged and left out.

        Raises:
            BadInput: it cannot be read.
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
        """The decoded image; None: it is damaged and left out.

        Raises:
            BadInput: it cannot be read.
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
        """Leaves out all images but these."""
        self.files = [self.files[row] for row in rows]
        self.original_sizes = [self.original_sizes[row] for row in rows]
        self.bucket_of = [self.bucket_of[row] for row in rows] if self.bucket_of else []
        self.decoded = {i: self.decoded[row] for i, row in enumerate(rows) if row in self.decoded}

    def check_added(self) -> None:
        """Checks all images together.

        Raises:
            BadInput: none can be read, or they have several sizes and `data.image.size` does not say which to make of them.
        """
        if not self.files:
            raise BadInput("no image can be read", where=self.where)
        if self.settings.size is None and len(self.sizes) > 1:
            some = ", ".join(f"{h} x {w}" for h, w in sorted(self.sizes)[:3])
            raise BadInput(f"images are of {len(self.sizes)} sizes: {some} ...", where=self.where, hint="data.image.size=64")

    def _prepared(self, image: np.ndarray) -> np.ndarray:
        """The image at the least size that covers the square of the settings, or its bucket."""
        if (size := self.settings.size) is None:
            return image
        height, width = image.shape[:2]
        target = self.bucket_sizes[nearest_bucket(height, width, self.bucket_sizes)] if self.bucket_sizes else (size, size)
        scale = max(target[0] / height, target[1] / width)
        return resize_image(image, max(target[0], round(height * scale)), max(target[1], round(width * scale)))

    def __len__(self) -> int:
        return len(self.files)

    def picture(self, row: int) -> np.ndarray:
        """The decoded image of a row."""
        cached = self.decoded.get(row)
        return self._prepared(read_image(self.encoded(row))) if cached is None else cached

    def control(self, row: int) -> np.ndarray:
        """The decoded control image of a row, as high and wide as its image."""
        return with_channels(resize_image(read_image(self.encoded_control(row)), *self.files[row].size), 3)

    def table(self, channels: int, size: tuple[int, int]) -> ImageTable:
        """All images with so many channels, at one size."""
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
        """Names count, because they set the order; where the folder or archive is does not."""
        digest = hashlib.sha256()
        for file in self.files:
            digest.update(json.dumps([file.name, file.label, file.caption, file.digest.hex()]).encode())
        fingerprint = {"source": self.kind, "source.files": len(self.files), "source.sha256": digest.hexdigest()}
        fingerprint |= {"held_out": self.held_out}
        return fingerprint | self.settings.fingerprint()


class ChannelsOf:
    """Images with so many channels: gray, RGB on white, or RGBA."""

    def __init__(self, files: ImageFiles, channels: int):
        self.files, self.channels = files, channels

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, row: Any, /) -> Any:
        return with_channels(self.files.picture(row), self.channels)


class ControlsOf:
    """Control images, RGB on white."""

    def __init__(self, files: ImageFiles):
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, row: Any, /) -> Any:
        return self.files.control(row)


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
