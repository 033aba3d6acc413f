"""Reads images from a NumPy file (`.npz`). Only `images` is required.

    images               [N H W], or [N H W C] with 1, 3 or 4 channels: numbers from 0 (black) to `data.image.white`
    labels               [N] integers from 0
    captions             [N] texts
    class_names          [classes] texts
    conditioning_images  [N H W 3] control images of edges, depths or poses, for ControlNets

`data.columns` renames arrays: `data.columns.images=train_images`. If a file has `train_images` and `test_images` (and labels of both),
the test images are held out.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from argosy.core.errors import BadInput
from argosy.data.images.settings import ImageSettings
from argosy.data.images.table import ImageSource, ImageTable, SplitImages, held_out_mask, image_identity
from argosy.data.sources import existing
from argosy.data.sources.opening import content_hash

if TYPE_CHECKING:
    from argosy.data.settings import DataSettings

COLUMNS = ("images", "labels", "captions", "class_names", "conditioning_images")
# If no pixel of all images reaches this share of white, `data.image.white` is probably wrong.
DARK = 1 / 8


class ImageArrays(ImageSource):
    """A source of the images in a NumPy file."""

    has_columns = True

    def __init__(self, path: str, settings: ImageSettings, held_out: float = 0.0, columns: dict[str, str] | None = None):
        self.file, self.settings, self.held_out = existing(path), settings, held_out
        self.path = self.file.path
        self.columns = dict(columns or {})
        if settings.buckets is not None:
            problem = "data.image.buckets is for image files, which have sizes of their own, and the images of an array have one"
            raise BadInput(problem, where=str(self.path), hint="leave data.image.buckets out")
        if unknown := set(self.columns) - set(COLUMNS):
            raise BadInput(f"data.columns.{min(unknown)} is no column of images", hint=f"columns: {', '.join(COLUMNS)}")
        self.tables = self._read()

    @classmethod
    def from_settings(cls, argument: str, settings: "DataSettings") -> Self:
        return cls(argument, settings.image, settings.held_out, settings.columns)

    @property
    def where(self) -> str:
        return str(self.path)

    def stored_splits(self, held_out: bool, channels: int) -> list[SplitImages]:
        if len(self.tables) == 2:
            table = self.tables[int(held_out)]
            return [SplitImages(table, np.arange(len(table.pictures)))]
        mask = held_out_mask(self.tables[0].identities, self.held_out)
        return [SplitImages(self.tables[0], np.flatnonzero(mask == held_out))]

    def fingerprint(self) -> dict[str, Any]:
        fingerprint = {"source": "arrays", "source.sha256": content_hash(self.file), "held_out": self.held_out}
        fingerprint |= {f"source.{name}": column for name, column in sorted(self.columns.items())}
        return fingerprint | self.settings.fingerprint()

    def _read(self) -> list[ImageTable]:
        arrays = self._arrays(lambda name: not self._is_control(name))
        has_splits = "images" not in self.columns and "images" not in arrays and "train_images" in arrays
        self.prefixes = ("train_", "test_") if has_splits and "test_images" in arrays else ("train_",) if has_splits else ("",)
        return [self._table(arrays, prefix) for prefix in self.prefixes]

    def _arrays(self, is_read: Callable[[str], bool]) -> dict[str, np.ndarray]:
        """Reads the arrays whose names pass `is_read`.

        Raises:
            BadInput: the file is no NumPy file of arrays.
        """
        try:
            with np.load(self.path, allow_pickle=False) as file:
                return {name: file[name] for name in file.files if is_read(name)}
        except (ValueError, OSError, EOFError, KeyError) as error:
            raise BadInput(f"not a NumPy file of arrays: {error}", where=str(self.path)) from None

    def _is_control(self, name: str) -> bool:
        """Whether the array of this name holds control images."""
        usual = ("conditioning_images", "train_conditioning_images", "test_conditioning_images")
        requested = self.columns.get("conditioning_images")
        return name != self.columns.get("images") and (name in usual if requested is None else name == requested)

    def read_controls(self) -> None:
        arrays = self._arrays(self._is_control)
        for i, (table, prefix) in enumerate(zip(self.tables, self.prefixes, strict=True)):
            name = self.columns.get("conditioning_images", f"{prefix}conditioning_images")
            images, controls = np.asarray(table.pictures), arrays.get(name)
            expected = (*images.shape[:3], 3), images.dtype
            if controls is not None and (controls.shape, controls.dtype) != expected:
                shape = list(controls.shape)
                problem = f"`conditioning_images` is {controls.dtype} {shape}, not {images.dtype} [N H W 3] like `images`"
                raise BadInput(problem, where=str(self.path))
            self.tables[i] = replace(table, controls=controls)

    def _table(self, arrays: dict[str, np.ndarray], prefix: str) -> ImageTable:
        def column(name: str, of_split: bool = True) -> np.ndarray | None:
            return arrays.get(self.columns.get(name, (prefix if of_split else "") + name))

        where, images, labels, captions = str(self.path), column("images"), column("labels"), column("captions")
        if images is None:
            expected = self.columns.get("images", "images")
            raise BadInput(
                f"no array `{expected}`", where=where, hint=f"it has {', '.join(arrays)}; data.columns.images=NAME names another"
            )
        if images.ndim not in (3, 4) or images.dtype.kind not in "uif" or not images.size:
            problem = f"`images` is {images.dtype} {list(images.shape)}, not [N H W] or [N H W C] numbers"
            raise BadInput(problem, where=where, hint="channels come last: transpose(0, 2, 3, 1) from channels first")
        images = images[..., None] if images.ndim == 3 else images
        if images.shape[-1] not in (1, 3, 4) and images.shape[1] in (1, 3, 4):
            problem = f"`images` has its {images.shape[1]} channels first: {list(images.shape)}"
            raise BadInput(problem, where=where, hint="channels come last: transpose(0, 2, 3, 1)")
        white = self.settings.white or (1.0 if images.dtype.kind == "f" else 255.0)
        self._check_values(images, white)
        for name, other in (("labels", labels), ("captions", captions)):
            if other is not None and len(other) != len(images):
                raise BadInput(f"{len(images):,} images and {len(other):,} {name}", where=where)
        if labels is not None and (labels.ndim != 1 or labels.dtype.kind not in "ui" or int(labels.min()) < 0):
            raise BadInput(f"`labels` is {labels.dtype} {list(labels.shape)}, not [N] whole numbers from 0", where=where)
        names, texts = column("class_names", False), None if captions is None else [str(text) for text in captions]
        identities = [image_identity(image, texts[i] if texts else None) for i, image in enumerate(images)]
        height, width = images.shape[1:3]
        size = self.settings.size
        if size is not None and size > min(height, width):
            problem = f"data.image.size = {size}, and the images are {height} x {width}"
            raise BadInput(problem, where=where, hint="arrays are cropped and not resized: choose a smaller size")
        return ImageTable(
            images,
            None if labels is None else labels.astype(np.int32),
            texts,
            () if names is None else tuple(map(str, names)),
            np.array(identities, np.uint64),
            (height, width) if size is None else (size, size),
            images.shape[-1],
            white,
        )

    def _check_values(self, images: np.ndarray, white: float) -> None:
        """Raises BadInput if some numbers are not finite, below 0 or above white, or if all images are nearly black."""
        low, high = float(images.min()), float(images.max())
        if not np.isfinite([low, high]).all():
            row = int(np.flatnonzero(~np.isfinite(images.reshape(len(images), -1)).all(1))[0])
            raise BadInput(f"image {row} has numbers that are not finite", where=str(self.path))
        if low < 0 or high > white:
            problem = f"images have numbers from {low:g} to {high:g}, and black is 0, white {white:g}"
            raise BadInput(problem, where=str(self.path), hint="data.image.white=NUMBER says what white is; shift so that black is 0")
        if self.settings.white is None and high < DARK * white:
            problem = f"images have numbers up to {high:g}, and white is {white:g}: all of them would be nearly black"
            hint = f"data.image.white={high:g}; or data.image.white={white:g} if they are so dark"
            raise BadInput(problem, where=str(self.path), hint=hint)
