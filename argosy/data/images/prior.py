"""Pairs each image of a subject with an image of its class, as DreamBooth does (Ruiz et al. 2022, arXiv:2208.12242).

Row 2 i is image i of the subject. Row 2 i + 1 is an image of the class. The images of the class are shuffled anew in each epoch over
them. All images are encoded, and have the same size.

    prior   float32  [B]   1 for images of the class, 0 for images of the subject
"""

from typing import Any

import numpy as np

from argosy.data.batch import Batch, Field, Fields
from argosy.data.images.encoded import EncodedImages, EncodedRows
from argosy.data.mixtures.order import named_seed
from argosy.data.order import Order
from argosy.data.sources import RowSource

PRIOR = Field("B", np.float32, "row")


class PriorImages(RowSource):
    """Encoded images of a subject, and of its class (`prior`)."""

    def __init__(self, subject: EncodedImages, prior: EncodedImages):
        self.subject, self.prior = subject, prior
        self.unreadable = [*getattr(subject.source, "unreadable", ()), *getattr(prior.source, "unreadable", ())]

    def rows(self, *, sequence: int, vocab: Any, seed: int, held_out: bool = False) -> "PriorRows":
        subject = self.subject.rows(sequence=sequence, vocab=vocab, seed=seed, held_out=held_out)
        # The seed differs, so that the two images of a pair are mirrored independently.
        prior = self.prior.rows(sequence=sequence, vocab=vocab, seed=named_seed(seed, "prior"))
        assert isinstance(subject, EncodedRows)
        assert isinstance(prior, EncodedRows)
        return PriorRows(subject, prior, None if held_out else named_seed(seed, "pairs"))

    def fingerprint(self) -> dict[str, Any]:
        return self.subject.fingerprint() | {f"prior.{name}": value for name, value in self.prior.fingerprint().items()}


class PriorRows:
    """The rows of one split, in pairs.

    Args:
        subject: the rows of the subject.
        prior: the rows of the class.
        seed: the random seed of the order of the class's images; None: they are not shuffled.
    """

    per_group = 2
    reads_places = True
    tokens_per_row = 1

    def __init__(self, subject: EncodedRows, prior: EncodedRows, seed: int | None):
        self.subject, self.prior, self.order = subject, prior, Order(len(prior), seed)
        self.fields: Fields = dict(subject.fields) | {"prior": PRIOR}

    def __len__(self) -> int:
        return 2 * len(self.subject)

    @property
    def own_sizes(self) -> dict[str, int]:
        return self.subject.own_sizes

    @property
    def numbers_per_row(self) -> int:
        return self.subject.numbers_per_row

    def gather(self, rows: np.ndarray, places: np.ndarray | None = None) -> Batch:
        """Returns the batch of whole pairs. `places` has one entry per pair: its index in the sequence of epochs."""
        pairs = rows[::2] // 2
        places = pairs if places is None else places
        parts = self.subject.gather(pairs, places), self.prior.gather(self.order(places), places)
        # Fields that only images of the subject have, such as classes, are left out.
        shared = {name: array for name, array in parts[0].items() if name in parts[1]}
        batch = {name: np.stack([part[name] for part in parts], 1).reshape(-1, *array.shape[1:]) for name, array in shared.items()}
        return batch | {"prior": np.tile(np.array([0, 1], np.float32), len(pairs))}
