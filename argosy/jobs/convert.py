"""`argosy convert`: a model from one format to another, without building it, tensor by tensor.

Memory stays under twice the largest tensor of the source and 500 MB, and the answer says both the bound and what was used.
A conversion that was stopped, killed or met a full disk goes on when the same command is given again.
"""

import hashlib
import math
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from argosy.checkpoint import manifest, peft
from argosy.checkpoint.hub import Mapped, check_tied
from argosy.checkpoint.peft import Merged, read_adapter
from argosy.checkpoint.stored import COMPANIONS, Stored, open_model
from argosy.checkpoint.stream import largest, streamed
from argosy.core.errors import BadInput
from argosy.core.signals import before_leaving
from argosy.data.tokenize import matching
from argosy.infer.load import no_weights, tokenizer_of
from argosy.infer.save import Told, write
from argosy.jobs.compose import presets

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
REST_BYTES = 500_000_000  # the interpreter with its libraries takes 210 MB of it, slabs under way 130 MB

Say = Callable[[str], None]


def convert(
    source: str,
    target: Path,
    to: str,
    dtype: str | None,
    *,
    shard_gb: float = 5.0,
    adapter: str | None = None,
    say: Say = lambda _: None,
    told: Told = lambda new, all, kept: None,
) -> dict[str, Any]:
    """Writes `source` to the new folder `target`; says what was written.

    Args:
        dtype: float32, float16 or bfloat16; as it is where None.
        shard_gb: the largest file of a Hub folder, in 1e9 bytes.
        adapter: a PEFT folder to merge on the way.
        told: bytes written since the last call, bytes in all, bytes kept from a process that was killed.

    Raises:
        BadInput, Damaged: the source is no model, the target exists, the disk is too small; nothing is written.
    """
    if target.suffix == ".gguf":
        raise BadInput(f"{target}: GGUF is read here, not written", hint="name a new folder")
    start = time.monotonic()
    original = stored = opened(source, say)
    if dtype is None and isinstance(stored.weights, Mapped) and (scaled := stored.weights.scaled):
        many = f"{len(scaled)} tensors are stored in blocks with scales (fp8, mxfp4)"
        say(f"{many} and become float32; dtype=bfloat16 halves that")
    facts = facts_of(stored, to, dtype, shard_gb)
    if adapter is not None:
        adapters = read_adapter(adapter, stored.config)
        stored = replace(stored, weights=Merged(stored.weights, adapters, stored.config))
        facts["adapter"] = [manifest.describe(Path(adapter) / name)["sha256"][:12] for name in peft.FILES]
        say(f"merging adapters on {len(adapters)} weights")
    tokenizer = tokenizer_of(stored)
    if tokenizer is not None and tokenizer.vocab > stored.config.vocab:
        say(f"the tokenizer has {tokenizer.vocab} tokens, the model {stored.config.vocab}: do they belong together?")
    count = _Count(told)

    def stopped() -> None:
        if count.all:
            say(f"stopped; what is whole is kept in {target}.part, and the same command goes on from there")

    with before_leaving(stopped):
        write(
            *(target, to, stored.config, stored.weights, stored.hub, stored.companions),
            DTYPES[dtype] if dtype else None,
            tokenizer,
            shard_bytes=shard_gb * 1e9,
            facts=facts,
            told=count,
        )
    seconds = time.monotonic() - start
    weights = stored.weights
    parameters = sum(math.prod(weights.shape(n)) for n in weights.names)
    return {
        "source": source,
        "target": str(target),
        "format": to,
        "tensors": len(weights.names),
        "parameters": parameters,
        "bytes": count.all,
        "kept_bytes": count.kept,
        "seconds": seconds,
        "memory": memory([original]),
    }


def opened(source: str, say: Say = lambda _: None) -> Stored:
    """A model whose weights are read one at a time.

    Raises:
        BadInput, Damaged: it is none.
    """
    if not Path(source).exists():
        raise no_weights(source, presets())
    stored = streamed(open_model(source, say))
    check_tied(stored)
    return stored


def facts_of(stored: Stored, to: str, dtype: str | None, shard_gb: float) -> dict[str, Any]:
    """What tells one conversion from another: the source by its files' names, sizes and times, and how it is written."""
    if stored.kind == "argosy":
        digest = hashlib.sha256((stored.path / manifest.NAME).read_bytes())
    else:
        digest = hashlib.sha256()
        for file in _files_of(stored.path):
            about = file.stat()
            digest.update(f"{file.name}\0{about.st_size}\0{about.st_mtime_ns}\n".encode())
    how = {"to": to, "dtype": dtype or "kept"} | ({"shard_gb": shard_gb} if to == "hub" else {})
    return {"source": f"{stored.kind} {digest.hexdigest()[:12]}", **how}


def _files_of(path: Path) -> list[Path]:
    """What a conversion reads of a Hub folder, or the one file."""
    if path.is_file():
        return [path]
    return matching(path, [*COMPANIONS, "config.json", "model.safetensors.index.json", "*.safetensors"])


def memory(models: list[Stored]) -> dict[str, Any]:
    """The most memory that this process had, the bound, and the tensor that it comes from."""
    name, size = max((largest(stored) for stored in models), key=lambda item: item[1])
    return {"peak_bytes": _peak_bytes(), "bound_bytes": 2 * size + REST_BYTES, "largest": name, "largest_bytes": size}


def _peak_bytes() -> int:
    """The largest resident set of this process. What getrusage says is no less than what the process was that started it,
    on Linux, which also knows better."""
    if (status := Path("/proc/self/status")).is_file():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class _Count:
    """Passes on what `write` tells, and remembers it."""

    def __init__(self, told: Told):
        self.told, self.all, self.kept = told, 0, 0

    def __call__(self, new: int, all: int, kept: int) -> None:
        self.all, self.kept = all, kept
        self.told(new, all, kept)
