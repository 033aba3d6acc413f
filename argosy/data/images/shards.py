"""Reads shards of images: tar files in the format of WebDataset, and Parquet files in the format of `datasets`.

    0001.jpg  0001.txt  0001.json  0001.cls    The members of a tar file whose names are equal up to the first dot form one record: an
                                               image, its caption (`.txt`, or `text` or `caption` of the JSON object), and its class
                                               (`.cls`, or `label` of the JSON object).
    0001.conditioning_image.png                The control image of the record, for ControlNets.
    image, text, label, conditioning_image     The columns of a Parquet file. Images are bytes, or structures with `bytes`.

`data.columns.images=NAME`, `controls`, `captions` and `labels` choose other endings of files, keys of JSON objects or columns. A path
may be a pattern with wildcards, or with a range in braces: `shard-{000..010}.tar`. Images are read again from their position in the
shard, so tar files must not be compressed. To read one image of a Parquet file, its whole row group is read. So row groups of large
sets should be small: `datasets` writes groups of 100 rows.
"""

import json
import tarfile
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from argosy.core.errors import BadInput, Damaged
from argosy.core.input_files import InputFile, matching_files
from argosy.data.images.files import ImageFiles
from argosy.data.images.settings import ImageSettings
from argosy.data.sources import missing
from argosy.data.sources.kinds import IMAGE_NAMES, file_kind
from argosy.data.sources.opening import import_package
from argosy.data.sources.tar_files import BLOCK_BYTES, TEXT_ENDINGS, member_columns

if TYPE_CHECKING:
    from argosy.data.settings import DataSettings

COLUMNS = {
    "images": ("image", "images", "img", *(ending[1:] for ending in IMAGE_NAMES)),
    "controls": ("conditioning_image", "control_image", "control", "conditioning"),
    "captions": ("text", "caption", "txt", "captions", "prompt"),
    "labels": ("label", "cls", "labels", "class"),
}
KINDS = ("tar", "parquet")
# Number of row groups of a Parquet file that are kept in memory.
GROUPS_KEPT = 4


class ShardRecord(NamedTuple):
    """One image of a shard, with its label, caption and control images.

    name: the name of the record in its shard.
    image: the encoded image.
    at: the position of the image in the shard, for `ImageShard.read`.
    label: the class, a number or a name; None: there is no class.
    caption: the caption; None: there is no caption.
    controls: the positions of control images, by the ending of their names or by column.
    """

    name: str
    image: bytes
    at: Any
    label: int | str | None
    caption: str | None
    controls: Mapping[str, Any]


class ImageShard(ABC):
    """One file of images.

    columns: the names that `data.columns` gives for `images`, `controls`, `captions` and `labels`.
    """

    # The names of the classes, if the file holds them.
    class_names: tuple[str, ...] = ()

    def __init__(self, file: InputFile, columns: Mapping[str, str]):
        self.file, self.columns = file, columns

    @abstractmethod
    def records(self) -> Iterator[ShardRecord]:
        """Yields the records of all images, in order.

        Raises:
            BadInput: a record has no image or several images.
            Damaged: the file is truncated or damaged.
        """

    @abstractmethod
    def read(self, at: Any) -> bytes:
        """Reads the encoded image at this position."""

    def chosen(self, column: str, fields: Mapping[str, Any], where: str) -> Any:
        """Chooses the caption or label among the fields of a record; None if there is none.

        Args:
            column: `captions` or `labels`.

        Raises:
            BadInput: the settings name a field that the record does not have.
        """
        if (field := self.columns.get(column)) is not None and field not in fields:
            raise BadInput(f"no `{field}`, which data.columns.{column} names", where=where, hint=f"it has {', '.join(fields)}")
        names = COLUMNS[column] if field is None else (field,)
        return next((fields[name] for name in names if fields.get(name) is not None), None)


