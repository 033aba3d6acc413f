"""Figures of vectors, as scipy, scikit-learn, MTEB (arXiv:2210.07316) and trec_eval define them; BEIR (arXiv:2104.08663) takes the last
by pytrec_eval."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

# How far down a ranking is read, and where recall is told.
CUT = 10
RECALL_AT = (1, 10, 100)


def pearson(a: Float[np.ndarray, " N"], b: Float[np.ndarray, " N"]) -> float:
    """Pearson's correlation; 0 where one of them has one value only."""
    a, b = a - a.mean(), b - b.mean()
    norm = np.sqrt((a @ a) * (b @ b))
    return float(a @ b / norm) if norm > 0 else 0.0


def spearman(a: Float[np.ndarray, " N"], b: Float[np.ndarray, " N"]) -> float:
    """Spearman's correlation: Pearson's of the ranks; 0 where one of them has one value only."""
    return pearson(average_ranks(a), average_ranks(b))


def average_ranks(values: Float[np.ndarray, " N"]) -> Float[np.ndarray, " N"]:
    """The rank of each value from 1; equal ones have the mean of theirs."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[place]


class PairFigures(NamedTuple):
    """How well a score tells two classes of pairs apart.

    ap: average precision of the pairs with label 1, as scikit-learn's.
    accuracy, f1: at the threshold that is best for each, as in MTEB.
    """

    ap: float
    accuracy: float
    f1: float


def pair_figures(scores: Float[np.ndarray, " N"], labels: Int[np.ndarray, " N"]) -> PairFigures:
    """The figures of scores of pairs with label 0 or 1. Pairs of one score are on one side of every threshold."""
    order = np.argsort(-scores, kind="stable")
    scores, labels = scores[order], labels[order]
    # The last pair of each score: thresholds lie behind these.
    ends = np.append(np.flatnonzero(np.diff(scores)), len(scores) - 1)
    true_positives, read, total = np.cumsum(labels)[ends], ends + 1, int(labels.sum())
    precision, recall = true_positives / read, true_positives / total
    ap = float(np.sum(np.diff(recall, prepend=0.0) * precision))
    # Right: those with label 1 above the threshold, and with label 0 below it; all may lie below.
    right = np.append(true_positives + (len(labels) - total) - (read - true_positives), len(labels) - total)
    return PairFigures(ap, float(right.max() / len(labels)), float((2 * true_positives / (read + total)).max()))


def ranking_figures(ranked: Sequence[str], relevant: Mapping[str, int]) -> dict[str, float]:
    """nDCG@10, MRR@10 and recall at several depths of one query.

    Args:
        ranked: ids of documents, the best first.
        relevant: the grade of each judged document; those above 0 are relevant.
    """
    grades = [max(relevant.get(document, 0), 0) for document in ranked]
    best = sorted((grade for grade in relevant.values() if grade > 0), reverse=True)
    ideal = _discounted(best[:CUT])
    first = next((i for i, grade in enumerate(grades[:CUT]) if grade), None)
    figures = {f"ndcg_at_{CUT}": _discounted(grades[:CUT]) / ideal if ideal else 0.0}
    figures[f"mrr_at_{CUT}"] = 0.0 if first is None else 1 / (first + 1)
    return figures | {f"recall_at_{k}": sum(grade > 0 for grade in grades[:k]) / len(best) if best else 0.0 for k in RECALL_AT}


def _discounted(grades: Sequence[int]) -> float:
    """The discounted cumulative gain, with the grade itself as the gain, as in trec_eval."""
    return float(sum(grade / np.log2(i + 2) for i, grade in enumerate(grades)))


def best_documents(scores: Float[np.ndarray, " N"], ids: Sequence[str], count: int) -> list[str]:
    """The ids of the best documents. Equal scores are ordered by id, the later one first, as in trec_eval."""
    some = np.arange(len(ids))
    if count < len(ids):
        least = np.partition(scores, len(ids) - count)[len(ids) - count]
        some = np.flatnonzero(scores >= least)
    return [ids[i] for i in sorted(some.tolist(), key=lambda i: (scores[i], ids[i]), reverse=True)[:count]]
