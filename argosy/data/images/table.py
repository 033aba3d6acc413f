"""Makes a table of rows from images. A row follows from its number. Its random crop and mirroring follow from its place, the index in
the run's sequence of rows.

    images   float32  [B h w c]  the image; -1 is black, 1 is white
    labels   int32    [B]        the class, if there are classes
    control  float32  [B y x k]  the control image, if there are any; 0 is black, 1 is white
"""

import hashlib
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from argosy.core.counts import plural
from argosy.core.errors import BadInput
from argosy.data.batch import Batch, Field, Fields
from argosy.data.images.buckets import BucketRows
from argosy.data.images.settings import ImageSettings
from argosy.data.sources import RowSource
from argosy.data.sources.synthetic import mix, splitmix

IMAGES = Field("B h w c", np.float32, "row")
LABELS = Field("B", np.int32, "row")
CONTROL = Field("B y x k", np.float32, "row")


class Pictures(Protocol):
    """A sequence of images, [H W C] each. They are in memory, or are read when they are asked for."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: Any, /) -> Any: ...


@dataclass(frozen=True)
class ImageTable:
    """All images of a source, with their labels, captions and control images.

    pictures: the images.
    labels: the class of each image; None: there are no classes.
    captions: the caption of each image; None: there are no captions.
    class_names: the names of the classes, in order; empty if classes have no names.
    identities: [images] uint64, the hash of each image that decides whether it is held out.
    size: the (height, width) of each image in a batch, after cropping.
    channels: the number of channels of each image.
    white: the number that stands for white.
    controls: the control image of each image, with 3 channels and the size of the image; None: there are no control images.
    """

    pictures: Pictures
    labels: np.ndarray | None
    captions: Sequence[str] | None
    class_names: tuple[str, ...]
    identities: np.ndarray
    size: tuple[int, int]
    channels: int
    white: float
    controls: Pictures | None = None

    @property
    def classes(self) -> int:
        """The number of classes: the number of names, or one more than the largest label if that is more. 0 without labels."""
        if self.labels is None or not len(self.labels):
            return 0
        return max(len(self.class_names), int(self.labels.max()) + 1)


class SplitImages(NamedTuple):
    """The images of one split that have one size.

    table: all images of the source, at that size.
    chosen: the indices in `table` of the images in the split.
    """

    table: ImageTable
    chosen: np.ndarray


def image_identity(picture: np.ndarray, caption: str | None) -> int:
    """A 64-bit hash of an image and its caption. Images with the same hash are held out together."""
    digest = hashlib.sha256(np.ascontiguousarray(picture).tobytes())
    if caption is not None:
        digest.update(caption.encode())
    return int.from_bytes(digest.digest()[:8], "big")


def held_out_mask(identities: np.ndarray, share: float) -> np.ndarray:
    """A mask of the images that are held out for evaluation: those whose hash, as a number from 0 to 1, is below the share. If these
    are less than half of the share, as in a small set, the last images are held out instead."""
    mask = identities < np.uint64(min(share, 1.0) * 2.0**64) if share else np.zeros(len(identities), bool)
    count = int(share * len(identities))
    if mask.sum() < count / 2 or mask.all():
        mask = np.arange(len(identities)) >= len(identities) - count
    return mask


class ImageSource(RowSource):
    """The base of sources of images: a file of arrays, a folder of image files, or shards."""

    settings: ImageSettings

    @property
    @abstractmethod
    def where(self) -> str:
        """The file or folder, for error messages."""

    def read_controls(self) -> None:
        """Reads control images too, if the data has any. Called only for objectives that use them.

        Raises:
            BadInput: a control image is missing or damaged.
        """

    @abstractmethod
    def stored_splits(self, held_out: bool, channels: int) -> list[SplitImages]:
        """The images of a split, with the captions of the source: one entry for each bucket, or only one without buckets."""

    def splits(self, held_out: bool, channels: int) -> list[SplitImages]:
        """The images of a split: one entry for each bucket, or only one without buckets. `data.image.caption` replaces captions.

        Args:
            channels: the number of channels to convert images to. Sources that cannot convert images ignore it.
        """
        splits = self.stored_splits(held_out, channels)
        if (caption := self.settings.caption) is None:
            return splits
        captions = [caption] * (len(splits[0].table.pictures) if splits else 0)
        return [SplitImages(replace(table, captions=captions), indexes) for table, indexes in splits]

    def rows(self, *, sequence: int, vocab: Any, seed: int, held_out: bool = False) -> "ImageRows | BucketRows":
        parts = []
        for table, indexes in self.splits(held_out, vocab.channels):
            check_images(table, vocab, self.where, self.settings)
            parts.append(ImageRows(table, indexes, self.settings, seed, trains=not held_out))
        return parts[0] if self.settings.buckets is None else BucketRows(parts)


class ImageRows:
    """The rows of one split.

    `gather` takes, beside row numbers, the place of each row: its index in the run's sequence of rows, over all epochs.
    """

    per_group = 1
    reads_places = True
    # The number of tokens in a row for throughput metrics. An image counts as one.
    tokens_per_row = 1

    def __init__(self, table: ImageTable, indexes: np.ndarray, settings: ImageSettings, seed: int, trains: bool):
        self.table, self.chosen, self.settings = table, indexes, settings if trains else without_chance(settings)
        self.fields: Fields = {"images": IMAGES} | ({"labels": LABELS} if table.labels is not None else {})
        self.fields |= {} if table.controls is None else {"control": CONTROL}
        self.seed = mix(np.array([seed % 2**64], np.uint64))

    def __len__(self) -> int:
        return len(self.chosen)

    @property
    def own_sizes(self) -> dict[str, int]:
        height, width = self.table.size
        control = {} if self.table.controls is None else {"y": height, "x": width, "k": 3}
        return {"h": height, "w": width, "c": self.table.channels} | control

    @property
    def numbers_per_row(self) -> int:
        """The number of numbers in a row, from which the pipeline chooses how many batches it makes at once."""
        return self.table.size[0] * self.table.size[1] * (self.table.channels + (0 if self.table.controls is None else 3))

    def gather(self, rows: np.ndarray, places: np.ndarray | None = None) -> Batch:
        places = rows if places is None else places
        images = [self.prepared(*pair) for pair in zip(rows.tolist(), places.tolist(), strict=True)]
        batch: Batch = {"images": np.stack(images)}
        if self.table.labels is not None:
            batch["labels"] = self.table.labels[self.chosen[rows]].astype(np.int32)
        return batch | self.controls(rows, places)

    def controls(self, rows: np.ndarray, places: np.ndarray) -> Batch:
        """The field `control` of some rows, cropped and mirrored like their images; empty if there are no control images."""
        if (controls := self.table.controls) is None:
            return {}
        pairs = zip(rows.tolist(), places.tolist(), strict=True)
        images = np.stack([self._placed(controls[int(self.chosen[row])], place) for row, place in pairs])
        return {"control": images.astype(np.float32) * np.float32(1 / self.table.white)}

    def drawn(self, place: int) -> np.ndarray:
        """Four random uint64 for a place in the run. They decide the vertical and horizontal offset of the crop, the mirroring, and the
        caption or prompt."""
        return splitmix(self.seed, np.arange(4, dtype=np.uint64) + np.uint64(4 * place))

    def prepared(self, row: int, place: int) -> np.ndarray:
        """One image, cropped and mirrored, as float32 from -1 (black) to 1 (white)."""
        picture = self._placed(self.table.pictures[int(self.chosen[row])], place)
        return (picture.astype(np.float32) * np.float32(2 / self.table.white) - 1).astype(np.float32)

    def _placed(self, picture: np.ndarray, place: int) -> np.ndarray:
        """Crops and mirrors an image as its place in the run decides."""
        draws = self.drawn(place)
        picture = crop_image(picture, self.table.size, self.settings.crop == "random", draws[:2])
        return picture[:, ::-1] if self.settings.flip and draws[2] >> np.uint64(63) else picture


def without_chance(settings: ImageSettings) -> ImageSettings:
    """The same settings without random crops and mirroring, for held-out images."""
    return settings.model_copy(update={"crop": "center", "flip": False})


def crop_image(picture: np.ndarray, size: tuple[int, int], random: bool, draws: np.ndarray) -> np.ndarray:
    """Crops an image to a size, at its center or, with `random`, at a place that `draws` decides."""
    spare = [have - target for have, target in zip(picture.shape[:2], size, strict=True)]
    at = [int(bits % np.uint64(room + 1)) if random else room // 2 for room, bits in zip(spare, draws, strict=True)]
    return picture[at[0] : at[0] + size[0], at[1] : at[1] + size[1]]


def check_images(table: ImageTable, space: Any, where: str, settings: ImageSettings) -> None:
    """Checks that a model can read these images. `space` is its `ImageSpace`.

    Raises:
        BadInput: the number of channels differs, the patch size does not divide the image, or the data has no or too many classes.
    """
    height, width = table.size
    if table.channels != space.channels:
        problem = f"images have {plural(table.channels, 'channel')}, and the model reads {space.channels}"
        raise BadInput(problem, where=where, hint=f"model.channels={table.channels}")
    if height % space.multiple or width % space.multiple:
        problem = f"images of {height} x {width} do not divide into the model's patches of {space.multiple}"
        size = max(space.multiple, height // space.multiple * space.multiple)
        setting = f"size={size}" if settings.buckets is None else f"buckets={-(-settings.buckets // space.multiple) * space.multiple}"
        raise BadInput(problem, where=where, hint=f"data.image.{setting}, or another model.patch")
    if space.classes and table.labels is None:
        raise BadInput("the model reads classes, and this data has none", where=where, hint="labels: an array, or a folder a class")
    if space.classes and table.classes > space.classes:
        problem = f"the data has {table.classes} classes, and the model knows {space.classes}"
        raise BadInput(problem, where=where, hint=f"model.classes={table.classes}")