class TarShard(ImageShard):
    """An uncompressed tar file of images. A position is (offset, size) in bytes."""

    def records(self) -> Iterator[ShardRecord]:
        key, fields, images, controls = "", dict[str, Any](), dict[str, tuple[bytes, Any]](), dict[str, Any]()
        for name, ending, data, at in self._members():
            stem = name[: len(name) - len(ending) - 1]
            if stem != key:
                if key:
                    yield self._record(key, fields, images, controls)
                key, fields, images, controls = stem, {}, {}, {}
            last = ending.rpartition(".")[2]
            if data is None:
                controls[ending] = at
            elif f".{last}" in IMAGE_NAMES:
                images[ending] = data, at
            elif last in TEXT_ENDINGS:
                fields |= member_columns(ending, last, data, f"{self.file}, {name}")
        if key:
            yield self._record(key, fields, images, controls)

    def read(self, at: Any) -> bytes:
        with self.file.open() as raw:
            raw.seek(at[0])
            return raw.read(at[1])

    def _record(
        self, stem: str, fields: dict[str, Any], images: dict[str, tuple[bytes, Any]], controls: Mapping[str, Any]
    ) -> ShardRecord:
        where = f"{self.file}, {stem}"
        if (requested := self.columns.get("images")) is not None:
            images = {ending: image for ending, image in images.items() if ending == requested}
        if len(images) != 1:
            problem = f"several images: {', '.join(images)}" if images else f"no image{'' if requested is None else f' `{requested}`'}"
            raise BadInput(f"a record with {problem}", where=where, hint="data.columns.images=ENDING names that of the images")
        data, at = next(iter(images.values()))
        caption = self.chosen("captions", fields, where)
        text = None if caption is None else str(caption).strip()
        return ShardRecord(stem, data, at, self.chosen("labels", fields, where), text, controls)

    def _is_control(self, ending: str) -> bool:
        """Whether a member with this ending is a control image: `conditioning_image.png`, or the ending that the settings name."""
        requested, (stem, _, last) = self.columns.get("controls"), ending.rpartition(".")
        if f".{last}" not in IMAGE_NAMES or ending == self.columns.get("images"):
            return False
        return stem in COLUMNS["controls"] if requested is None else ending == requested

    def _members(self) -> Iterator[tuple[str, str, bytes | None, tuple[int, int]]]:
        """Yields each member that is an image or a text: its name, its ending after the first dot, its content (None: a control image,
        which is not read), and its position."""
        name = ""
        try:
            with self.file.open() as raw, tarfile.open(fileobj=raw, mode="r:") as archive:
                for member in archive:
                    base = member.name.rpartition("/")[2]
                    ending = base.partition(".")[2].lower()
                    last = ending.rpartition(".")[2]
                    if not member.isfile() or base.startswith(".") or not (f".{last}" in IMAGE_NAMES or last in TEXT_ENDINGS):
                        continue
                    name, file = member.name, archive.extractfile(member)
                    data = None if self._is_control(ending) else b"" if file is None else file.read()
                    if data is not None and len(data) != member.size:
                        raise tarfile.ReadError(f"{name} is cut off")
                    yield name, ending, data, (member.offset_data, member.size)
                # tarfile does not notice if an archive is truncated between two members.
                raw.seek(-min(BLOCK_BYTES, self.file.size_bytes), 2)
                if raw.read().strip(b"\0"):
                    raise tarfile.ReadError("it has no end")
        except tarfile.TarError as error:
            where = f"{self.file}, after {name}" if name else str(self.file)
            hint = "" if name else "a packed one is unpacked first (gunzip): images are read again where they are"
            raise Damaged(f"a damaged tar file: {error}", where=where, hint=hint) from None


