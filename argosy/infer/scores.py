"""Scores of whole sequences by a reward model: read at the last token, as its training does (`train.objectives.reward`).

Transformers' `ForSequenceClassification` reads the last token that is not padding, which is the same unless a sequence ends with the
padding token.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from argosy.core.errors import BadInput
from argosy.core.progress import telling
from argosy.infer.engine.sequences import batches, bucket
from argosy.models.parts.weight import merge, split

if TYPE_CHECKING:
    from argosy.infer.lm import LM


def rewards(lm: "LM", conversations: Sequence[Any], batch: int) -> np.ndarray:
    """As `LM.rewards`."""
    if not lm.config.scored:
        raise BadInput("this model has no head of scores", hint="`argosy train reward model=FOLDER` trains one")
    if isinstance(conversations, str):
        raise BadInput("rewards takes a list of conversations, not one text", hint="rewards([text])")
    rows = [ids_of(lm, one) for one in conversations]
    for ids in rows:
        if not ids:
            raise BadInput("an empty text has no score")
        lm.check_ids(ids, len(ids))
    found = np.zeros((len(rows), lm.config.scored), np.float32)
    graph, weights = split(lm.module)
    program = _scored(graph, lm.module.dtype)
    for places in batches([len(ids) for ids in rows], batch, lm.config.context):
        length = min(bucket(max(len(rows[i]) for i in places)), lm.config.context)
        tokens, segments = np.zeros((2, 1 << (len(places) - 1).bit_length(), length), np.int32)
        for row, i in enumerate(places):
            tokens[row, : len(rows[i])], segments[row, : len(rows[i])] = rows[i], 1
        with telling(lm.say, f"compiling {len(tokens)} x {length} tokens"):
            found[list(places)] = np.asarray(program(weights, tokens, segments))[: len(places)]
    return found[:, 0] if lm.config.scored == 1 else found


def ids_of(lm: "LM", one: Any) -> list[int]:
    """The token ids of a conversation, a text or ids."""
    if isinstance(one, str):
        ids = lm.encode(one)
        return ids if lm.tokenizer.eos is None or ids[-1:] == [lm.tokenizer.eos] else [*ids, lm.tokenizer.eos]
    if len(one) and isinstance(one[0], Mapping):
        return lm.chat_prompt(one, add_generation_prompt=False)
    return lm.encode(one)


@lru_cache(maxsize=8)
def _scored(graph: Any, dtype: Any) -> Any:
    """(weights, tokens [B T], segments [B T]) -> scores [B Z]; compiled once for each model and shape."""

    def scored(weights: Any, tokens: Any, segments: Any) -> Any:
        model = merge(graph, weights)
        model.dtype = dtype
        x, _, _ = model.hidden(tokens, model.config.attend(segments))
        last = jnp.maximum(jnp.sum(segments, 1) - 1, 0)
        own = jnp.take_along_axis(x, last[:, None, None], 1)
        return model.unembed(own)[:, 0]

    return jax.jit(scored)
