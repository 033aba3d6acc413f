"""`argosy quantize MODEL OUT.gguf preset=q4_k_m`: writes a GGUF file in llama.cpp's types, tensor by tensor.

Memory stays below twice the source's largest tensor plus a few slabs. After a kill, the same command starts again from the beginning.
"""

import math
import time
from pathlib import Path
from typing import Any

from argosy.checkpoint.save import Progress
from argosy.core.errors import BadInput
from argosy.core.formats.gguf_writer import EncodedTensor
from argosy.core.formats.quants import CODES
from argosy.jobs.convert import CountedProgress, Say, identity_of, open_source, write_gguf
from argosy.weights.build import stored_tokenizer
from argosy.weights.gguf.metadata import KIND
from argosy.weights.gguf.mixtures import Mixture, mixture, usual_type
from argosy.weights.model import OpenedModel


def quantize_gguf(
    source: str,
    target: Path,
    preset: str,
    *,
    say: Say = lambda _: None,
    progress: Progress = lambda new, all, kept_bytes: None,
) -> dict[str, Any]:
    """Quantizes a model by rounding to nearest, as llama.cpp does. Returns a report like that of `quantize`: a row for each tensor that
    is not float32, and the names of tensors whose rows are too narrow for the preset's type.

    Args:
        target: a new file that ends in .gguf.
        preset: one of `MIXTURES`.

    Raises:
        BadInput: the source is not a model or already quantized, the target exists, or there is no such preset. Nothing is written.
        Unsupported: a GGUF file cannot express the family or a setting.
    """
    start, target_mixture = time.monotonic(), mixture(preset)
    stored = open_source(source, say)
    _check_plain(stored, source, say)
    count = CountedProgress(progress)
    identity = identity_of(stored, "gguf", None, 0) | {"preset": preset}
    content = write_gguf(stored, target, target_mixture, stored_tokenizer(stored), identity, say, count)
    float_tensors = [tensor for tensor in content.tensors if tensor.type == "F32"]
    largest = sorted(float_tensors, key=lambda tensor: -tensor.bytes)[:3]
    others = [tensor for tensor in content.tensors if tensor.type != "F32"]
    return {
        "source": source,
        "target": str(target),
        "weights": [row(tensor) for tensor in others],
        "narrow": [tensor.entry.name for tensor in others if _is_narrow(tensor, target_mixture, stored.config, content.meta[KIND])],
        "kept": {
            "tensors": len(float_tensors),
            "bytes": sum(tensor.bytes for tensor in float_tensors),
            "largest": [tensor.entry.name for tensor in largest],
        },
        "bytes": count.all,
        "seconds": time.monotonic() - start,
    }


def row(tensor: EncodedTensor) -> dict[str, Any]:
    """The report's row of a tensor."""
    numbers = math.prod(tensor.entry.shape)
    return {
        "name": tensor.entry.name,
        "weights": tensor.type,
        "granularity": tensor.kind.values if tensor.kind.dtype is None else None,
        "activations": None,
        "numbers": numbers,
        "bytes": tensor.bytes,
        "bits": 8 * tensor.bytes / numbers,
        "error": tensor.errors.relative,
    }


def _is_narrow(tensor: EncodedTensor, mixture: Mixture, config: Any, architecture: str) -> bool:
    usual = usual_type(tensor.entry.name, tensor.entry.shape, mixture, config, architecture)
    return (tensor.kind.dtype is None and usual != tensor.type) or (tensor.type == "F16") != (mixture.type == "F16")


def _check_plain(stored: OpenedModel, source: str, say: Say) -> None:
    """Whether the source has floats.

    Raises:
        BadInput: it is a folder of quantized weights.
    """
    if stored.quantized is not None:
        raise BadInput(f"{source} is quantized already", hint="quantize the model it came from; or `argosy convert` makes floats of it")
    if stored.blocks is not None and any(stored.blocks.file.type(name) in CODES for name in stored.blocks.file.names):
        say(f"{source} is rounded already: it is rounded again")
