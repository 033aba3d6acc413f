"""Encodes images and captions with frozen models: latents of an autoencoder, and hidden states of text encoders. They are computed
once, stored on disk, and mapped.

    FOLDER/SPLIT/manifest.json    the number of rows that are stored of each kind of array
    FOLDER/SPLIT/latents.npy      [N F h w C]  the latents of each image and, if images are mirrored (F = 2), of its mirror image
    FOLDER/SPLIT/controls.npy     [N F h w C]  the latents of control images, for ControlNets that read latents
    FOLDER/SPLIT/text.npy         [U S E]      the hidden states of each distinct caption; the first is the empty caption
    FOLDER/SPLIT/text_mask.npy    [U S]        the attention mask of each caption
    FOLDER/SPLIT/pooled.npy       [U O]        the pooled vector of each caption

SPLIT is `train` or `held_out`, followed by the size of images if there are buckets.

The name of the folder is a hash of everything that decides the numbers: the images and their settings, the weights of the encoders, and
the precision. Runs for which these are equal share a folder. A run that is killed while it fills the folder is continued by the next.

A batch has these fields:

    images     float32  [B h w c]  latents, or images if there is no autoencoder
    text       float32  [B s e]    hidden states of the caption, or of the empty caption for a share of the rows (`dropout`)
    text_mask  int32    [B s]      attention mask of the caption
    pooled     float32  [B o]      the pooled vector of the caption
    labels     int32    [B]        the class, if there are classes
    control    float32  [B y x k]  the control image or its latents, if there are any
    prompts    int32    [B n t]    token ids of a prompt for n text encoders, if `prompts` is given
"""

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from argosy.core.caches import file_lock
from argosy.core.counts import plural
from argosy.core.errors import BadInput
from argosy.core.formats.files import sync
from argosy.core.progress import Say
from argosy.data.batch import Batch, Field, Fields
from argosy.data.images.buckets import BucketRows
from argosy.data.images.table import ImageRows, ImageSource, ImageTable, check_images
from argosy.data.sources import RowSource

# The fields that text encoders make of captions.
CAPTION_FIELDS = {
    "text": Field("B s e", np.float32, "row"),
    "text_mask": Field("B s", np.int32, "row"),
    "pooled": Field("B o", np.float32, "row"),
}
PROMPTS = Field("B n t", np.int32, "row")
MANIFEST = "manifest.json"
# The numbers of images and of texts that are encoded in one batch.
IMAGES_AT_ONCE, TEXTS_AT_ONCE = 8, 16
# The random numbers of a row are integers below this.
WIDTH = 2.0**64


class FrozenEncoders(Protocol):
    """The frozen models that encode images and captions. They are loaded only if something is missing in the cache."""

    @property
    def identity(self) -> str:
        """A hash of what decides the results: weights, settings and precision."""
        ...

    @property
    def space(self) -> Any:
        """The requirements of the autoencoder on images (`ImageSpace`); None: there is no autoencoder."""
        ...

    @property
    def reads_text(self) -> bool:
        """Whether captions are encoded."""
        ...

    @property
    def encodes_controls(self) -> bool:
        """Whether control images are encoded."""
        ...

    def latents(self, images: np.ndarray) -> np.ndarray:
        """Encodes images [B H W c], from -1 (black) to 1 (white), to latents [B h w C]."""
        ...

    def control_latents(self, images: np.ndarray) -> np.ndarray:
        """Encodes control images [B H W 3], from 0 (black) to 1 (white), to latents [B h w C]."""
        ...

    def states(self, texts: Sequence[str]) -> dict[str, np.ndarray]:
        """Encodes texts to `text` [B S E], `text_mask` [B S] and `pooled` [B O]. Arrays that the encoders do not make are left out."""
        ...