class ParquetShard(ImageShard):
    """A Parquet file with a column of images. A position is (row group, row in the group, column)."""

    def __init__(self, file: InputFile, columns: Mapping[str, str]):
        super().__init__(file, columns)
        schema, self.row_groups = self._read_with(lambda opened: (opened.schema_arrow, opened.num_row_groups))
        names = schema.names
        # Unless the settings name a column, its type decides whether it holds images.
        with_files = [name for name in names if holds_files(schema.field(name).type)]
        candidates = [name for name in self._names("images") if name in names]
        self.column = next((name for name in candidates if name in with_files), next(iter(candidates), ""))
        if not self.column:
            problem = "no column of images" if "images" not in columns else f"no column `{columns['images']}`"
            raise BadInput(problem, where=str(file), hint=f"it has {', '.join(names)}; data.columns.images=NAME names it")
        candidates = names if "controls" in columns else [name for name in with_files if name != self.column]
        self.control_column = next((name for name in self._names("controls") if name in candidates), None)
        if self.control_column is None and "controls" in columns:
            problem = f"no column `{columns['controls']}`, which data.columns.controls names"
            raise BadInput(problem, where=str(file), hint=f"it has {', '.join(names)}")
        readable = dict.fromkeys((*COLUMNS["captions"], *COLUMNS["labels"], *columns.values()))
        self.others = [name for name in readable if name in names and name not in (self.column, self.control_column)]
        features = json.loads((schema.metadata or {}).get(b"huggingface", b"{}")).get("info", {}).get("features", {})
        label = next((name for name in self._names("labels") if name in names), "")
        self.class_names = tuple((features.get(label) or {}).get("names") or ())
        self.groups = OrderedDict[tuple[int, str], list[bytes]]()

    def _read_with(self, use: Callable[[Any], Any]) -> Any:
        """Opens the file, and returns the result of `use` for it.

        Raises:
            Damaged: the file cannot be read.
        """
        parquet, lib = import_package("pyarrow.parquet", "Parquet files"), import_package("pyarrow", "Parquet files")
        try:
            with self.file.open() as raw:
                return use(parquet.ParquetFile(raw, page_checksum_verification=True))
        except (lib.ArrowException, OSError) as error:
            raise Damaged(f"a damaged Parquet file: {error}".splitlines()[0][:200], where=str(self.file)) from None

    def _rows(self, group: int, columns: list[str]) -> list[dict[str, Any]]:
        return self._read_with(lambda opened: opened.read_row_group(group, columns=columns).to_pylist()) if columns else []

    def _names(self, column: str) -> tuple[str, ...]:
        return (self.columns[column],) if column in self.columns else COLUMNS[column]

    def records(self) -> Iterator[ShardRecord]:
        row = 0
        for group in range(self.row_groups):
            images, others = self._images(group, self.column), self._rows(group, self.others)
            for i, image in enumerate(images):
                where, fields = f"{self.file}, row {row}", others[i] if others else {}
                caption = self.chosen("captions", fields, where)
                text = None if caption is None else str(caption).strip()
                controls = {} if self.control_column is None else {self.control_column: (group, i, self.control_column)}
                yield ShardRecord(str(row), image, (group, i, self.column), self.chosen("labels", fields, where), text, controls)
                row += 1

    def read(self, at: Any) -> bytes:
        return self._images(at[0], at[2])[at[1]]

    def _images(self, group: int, column: str) -> list[bytes]:
        """The encoded images of a column in a row group.

        Raises:
            BadInput: an entry holds no bytes, for instance because it is a path.
        """
        if (key := (group, column)) not in self.groups:
            images = []
            for i, row in enumerate(self._rows(group, [column])):
                value = row[column]
                data = value.get("bytes") if isinstance(value, dict) else value
                if not isinstance(data, bytes):
                    where = f"{self.file}, row {i} of group {group}"
                    raise BadInput(f"`{column}` holds no bytes of an image", where=where, hint="the file has images, not paths")
                images.append(data)
            self.groups[key] = images
            while len(self.groups) > GROUPS_KEPT * (1 if self.control_column is None else 2):
                self.groups.popitem(last=False)
        self.groups.move_to_end(key)
        return self.groups[key]


def holds_files(kind: Any) -> bool:
    """Whether a column of this Arrow type can hold encoded images: bytes, or structures with `bytes`."""
    types = import_package("pyarrow", "Parquet files").types
    if types.is_struct(kind):
        return any(field.name == "bytes" and holds_files(field.type) for field in kind)
    return types.is_binary(kind) or types.is_large_binary(kind) or (types.is_dictionary(kind) and holds_files(kind.value_type))


