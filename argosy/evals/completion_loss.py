"""Measures the loss of the answers in a file, in nats per token, which training on this file minimizes.

Records become tokens as in fine-tuning (`data.chat.conversations`): messages with the model's chat template, a prompt and its
completion as plain text, and an Alpaca record with the template or as Stanford's text. The tokens that count are those that training
learns: the words of an assistant with the token that ends the turn, or a completion with the end-of-sequence token.
"""

from typing import Any

import numpy as np

from argosy.core.errors import BadInput
from argosy.data.chat.conversations import ConversationEncoder
from argosy.data.encoding import TEMPLATE_HINT, Encoding
from argosy.data.sources import Document
from argosy.evals.likelihood import Tick
from argosy.evals.plan import PlannedTask
from argosy.evals.settings import EvalSettings
from argosy.evals.statistics import RowScores
from argosy.infer.forward.sequences import length_batches


def measure_completion_loss(lm: Any, planned: PlannedTask, settings: EvalSettings, tick: Tick) -> tuple[list[RowScores], int]:
    """Returns the loss of the answers of each record, whose weight is the number of their tokens, and the number of records that lost
    tokens at their beginning.

    Raises:
        BadInput: a record has no answer, or needs a chat template that the model does not have. The message names the record.
    """
    encoder = ConversationEncoder(Encoding(lm.tokenizer))
    try:
        encoded = list(encoder.encode([Document(record=record) for record in planned.records]))
    except BadInput as error:
        if error.hint == TEMPLATE_HINT:
            # The hint is replaced, because data.template is a setting of training.
            error.hint = "put the chat_template.jinja that it was trained with into the model's folder"
        raise
    finally:
        encoder.close()
    # The last token is only a target, so a sequence may have one token more than the context.
    most, rows = lm.config.context + 1, list[np.ndarray]()
    learned: list[np.ndarray] = []
    for record, sequence in zip(planned.records, encoded, strict=True):
        if sequence.weights is None or not sequence.weights[1:].any():
            raise BadInput("a record without an answer to evaluate", where=record.where, hint="leave it out of the file")
        ids, weights = sequence.tokens[-most:].astype(np.int64), sequence.weights[-most:] > 0
        rows.append(ids)
        learned.append(weights[1:])
        if not learned[-1].any():
            raise BadInput(f"what follows the answer fills the context of {lm.config.context} tokens", where=record.where)
    row_scores, done, sequences = dict[int, RowScores](), 0, lm.sequences()
    for places in length_batches([len(ids) - 1 for ids in rows], settings.batch, lm.config.context):
        for i, scores in zip(places, sequences.scores([rows[i] for i in places]), strict=True):
            each = -scores.logprobs[learned[i]].astype(np.float64)
            row_scores[i] = RowScores(i, {"loss": float(each.mean())}, {"loss": float(len(each))})
        done += len(places)
        tick(done)
    return [row_scores[i] for i in range(len(rows))], sum(len(sequence.tokens) > most for sequence in encoded)
