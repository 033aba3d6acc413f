"""Measures the loss of text, in nats per token.

A text is read in windows of `window` tokens. Each begins `stride` tokens after the one before. In the first window all tokens count,
and in every other window only the last `stride`. So each token of the text counts once, and has at least window - stride tokens before
it. With stride = window (the default), two windows share only the token from which the first token of the later window is predicted.

The first token of a text is predicted from the beginning-of-sequence token if the tokenizer adds one. Otherwise it is not scored,
because nothing is before it. Later windows do not begin with a beginning-of-sequence token.

For the standard error, windows count as independent, or documents if the file has several, because the tokens of one window are not
independent. A text of fewer than `FEWEST` windows is divided into stretches of `STRETCH` tokens for this purpose.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from argosy.core.errors import BadInput
from argosy.evals.likelihood import Tick
from argosy.evals.plan import PlannedTask
from argosy.evals.rows import read_task_text
from argosy.evals.settings import EvalSettings
from argosy.evals.statistics import RowScores
from argosy.infer.forward.sequences import length_batches

WINDOW = 2048
FEWEST, STRETCH = 8, 128


class TextWindow(NamedTuple):
    """A window: the tokens of a text from index `start` to `end`. Tokens from index `counts` on are scored, each predicted from the
    tokens before it in the window."""

    start: int
    counts: int
    end: int


def text_windows(length: int, window: int, stride: int) -> Iterator[TextWindow]:
    """Yields the windows of a text of `length` tokens. A window has up to `window` inputs, and so one token more."""
    end = min(length, window + 1)
    if end > 1:
        yield TextWindow(0, 1, end)
    while end < length:
        counts, end = end, min(end + stride, length)
        yield TextWindow(max(end - window - 1, 0), counts, end)


def window_losses(lm: Any, texts: Sequence[Sequence[int]], window: int, stride: int, batch: int, tick: Tick) -> list[list[np.ndarray]]:
    """The losses in nats of the scored tokens, as an array for each window of each text.

    Args:
        texts: the token ids of the texts.
        batch: the number of tokens in a forward pass.
        tick: called with the number of windows that are done.
    """
    every = [(i, span) for i, ids in enumerate(texts) for span in text_windows(len(ids), window, stride)]
    losses: dict[int, np.ndarray] = {}
    sequences = lm.sequences()
    for places in length_batches([span.end - span.start - 1 for _, span in every], batch, lm.config.context):
        rows = [texts[every[k][0]][every[k][1].start : every[k][1].end] for k in places]
        for k, scores in zip(places, sequences.scores(rows), strict=True):
            span = every[k][1]
            losses[k] = -scores.logprobs[span.counts - span.start - 1 :].astype(np.float64)
        tick(len(losses))
    out: list[list[np.ndarray]] = [[] for _ in texts]
    for k, (i, _) in enumerate(every):
        out[i].append(losses[k])
    return out


def measure_perplexity(lm: Any, planned: PlannedTask, settings: EvalSettings, tick: Tick) -> tuple[list[RowScores], int]:
    """Returns the loss and the bits per byte of each document, window or stretch, and 0, because no sequence is cut.

    Raises:
        BadInput: the window is longer than the model's context, the stride longer than the window, or there is nothing to score.
    """
    window = settings.window or min(WINDOW, lm.config.context)
    stride = settings.stride or window
    if window > lm.config.context:
        raise BadInput(f"window={window} is more than the model's context of {lm.config.context}")
    if stride > window:
        raise BadInput(f"stride={stride} is more than the window of {window}", hint="tokens between windows would not be scored")
    documents = [row["text"] for row in planned.rows] if planned.rows else [read_task_text(planned.path)]
    encoded = [_encoded(lm, text) for text in documents]
    texts = [ids for ids, _ in encoded]
    if not planned.rows and settings.limit:
        texts = [texts[0][: window + 1 + (settings.limit - 1) * stride]]
    scored = window_losses(lm, texts, window, stride, settings.batch, tick)
    if not any(len(part) for text in scored for part in text):
        raise BadInput(f"{planned.path} has nothing to score", hint="a text needs two tokens, or one after the token that begins it")
    row_scores = []
    kind = kind_of_rows([len(part) for part in scored[0]], len(documents))
    for i, parts in enumerate(scored):
        loss, sizes = np.concatenate([*parts, np.zeros(0)]), encoded[i][1][1 : len(texts[i])]
        for at, end in _units([len(part) for part in parts], whole=len(documents) > 1):
            if end > at:
                total, tokens, n_bytes = float(loss[at:end].sum()), float(end - at), float(max(sum(sizes[at:end]), 1))
                values = {"loss": total / tokens, "bits_per_byte": total / math.log(2) / n_bytes}
                row_scores.append(RowScores(len(row_scores), values, {"loss": tokens, "bits_per_byte": n_bytes}, {"kind": kind}))
    return row_scores, 0


def _encoded(lm: Any, text: str) -> tuple[list[int], list[int]]:
    """The token ids of a text, and the number of bytes that each stands for. The bytes of a token reach to the beginning of the next,
    so that they add up to the text."""
    ids, spans = lm.tokenizer.encode_with_offsets(text)
    ends = [begin for begin, _ in spans[1:]] + [len(text)]
    sizes, at = [], 0
    for end in ends[: len(ids)]:
        sizes.append(len(text[at : max(end, at)].encode()))
        at = max(end, at)
    return ([lm.tokenizer.bos, *ids], [0, *sizes]) if lm.tokenizer.adds_bos else (ids, sizes)


def kind_of_rows(lengths: Sequence[int], documents: int) -> str:
    """A phrase for the units that count as independent: documents, stretches or windows.

    Args:
        lengths: the number of scored tokens in each window of the first document.
        documents: the number of documents.
    """
    return "documents" if documents > 1 else f"stretches of {STRETCH} tokens" if len(lengths) < FEWEST else "windows"


def _units(lengths: Sequence[int], whole: bool) -> list[tuple[int, int]]:
    """The (begin, end) of each unit that counts as independent, as indices among the scored tokens of a text.

    Args:
        lengths: the number of scored tokens in each window.
        whole: whether the whole text is one unit.
    """
    total = sum(lengths)
    if whole:
        return [(0, total)]
    if len(lengths) < FEWEST:
        lengths = [min(STRETCH, total - at) for at in range(0, total, STRETCH)]
    ends = np.cumsum(lengths).tolist()
    return list(zip([0, *ends[:-1]], ends))