class EncodedImages(RowSource):
    """The images of another source, encoded by frozen models.

    Args:
        source: the images.
        encoders: the frozen models.
        cache: the folder of the cache, which has one folder for each combination of source and encoders.
        dropout: the share of captions that are replaced by the empty caption in training.
        say: called with progress messages.
        prompts: the token ids [P n t] of P prompts for n text encoders, which replace captions. The first is the empty prompt. Each
            image gets a random one, drawn anew in each epoch. None: captions are used.
    """

    def __init__(
        self,
        source: ImageSource,
        encoders: FrozenEncoders,
        cache: Path,
        *,
        dropout: float = 0.0,
        say: Say = lambda _: None,
        prompts: np.ndarray | None = None,
    ):
        self.source, self.encoders, self.dropout, self.say, self.prompts = source, encoders, dropout, say, prompts
        if encoders.space is not None and source.settings.crop == "random":
            problem = "latents are computed once for each image, and data.image.crop=random crops anew in each epoch"
            raise BadInput(problem, where=source.where, hint="data.image.crop=center; data.image.flip=true is built")
        identity = json.dumps([source.fingerprint(), encoders.identity], sort_keys=True, default=str)
        self.folder = cache / "images" / hashlib.sha256(identity.encode()).hexdigest()[:32]

    @property
    def unreadable(self) -> Sequence[str]:
        """The names of images that are left out because they cannot be read."""
        return getattr(self.source, "unreadable", ())

    @property
    def stretched(self) -> Sequence[str]:
        """The names of images whose control image has another aspect ratio."""
        return getattr(self.source, "stretched", ())

    def rows(self, *, sequence: int, vocab: Any, seed: int, held_out: bool = False) -> "EncodedRows | BucketRows":
        space, buckets = self.encoders.space, self.source.settings.buckets
        image_space = vocab if space is None else vocab._replace(channels=space.channels, multiple=space.multiple * vocab.multiple)
        parts = []
        for table, indexes in self.source.splits(held_out, vocab.channels if space is None else space.channels):
            name = ("held_out" if held_out else "train") + ("" if buckets is None else "-{}x{}".format(*table.size))
            parts.append(self._rows_of(table, indexes, image_space, vocab.channels, seed, held_out, name))
        return parts[0] if buckets is None else BucketRows(parts)

    def _rows_of(
        self, table: ImageTable, indexes: np.ndarray, space: Any, channels: int, seed: int, held_out: bool, name: str
    ) -> "EncodedRows":
        """The rows of images of one size. Encodes what is missing into the folder `name`."""
        check_images(table, space, self.source.where, self.source.settings)
        if self.encoders.reads_text and table.captions is None:
            hint = "NAME.txt beside NAME.png; `text` in metadata.jsonl; an array `captions`; data.image.caption gives all the same one"
            raise BadInput("the model reads captions, and this data has none", where=self.source.where, hint=hint)
        rows = ImageRows(table, indexes, self.source.settings, seed, trains=not held_out)
        store = EncodedStore(self.folder / name)
        store.fill(rows, self.encoders, self.say)
        return EncodedRows(rows, store, channels, 0.0 if held_out else self.dropout, self.prompts)

    def fingerprint(self) -> dict[str, Any]:
        prompts = {} if self.prompts is None else {"prompts": hashlib.sha256(self.prompts.tobytes()).hexdigest()}
        return self.source.fingerprint() | {"encoders": self.encoders.identity, "dropout": self.dropout} | prompts


