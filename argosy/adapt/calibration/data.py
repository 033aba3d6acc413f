"""Reads calibration data: the first sequences of a data pipeline, as training would read them."""

import hashlib
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from jaxtyping import Int

from argosy.core.counts import plural
from argosy.core.errors import BadInput
from argosy.data.pipeline import build
from argosy.data.settings import DataSettings

if TYPE_CHECKING:
    from argosy.data.tokenizers.load import Tokenizer

# The number of tokens of a sequence, unless the settings say otherwise or the model has a shorter context.
SEQUENCE = 512


class CalibrationData(NamedTuple):
    """Sequences of equal length.

    tokens: the token ids.
    segments: the number of the segment that each token belongs to, 0 for padding.
    """

    tokens: Int[np.ndarray, "S T"]
    segments: Int[np.ndarray, "S T"]

    @property
    def size(self) -> int:
        """The number of tokens without padding."""
        return int((self.segments > 0).sum())

    @property
    def identity(self) -> str:
        """A hash of all tokens and segments."""
        digest = hashlib.sha256(str(self.tokens.shape).encode())
        for array in self:
            digest.update(np.ascontiguousarray(array, np.int32).data)
        return digest.hexdigest()[:12]


def calibration_data(
    settings: DataSettings, samples: int, tokenizer: "Tokenizer | None", *, vocab: int, context: int
) -> CalibrationData:
    """Reads the first sequences of the data, shuffled by the seed of the settings, or by seed 0.

    Args:
        settings: the settings of the data.
        samples: the number of sequences.
        tokenizer: the model's tokenizer.
        vocab: the size of the model's vocabulary.
        context: the model's context, in tokens.

    Raises:
        UserError: the data is missing or does not fit the model, or has fewer sequences.
    """
    sequence = settings.sequence if "sequence" in settings.model_fields_set else min(SEQUENCE, context)
    if sequence > context:
        raise BadInput(f"data.sequence={sequence} is more than the model's context of {context}", hint=f"at most {context}")
    settings = settings.model_copy(update={"sequence": sequence, "batch": 1, "epochs": 1, "prefetch": 0})
    batches = build(settings, tokenizer, vocab=vocab, seed=0)
    try:
        sequences = [batch for _, batch in zip(range(samples), batches)]
    finally:
        batches.close()
    if len(sequences) < samples:
        problem = f"{settings.source_name} has {plural(len(sequences), 'sequence')} of {sequence} tokens, fewer than samples={samples}"
        raise BadInput(problem, hint=f"more data, samples={len(sequences)}, or a shorter data.sequence")
    return CalibrationData(*(np.concatenate([batch[name] for batch in sequences]) for name in ("tokens", "segments")))
