"""`argosy convert`: a model from one format to another, without building it."""

import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from argosy.checkpoint.stored import open_model
from argosy.infer.load import no_weights, tokenizer_of
from argosy.infer.save import write
from argosy.jobs.compose import presets

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def convert(source: str, target: Path, to: str, dtype: str | None) -> dict[str, Any]:
    """Writes `source` to the new folder `target`; says what was written.

    Raises:
        BadInput, Damaged: the source is no model, the target exists.
    """
    if not Path(source).exists():
        raise no_weights(source, presets())
    stored = open_model(source)
    kind = DTYPES[dtype] if dtype else None
    write(target, to, stored.config, stored.weights, stored.hub, stored.companions, kind, tokenizer_of(stored))
    weights = stored.weights
    parameters = sum(math.prod(weights.shape(n)) for n in weights.names)
    return {
        "source": source,
        "target": str(target),
        "format": to,
        "tensors": len(weights.names),
        "parameters": parameters,
    }
