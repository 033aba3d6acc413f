"""Predicts the rollouts of a run that learns from its own completions: the memory that the engine needs in addition to the trainer's
state, and the time of prefill and decode steps relative to that of the updates.

The engine uses the trainer's weights in place, in their type and with their shardings, or copies on separate devices
(`rollout.devices`). Its cache is freed before an update. All completions are assumed to reach their largest length.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from argosy.core.counts import plural
from argosy.core.errors import BadInput
from argosy.infer.engine.cache import OF_DEVICE, CacheSize, cache_needs, host_room
from argosy.infer.engine.cached_engine import EngineRoom
from argosy.infer.sampling.sampler import empty_slots
from argosy.infer.settings import EngineSettings
from argosy.observe.environment import memory_bytes
from argosy.observe.hlo.estimate import Prices
from argosy.parallel.mesh import MeshSettings
from argosy.parallel.scope import scope
from argosy.parallel.target import Target
from argosy.rl.policy.critic import PREFIX
from argosy.run.plan.figures import Traffic
from argosy.run.plan.serving import HOP_S, PlannedModel, ServingStep, bytes_in_panels, step_temporaries
from argosy.run.plan.serving_cpu import serving_step
from argosy.run.rl.parts import part_shape
from argosy.weights.build import tensor_places

# Sums over the devices in each layer, where each has a part of the features: of queries, keys and values, of the feed-forward layer,
# and of two norms.
SUMS = 4


@dataclass(frozen=True)
class RolloutSize:
    """The size of a rollout.

    completions: the number of completions.
    prompts: the number of prompts.
    greedy: the number of additional greedy completions, whose rewards are a baseline.
    input: the number of tokens in a prompt.
    output: the number of tokens in a completion.
    shared: whether completions of one prompt share one copy of it in the updates.
    """

    completions: int
    prompts: int
    greedy: int
    input: int
    output: int
    shared: bool

    @property
    def learned(self) -> int:
        """The number of tokens that updates compute: all completions with their prompts."""
        return self.completions * self.output + (self.prompts if self.shared else self.completions) * self.input


@dataclass(frozen=True)
class RolloutPlan:
    """The prediction of a run's rollouts.

    lengths: the size of a rollout.
    engine: the model as the engine has it.
    size: the size of the KV cache.
    weights: "shared" if the engine uses the trainer's weights, "copied" if it has copies on separate devices.
    memory: the bytes by kind on each device that samples, or on the machine if its devices share memory.
    prefill: a prefill step; None if times are not predicted.
    decode: a decode step with a sequence in every slot; None if times are not predicted.
    prefill_steps, decode_steps: the numbers of such steps in a rollout.
    updates: the number of updates per rollout.
    overlaps: whether sampling and updates run at the same time.
    """

    lengths: RolloutSize
    engine: PlannedModel
    size: CacheSize
    weights: str
    memory: Mapping[str, int]
    prefill: ServingStep | None
    decode: ServingStep | None
    prefill_steps: int
    decode_steps: int
    updates: int
    overlaps: bool

    @property
    def prefill_seconds(self) -> float:
        return 0.0 if self.prefill is None else self.prefill_steps * self.prefill.seconds

    @property
    def decode_seconds(self) -> float:
        return 0.0 if self.decode is None else self.decode_steps * self.decode.seconds

    @property
    def seconds(self) -> float:
        """The time of a rollout in seconds."""
        return self.prefill_seconds + self.decode_seconds

    @property
    def exposed_seconds(self) -> float:
        """The sampling time per update in seconds, for rollouts that do not overlap with updates."""
        return self.seconds / self.updates

    @property
    def fits(self) -> bool:
        limit = self.engine.target.memory_bytes
        return limit is None or sum(self.memory.values()) <= limit

    def document(self) -> dict[str, Any]:
        decode = self.decode
        return {
            "completions": self.lengths.completions,
            "prompts": self.lengths.prompts,
            "input_len": self.lengths.input,
            "output_len": self.lengths.output,
            "weights": self.weights,
            "devices": self.engine.mesh.size,
            "sequences": self.engine.settings.slots,
            "cache_tokens": self.size.pages * self.engine.settings.page,
            "fits": self.fits,
            "memory_bytes": {**self.memory, "total": sum(self.memory.values())},
            "memory_limit_bytes": self.engine.target.memory_bytes,
            "prefill_seconds": self.prefill_seconds,
            "decode_seconds": self.decode_seconds,
            "decode_steps": self.decode_steps,
            "decode_step_seconds": None if decode is None else decode.seconds,
            "seconds": self.seconds,
            "updates": self.updates,
            "bound_by": None if decode is None else decode.bound_by,
            "collectives": [] if decode is None else [transfer.document() for transfer in decode.traffic],
        }


def lengths_of_rollout(assembly: Any) -> RolloutSize:
    """Returns the size of a run's rollouts. A prompt is assumed to fill the part of a row that a completion of full length leaves."""
    run, rollout = assembly.run, assembly.run.rollout
    prompts = run.data.batch // rollout.completions
    greedy = prompts if getattr(run.objective, "needs_greedy", False) else 0
    prompt = max(1, run.data.sequence - rollout.tokens)
    return RolloutSize(run.data.batch, prompts, greedy, prompt, rollout.tokens, assembly.decided.shared_prompts)


