"""`argosy quantize`: writes a model in few bits, weight by weight, without building it.

Memory stays below a few times the source's largest weight. After an interruption, a kill or a full disk, the same command resumes.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from argosy.adapt.quant import Scheme, by_layer
from argosy.adapt.rules import Rule, schemes_of
from argosy.checkpoint.save import Progress, write_model_folder
from argosy.core.errors import BadInput
from argosy.core.process.signals import before_leaving
from argosy.core.settings import dump
from argosy.jobs.convert import DTYPES, CountedProgress, identity_of, open_source
from argosy.models.parts.einsum import Contraction
from argosy.models.parts.stack import Unroll
from argosy.ops.quantized import Quantized
from argosy.weights.build import stored_tokenizer
from argosy.weights.quantized import RoundedTensors

Say = Callable[[str], None]


def quantize(
    source: str,
    target: Path,
    rules: Sequence[Rule],
    *,
    dtype: str | None = None,
    to: str = "argosy",
    say: Say = lambda _: None,
    progress: Progress = lambda new, all, kept: None,
) -> dict[str, Any]:
    """Quantizes a model to nearest. Returns what was written: a row for each weight, with its bytes and error.

    Args:
        target: a new folder.
        dtype: the type of the weights that are not quantized; None keeps each one's.
        to: argosy, or compressed-tensors: a Hub folder.

    Raises:
        BadInput: the source is no model or quantized already, the target exists, or a rule matches nothing; nothing is written.
        Unsupported: the layout cannot say a rule; nothing is written.
    """
    start = time.monotonic()
    stored = open_source(source, say)
    order = {name.removesuffix(".w"): i for i, name in enumerate(stored.weights.names)}
    if stored.quantized is not None:
        raise BadInput(f"{source} is quantized already", hint="quantize the model it came from; or `argosy convert` makes floats of it")
    model = stored.config.build(Unroll())
    schemes = by_layer(model, schemes_of(model, list(rules)))
    table = LayerTable()
    weights = RoundedTensors(stored.config, stored.weights, schemes, lambda name, of, w: schemes[name].quantize(of, w), table.add)
    identity = identity_of(stored, to, dtype, 0) | {"rules": [dump(rule) for rule in rules]}
    written = CountedProgress(progress)

    def stopped() -> None:
        say(f"stopped; complete files are kept in {target}.part, and the same command resumes from there")

    with before_leaving(stopped):
        write_model_folder(
            *(target, to, stored.config, weights, stored.hub, stored.companions),
            DTYPES[dtype] if dtype else None,
            stored_tokenizer(stored),
            identity=identity,
            progress=written,
            schemes=schemes,
        )
    # What a killed process had written was not quantized again.
    weights.see_all()
    kept = [name for name in stored.weights.names if name.removesuffix(".w") not in schemes]
    bytes_kept = sum(int(np.prod(stored.weights.shape(name))) * weights.dtype(name).itemsize for name in kept)
    return {
        "source": source,
        "target": str(target),
        "weights": sorted(table.rows, key=lambda row: order[row["name"]]),
        "kept": {"tensors": len(kept), "bytes": bytes_kept, "largest": largest(stored.weights, kept)},
        "bytes": written.all,
        "seconds": time.monotonic() - start,
    }


def largest(weights: Any, names: Sequence[str]) -> list[str]:
    """The largest of the weights that were kept, at most three."""
    return sorted(names, key=lambda name: -int(np.prod(weights.shape(name))))[:3]


class LayerTable:
    """What became of each weight.

    rows: name, scheme, numbers, bytes, bits of a number with its scales, and error: the root mean square of what rounding changed over
        that of the weight.
    """

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def add(self, name: str, of: Contraction, w: np.ndarray, quantized: Quantized) -> None:
        scheme: Scheme = of.scheme  # type: ignore[attr-defined]
        change = float(np.linalg.norm((np.asarray(quantized.dequantized()) - w).ravel()))
        size = float(np.linalg.norm(w.ravel()))
        granularity = scheme.granularity or scheme.format.block or "channel"
        sizes = {"numbers": w.size, "bytes": quantized.nbytes, "bits": 8 * quantized.nbytes / w.size}
        error = change / size if size else 0.0
        self.rows.append({"name": name, **asdict(scheme), "granularity": granularity, **sizes, "error": error})
