"""What objectives over whole texts read of a batch: tokens and segments [B T], and for each slot of a row whether it holds a text
(`live`), where the second text of a pair begins (`second`, 0 without one), and its label."""

from typing import Any

import numpy as np
from jaxtyping import Array, Float

from argosy.data.batch import Field, Fields
from argosy.models.parts.stack import Aux
from argosy.models.parts.texts import pair_types, text_scores
from argosy.train.objectives.preferences.sequences import FIELDS, PER_SEQUENCE

TEXTS: Fields = {**{name: FIELDS[name] for name in ("tokens", "segments", "live")}, "second": PER_SEQUENCE}
LABELS = Field("B s z", np.float32, "row")


def batch_scores(model: Any, batch: dict[str, Array]) -> tuple[Float[Array, "B s Z"], Aux]:
    """The scores of the texts of a batch, and the aux outputs of the layers."""
    segments = batch["segments"]
    types = None if model.config.causal else pair_types(model.config.attend(segments).positions, segments, batch["second"])
    return text_scores(model, batch["tokens"], segments, types, batch["live"].shape[1])
