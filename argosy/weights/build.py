"""Builds a stored model and reads its weights: what `argosy.load` makes an `LM` from.

Building is free, because weights begin as descriptions. So a model is built, checked against memory, and filled one stored array
at a time. This module knows nothing of generation.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from argosy.adapt.base import FACTORS, fill_base
from argosy.adapt.quant import apply_schemes, are_alike, by_layer
from argosy.adapt.rules import Rule, schemes_of
from argosy.core.errors import BadInput
from argosy.core.formats import Arrays, OverlaidTensors
from argosy.models.base.language import LanguageConfig
from argosy.models.parts.stack import Execution, Scan, Unroll
from argosy.models.parts.stack.addresses import layer_addresses
from argosy.models.parts.weight import fill, logical, put, storage_dtype, variables
from argosy.observe.environment import check_fits
from argosy.parallel.mesh import MeshSettings
from argosy.parallel.rules import DEFAULT, shardings
from argosy.weights.fill import read_into, stored_arrays
from argosy.weights.gguf.blocks import BlockedWeights, BlockRows, Origin
from argosy.weights.hub.config import read_json_object
from argosy.weights.hub.reader import MappedTensors
from argosy.weights.model import OpenedModel
from argosy.weights.peft.attach import mark_retrained, precompute_norms, put_adapter
from argosy.weights.peft.reader import check_base, config_for, read_contents
from argosy.weights.peft.sites import PeftContents
from argosy.weights.quantized import QuantizedWeights

# Maps a model to the weights that are matrices of a product: the name of the parameter to `(inner, first, has_experts)`, the arguments
# of `BlockedWeights.of`.
Forms = Callable[[Any], Mapping[str, tuple[int, bool, bool]]]
NONE: Mapping[str, BlockRows] = {}


@dataclass(frozen=True)
class LoadedModel:
    """A model and the files that were stored with it.

    tokenizer: the tokenizer, None where the folder has none.
    generation: the contents of generation_config.json.
    hub: the contents of config.json.
    companions: the folder with the model's small files (tokenizer, configs).
    dtypes: the type that each tensor was stored in, by per-layer name.
    origin: the GGUF blocks that the weights were read from, None for other files.
    """

    config: LanguageConfig
    module: Any
    tokenizer: Any = None
    generation: Mapping[str, Any] = field(default_factory=dict)
    hub: Mapping[str, Any] = field(default_factory=dict)
    companions: Path | None = None
    dtypes: Mapping[str, Any] = field(default_factory=dict)
    origin: Origin | None = None


def load_model(
    stored: OpenedModel,
    *,
    dtype: Any = None,
    run: Execution | None = None,
    adapter: str | Path | None = None,
    context: int | None = None,
    tensor: int = 1,
    forms: Forms | None = None,
    rules: Sequence[Rule] | None = None,
) -> LoadedModel:
    """Builds an opened model and reads its weights.

    Args:
        stored: the opened model. A run that trained adapters is loaded as its base with the adapters, quantized as in training.
        dtype: the type of weights and activations. The default is float32 on CPUs and bfloat16 elsewhere.
        run: whether layers are unrolled or scanned. The default is that of `default_run`.
        context: the length of the longest sequence that the model will get, in tokens. It selects one of the two tables of rotary
            positions of LongRoPE. The default is the model's own context.
        adapter: a PEFT folder. With it, layers are unrolled, because each may carry adapters of its own.
        tensor: the number of devices that share heads, feed-forward features and vocabulary (arXiv:1909.08053).
        forms: names the weights that may stay in the blocks of a GGUF file (`weights.gguf.blocks`). It applies only to plain GGUF
            files on one CPU device in float32, and layers are then unrolled.
        rules: the rules by which weights are quantized while they are read (`adapt.rules`).

    Raises:
        BadInput: there is no model, its family is not implemented, it does not fit into memory, or `tensor` devices cannot share it.
        Damaged: a file differs from what was written.
    """
    dtype = as_dtype(dtype)
    if adapter is not None and stored.adapted is not None:
        raise BadInput(f"{stored.path} has adapters already", hint="convert it first, which merges them: argosy convert")
    config = stored.config if context is None else stored.config.for_context(context)
    config = config if adapter is None else config_for(adapter, config)
    contents = stored.adapted.contents if stored.adapted else PeftContents({})
    if adapter is not None:
        contents = read_contents(adapter, config)
        check_base(contents, stored.weights)
    adapters = contents.adapters
    if rules is not None and stored.quantized is not None:
        raise BadInput(f"{stored.path} is quantized already", hint="leave out `quantization`, or load the model it came from")
    if rules is not None and stored.adapted is not None:
        raise BadInput(f"{stored.path} has adapters", hint="merge them first: argosy convert; or leave out `quantization`")
    blocks = None if adapter is not None or tensor > 1 or run is not None or dtype != np.float32 or forms is None else stored.blocks
    layout = Unroll() if adapters or blocks is not None else run or default_run(config)
    quantized = None if rules is not None else stored.quantized or stored.published() or _under_adapters(stored)
    schemes = {} if quantized is None else quantized.schemes
    if rules is not None:
        # By layer, since a rule may name one.
        single = config.build(Unroll())
        schemes = by_layer(single, schemes_of(single, list(rules)))
    if not are_alike(config.build(layout), schemes):
        layout = Unroll()
    model, plain = config.build(layout), config.build(layout)
    is_quantized = stored.adapted is not None and bool(stored.adapted.settings.quantize(model))
    apply_schemes(model, schemes)
    rows = {} if blocks is None or forms is None else in_blocks(blocks, forms(plain))
    if schemes or is_quantized:
        check_quantized_memory(model, dtype)
    else:
        check_memory(config, dtype, rows)
    base = OverlaidTensors(stored.adapted.base.weights if stored.adapted else stored.weights, Arrays(contents.whole))
    place = None if tensor == 1 else tensor_shardings(model, tensor).__getitem__
    for address, block_rows in rows.items():
        put(model, {address: block_rows.packed()})
    if quantized is not None:
        read_into(model, OverlaidTensors(quantized.reader, Arrays(contents.whole)), dtype=dtype, place=place)
    else:
        fill_base(model, stored_arrays(plain, base, dtype=dtype, without=rows), dtype=dtype, place=place)
    if adapters:
        names = put_adapter(model, adapters, contents.dropout)
        mark_retrained(model, contents.whole)
        precompute_norms(model)
        if tensor > 1:
            on, model_weights = tensor_shardings(model, tensor), variables(model)
            factors = [at for name in names for factor in FACTORS if (at := f"{name}.{factor}") in model_weights]
            put(model, {address: jax.device_put(model_weights[address].get_value(), on[address]) for address in factors})
    model.dtype = dtype
    tokenizer = stored_tokenizer(stored)
    if tokenizer is not None and tokenizer.vocab > config.vocab:
        raise BadInput(
            f"the tokenizer has {tokenizer.vocab} tokens, the model {config.vocab}",
            where=str(stored.path),
            hint="they do not belong together",
        )
    hub = stored.hub | ({"_name_or_path": str(stored.adapted.base.path)} if stored.adapted else {})
    origin = None
    if stored.blocks is not None and adapter is None and not model.layers.run.stacked:
        values = {address: v.get_value() for address, v in variables(model).items()}
        origin = Origin(stored.blocks, {address: a for address, a in values.items() if isinstance(a, jax.Array)})
    return LoadedModel(config, model, tokenizer, stored_generation(stored), hub, stored.companions, dtypes_of(stored), origin)


def _under_adapters(stored: OpenedModel) -> QuantizedWeights | None:
    """The quantized weights of the base of trained adapters, which are loaded without being rounded again. None if the run quantized
    the base itself, trained weights in full, or has DoRA adapters."""
    adapted = stored.adapted
    if adapted is None or adapted.is_quantized or adapted.whole or any(adapter.m is not None for adapter in adapted.adapters.values()):
        return None
    return adapted.base.quantized or adapted.base.published()


def tensor_shardings(model: Any, tensor: int, devices: Sequence[Any] | None = None) -> dict[str, NamedSharding]:
    """The sharding of each weight, by parameter name, if several devices share heads, feed-forward features and vocabulary.

    Args:
        tensor: the number of devices that share the model.
        devices: the devices to choose from, of which the first `tensor` are used. The default is all devices of this process.

    Raises:
        BadInput: there are fewer devices than `tensor`, or `tensor` divides neither heads, features nor vocabulary.
    """
    devices = devices or jax.devices()
    if tensor > len(devices):
        raise BadInput(
            f"tensor = {tensor}, but this process has {len(devices)} device{'s' * (len(devices) > 1)}",
            hint=f"to try it on a CPU: XLA_FLAGS=--xla_force_host_platform_device_count={tensor}",
        )
    return tensor_places(model, MeshSettings(fsdp=1, tensor=tensor).build(devices[:tensor]))


def tensor_places(model: Any, mesh: Any) -> dict[str, NamedSharding]:
    """Returns the result of `tensor_shardings` for a given mesh, whose devices need not exist on this machine."""
    tensor = mesh.shape["tensor"]
    places = shardings(logical(model), {a: v.shape for a, v in variables(model).items()}, DEFAULT, mesh)
    if tensor > 1 and all(not any(place.spec) for place in places.values()):
        raise BadInput(
            f"tensor = {tensor} divides neither the heads, nor the feed-forward features, nor the vocabulary of this model",
            hint="a number that divides the heads, such as a power of two",
        )
    return places


def random_model(config: LanguageConfig, seed: int, *, dtype: Any = None, run: Execution | None = None) -> LoadedModel:
    """Builds a model with random weights from a seed, without a tokenizer."""
    dtype = as_dtype(dtype)
    # Weights are drawn in float32.
    check_memory(config, np.float32)
    model = config.build(run or default_run(config))
    model.dtype = dtype
    fill(model, jax.random.key(seed), addresses=layer_addresses(model))
    put(model, {a: v[...].astype(storage_dtype(v, model.dtype)) for a, v in variables(model).items()})
    return LoadedModel(config, model)


def dtypes_of(stored: OpenedModel) -> dict[str, Any]:
    """The stored type of each tensor of a Hub folder, by per-layer name; empty for other files. Tensors in blocks with scales are left
    out, because they are read as float32."""
    weights = stored.weights
    if not isinstance(weights, MappedTensors) or stored.kind != "hub":
        return {}
    return {name: weights.dtype(name) for name in set(weights.names) - set(weights.scaled)}


def in_blocks(blocks: BlockedWeights, forms: Mapping[str, tuple[int, bool, bool]]) -> dict[str, BlockRows]:
    """Returns the weights that the file stores in blocks, by parameter name. `forms`: the candidates (`Forms`)."""
    candidates = {address: blocks.of(address, *form) for address, form in forms.items()}
    return {address: rows for address, rows in candidates.items() if rows is not None}


def check_memory(config: LanguageConfig, dtype: Any, rows: Mapping[str, BlockRows] = NONE) -> None:
    """Checks that the weights fit into the computer's memory. Does nothing on accelerators.

    Args:
        dtype: the type that the weights are kept in.
        rows: the weights that stay in the blocks of the GGUF file.

    Raises:
        BadInput: the weights do not fit.
    """
    if jax.default_backend() == "cpu":
        count, kind = config.parameters(), np.dtype(dtype)
        apart = sum(math.prod(weight.shape) for weight in rows.values())
        needed = (count - apart) * kind.itemsize + sum(weight.nbytes for weight in rows.values())
        check_fits(needed, f"{count:,} weights in {kind.name}{' and the blocks of the file' if rows else ''}")


def check_quantized_memory(model: Any, dtype: Any) -> None:
    """Checks the memory as `check_memory` does, for the description of a model with quantized weights.

    Raises:
        BadInput: the weights do not fit.
    """
    if jax.default_backend() == "cpu":
        model_weights = variables(model).values()
        needed = sum(math.prod(v.shape) * np.dtype(storage_dtype(v, dtype)).itemsize for v in model_weights)
        check_fits(needed, f"{model.config.parameters():,} weights, quantized")


def as_dtype(dtype: Any) -> Any:
    """Returns the type of activations for a name or a type; `default_dtype()` for None.

    Raises:
        BadInput: `dtype` is not a float type that models compute in.
    """
    if dtype is None:
        return default_dtype()
    names = ["float32", "bfloat16", "float16", *(["float64"] if jax.config.read("jax_enable_x64") else [])]
    match = next((jnp.dtype(name) for name in names if dtype in (name, getattr(jnp, name), jnp.dtype(name))), None)
    if match is None:
        raise BadInput(f"models do not compute in dtype `{dtype}`", hint=f"{', '.join(names[:-1])} or {names[-1]}")
    return match


def default_dtype() -> Any:
    """The default type of weights and activations: bfloat16, and float32 on CPUs, where bfloat16 decodes six times slower."""
    return jnp.dtype(jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)


def default_run(config: LanguageConfig, platform: str | None = None) -> Execution:
    """Returns how layers run by default. They are unrolled on GPUs, where a scan copies the weights of a layer before each product
    (docs/guides/gpus.md). They are unrolled on TPUs for models with experts, whose kernel causes the same copies (docs/measured.md),
    and on CPUs up to 32 layers. Otherwise they are scanned.

    Args:
        platform: cpu, gpu or tpu. The default is the platform that JAX computes on.
    """
    backend = platform or jax.default_backend()
    few = backend == "cpu" and getattr(config, "layers", 1) <= 32
    copies = backend == "gpu" or (backend == "tpu" and getattr(config, "experts", None) is not None)
    return Unroll() if few or copies else Scan()


def stored_tokenizer(stored: OpenedModel) -> Any:
    """Loads the tokenizer that is stored with a model; None where there is none."""
    if stored.companions is None:
        return None
    from argosy.data.tokenizers.load import find_tokenizer

    return find_tokenizer(stored.companions)


def stored_generation(stored: OpenedModel) -> dict[str, Any]:
    """Reads the generation_config.json that is stored with a model; empty where there is none."""
    if stored.companions is None or not (stored.companions / "generation_config.json").is_file():
        return {}
    return read_json_object(stored.companions / "generation_config.json")
