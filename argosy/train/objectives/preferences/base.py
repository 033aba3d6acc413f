"""The shared settings of objectives over sequences, without jax.

A sequence is a prompt with a completion, of which only the completion counts (`data.chat.conversations`). A preference pair is two rows
of a batch, which are never separated.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from argosy.core.settings import Also
from argosy.train.objectives.objective import Needs, TokenObjective

if TYPE_CHECKING:
    from argosy.data.batch import Fields

PAIRS = Needs(rows_per_group=2, formats=("preference",))


def sequence_fields(*names: str) -> "Fields":
    """Returns the fields of a batch of sequences, by name, with further fields of one number per sequence.

    Args:
        names: the names of the further fields.
    """
    from argosy.train.objectives.preferences.sequences import FIELDS, PER_SEQUENCE

    return {**FIELDS, **dict.fromkeys(names, PER_SEQUENCE)}


class PairObjective(TokenObjective):
    """An objective over pairs alone, without a reference."""

    needs: ClassVar[Needs] = PAIRS

    def reads(self) -> "Fields":
        return sequence_fields()


class ReferenceObjective(TokenObjective):
    """An objective that compares the model with a frozen reference: the initial model."""

    reference: Annotated[
        Literal["cached", "online"], Also("precompute_ref_log_probs", note="`reference=cached`, the default, does that")
    ] = "cached"
    """Source of the reference's log-probabilities. cached: computed once before the first step, for every sequence, and stored on disk;
    this saves the reference's forward pass in every step, a quarter of its FLOPs, and the memory of a second model. online: computed in
    every step by a frozen copy of the initial weights. Both give the same numbers to rounding, because the reference never changes and
    rows are not augmented.
    """

    @property
    def roles(self) -> Mapping[str, str]:
        return {"reference": self.reference}

    def reads(self) -> "Fields":
        return sequence_fields(*(("reference",) if self.reference == "cached" else ()))
