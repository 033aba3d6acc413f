"""Reads Bagz files (github.com/google-deepmind/bagz) with the package `bagz`, an extra.

A record is a tf.Example, a JSON object or a text, as in ArrayRecord files. Records of `.bagz` files are compressed by Zstandard, and
those of `.bag` files are not. The format has no magic number and no checksums. So a file is recognized by its name, and a damaged byte
in a text is not noticed.
"""

from collections.abc import Iterator, Sequence
from typing import ClassVar

from argosy.core.errors import BadInput, Damaged
from argosy.data.sources.array_record import BATCH_RECORDS, RecordContainer
from argosy.data.sources.opening import import_package

# Bagz reads a path with these characters as several files.
SEPARATORS = ",@"


class BagzRecords(RecordContainer):
    """A Bagz file: texts, or records to fine-tune on."""

    kind: ClassVar[str] = "bagz"
    noun: ClassVar[str] = "Bagz"

    def batches(self) -> Iterator[Sequence[bytes]]:
        place = str(self.path)
        if any(character in place for character in SEPARATORS):
            hint = "rename it or its folder; several files are read as a folder or by a pattern with `*`"
            raise BadInput("Bagz reads a path with `,` or `@` as several files", where=place, hint=hint)
        reader = import_package("bagz", "Bagz files", "bagz").Reader(place)
        if not len(reader):
            raise Damaged("a Bagz file without records", where=place)
        for first in range(0, len(reader), BATCH_RECORDS):
            yield reader.read_range(first, min(BATCH_RECORDS, len(reader) - first))
