"""Metrics of vectors, as scipy, scikit-learn, MTEB (arXiv:2210.07316) and trec_eval define them. BEIR (arXiv:2104.08663) uses trec_eval
through pytrec_eval."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

# The depth of a ranking for nDCG and MRR, and the depths for recall.
CUT = 10
RECALL_AT = (1, 10, 100)


def pearson(a: Float[np.ndarray, " N"], b: Float[np.ndarray, " N"]) -> float:
    """Pearson's correlation; 0 if all values of a, or all values of b, are equal."""
    a, b = a - a.mean(), b - b.mean()
    norm = np.sqrt((a @ a) * (b @ b))
    return float(a @ b / norm) if norm > 0 else 0.0


def spearman(a: Float[np.ndarray, " N"], b: Float[np.ndarray, " N"]) -> float:
    """Spearman's correlation, which is Pearson's of the ranks; 0 if all values of a, or all values of b, are equal."""
    return pearson(average_ranks(a), average_ranks(b))


def average_ranks(values: Float[np.ndarray, " N"]) -> Float[np.ndarray, " N"]:
    """The rank of each value, counted from 1. Equal values get the mean of their ranks."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[place]


class PairFigures(NamedTuple):
    """The metrics of how well a score separates two classes of pairs.

    ap: the average precision of the pairs with label 1, as in scikit-learn.
    accuracy: the accuracy at the threshold with the best accuracy, as in MTEB.
    f1: the F1 score at the threshold with the best F1 score, as in MTEB.
    """

    ap: float
    accuracy: float
    f1: float


def pair_figures(scores: Float[np.ndarray, " N"], labels: Int[np.ndarray, " N"]) -> PairFigures:
    """The metrics of the scores of pairs with label 0 or 1. Pairs with equal scores are on the same side of every threshold."""
    order = np.argsort(-scores, kind="stable")
    scores, labels = scores[order], labels[order]
    # The index of the last pair of each distinct score. A threshold follows each.
    ends = np.append(np.flatnonzero(np.diff(scores)), len(scores) - 1)
    true_positives, read, total = np.cumsum(labels)[ends], ends + 1, int(labels.sum())
    precision, recall = true_positives / read, true_positives / total
    ap = float(np.sum(np.diff(recall, prepend=0.0) * precision))
    # The number of right pairs: label 1 above the threshold, and label 0 below it. The last entry is for a threshold above all pairs.
    right = np.append(true_positives + (len(labels) - total) - (read - true_positives), len(labels) - total)
    return PairFigures(ap, float(right.max() / len(labels)), float((2 * true_positives / (read + total)).max()))


def ranking_figures(ranked: Sequence[str], relevant: Mapping[str, int]) -> dict[str, float]:
    """The nDCG@10, the MRR@10 and the recall at several depths of one query.

    Args:
        ranked: the ids of the best documents, the best first.
        relevant: the grade of each judged document, by id. Documents with a grade above 0 are relevant.
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
    """The ids of the `count` documents with the best scores. Documents with equal scores are sorted by id in descending order, as in
    trec_eval."""
    some = np.arange(len(ids))
    if count < len(ids):
        least = np.partition(scores, len(ids) - count)[len(ids) - count]
        some = np.flatnonzero(scores >= least)
    return [ids[i] for i in sorted(some.tolist(), key=lambda i: (scores[i], ids[i]), reverse=True)[:count]]
