"""From a MODEL argument to an `LM`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from argosy.checkpoint.hub import Mapped, read_json
from argosy.checkpoint.peft import put_adapter, read_adapter
from argosy.checkpoint.stored import Stored, open_model, read_into
from argosy.core.errors import BadInput
from argosy.infer.lm import LM
from argosy.models.family import FamilyConfig
from argosy.models.parts.stack import Execution, Scan, Unroll, layer_addresses
from argosy.models.parts.weight import fill, kept_in, put, variables
from argosy.observe.environment import check_fits


def load(
    path: str | Path,
    *,
    dtype: Any = None,
    run: Execution | None = None,
    adapter: str | Path | None = None,
    context: int | None = None,
    warn: Callable[[str], None] = lambda _: None,
) -> LM:
    """A model from a Hub folder, a GGUF file, a run directory or a checkpoint.

    Args:
        dtype: what weights are kept and activations computed in: float32 on CPUs, bfloat16 elsewhere, unless told.
        run: how layers run; unrolled up to 32 on CPUs, scanned elsewhere, unless told.
        context: the longest sequence it will see, in tokens; decides between tables of rotary positions where it has two (LongRoPE).
            The model's own context unless given.
        adapter: a PEFT folder; layers are then unrolled, since each may carry adapters of its own.

    Raises:
        BadInput, Damaged: nothing is there, it is no model, or not one that is built.
    """
    stored = open_model(path, warn)
    dtype = as_dtype(dtype)
    config = stored.config if context is None else stored.config.for_context(context)
    adapters = read_adapter(adapter, config) if adapter is not None else {}
    check_memory(config, dtype)
    model = config.build(Unroll() if adapters else run or default_run(config))
    read_into(model, stored.weights, dtype=dtype)
    if adapters:
        put_adapter(model, adapters)
    model.dtype = dtype
    tokenizer = tokenizer_of(stored)
    if tokenizer is not None and tokenizer.vocab > config.vocab:
        raise BadInput(
            f"the tokenizer has {tokenizer.vocab} tokens, the model {config.vocab}",
            where=str(path),
            hint="they do not belong together",
        )
    return LM(config, model, tokenizer, generation_of(stored), stored.hub, stored.companions, dtypes_of(stored))


def dtypes_of(stored: Stored) -> dict[str, Any]:
    """The types of a Hub folder's tensors, but of those in blocks with scales, which come as float32."""
    weights = stored.weights
    if not isinstance(weights, Mapped):
        return {}
    return (
        {name: weights.dtype(name) for name in set(weights.names) - set(weights.scaled)} if stored.kind == "hub" else {}
    )


def random(config: FamilyConfig, seed: int, *, dtype: Any = None, run: Execution | None = None) -> LM:
    """A model with random weights and no tokenizer."""
    dtype = as_dtype(dtype)
    check_memory(config, np.float32)  # drawn in float32
    model = config.build(run or default_run(config))
    model.dtype = dtype
    fill(model, jax.random.key(seed), addresses=layer_addresses(model))
    put(model, {a: v[...].astype(kept_in(v, model.dtype)) for a, v in variables(model).items()})
    return LM(config, model)


def check_memory(config: FamilyConfig, dtype: Any) -> None:
    """That the weights fit, where memory is the computer's own.

    Raises:
        BadInput: they do not.
    """
    if jax.default_backend() == "cpu":
        count, kind = config.parameters(), np.dtype(dtype)
        check_fits(count * kind.itemsize, f"{count:,} weights in {kind.name}")


def as_dtype(dtype: Any) -> Any:
    """A type to compute in, by name or itself.

    Raises:
        BadInput: it is none.
    """
    if dtype is None:
        return default_dtype()
    known = ["float32", "bfloat16", "float16", *(["float64"] if jax.config.read("jax_enable_x64") else [])]
    found = next((jnp.dtype(name) for name in known if dtype in (name, getattr(jnp, name), jnp.dtype(name))), None)
    if found is None:
        raise BadInput(f"dtype `{dtype}` is nothing to compute in", hint=f"{', '.join(known[:-1])} or {known[-1]}")
    return found


def default_dtype() -> Any:
    """On CPUs bfloat16 decodes six times slower than float32."""
    return jnp.dtype(jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)


def default_run(config: FamilyConfig) -> Execution:
    return Unroll() if jax.default_backend() == "cpu" and config.layers <= 32 else Scan()


def tokenizer_of(stored: Stored) -> Any:
    """The tokenizer that came with a model, or None."""
    if stored.companions is None:
        return None
    from argosy.data.tokenize import find_tokenizer

    return find_tokenizer(stored.companions)


def generation_of(stored: Stored) -> dict[str, Any]:
    """Its generation_config.json, or nothing."""
    if stored.companions is None or not (stored.companions / "generation_config.json").is_file():
        return {}
    return read_json(stored.companions / "generation_config.json")


def no_weights(name: str, presets: list[str]) -> BadInput:
    """The error for a preset's name where trained weights are needed."""
    if name in presets:
        return BadInput(
            f"`{name}` is a preset: its name alone means random weights",
            hint="give the folder or file of its trained weights, or train one: argosy train RECIPE model=" + name,
        )
    return BadInput(
        f"no file and no folder at {name}", hint="a Hub folder, a .gguf file, a run directory or a checkpoint"
    )