def update_assembly(assembly: Any) -> Any:
    """Returns a copy of a run whose batch has the size of one update of a rollout, divided into micro-batches of the size that is
    computed at once."""
    run, rollout, lengths = assembly.run, assembly.run.rollout, lengths_of_rollout(assembly)
    rows = part_shape(run, assembly.mesh).rows
    parts = max(1, math.ceil(lengths.learned / rollout.minibatches / run.data.sequence / rows))
    data = run.data.model_copy(update={"batch": parts * rows})
    return replace(assembly, run=run.model_copy(update={"data": data, "accumulate": parts}))


def trainer_target(target: Target, run: Any) -> Target:
    """Returns the devices that train: all but those that only sample.

    Raises:
        BadInput: no device is left, or other processes sample.
    """
    if run.rollout is not None and run.rollout.processes is not None:
        problem = "rollout.processes: a plan counts the engine of the trainer's process alone"
        raise BadInput(problem, hint="leave it out; each process has a copy of the weights and a cache of its own")
    apart = 0 if run.rollout is None else run.rollout.devices or 0
    if not apart:
        return target
    if apart >= target.count:
        problem = f"rollout.devices = {apart}, and {target.name} has {plural(target.count, 'device')}: none is left to train"
        raise BadInput(problem, hint="fewer, or a larger device")
    return replace(target, count=target.count - apart, devices=target.devices[:-apart])


