"""Synthetic clicks of users on items from a model of latent factors, for recommenders without a corpus.

    click ~ Bernoulli(sigmoid(4 <p_u, q_i> / sqrt(k) + <w, x> - 3))
            p, q: k = 4 normal factors of each user and item; x: four normal numbers of the visit; w = (1, -1, 0.5, 0)

u, i and x are drawn anew for each row. p_u and q_i are fixed. A row follows from its number and the seed, so any process can make any
row. A batch also holds the probability of each click and the factors. No model predicts better than this probability, so the best
possible AUC, log loss and recall of the same rows can be reported beside those of a model.
"""

from typing import Any, ClassVar

import numpy as np

from argosy.core.errors import BadInput
from argosy.data.batch import Batch, Field, Fields
from argosy.data.sources import RowSource
from argosy.data.sources.synthetic import mix, splitmix

FACTORS, NUMBERS = 4, 4
WEIGHTS, OFFSET, STRENGTH = np.array([1.0, -1.0, 0.5, 0.0]), -3.0, 4.0
CLICK_FIELDS: Fields = {
    "numbers": Field("B i", np.float32, "row"),
    "categories": Field("B f", np.int32, "row"),
    "label": Field("B", np.float32, "row"),
    "probability": Field("B", np.float32, "row"),
    "p": Field("B k", np.float32, "row"),
    "q": Field("B k", np.float32, "row"),
}
# The number of the first row for evaluation.
TRAINED = 1 << 40


class Clicks(RowSource):
    """A source of `count` clicks per epoch, and `held_out` other clicks for evaluation."""

    def __init__(self, count: int = 1 << 22, held_out: int = 1 << 15):
        self.count, self.held_out = count, held_out

    def rows(self, *, sequence: int, vocab: Any, seed: int, held_out: bool = False) -> "ClickRows":
        """Raises:
        BadInput: the model does not have two tables, one of users and one of items.
        """
        if not isinstance(vocab, tuple) or len(vocab) != 2:
            hint = "model.family=ranker model.tables=[2000,1000], or model.family=two_tower"
            raise BadInput("clicks are of users on items: a model with two tables", where="data.source=clicks", hint=hint)
        return ClickRows(TRAINED if held_out else 0, self.held_out if held_out else self.count, vocab, seed)

    def fingerprint(self) -> dict[str, Any]:
        return {"source": "clicks", "source.rows": self.count}


class ClickRows:
    """Rows `first` up to `first + count` of an endless table of clicks. A batch has the fields

    numbers      float32  [B i]  the numbers x of the visit
    categories   int32    [B f]  the ids of the user and the item
    label        float32  [B]    1 for a click, else 0
    probability  float32  [B]    the probability of the click
    p, q         float32  [B k]  the factors of the user and the item
    """

    per_group = 1
    own_sizes: ClassVar[dict[str, int]] = {"i": NUMBERS, "f": 2, "k": FACTORS}

    def __init__(self, first: int, count: int, tables: tuple[int, int], seed: int):
        self.first, self.count, self.tables = first, count, tables
        self.fields: Fields = CLICK_FIELDS
        self.seeds = mix(np.arange(3, dtype=np.uint64) + mix(np.array([seed % 2**64], np.uint64)))

    def __len__(self) -> int:
        return self.count

    def gather(self, rows: np.ndarray) -> Batch:
        row = (rows.astype(np.uint64) + np.uint64(self.first))[:, None] * np.uint64(16)
        bits = splitmix(self.seeds[:1], row + np.arange(16, dtype=np.uint64))
        ids = np.stack([below(bits[:, i], self.tables[i]) for i in range(2)], 1)
        numbers = normal(bits[:, 4 : 4 + 2 * NUMBERS])
        user, item = (normal(splitmix(self.seeds[1 + i : 2 + i], factor_places(ids[:, i]))) for i in range(2))
        logit = STRENGTH * (user * item).sum(1) / np.sqrt(FACTORS) + numbers @ WEIGHTS + OFFSET
        probability = 1 / (1 + np.exp(-logit))
        label = uniform(bits[:, 2]) < probability
        fields = {"numbers": numbers, "label": label, "probability": probability, "p": user, "q": item}
        return {name: value.astype(np.float32) for name, value in fields.items()} | {"categories": ids.astype(np.int32)}


def factor_places(ids: np.ndarray) -> np.ndarray:
    """The counters of the random numbers from which the factors of these users or items are made."""
    return ids.astype(np.uint64)[:, None] * np.uint64(2 * FACTORS) + np.arange(2 * FACTORS, dtype=np.uint64)


def uniform(bits: np.ndarray) -> np.ndarray:
    """Converts random uint64 to uniform numbers above 0 and below 1."""
    return ((bits >> np.uint64(11)).astype(np.float64) + 0.5) / 2.0**53


def below(bits: np.ndarray, count: int) -> np.ndarray:
    """Converts random uint64 to uniform integers from 0 to count - 1."""
    return (bits >> np.uint64(32)) * np.uint64(count) >> np.uint64(32)


def normal(bits: np.ndarray) -> np.ndarray:
    """Converts random uint64 [B 2n] to standard normal numbers [B n] (Box and Muller 1958)."""
    half = bits.shape[1] // 2
    return np.sqrt(-2 * np.log(uniform(bits[:, :half]))) * np.cos(2 * np.pi * uniform(bits[:, half:]))