class ImageShards(ImageFiles):
    """A source of the images in tar and Parquet files."""

    kind = "shards"
    has_columns = True

    def __init__(self, path: str, settings: ImageSettings, held_out: float = 0.0, columns: Mapping[str, str] | None = None):
        super().__init__(settings, held_out)
        self.place = path
        if unknown := set(columns or {}) - set(COLUMNS):
            raise BadInput(f"data.columns.{min(unknown)} is no column of images", hint=f"columns: {', '.join(COLUMNS)}")
        files = image_shard_files(path)
        self.shards = [{"tar": TarShard, "parquet": ParquetShard}[file_kind(file)](file, columns or {}) for file in files]
        # For each image: the index of its shard, its position there, and the positions of its control images.
        self.places: list[tuple[int, Any, Mapping[str, Any]]] = []
        labels = list[Any]()
        for number, shard in enumerate(self.shards):
            for record in shard.records():
                name = f"{files[number].name}/{record.name}"
                if self.add(name, f"{files[number]}, {record.name}", record.image, None, record.caption):
                    self.places.append((number, record.at, record.controls))
                    labels.append(record.label)
        self.check_added()
        self._check_complete(labels)

    def _check_complete(self, labels: list[Any]) -> None:
        """Checks that all images have a class, or none, and the same for captions. Then sets the class of each image.

        Raises:
            BadInput: some images have a class or a caption, and others have none.
        """
        for noun, values in (("class", labels), ("caption", [file.caption for file in self.files])):
            without = [file.name for file, value in zip(self.files, values) if value is None]
            if without and len(without) < len(values):
                raise BadInput(f"an image without a {noun}, which others have: {without[0]}", where=self.place)
        if labels[0] is None:
            return
        names = next((shard.class_names for shard in self.shards if shard.class_names), ())
        if not all(isinstance(label, int) and label >= 0 for label in labels):
            names = tuple(sorted({str(label) for label in labels}))
            labels = [names.index(str(label)) for label in labels]
        self.class_names = names
        self.files = [file._replace(label=label) for file, label in zip(self.files, labels)]

    @classmethod
    def from_settings(cls, argument: str, settings: "DataSettings") -> Self:
        return cls(argument, settings.image, settings.held_out, settings.columns)

    def encoded(self, row: int) -> bytes:
        shard, at, _ = self.places[row]
        return self.shards[shard].read(at)

    def control_places(self) -> list[str]:
        without_control = [file.name for file, (_, _, controls) in zip(self.files, self.places, strict=True) if not controls]
        if len(without_control) == len(self.files):
            return []
        if without_control:
            raise BadInput(f"an image without a control image, which others have: {without_control[0]}", where=self.place)
        places = list[str]()
        for file, (number, _, controls) in zip(self.files, self.places, strict=True):
            shard = self.shards[number].file
            where = f"{shard}, {file.name.removeprefix(f'{shard.name}/')}"
            if len(controls) > 1:
                problem = f"a record with several control images: {', '.join(controls)}"
                raise BadInput(problem, where=where, hint="data.columns.controls=ENDING names that of the control images")
            places.append(f"{where}, its control image")
        return places

    def encoded_control(self, row: int) -> bytes:
        shard, _, controls = self.places[row]
        return self.shards[shard].read(next(iter(controls.values())))

    def keep(self, rows: list[int]) -> None:
        super().keep(rows)
        self.places = [self.places[row] for row in rows]

    @property
    def where(self) -> str:
        return self.place


def image_shard_files(place: str) -> list[InputFile]:
    """The files that a path or URL names: one file, or all files that a pattern matches.

    Raises:
        BadInput: there are no files, or a file is neither a tar nor a Parquet file.
    """
    single = InputFile(place)
    files = [single] if single.is_file else matching_files(place)
    if not files:
        raise missing(single)
    for file in files:
        if (kind := file_kind(file)) not in KINDS:
            raise BadInput(f"images come in tar and Parquet files, and this one is read as {kind}", where=str(file))
    return files


def image_data(settings: "DataSettings") -> "DataSettings":
    """Returns the settings for a model of images: if the source is tar or Parquet files, it becomes `shards:SOURCE`."""
    if not isinstance(settings.source, str):
        return settings
    single = InputFile(settings.source)
    files = [single] if single.is_file else matching_files(settings.source)
    if not files or single.is_folder or any(file_kind(file) not in KINDS for file in files):
        return settings
    return settings.model_copy(update={"source": f"shards:{settings.source}"})