class EncodedStore:
    """The arrays of one split on disk.

    arrays: the memory-mapped arrays, by name.
    texts: the index of each distinct caption in the arrays of captions.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.arrays = dict[str, np.ndarray]()
        self.texts = dict[str, int]()

    def fill(self, rows: ImageRows, encoders: FrozenEncoders, say: Say) -> None:
        """Computes and stores the rows that are missing, then maps the arrays."""
        captions = rows.table.captions if encoders.reads_text else None
        encodes_controls = rows.table.controls is not None and encoders.encodes_controls
        if captions is not None:
            distinct = dict.fromkeys(["", *(captions[int(i)] for i in rows.chosen)])
            self.texts = {text: i for i, text in enumerate(distinct)}
        with file_lock(self.folder.parent / f".{self.folder.name}.lock", say):
            self.folder.mkdir(parents=True, exist_ok=True)
            if encoders.space is not None and len(rows):
                still = ImageRows(rows.table, rows.chosen, rows.settings, 0, trains=False)
                stacked = lambda at, end: np.stack([still.prepared(row, 0) for row in range(at, end)])  # noqa: E731
                flip = rows.settings.flip
                each = lambda at, end: {"latents": encode_views(stacked(at, end), flip, encoders.latents)}  # noqa: E731
                self._write("images", len(rows), IMAGES_AT_ONCE, each, say)
                if encodes_controls:
                    given = lambda at, end: still.controls(np.arange(at, end), np.zeros(end - at, np.int64))["control"]  # noqa: E731
                    each = lambda at, end: {"controls": encode_views(given(at, end), flip, encoders.control_latents)}  # noqa: E731
                    self._write("control images", len(rows), IMAGES_AT_ONCE, each, say)
            if self.texts:
                texts = list(self.texts)
                self._write("captions", len(texts), TEXTS_AT_ONCE, lambda at, end: encoders.states(texts[at:end]), say)
        for name in ("latents", *(("controls",) if encodes_controls else ()), *CAPTION_FIELDS):
            if (path := self.folder / f"{name}.npy").is_file():
                self.arrays[name] = np.load(path, mmap_mode="r")

    def _write(
        self, noun: str, count: int, at_once: int, compute: Callable[[int, int], dict[str, np.ndarray]], say: Say
    ) -> None:
        """Computes the rows that earlier processes have not stored, and records the progress after each part.

        Args:
            noun: what is computed, such as "images". It is also the key in the manifest.
            count: the number of rows.
            at_once: the number of rows that are computed together.
            compute: (first row, row after the last) -> the arrays of these rows, by name.
        """
        done = self._manifest().get(noun, 0)
        arrays, last_tenth = dict[str, np.ndarray](), -1
        for at in range(done, count, at_once):
            if (tenth := 10 * at // count) > last_tenth:
                say(f"encoding {noun}: {at:,} of {count:,}")
                last_tenth = tenth
            for name, values in compute(at, min(at + at_once, count)).items():
                if name not in arrays:
                    arrays[name] = self._open_array(name, (count, *values.shape[1:]), values.dtype, begins=not at)
                arrays[name][at : at + len(values)] = values
            for array in arrays.values():
                array.flush()  # type: ignore[attr-defined]
            self._record_progress(noun, min(at + at_once, count))

    def _open_array(self, name: str, shape: tuple[int, ...], dtype: np.dtype, begins: bool) -> np.ndarray:
        path = self.folder / f"{name}.npy"
        if begins:
            return np.lib.format.open_memmap(path, "w+", dtype, shape)
        return np.lib.format.open_memmap(path, "r+")

    def _manifest(self) -> dict[str, Any]:
        path = self.folder / MANIFEST
        return json.loads(path.read_text()) if path.is_file() else {}

    def _record_progress(self, noun: str, rows: int) -> None:
        path = self.folder / f"{MANIFEST}.part"
        path.write_text(json.dumps(self._manifest() | {noun: rows}))
        sync(path)
        os.replace(path, self.folder / MANIFEST)


class EncodedRows:
    """The rows of one split: latents or images, with hidden states of captions or token ids of prompts.

    Args:
        rows: the images.
        store: the stored arrays.
        channels: the number of channels that the model reads.
        dropout, prompts: as in `EncodedImages`.
    """

    per_group = 1
    reads_places = True
    tokens_per_row = 1

    def __init__(
        self, rows: ImageRows, store: EncodedStore, channels: int, dropout: float, prompts: np.ndarray | None = None
    ):
        self.images, self.store, self.dropout, self.prompts = rows, store, dropout, prompts
        self.table, self.chosen, self.settings = rows.table, rows.chosen, rows.settings
        arrays = store.arrays
        if "latents" in arrays and arrays["latents"].shape[-1] != channels:
            problem = f"the autoencoder's latents have {plural(arrays['latents'].shape[-1], 'channel')}, and the model reads {channels}"
            raise BadInput(problem, hint=f"model.channels={arrays['latents'].shape[-1]}, or another autoencoder")
        captions = {name: field for name, field in CAPTION_FIELDS.items() if name in arrays}
        self.fields: Fields = dict(rows.fields) | captions | ({} if prompts is None else {"prompts": PROMPTS})
        self._captions = np.zeros(0, np.int64)
        if store.texts and (captions := rows.table.captions) is not None:
            self._captions = np.array([store.texts[captions[int(i)]] for i in rows.chosen], np.int64)

    def __len__(self) -> int:
        return len(self.images)

    @property
    def own_sizes(self) -> dict[str, int]:
        arrays, sizes = self.store.arrays, dict(self.images.own_sizes)
        if "latents" in arrays:
            sizes |= dict(zip("hwc", arrays["latents"].shape[2:], strict=True))
        sizes |= dict(zip("yxk", arrays["controls"].shape[2:], strict=True)) if "controls" in arrays else {}
        sizes |= dict(zip("se", arrays["text"].shape[1:], strict=True)) if "text" in arrays else {}
        sizes |= {} if self.prompts is None else dict(zip("nt", self.prompts.shape[1:], strict=True))
        return sizes | ({"o": arrays["pooled"].shape[1]} if "pooled" in arrays else {})

    @property
    def numbers_per_row(self) -> int:
        sizes = self.own_sizes
        control = sizes.get("y", 0) * sizes.get("x", 0) * sizes.get("k", 0)
        return sizes["h"] * sizes["w"] * sizes["c"] + sizes.get("s", 0) * sizes.get("e", 0) + control

    def gather(self, rows: np.ndarray, places: np.ndarray | None = None) -> Batch:
        places, arrays = rows if places is None else places, self.store.arrays
        draws = [self.images.drawn(place) for place in places.tolist()]
        batch = dict[str, Any]()
        if "latents" in arrays:
            mirrored = np.array([bool(bits[2] >> np.uint64(63)) and self.settings.flip for bits in draws], np.int64)
            batch["images"] = arrays["latents"][rows, mirrored]
            if self.table.labels is not None:
                batch["labels"] = self.table.labels[self.chosen[rows]].astype(np.int32)
            if "controls" in arrays:
                batch["control"] = np.asarray(arrays["controls"][rows, mirrored])
            else:
                batch |= self.images.controls(rows, places)
        else:
            batch = self.images.gather(rows, places)
        if len(self._captions):
            # The empty caption is the first.
            empty = np.array([float(bits[3]) < self.dropout * WIDTH for bits in draws])
            captions = np.where(empty, 0, self._captions[rows])
            batch |= {name: np.asarray(arrays[name][captions]) for name in CAPTION_FIELDS if name in arrays}
        if self.prompts is not None:
            # One random number decides whether the prompt is empty, and if not, which prompt it is.
            shares = np.array([float(bits[3]) / WIDTH for bits in draws])
            each = (shares - self.dropout) / (1 - self.dropout) * (len(self.prompts) - 1)
            prompt_ids = np.where(shares < self.dropout, 0, 1 + np.minimum(each.astype(np.int64), len(self.prompts) - 2))
            batch["prompts"] = self.prompts[prompt_ids]
        return batch


def encode_views(images: np.ndarray, flip: bool, encode: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Encodes images [B H W c] to latents [B F h w C]: F is 2, for each image and its mirror image, if `flip` is set, else 1."""
    # The last batch is padded to the size of the others, so that only one program is compiled.
    padded = np.concatenate([images, np.zeros((IMAGES_AT_ONCE - len(images), *images.shape[1:]), np.float32)])
    views = [padded, padded[:, :, ::-1]] if flip else [padded]
    return np.stack([encode(view)[: len(images)] for view in views], 1)

