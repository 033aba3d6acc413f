"""Images as a table of rows: any row is made from its number, and what is random about it from its place in the run.

    images   float32  [B h w c]  -1 is black, 1 is white
    labels   int32    [B]        the class, where there are classes
    control  float32  [B y x k]  the control image, where there are any: 0 is black, 1 is white
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
    """Images by number, [H W C] each; a source holds them, or reads them when they are asked for."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: Any, /) -> Any: ...


@dataclass(frozen=True)
class ImageTable:
    """All images of a source, and what belongs to each.

    pictures: the images.
    labels: the class of each; None: there are no classes.
    captions: the text of each; None: there are no texts.
    class_names: names of the classes, in order; empty if they have none.
    identities: for each image, the hash that decides whether it is held out.
    size, channels: of every image as a row has it.
    white: the number that stands for white.
    controls: the control image of each, of three channels and as high and wide as the picture; None: there are none.
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
        """The number of classes: of the names, or one more than the largest label."""
        if self.labels is None or not len(self.labels):
            return 0
        return max(len(self.class_names), int(self.labels.max()) + 1)


class SplitImages(NamedTuple):
    """Images of one split and one size.

    table: all images of the source, at that size.
    chosen: indices into `table` of the images of the split.
    """

    table: ImageTable
    chosen: np.ndarray


def image_identity(picture: np.ndarray, caption: str | None) -> int:
    """The hash of an image and its caption: equal ones are held out together."""
    digest = hashlib.sha256(np.ascontiguousarray(picture).tobytes())
    if caption is not None:
        digest.update(caption.encode())
    return int.from_bytes(digest.digest()[:8], "big")


def held_out_mask(identities: np.ndarray, share: float) -> np.ndarray:
    """Which images are kept for evaluation: those whose hash falls below the share; the last ones if that gives less than half of
    it, as in a small set."""
    mask = identities < np.uint64(min(share, 1.0) * 2.0**64) if share else np.zeros(len(identities), bool)
    count = int(share * len(identities))
    if mask.sum() < count / 2 or mask.all():
        mask = np.arange(len(identities)) >= len(identities) - count
    return mask


class ImageSource(RowSource):
    """Images with what belongs to each: a file of arrays, a folder of image files, or archives of them."""

    settings: ImageSettings

    @property
    @abstractmethod
    def where(self) -> str:
        """The file or folder, for error messages."""

    def read_controls(self) -> None:
        """Reads the control images too, if the data has any: an objective asks for them, and other runs leave them alone.

        Raises:
            BadInput: one is missing or damaged.
        """

    @abstractmethod
    def stored_splits(self, held_out: bool, channels: int) -> list[SplitImages]:
        """The images of a split, with the captions that the source has."""

    def splits(self, held_out: bool, channels: int) -> list[SplitImages]:
        """The images of a split with so many channels, if the source can convert them: of each bucket, where there are any."""
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

    gather: takes the place of each row in the run beside its number: epoch times rows, plus the position in the epoch.
    """

    per_group = 1
    reads_places = True
    # Tokens of a row, as rates count them: one for an image.
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
        """Numbers of an image, by which the pipeline decides how many batches it makes at once."""
        return self.table.size[0] * self.table.size[1] * (self.table.channels + (0 if self.table.controls is None else 3))

    def gather(self, rows: np.ndarray, places: np.ndarray | None = None) -> Batch:
        places = rows if places is None else places
        images = [self.prepared(*pair) for pair in zip(rows.tolist(), places.tolist(), strict=True)]
        batch: Batch = {"images": np.stack(images)}
        if self.table.labels is not None:
            batch["labels"] = self.table.labels[self.chosen[rows]].astype(np.int32)
        return batch | self.controls(rows, places)

    def controls(self, rows: np.ndarray, places: np.ndarray) -> Batch:
        """The control images of rows, cropped and mirrored as their images; nothing without any."""
        if (controls := self.table.controls) is None:
            return {}
        pairs = zip(rows.tolist(), places.tolist(), strict=True)
        images = np.stack([self._placed(controls[int(self.chosen[row])], place) for row, place in pairs])
        return {"control": images.astype(np.float32) * np.float32(1 / self.table.white)}

    def drawn(self, place: int) -> np.ndarray:
        """Four random numbers for a place in the run: of the crop's height and width, of the mirror, and of the caption or prompt."""
        return splitmix(self.seed, np.arange(4, dtype=np.uint64) + np.uint64(4 * place))

    def prepared(self, row: int, place: int) -> np.ndarray:
        """One image as the model reads it."""
        picture = self._placed(self.table.pictures[int(self.chosen[row])], place)
        return (picture.astype(np.float32) * np.float32(2 / self.table.white) - 1).astype(np.float32)

    def _placed(self, picture: np.ndarray, place: int) -> np.ndarray:
        """An image, cropped and mirrored as its place in the run says."""
        draws = self.drawn(place)
        picture = crop_image(picture, self.table.size, self.settings.crop == "random", draws[:2])
        return picture[:, ::-1] if self.settings.flip and draws[2] >> np.uint64(63) else picture


def without_chance(settings: ImageSettings) -> ImageSettings:
    """The same settings without anything random: held-out images are the same in every evaluation."""
    return settings.model_copy(update={"crop": "center", "flip": False})


def crop_image(picture: np.ndarray, size: tuple[int, int], random: bool, draws: np.ndarray) -> np.ndarray:
    """The part of an image with this size, at its center or at a random place."""
    spare = [have - target for have, target in zip(picture.shape[:2], size, strict=True)]
    at = [int(bits % np.uint64(room + 1)) if random else room // 2 for room, bits in zip(spare, draws, strict=True)]
    return picture[at[0] : at[0] + size[0], at[1] : at[1] + size[1]]


def check_images(table: ImageTable, space: Any, where: str, settings: ImageSettings) -> None:
    """Checks that a model takes these images.

    Raises:
        BadInput: other channels, a size that its patches do not divide, or classes that it does not know.
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