def rollout_plan(assembly: Any, state: int, prices: Prices | None, target: Target | None = None) -> RolloutPlan:
    """Predicts the rollouts of a run.

    Args:
        state: the bytes of the trainer's state and of frozen models on each device, or on all devices if they share the machine's
            memory.
        prices: the speeds of the device; None: times are not predicted.
        target: all devices, of the trainer and of rollouts; None: rollouts have no devices but the trainer's.
    """
    run, rollout, lengths = assembly.run, assembly.run.rollout, lengths_of_rollout(assembly)
    apart = rollout.devices is not None
    requests = [lengths.input + lengths.output] * (lengths.completions + lengths.greedy)
    room = EngineRoom().grown(requests, run.model.context, EngineSettings(slots=rollout.slots))
    settings = EngineSettings(slots=room.slots, context=room.context)
    engine = _engine(assembly, target or assembly.target, settings, apart)
    weights = int(sum(engine.bytes_of(address) for address in engine.shapes)) if apart else 0
    packed = int(sum(engine.packed.values()))
    size = _cache_size(engine, room, weights if apart else state)
    memory = {"state": 0 if apart and not engine.target.shares_memory else state, "weights": weights, "packed weights": packed}
    sampler = jax.eval_shape(lambda: empty_slots(settings.slots, run.model.vocab))
    memory |= {
        "cache": engine.cache_bytes(size),
        "sampler": sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(sampler)),
        "temporaries": step_temporaries(engine),
    }
    budget, rows = settings.budget, min(settings.slots, len(requests))
    prefill = decode = None
    if prices is not None:
        prefill = _step(engine, 0, min(budget, lengths.prompts * lengths.input), 0, prices)
        decode = _step(engine, rows, 0, lengths.input + lengths.output // 2, prices)
    return RolloutPlan(
        lengths, engine, size, "copied" if apart else "shared", memory, prefill, decode,
        # Completions of one prompt compute it once.
        math.ceil(lengths.prompts * lengths.input / budget),
        math.ceil(lengths.completions / rows) * lengths.output + (math.ceil(lengths.greedy / rows) * lengths.output),
        rollout.updates, bool(rollout.ahead),
    )  # fmt: skip


def _engine(assembly: Any, target: Target, settings: EngineSettings, apart: bool) -> PlannedModel:
    """Returns the trainer's model as the engine has it.

    Args:
        target: all devices.
        apart: whether the engine has separate devices.
    """
    run, mesh = assembly.run, assembly.mesh
    all_shapes, all_places = assembly.shapes.params | assembly.shapes.rest, assembly.places.params | assembly.places.rest
    shapes = {a: s for a, s in all_shapes.items() if not a.startswith(PREFIX) and hasattr(s, "shape")}
    places = {a: all_places[a] for a in shapes}
    split = mesh.size // mesh.shape["data"]
    module = assembly.model
    module.dtype = assembly.decided.dtype
    if apart:
        split = run.rollout.devices
        sampler_target = replace(target, count=split, devices=target.devices[-split:])
        mesh = sampler_target.mesh(MeshSettings(fsdp=1, tensor=split))
        places = {a: place for a, place in tensor_places(module, mesh).items() if a in shapes}
    if run.rollout.weights == "int8":
        rounded = {a: jax.ShapeDtypeStruct(s.shape, jnp.int8) for a, s in shapes.items() if "layers" in a and len(s.shape) > 2}
        shapes |= rounded
    with scope(mesh):
        needs = cache_needs(module.layers.holds(), settings, module.dtype, settings.context or run.model.context)
    model = PlannedModel(run.model, module, replace(target, count=split), mesh, shapes, places, needs, settings)
    if not target.shares_memory or mesh.size > 1 or module.layers.run.stacked:
        return model
    # The trainer needs its own weights, so packed ones are copies.
    return replace(model, packed=bytes_in_panels(module, shapes, lambda _: jnp.float32))


def _cache_size(engine: PlannedModel, room: EngineRoom, besides: int) -> CacheSize:
    """Returns the size of the engine's cache: what its completions need, or less if there is no room.

    Args:
        besides: the bytes on each device that are in use already.
    """
    target = engine.target
    free = memory_bytes()[1]
    space = host_room(None if free is None else max(0, free - besides)) if target.shares_memory else 0.0
    if not target.shares_memory:
        space = OF_DEVICE * max(0.0, float(target.memory_bytes or 0) - besides)
    most = engine.needs.fitting(room.slots, space, engine.mesh).pages
    return engine.needs.size(room.slots, min(room.pages, most))


def _step(engine: PlannedModel, decodes: int, prompt: int, length: int, prices: Prices) -> ServingStep:
    """Predicts a step of the engine with the trainer's shardings. Each device has a part of the features, so matrix products are summed
    over devices (as XLA chooses), and every device computes the attention of all heads that are not split."""
    step, mesh, config = serving_step(engine, decodes, prompt, length, prices), engine.mesh, engine.config
    whole = engine.target.count // mesh.shape["tensor"]
    if whole == 1:
        return step
    by_kind = {kind: seconds * (whole if kind == "attention" else 1) for kind, seconds in step.by_kind.items()}
    tokens, rows = decodes + prompt, decodes + bool(prompt)
    count, size = SUMS * config.layers + 2, 4 * (tokens * config.layers * _summed_numbers(config) + rows * config.vocab)
    seconds = 2 * (whole - 1) / whole * size / prices.ring_bytes_per_s + count * 2 * (whole - 1) * HOP_S
    return replace(step, by_kind=by_kind, traffic=[Traffic("all-reduce", "fsdp", size, count, seconds, seconds)])


def _summed_numbers(config: Any) -> int:
    """Returns how many numbers a layer computes per token as sums over features: queries, keys, values, and the hidden layer of the
    feed-forward network."""
    experts = config.moe if getattr(config, "moe", None) is not None else None
    inside = config.ffn if experts is None else experts.active * experts.ffn
    size = getattr(config, "head_size", None) or config.width // config.heads
    return (config.heads + 2 * getattr(config, "kv_heads", config.heads)) * size + 2 * inside


def scoring_seconds(assembly: Any, products: float) -> float:
    """Predicts the seconds that an update spends on scoring its completions before the first update: on their log-probabilities under
    the weights that sampled them, if a rollout has several updates, and on a critic's values. Each is a forward pass, which takes a
    third of an update's matrix products.

    Args:
        products: the seconds of the matrix products of an update.
    """
    passes = (assembly.run.rollout.updates > 1) + bool(getattr(assembly.run.objective, "critic", None))
    return passes * products / 3 / assembly.run.rollout.epochs

