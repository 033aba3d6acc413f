"""Classifies texts by a model with a score head: `lm.classify(texts)`.

The tokenizer's special tokens are put around each text (`data.framing`), and scores are read at the same tokens as in training
(`models.parts.texts`). Scores become probabilities as in transformers' text classification pipeline. Texts longer than the model's
context are truncated at the end.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from argosy.core.errors import BadInput
from argosy.data.framing import frame_ids, frame_of
from argosy.infer.forward.sequences import length_batches, length_bucket
from argosy.models.parts.texts import text_scores
from argosy.models.parts.weight import merge

if TYPE_CHECKING:
    from argosy.infer.lm import LM

# A text, or a pair of texts, such as premise and hypothesis.
TextOrPair = str | tuple[str, str]


def classify(lm: "LM", texts: Sequence[TextOrPair], batch: int) -> list[dict[str, float]]:
    """As `LM.classify`."""
    probabilities = apply_activation(scores_of(lm, texts, batch), lm.config.activation_of_scores)
    return [dict(zip(lm.config.label_names, row.tolist(), strict=True)) for row in probabilities]


def scores_of(lm: "LM", texts: Sequence[TextOrPair], batch: int) -> Float[np.ndarray, "N Z"]:
    """The scores of texts or pairs of texts, before any activation."""
    rows, seconds = framed_texts(lm, texts)
    scores = np.zeros((len(rows), lm.config.scored), np.float32)
    model = lm.sequences()
    program, weights = _scores(model.graph, lm.module.dtype), model.weights()
    for places in length_batches([len(ids) for ids in rows], batch, lm.config.context):
        longest = max(len(rows[i]) for i in places)
        shape = (1 << (len(places) - 1).bit_length(), max(longest, min(length_bucket(longest), lm.config.context)))
        tokens, segments, types = (np.zeros(shape, np.int32) for _ in range(3))
        for row, i in enumerate(places):
            tokens[row, : len(rows[i])], segments[row, : len(rows[i])] = rows[i], 1
            types[row, seconds[i] or shape[1] : len(rows[i])] = 1
        with model.on_mesh():
            scores[list(places)] = np.asarray(program(weights, tokens, segments, types))[: len(places)]
    return scores


def framed_texts(lm: "LM", texts: Sequence[TextOrPair]) -> tuple[list[list[int]], list[int]]:
    """The token ids of each text or pair with special tokens, and the index where the second text of a pair begins (0: no pair).

    Raises:
        BadInput: the model has no score head or no tokenizer, or `texts` is no list of texts or pairs.
    """
    if not lm.config.scored:
        hint = "`argosy train classify model=FOLDER data.source=FILE.jsonl` trains one"
        raise BadInput("this model has no head of scores", hint=hint)
    if lm.tokenizer is None:
        raise BadInput("this model came without a tokenizer", hint="lm.rewards(ids) scores token ids")
    if isinstance(texts, str) or not all(isinstance(entry, str) or _is_pair(entry) for entry in texts):
        raise BadInput("classify takes a list of texts, or of pairs of texts", hint="classify([text]), classify([(query, document)])")
    frame, context = frame_of(lm.tokenizer), lm.config.context
    flat = [text for entry in texts for text in ([entry] if isinstance(entry, str) else entry)]
    ids = iter(lm.tokenizer.encode_many(flat))
    rows = [frame_ids(frame, next(ids), None if isinstance(entry, str) else next(ids), context) for entry in texts]
    if empty := [i for i, (row, _) in enumerate(rows) if not row]:
        raise BadInput(f"text {empty[0]} has no tokens")
    return [row for row, _ in rows], [second for _, second in rows]


def _is_pair(entry: Any) -> bool:
    return isinstance(entry, tuple | list) and len(entry) == 2 and all(isinstance(text, str) for text in entry)


def apply_activation(scores: Float[np.ndarray, "N Z"], activation: str) -> Float[np.ndarray, "N Z"]:
    """Converts scores to probabilities. `activation` is softmax, sigmoid, or none, which returns them unchanged."""
    if activation == "none":
        return scores
    wide = jnp.asarray(scores)
    return np.asarray(jax.nn.softmax(wide) if activation == "softmax" else jax.nn.sigmoid(wide))


@lru_cache(maxsize=16)
def _scores(graph: Any, dtype: Any) -> Any:
    """(weights, tokens, segments, types [B T]) -> [B Z]; compiled once for each model and shape."""

    def scores(weights: dict[str, Any], tokens: Any, segments: Any, types: Any) -> Any:
        model = merge(graph, weights)
        model.dtype = dtype
        return text_scores(model, tokens, segments, types)[0][:, 0].astype(jnp.float32)

    return jax.jit(scores)
