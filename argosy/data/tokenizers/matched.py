"""Finds the tokens of two vocabularies that stand for the same bytes. Their ids, and how the tokenizers write spaces, may differ."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from argosy.data.tokenizers.load import Tokenizer


@dataclass(frozen=True)
class Matched:
    """Pairs of a student's id and a teacher's id. Each id is in at most one pair.

    student, teacher: the ids as the bytes of int32 arrays, which are compared and hashed fast.
    """

    student: bytes
    teacher: bytes

    def __len__(self) -> int:
        return len(self.student) // 4

    @cached_property
    def ids(self) -> tuple[np.ndarray, np.ndarray]:
        """The student's ids and the teacher's ids of the M pairs, int32 [M] each."""
        return np.frombuffer(self.student, np.int32), np.frombuffer(self.teacher, np.int32)


def match_tokens(student: "Tokenizer", teacher: "Tokenizer") -> Matched:
    """Finds the tokens that both vocabularies have. The two end-of-sequence tokens are the only special tokens that are matched."""
    ours, theirs = by_bytes(student), by_bytes(teacher)
    pairs = [(token, theirs[piece]) for piece, token in ours.items() if piece in theirs]
    if student.eos is not None and teacher.eos is not None:
        pairs.append((student.eos, teacher.eos))
    sorted_pairs = np.array(sorted(pairs), np.int32).reshape(-1, 2)
    return Matched(sorted_pairs[:, 0].tobytes(), sorted_pairs[:, 1].tobytes())


def same_tokens(first: "Tokenizer", second: "Tokenizer") -> bool:
    """Whether every id stands for the same bytes in both. The tokenizers may come from files of different kinds, such as GGUF and
    tokenizer.json."""
    if first.fingerprint == second.fingerprint:
        return True
    if first.vocab != second.vocab or first.unknown != second.unknown:
        return False
    # The unknown token stands for no bytes, and files write it in many ways.
    ids = (token for token in range(first.vocab) if token != first.unknown)
    return all(first.piece(token, False) == second.piece(token, False) for token in ids)


def by_bytes(tokenizer: "Tokenizer") -> Mapping[bytes, int]:
    """The ids of ordinary tokens by their bytes. If several tokens have the same bytes, such as a character and a byte token, the id is
    that of the token to which the tokenizer encodes these bytes."""
    out: dict[bytes, int] = {}
    for token in range(tokenizer.vocab):
        if token in tokenizer.hidden or token == tokenizer.unknown:
            continue
        piece = tokenizer.piece(token, False)
        if piece and (piece not in out or writes(tokenizer, piece) == token):
            out[piece] = token
    return out


def writes(tokenizer: "Tokenizer", piece: bytes) -> int | None:
    """The token to which these bytes are encoded inside of a text; None: they are no text, or several tokens."""
    try:
        ids = tokenizer.encode_rest([piece.decode()])[0]
    except UnicodeDecodeError:
        return None
    return ids[0] if len(ids) == 1 else None
