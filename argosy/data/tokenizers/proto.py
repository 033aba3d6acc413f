"""Reads and writes the protocol buffer of a SentencePiece model (google/sentencepiece, sentencepiece_model.proto).

Only the fields that decide ids and text are read. Every length is checked against the number of bytes that are left. The models that
this module writes are BPE with byte fallback, which GGUF files call `llama`. No protocol buffer library is needed.
"""

import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from argosy.data.tokenizers.config import damaged_file_error

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # kinds of pieces, in GGUF too
BPE = 2
# Appended to a model: normalizer_spec { add_dummy_prefix: false } or true. Of two values the later one counts.
NO_PREFIX, PREFIX = b"\x1a\x02\x18\x00", b"\x1a\x02\x18\x01"

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_PIECE, _TRAINER, _NORMALIZER, _DENORMALIZER = 1, 2, 3, 5  # fields of the model


@dataclass(frozen=True)
class SentencePieceModel:
    """The contents of a SentencePiece model.

    pieces: the text and the kind of each piece.
    scores: the score of each piece.
    bpe: whether the model is a BPE model.
    prefix: whether a space is added before a text.
    trims: whether runs of spaces become one, and spaces at both ends are removed.
    unknown: the text to which the unknown piece is decoded.
    denormalizes: whether text is changed again after decoding.
    """

    pieces: list[tuple[str, int]]
    scores: list[float]
    bpe: bool
    prefix: bool
    trims: bool
    unknown: str
    denormalizes: bool


def read_model(data: bytes, path: Path) -> SentencePieceModel:
    """Parses a model.

    Raises:
        Damaged: the bytes are no SentencePiece model.
    """
    pieces, scores, trainer, normalizer, denormalizes = [], [], {}, {}, False
    for number, value in fields(data, path):
        if number not in (_PIECE, _TRAINER, _NORMALIZER, _DENORMALIZER):
            continue
        if not isinstance(value, bytes):
            raise damaged_file_error(path, "it is not a SentencePiece model")
        part = dict(fields(value, path))
        if number == _PIECE:
            pieces.append(piece_of(part, path))
            scores.append(_score_of(part))
        elif number == _TRAINER:
            trainer |= part
        elif number == _NORMALIZER:
            normalizer |= part
        else:
            denormalizes = bool(part.get(2))
    if not pieces:
        raise damaged_file_error(path, "it has no pieces")
    unknown = _text_of(trainer.get(44, " \u2047 ".encode()), path)
    prefix, trims = bool(normalizer.get(3, 1)), bool(normalizer.get(4, 1))
    return SentencePieceModel(pieces, scores, trainer.get(3, 1) == BPE, prefix, trims, unknown, denormalizes)


def piece_of(fields: dict[int, int | bytes], path: Path) -> tuple[str, int]:
    kind = fields.get(3, NORMAL)
    if not isinstance(kind, int):
        raise damaged_file_error(path, "a piece has no kind")
    text = _text_of(fields.get(1, b""), path)
    if kind == BYTE and not re.fullmatch("<0x[0-9A-Fa-f]{2}>", text):
        raise damaged_file_error(path, "a piece for a byte names none")
    return text, kind


def _score_of(fields: dict[int, int | bytes]) -> float:
    score = fields.get(2, b"")
    return struct.unpack("<f", score)[0] if isinstance(score, bytes) and len(score) == 4 else 0.0


def _text_of(value: int | bytes, path: Path) -> str:
    try:
        return bytes(value if isinstance(value, bytes) else b"\xff").decode()
    except UnicodeDecodeError:
        raise damaged_file_error(path, "a piece is not UTF-8") from None


def fields(data: bytes, path: Path) -> Iterator[tuple[int, int | bytes]]:
    """Yields the number and the value of each field of a message. Values of fixed size are bytes."""
    at = 0
    while at < len(data):
        key, at = varint(data, at, path)
        number, wire = key >> 3, key & 7
        if wire == _VARINT:
            value, at = varint(data, at, path)
            yield number, value
            continue
        if wire == _BYTES:
            size, at = varint(data, at, path)
        elif wire in (_FIXED32, _FIXED64):
            size = 4 if wire == _FIXED32 else 8
        else:
            raise damaged_file_error(path, "it is not a SentencePiece model")
        if size > len(data) - at:
            raise damaged_file_error(path, f"{size} bytes asked for, {len(data) - at} are left")
        yield number, data[at : at + size]
        at += size


def varint(data: bytes, at: int, path: Path) -> tuple[int, int]:
    """Decodes a varint at index `at`, which has seven bits per byte. Returns the number, and the index after it."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise damaged_file_error(path, "it is cut short")
        value |= (data[at] & 127) << shift
        at += 1
        if data[at - 1] < 128:
            return value, at
    raise damaged_file_error(path, "it is not a SentencePiece model")


def write_model(
    pieces: Sequence[tuple[str, float, int]], *, prefix: bool, trims: bool, bos: str | None, eos: str | None
) -> bytes:
    """Encodes a BPE model that does not normalize text.

    Args:
        pieces: the text, score and kind of each piece.
        prefix: whether a space is added before a text.
        trims: whether runs of spaces become one, and spaces at both ends are removed.
        bos, eos: the texts of the beginning-of-sequence and end-of-sequence pieces; None: there is none.
    """
    body = b"".join(
        message(_PIECE, message(1, text.encode()) + b"\x15" + struct.pack("<f", score) + number(3, kind))
        for text, score, kind in pieces
    )
    unknown = next(place for place, (_, _, kind) in enumerate(pieces) if kind == UNKNOWN)
    falls_back = any(kind == BYTE for _, _, kind in pieces)
    trainer = number(3, BPE) + number(35, falls_back) + number(40, unknown) + message(45, pieces[unknown][0].encode())
    for field, text in ((46, bos), (47, eos)):
        trainer += message(field, text.encode()) if text else b""
    normalizer = message(1, b"identity") + number(3, prefix) + number(4, trims)
    return body + message(_TRAINER, trainer) + message(_NORMALIZER, normalizer)


def number(field: int, value: int) -> bytes:
    return _encoded(field << 3 | _VARINT) + _encoded(value)


def message(field: int, content: bytes) -> bytes:
    return _encoded(field << 3 | _BYTES) + _encoded(len(content)) + content


def _encoded(value: int) -> bytes:
    """Encodes a number as a varint, the inverse of `varint`."""
    data = bytearray()
    while value > 127:
        data.append(value & 127 | 128)
        value >>= 7
    return bytes([*data, value])
