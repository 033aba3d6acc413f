"""Evaluates sentence vectors by their cosines on pairs, and by searches.

Texts of pairs get the default prompt of the model's folder. Queries and documents get the prompts with these names, if the folder has
them. A search compares a query with every document.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from argosy.evals.plan import PlannedTask
from argosy.evals.settings import EvalSettings
from argosy.evals.statistics import MeanWithError, RowScores
from argosy.evals.vectors.metrics import RECALL_AT, best_documents, pair_figures, pearson, ranking_figures, spearman
from argosy.infer.denoise.finite import check_finite
from argosy.infer.embed import SentenceEncoder, unit_vectors
from argosy.weights.hub.sentence_steps import DOCUMENT_PROMPTS, QUERY_PROMPTS

Tick = Callable[[int], None]
# The largest number of texts in a batch, and the number of queries whose scores are in memory at once.
MOST_ROWS, MOST_QUERIES = 256, 64


class TextVectors:
    """Computes vectors of texts, normalized to length 1.

    Args:
        tick: called with the progress, converted to a number of rows of the task.
        texts: the number of texts of the task.

    truncated: the number of texts that were longer than the model's context.
    """

    def __init__(self, lm: Any, planned: PlannedTask, settings: EvalSettings, tick: Tick, texts: int):
        self.encoder, self.tokens, self.tick = SentenceEncoder(lm, say=lm.say), settings.batch, tick
        self.truncated, self._done, self._rows_per_text = 0, 0, len(planned.rows) / texts

    def role(self, names: tuple[str, ...], prompt: str | None) -> str:
        """The prompt of queries or documents: `prompt`, or if it is None, the prompt of the model's folder with one of these names."""
        steps = self.encoder.steps
        return steps.prompt_named(steps.role(names)) if prompt is None else prompt

    def of(self, texts: Sequence[str], prompt: str | None = None) -> Float[np.ndarray, "N D"]:
        """The vectors of texts. Each distinct text is computed once.

        Args:
            prompt: the text that is put before each text; None: the default prompt of the model's folder.
        """
        distinct = list(dict.fromkeys(texts))
        whole = self.encoder.ids(distinct, prompt=prompt)
        rows = self.encoder.ids(distinct, self.encoder.context, prompt=prompt)
        self.truncated += sum(len(a) > len(b) for a, b in zip(whole, rows))
        out = np.zeros((len(rows), self.encoder.lm.config.embedding_width), np.float32)
        order, at = sorted(range(len(rows)), key=lambda i: -len(rows[i])), 0
        while at < len(order):
            count = min(MOST_ROWS, max(1, self.tokens // len(rows[order[at]])))
            # The batch size is a power of two, because a program is compiled for each size.
            batch = order[at : at + (1 << (count.bit_length() - 1))]
            out[batch] = self.encoder.pooled([rows[i] for i in batch])
            at += len(batch)
            self.tick(int((self._done + at * len(texts) / len(order)) * self._rows_per_text))
        check_finite("the vectors of texts", out)
        self._done += len(texts)
        place = {text: i for i, text in enumerate(distinct)}
        return unit_vectors(self.encoder.finished(out))[[place[text] for text in texts]]


def evaluate_text_pairs(lm: Any, planned: PlannedTask, settings: EvalSettings, tick: Tick) -> tuple[list[RowScores], int]:
    """Returns the cosine of each pair with its score or label, and the number of texts that were cut."""
    vectors = TextVectors(lm, planned, settings, tick, 2 * len(planned.rows))
    target = "score" if planned.task.kind == "similarity" else "label"
    both = vectors.of([row[name] for row in planned.rows for name in ("sentence1", "sentence2")])
    cosines = np.einsum("ND,ND->N", both[::2], both[1::2], dtype=np.float64)
    row_values = [{"cosine": float(cosine), target: float(row[target])} for row, cosine in zip(planned.rows, cosines, strict=True)]
    return [RowScores(number, values) for number, values in enumerate(row_values)], vectors.truncated


def evaluate_retrieval(lm: Any, planned: PlannedTask, settings: EvalSettings, tick: Tick) -> tuple[list[RowScores], int]:
    """Returns the metrics of each query, and the number of texts that were cut."""
    corpus = planned.corpus
    vectors = TextVectors(lm, planned, settings, tick, len(corpus.texts) + len(planned.rows))
    documents = vectors.of(corpus.texts, vectors.role(DOCUMENT_PROMPTS, settings.document_prompt))
    queries = vectors.of([row["query"] for row in planned.rows], vectors.role(QUERY_PROMPTS, settings.query_prompt))
    row_scores = []
    for at in range(0, len(planned.rows), MOST_QUERIES):
        scores = queries[at : at + MOST_QUERIES] @ documents.T
        for row, its in zip(planned.rows[at : at + MOST_QUERIES], scores):
            ranked = best_documents(its, corpus.ids, max(RECALL_AT))
            answer = {"id": row["id"], "ranked": ranked[:10]}
            row_scores.append(RowScores(len(row_scores), ranking_figures(ranked, row["relevant"]), {}, answer))
        tick(len(planned.rows))
    return row_scores, vectors.truncated


def correlations(rows: Sequence[RowScores]) -> dict[str, MeanWithError]:
    """Spearman's and Pearson's correlations of cosines with scores."""
    cosines, scores = (np.asarray([row.values[name] for row in rows]) for name in ("cosine", "score"))
    return {"spearman": MeanWithError(spearman(cosines, scores), None), "pearson": MeanWithError(pearson(cosines, scores), None)}


def separations(rows: Sequence[RowScores]) -> dict[str, MeanWithError]:
    """The metrics of how well cosines separate pairs of label 0 and 1."""
    figures = pair_figures(*(np.asarray([row.values[name] for row in rows]) for name in ("cosine", "label")))
    return {name: MeanWithError(value, None) for name, value in figures._asdict().items()}
