"""Scores of whole sequences by a reward model, read at the last token as in its training (`train.objectives.preferences.reward`).

Transformers' `ForSequenceClassification` reads the last token that is not padding, which is the same unless a sequence ends with the
padding token.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from argosy.core.errors import BadInput
from argosy.infer.forward.sequences import length_batches

if TYPE_CHECKING:
    from argosy.infer.lm import LM


def rewards(lm: "LM", conversations: Sequence[Any], batch: int) -> np.ndarray:
    """As `LM.rewards`."""
    if not lm.config.scored:
        raise BadInput("this model has no head of scores", hint="`argosy train reward model=FOLDER` trains one")
    if not lm.config.causal:
        raise BadInput("this model is an encoder, and reads texts", hint="lm.classify(texts) gives its scores as probabilities")
    if isinstance(conversations, str):
        raise BadInput("rewards takes a list of conversations, not one text", hint="rewards([text])")
    rows = [conversation_ids(lm, conversation) for conversation in conversations]
    for ids in rows:
        if not ids:
            raise BadInput("an empty text has no score")
        lm.check_ids(ids, len(ids))
    scores = np.zeros((len(rows), lm.config.scored), np.float32)
    sequences = lm.sequences()
    for places in length_batches([len(ids) for ids in rows], batch, lm.config.context):
        tokens, segments = sequences.padded_rows([rows[i] for i in places])
        last = np.maximum(segments.sum(1) - 1, 0).astype(np.int32)
        scores[list(places)] = np.asarray(sequences.run("scores", last_scores, tokens, segments, last))[: len(places)]
    return scores[:, 0] if lm.config.scored == 1 else scores


def conversation_ids(lm: "LM", conversation: Any) -> list[int]:
    """The token ids of a conversation, as `LM.rewards` reads it: a list of messages, a text, or token ids."""
    if isinstance(conversation, str):
        ids = lm.encode(conversation)
        return ids if lm.tokenizer.eos is None or ids[-1:] == [lm.tokenizer.eos] else [*ids, lm.tokenizer.eos]
    if len(conversation) and isinstance(conversation[0], Mapping):
        return lm.chat_prompt(conversation, add_generation_prompt=False)
    return lm.encode(conversation)


def last_scores(model: Any, x: Array, last: Array) -> Array:
    """The scores [B Z] of sequences with hidden states `x` [B T D], at the positions `last` [B]."""
    return model.unembed(jnp.take_along_axis(x, last[:, None, None], 1))[:, 0]
