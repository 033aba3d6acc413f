"""Chooses the encoder of documents and the packing of rows by the format of a source's records."""

from argosy.core.errors import BadInput
from argosy.data.chat.conversations import ConversationEncoder
from argosy.data.encode import DocumentEncoder
from argosy.data.encoding import Encoding
from argosy.data.pack import Corpus
from argosy.data.rows.labeled import LabeledEncoder, LabeledRows
from argosy.data.rows.sequences import SequenceEncoder, SequenceRows
from argosy.data.sources import Source
from argosy.data.sources.labeled import COMPARED
from argosy.data.sources.records import GROUPS, LABELED


def encoder_for(source: Source, encoding: Encoding) -> DocumentEncoder:
    """Makes the encoder of a source's documents: for text, conversations, sequences that are compared, or labeled texts.

    Raises:
        BadInput: `encoding.prompts` is set for records that do not become vectors, or the encoder refuses a setting.
    """
    if encoding.prompts and source.format not in COMPARED:
        problem = f"data.prompts is for texts that become vectors, and this data is `{source.format}`"
        raise BadInput(problem, hint="leave `data.prompts` out")
    if source.format == "text":
        return DocumentEncoder(encoding)
    if source.format in LABELED:
        return LabeledEncoder(encoding, source.format)
    if source.format in GROUPS:
        return SequenceEncoder(encoding, source.format, source)
    return ConversationEncoder(encoding)


def sequence_rows(corpus: Corpus, format: str, per_group: int, sequence: int, packing: str, too_long: str) -> SequenceRows:
    """Packs a corpus of sequences or labeled texts into rows.

    Args:
        format: the format of the records.
        per_group: the number of sequences per record.
        sequence: the number of tokens in a row.
        packing, too_long: as in `data.packing` and `data.too_long`.
    """
    table_class = LabeledRows if format in LABELED else SequenceRows
    return table_class(corpus, per_group, sequence, packing, too_long)
