"""Predicts serving a model on devices that may be absent: the memory of weights and KV cache, and the time of the engine's steps.

A step reads the weights once for all of its tokens, and the cache of each sequence that decodes. So with few sequences the time of a
step is that of reading the weights. With many sequences it is that of the matrix products, or of reading the cache.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from argosy.adapt.bank import AdapterIds
from argosy.adapt.quant import Scheme, apply_schemes, are_alike
from argosy.core.dims import LOOKED_UP
from argosy.core.errors import BadInput
from argosy.infer.cpu.panels import packer_of, panel_forms
from argosy.infer.engine.adapters import put_banks
from argosy.infer.engine.cache import (
    OF_DEVICE,
    CacheNeeds,
    CacheSize,
    bytes_on_each,
    cache_needs,
    check_sequence_fits,
    host_room,
)
from argosy.infer.sampling.sampler import empty_slots
from argosy.infer.settings import EngineSettings
from argosy.models.parts.stack import Unroll
from argosy.models.parts.weight import logical, storage_dtype, variables
from argosy.observe.environment import memory_bytes
from argosy.observe.hlo.estimate import Prices
from argosy.ops.native import library
from argosy.ops.native.codes import PANEL
from argosy.ops.native.products import SMALLEST
from argosy.parallel.mesh import MeshSettings
from argosy.parallel.scope import scope
from argosy.parallel.target import Target
from argosy.parallel.unsplit import unsplit_weights
from argosy.run.plan.figures import Buffer, Traffic
from argosy.weights.build import default_run, tensor_places

# Seconds of a collective from each device to the next, for which it waits however little it sends ("How to Scale Your Model").
HOP_S = 1e-6
# Copies of the logits in float32 in the sampler: as they are, sorted, and their exponentials.
LOGITS = 3
# Arrays as wide as the feed-forward layer, and as the model, that a layer holds at once.
WIDE, NARROW = 3, 6
LARGEST = 8


# A step: sequences that decode, prompt tokens, and the tokens of each sequence in the cache.
StepKey = tuple[int, int, int]


@dataclass(frozen=True)
class PlannedModel:
    """A model as a server would load it, but without the arrays of its weights.

    config: the config of the model.
    module: the module with shapes instead of weights, quantized where the quantization schemes say so.
    target: the devices of one copy of the model.
    mesh: the mesh of these devices.
    shapes: the shape and type of each weight as the server stores it, by parameter name.
    places: the sharding of each weight, by parameter name.
    needs: the memory need of the KV cache.
    settings: the settings of the engine.
    packed: the bytes of the weights that the engine packs for the kernels of a CPU (`infer.cpu.panels`), by parameter name.
    factors: the parameter names of the factors of adapters. A request uses one adapter.
    draft: the draft model of speculative decoding; None without one.
    """

    config: Any
    module: Any
    target: Target
    mesh: Any
    shapes: Mapping[str, jax.ShapeDtypeStruct]
    places: Mapping[str, Any]
    needs: CacheNeeds
    settings: EngineSettings
    packed: Mapping[str, float] = field(default_factory=dict)
    factors: frozenset[str] = frozenset()
    draft: "PlannedModel | None" = None

    @property
    def dtype(self) -> Any:
        return self.module.dtype

    @property
    def context(self) -> int:
        return self.needs.longest

    def bytes_of(self, address: str) -> float:
        """Returns the bytes of a weight on each device.

        Args:
            address: the parameter name of the weight.
        """
        if address in self.packed:
            return self.packed[address]
        shape = self.shapes[address]
        bits = jax.dtypes.itemsize_bits(shape.dtype)
        # In the memory of a CPU, XLA gives each number a byte at least.
        return math.prod(self.places[address].shard_shape(shape.shape)) * (max(8, bits) if self.target.shares_memory else bits) / 8

    def cache_bytes(self, size: CacheSize) -> int:
        """Returns the bytes of the whole cache on each device, with the states of recurrent layers."""
        return bytes_on_each(self.needs.specs, self.mesh, lambda: self.needs.empty(self.settings.slots, size))

    def read_bytes(self, length: int) -> float:
        """Returns the bytes of the cache of one sequence of `length` tokens, on each device."""
        needs = replace(self.needs, longest=max(1, length), windows={w: n for w, n in self.needs.windows.items() if w.tokens < length})
        pages = needs.bytes(self.mesh, needs.size(1, needs.pages))
        states = bytes_on_each(needs.specs, self.mesh, lambda: needs.empty(1, CacheSize(0, {})))
        return pages + states


def served_model(
    config: Any,
    target: Target,
    settings: EngineSettings,
    dtype: str | None,
    tensor: int,
    schemes: Mapping[str, Scheme],
    stored: Callable[[str], Any] | None = None,
) -> PlannedModel:
    """Describes a model as `argosy serve` loads it on some devices.

    Args:
        target: all devices. A copy of the model takes the first `tensor` of them.
        dtype: the type of weights and activations; None: float32 on CPUs, bfloat16 elsewhere.
        tensor: the number of devices of a copy.
        schemes: the quantization scheme of each quantized matrix product, by the name of each layer's weight.
        stored: (name of a layer's weight) -> its type in the file. None: weights are not packed, because others use them too.

    Raises:
        BadInput: the model cannot be split over `tensor` devices, or the cache that the settings ask for does not fit it.
    """
    if tensor > target.count:
        raise BadInput(f"tensor = {tensor}, but {target.name} has {target.count}", hint=f"tensor={target.count}, or a larger device")
    copy_target = replace(target, count=tensor, devices=target.devices[:tensor])
    mesh = copy_target.mesh(MeshSettings(fsdp=1, tensor=tensor))
    # On one CPU the engine runs stacked layers over views of each.
    alone = target.platform == "cpu" and tensor == 1
    layout = Unroll() if alone else default_run(config, target.platform)
    if not are_alike(config.build(layout), schemes):
        layout = Unroll()
    module = config.build(layout)
    apply_schemes(module, schemes)
    module.dtype = jnp.dtype(dtype or ("float32" if target.platform == "cpu" else "bfloat16"))
    banks = put_banks(module, settings.lora) if settings.lora.enabled else {}
    weights = {address: v for address, v in variables(module).items() if not isinstance(v, AdapterIds)}
    shapes = {address: jax.ShapeDtypeStruct(v.shape, storage_dtype(v, module.dtype)) for address, v in weights.items()}
    context = min(settings.context or config.context, config.context)
    with scope(mesh):
        needs = cache_needs(module.layers.holds(), settings, module.dtype, context)
    packed = bytes_in_panels(module, shapes, stored) if alone and stored is not None else {}
    factors = frozenset(f"{name}.{side}" for name in banks for side in "ab")
    return PlannedModel(config, module, copy_target, mesh, shapes, tensor_places(module, mesh), needs, settings, packed, factors)


def bytes_in_panels(module: Any, shapes: Mapping[str, jax.ShapeDtypeStruct], stored: Callable[[str], Any]) -> dict[str, float]:
    """Returns the bytes of the weights of an unrolled model that an engine packs, by parameter name. Weights that are bfloat16 or
    quantized in the file keep their type when they are packed."""
    library.load()
    if packer_of(module) is None:
        return {}
    sizes = {}
    for address, (inner, first) in panel_forms(module).items():
        shape, quantized = shapes[address].shape, address.endswith(".values")
        bits = jax.dtypes.itemsize_bits(shapes[address].dtype)
        if not quantized:
            bits = 16 if jnp.dtype(stored(address)) == jnp.bfloat16 else 32
        if math.prod(shape) < SMALLEST:
            continue
        outputs = math.prod(shape[inner:] if first else shape[: len(shape) - inner])
        columns = outputs if quantized else -(-outputs // PANEL) * PANEL
        sizes[address] = math.prod(shape) // outputs * columns * bits / 8
    return sizes


# ---------------------------------------------------------------- memory


def serving_memory(model: PlannedModel, copies: int) -> tuple[dict[str, int], CacheSize]:
    """Predicts the memory of serving. Returns the bytes by kind on each device (or on the machine if its devices share memory), and the
    size of the KV cache that the engine would choose.

    Args:
        copies: the number of copies of the model.

    Raises:
        BadInput: the cache that the settings ask for cannot hold a single sequence of full length.
    """
    settings, target = model.settings, model.target
    adapters = int(sum(map(model.bytes_of, model.factors)))
    weights, draft = int(sum(map(model.bytes_of, model.shapes))) - adapters, model.draft
    # On CPUs copies have the same weights.
    times = copies if target.shares_memory else 1
    sampler = jax.eval_shape(lambda: empty_slots(settings.slots, model.config.vocab))
    memory = {"weights": weights, "adapters": adapters}
    memory |= {} if draft is None else {"draft model": int(sum(map(draft.bytes_of, draft.shapes)))}
    weight_bytes = sum(memory.values())
    memory |= {"sampler": times * sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(sampler))}
    if settings.pages is not None:
        size = model.needs.size(settings.slots, settings.pages)
        check_sequence_fits(size.pages, settings.page, model.context)
    else:
        besides = 0 if draft is None else draft.needs.bytes(draft.mesh, CacheSize(1, {}))
        room = _room(model, weight_bytes, copies)
        size = model.needs.fitting(settings.slots, room, model.mesh, besides, strict=settings.memory is not None)
    memory["cache"] = times * model.cache_bytes(size)
    memory["temporaries"] = times * step_temporaries(model)
    if draft is not None:
        # In the same pages, with arrays of its own.
        memory["cache"] += times * draft.cache_bytes(CacheSize(size.pages, {}))
        memory["temporaries"] = max(memory["temporaries"], times * step_temporaries(draft))
    return memory, size


def _room(model: PlannedModel, weights: int, copies: int) -> float:
    """Returns the bytes for the cache on each device, as `infer.engine.cache.room_for_cache` finds them."""
    target = model.target
    if model.settings.memory is not None:
        return float(model.settings.memory)
    if target.shares_memory:
        free = memory_bytes()[1]
        return host_room(None if free is None else max(0, free - weights)) / (target.count * copies)
    return OF_DEVICE * max(0.0, float(target.memory_bytes or 0) - weights)


def step_temporaries(model: PlannedModel) -> int:
    """Estimates the bytes of the temporary arrays of the largest step, on each device."""
    settings, config = model.settings, model.config
    tokens = max(settings.budget, settings.budget_decoding + settings.slots)
    wide = (getattr(config, "ffn", None) or 4 * config.width) / model.target.count
    return int(tokens * (WIDE * wide + NARROW * config.width) * model.dtype.itemsize + LOGITS * 4 * settings.slots * config.vocab)


def unsplit_text(model: PlannedModel) -> str:
    """Describes the weights that every device has unsharded although `tensor` splits weights; "" if they are few."""
    shapes = {a: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=model.places[a]) for a, s in model.shapes.items()}
    return unsplit_weights(model.mesh, shapes)


def largest_weights(model: PlannedModel) -> list[Buffer]:
    """Returns the largest weights on a device."""

    def buffer(address: str) -> Buffer:
        shape = model.shapes[address]
        return Buffer(address, f"{shape.dtype}{list(model.places[address].shard_shape(shape.shape))}", int(model.bytes_of(address)))

    return sorted(map(buffer, model.shapes), key=lambda weight: -weight.bytes)[:LARGEST]


# ---------------------------------------------------------------- time


@dataclass(frozen=True)
class ServingStep:
    """The time of a step of the engine.

    decodes: the number of sequences that decode.
    prompt: the number of prompt tokens.
    by_kind: the seconds of work on a device, by kind.
    traffic: the collectives between devices.
    """

    decodes: int
    prompt: int
    by_kind: Mapping[str, float]
    traffic: Sequence[Traffic]

    @property
    def seconds(self) -> float:
        return sum(self.by_kind.values()) + sum(transfer.exposed_seconds for transfer in self.traffic)

    @property
    def bound_by(self) -> str:
        """The kind of work that takes most of the time, with its share."""
        parts = {**self.by_kind, "communication": sum(transfer.exposed_seconds for transfer in self.traffic)}
        most = max(parts, key=lambda kind: parts[kind])
        return f"{most} ({parts[most] / self.seconds:.0%} of a step)"


class StepParts(NamedTuple):
    """The parts of an engine's step, in seconds on each device, as if each part ran alone.

    weights: reading the weights.
    products: the matrix products with weights.
    cache: reading the KV cache.
    mixing: the products of attention (scores and weighted sums).
    """

    weights: float
    products: float
    cache: float
    mixing: float

    def by_kind(self) -> dict[str, float]:
        """Returns seconds by kind. Reading and computing overlap, so only the slower of the two counts, for weights and for the
        cache."""
        kinds = {"reading the weights": self.weights} if self.weights > self.products else {"matrix products": self.products}
        return kinds | ({"reading the cache": self.cache} if self.cache > self.mixing else {"attention": self.mixing})


def step_parts(model: PlannedModel, decodes: int, prompt: int, length: int, prices: Prices) -> StepParts:
    """Predicts the parts of a step from FLOPs and bytes. The arguments are those of `step_work`."""
    config, count = model.config, model.target.count
    head = 2 * config.width * config.vocab
    each = config.flops(1) - config.mixing_flops(1)
    products = (decodes * each + prompt * (each - head) + head * bool(prompt) + (decodes + prompt) * factor_flops(model)) / count
    products /= prices.flops_per_s
    weights = read_weights(model, decodes + prompt) / prices.bytes_per_s
    # A prompt's own tokens see half of each other on average.
    mixing = (decodes * _mixing(config, length) + prompt * _mixing(config, length + prompt // 2)) / count / prices.flops_per_s
    # Rows of a prompt share what they read of their sequence.
    cache = (decodes + bool(prompt)) * model.read_bytes(length) / prices.bytes_per_s
    return StepParts(weights, products, cache, mixing)


def factor_flops(model: PlannedModel) -> float:
    """Returns the FLOPs of the adapters for one token. Each token is multiplied with the factors of every adapter."""
    axes, experts = logical(model.module), model.config.experts
    share = {True: 1.0 if experts is None else experts.active / experts.count, False: 1.0}
    return sum(2 * math.prod(model.shapes[a].shape) * share["experts" in axes[a]] for a in model.factors)


def step_work(model: PlannedModel, decodes: int, prompt: int, length: int, prices: Prices) -> ServingStep:
    """Predicts the time of a step from FLOPs and bytes.

    Args:
        decodes: the number of sequences that decode.
        prompt: the number of prompt tokens.
        length: the number of tokens of each sequence in the cache before the step.
        prices: the speeds of the device.
    """
    by_kind = step_parts(model, decodes, prompt, length, prices).by_kind()
    return ServingStep(decodes, prompt, by_kind, _step_traffic(model, decodes + prompt, decodes + bool(prompt), prices))


def _mixing(config: Any, length: int) -> float:
    """Returns the FLOPs of the attention of one token to `length` tokens."""
    return config.mixing_flops(max(length, 1)) / max(length, 1)


def read_weights(model: PlannedModel, tokens: int) -> float:
    """Returns the bytes of weights that a step with `tokens` tokens reads on each device."""
    return sum(weights_read(model, tokens).values())


def weights_read(model: PlannedModel, tokens: int) -> dict[str, float]:
    """Returns the bytes of each weight that a step with `tokens` tokens reads on each device, by parameter name. Experts without tokens
    are not read; all experts are assumed to be equally likely."""
    experts, axes = model.config.experts, logical(model.module)
    touched = 1.0 if experts is None else 1 - (1 - experts.active / experts.count) ** tokens
    sizes = {}
    for address in model.shapes:
        names = [name for name in axes[address] if name != "layers"]
        if LOOKED_UP & set(names[:1]) and not (model.config.tied and names[0] == "vocab"):
            continue
        sizes[address] = model.bytes_of(address) * (touched if names[:1] == ["experts"] else 1.0)
    return sizes


def expert_seconds(model: PlannedModel, tokens: int, prices: Prices) -> float:
    """Predicts the seconds of the experts in a step with `tokens` tokens, on each device: those of reading the experts with tokens, or
    those of their matrix products, whichever is larger."""
    experts = model.config.experts
    if experts is None:
        return 0.0
    reading = (read_weights(model, tokens) - read_weights(model, 0)) / prices.bytes_per_s
    axes = logical(model.module)
    sizes = [math.prod(s.shape) for a, s in model.shapes.items() if [n for n in axes[a] if n != "layers"][:1] == ["experts"]]
    return max(reading, 2 * tokens * sum(sizes) * experts.active / experts.count / model.target.count / prices.flops_per_s)


def _step_traffic(model: PlannedModel, tokens: int, rows: int, prices: Prices) -> list[Traffic]:
    n, config = model.target.count, model.config
    if n == 1:
        return []
    layers = config.layers
    sums, logits = 2 * layers * tokens * config.width * model.dtype.itemsize, 4 * rows * config.vocab
    ring = prices.ring_bytes_per_s
    timed = [
        ("all-reduce", sums, 2 * layers, 2 * (n - 1) / n * sums / ring + 2 * layers * 2 * (n - 1) * HOP_S),
        ("all-gather", logits, 1, (n - 1) / n * logits / ring + (n - 1) * HOP_S),
    ]
    return [Traffic(kind, "tensor", size, times, seconds, seconds) for kind, size, times, seconds in timed]


@dataclass(frozen=True)
class ServingRate:
    """The speed that clients see of one copy of a model.

    sequences: the number of sequences that run at a time.
    step: a step in which all of them decode.
    first_token_seconds: the time from a prompt's first step to its first token, if nothing else runs.
    tokens_per_s: the completion tokens per second over all sequences. The time of their prompts is included.
    """

    sequences: int
    step: ServingStep
    first_token_seconds: float
    tokens_per_s: float

    @property
    def token_seconds(self) -> float:
        """The average time between two tokens of a sequence, in seconds."""
        return self.sequences / self.tokens_per_s


def prompt_steps(model: PlannedModel, input_len: int) -> list[tuple[int, int]]:
    """Returns the steps of a prompt that runs alone, each as (tokens of the step, tokens in the cache before)."""
    budget = model.settings.budget
    return [(min(budget, input_len - at), at) for at in range(0, input_len, budget)]


def serving_rates(
    model: PlannedModel, size: CacheSize, input_len: int, output_len: int, steps: Mapping[StepKey, ServingStep],
    per_step: float = 1.0,
) -> list[ServingRate]:
    """Predicts the rates with 1, 8, 32 ... sequences at a time, up to the number that slots and KV-cache pages allow.

    Args:
        input_len: the number of tokens in a prompt.
        output_len: the number of tokens in a completion.
        steps: the predicted steps of `planned_steps`.
        per_step: the average number of tokens by which a step advances a sequence.
    """
    prompt = sum(steps[0, tokens, before].seconds for tokens, before in prompt_steps(model, input_len))
    rates = []
    for n in concurrencies(model, size, input_len + output_len):
        step = steps[n, 0, input_len + output_len // 2]
        # While a prompt is computed, nothing else gets a token: the same seconds, wherever its parts stand among the steps.
        seconds = n * prompt + output_len / per_step * step.seconds
        rates.append(ServingRate(n, step, prompt, n * output_len / seconds))
    return rates


def concurrencies(model: PlannedModel, size: CacheSize, length: int) -> list[int]:
    """Returns the numbers of concurrent sequences that `serving_rates` predicts, up to the largest number that can run at a time.

    Args:
        length: the number of tokens of a sequence.
    """
    most = max(1, min(model.settings.slots, size.pages // -(-length // model.settings.page)))
    return sorted({n for n in (1, 8, 32, 128, 512) if n < most} | {most})


def planned_steps(model: PlannedModel, size: CacheSize, input_len: int, output_len: int) -> list[StepKey]:
    """Returns the steps that `serving_rates` needs."""
    prompts = [(0, tokens, before) for tokens, before in prompt_steps(model, input_len)]
    return prompts + [(n, 0, input_len + output_len // 2) for n in concurrencies(model, size, input_len + output_len)]
