"""Replicas that train alone: against runs of one device and outer steps by hand, and what the compiled steps send."""

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import default, relative
from jax.sharding import NamedSharding
from laws.families import noisy_model

from argosy.models.parts.stack import Unroll
from argosy.models.parts.weight import abstract, logical
from argosy.observe.hlo.collectives import collectives
from argosy.observe.hlo.module import HloModule
from argosy.parallel.mesh import MeshSettings
from argosy.parallel.place import batch_sharding, like_weights
from argosy.parallel.rules import shardings
from argosy.parallel.scope import scope
from argosy.train import diloco
from argosy.train.diloco_settings import DilocoSettings
from argosy.train.objectives.next_token import NextToken
from argosy.train.optimizers.adam import AdamW
from argosy.train.optimizers.muon import Muon
from argosy.train.optimizers.sgd import SGD
from argosy.train.schedule import Constant
from argosy.train.state import TrainState, meanings_of, split_trained, training_graph
from argosy.train.step import make_step
from tools.devices import config_of

ROWS, LENGTH = 8, 24
ADAMW = AdamW(learning_rate=1e-2, clip=0.5)
PLAIN = SGD(learning_rate=0.1, weight_decay=0.0, clip=None)


def batches(config: Any, steps: int) -> list[dict[str, np.ndarray]]:
    """Rows of different lengths, so that replicas have different numbers of targets."""
    rng, out = np.random.default_rng(1), []
    for _ in range(steps):
        tokens = rng.integers(3, config.vocab, (ROWS, LENGTH + 1))
        lengths = rng.integers(5, LENGTH, ROWS)
        lengths[: ROWS // 2] //= 2
        live = np.arange(LENGTH) < lengths[:, None]
        out.append(
            {
                "tokens": tokens[:, :-1].astype(np.int32),
                "targets": tokens[:, 1:].astype(np.int32),
                "segments": live.astype(np.int32),
                # Eighths, so that their sums have no rounding.
                "mask": (live * rng.integers(1, 9, (ROWS, LENGTH)) / 8).astype(np.float32),
            }
        )
    return out


class Made:
    """A step of a model, its first state, and the numbers of its weights."""

    def __init__(self, kind: str, optimizer: Any, accumulate: int = 1, precision: Any = "float32"):
        small = {"width": 32, "vocab": 64, "layers": 1, "ffn": 48} if kind == "dense" else {}
        self.model = noisy_model(config_of(kind, **small), Unroll())
        _, self.params, self.rest = split_trained(self.model)
        if precision == "float64":
            self.params, self.rest = ({a: w.astype(precision) for a, w in of.items()} for of in (self.params, self.rest))
        self.rate = Constant(warmup=4).build(100)
        self.optimizer = optimizer.build(self.rate, meanings_of(self.model))
        options: Any = {"accumulate": accumulate, "precision": precision}
        self.step = make_step(training_graph(self.model), NextToken(head="logits"), self.optimizer, self.rate, **options)

    def state(self, optimizer: Any) -> TrainState:
        return TrainState.start(self.params, self.rest, optimizer.init(self.params), 0)

    def over(self, sizes: dict[str, int], diloco_settings: DilocoSettings) -> "Over":
        return Over(self, MeshSettings(**({"fsdp": 1} | sizes)), diloco_settings)


class Over:
    """The steps of replicas on a mesh."""

    def __init__(self, training: Made, settings: MeshSettings, diloco_settings: DilocoSettings):
        sizes = [getattr(settings, axis) for axis in ("data", "fsdp", "tensor", "context")]
        self.made, self.settings = training, settings
        self.mesh = settings.build(jax.devices()[: math.prod(sizes)])
        shapes = abstract(training.model)
        weights = shardings(logical(training.model), {a: s.shape for a, s in shapes.items()}, settings.table(), self.mesh)
        self.state = training.state(diloco.replicated_optimizer(training.optimizer, self.mesh.shape["data"]))
        self.places = like_weights(self.state, weights, shapes, self.mesh)
        places_of_state = diloco.places(self.state.optimizer, weights, shapes, self.mesh)
        self.places = TrainState(
            self.places.step, self.places.params, self.places.rest, places_of_state, self.places.key, self.places.guard
        )
        self.inner = diloco.alone(training.step)
        self.whole = diloco.together(self.inner, diloco_settings)

    def compiled(self, step: Any, batch: Any) -> Any:
        batch = jax.device_put(batch, batch_sharding(self.mesh))
        with scope(self.mesh, self.settings.table()):
            jitted = jax.jit(step, out_shardings=(self.places, None))
            return jitted.lower(jax.device_put(self.state, self.places), batch).compile()

    def run(self, some: list[Any]) -> tuple[list[TrainState], list[dict[str, float]]]:
        program, state = self.compiled(self.whole, some[0]), jax.device_put(self.state, self.places)
        states, values = [], []
        for batch in some:
            state, metrics = program(state, jax.device_put(batch, batch_sharding(self.mesh)))
            states.append(jax.device_get(state))
            values.append({name: float(m) for name, m in metrics.items()})
        return states, values


def oracle(
    training: Made, some: list[Any], replicas: int, diloco_settings: DilocoSettings
) -> tuple[dict, list[dict], list[list[dict]]]:
    """Runs of one device, each on its share of the rows, and outer steps as torch.optim.SGD(nesterov=True) makes them, in NumPy."""
    step, share = jax.jit(training.step), ROWS // replicas
    outer = {a: np.asarray(w) for a, w in training.params.items()}
    buffer: dict[str, Any] = {}
    states = [training.state(training.optimizer) for _ in range(replicas)]
    means, seen = [], []
    for number, batch in enumerate(some, 1):
        both = []
        for r in range(replicas):
            states[r], metrics = step(states[r], {name: a[r * share : (r + 1) * share] for name, a in batch.items()})
            both.append({name: float(m) for name, m in metrics.items()})
        means.append(both)
        seen.append([{a: np.asarray(w) for a, w in state.params.items()} for state in states])
        if number % diloco_settings.every:
            continue
        for a in outer:
            grad = sum(outer[a] - replica[a] for replica in seen[-1]) / replicas
            buffer[a] = grad.copy() if a not in buffer else diloco_settings.momentum * buffer[a] + grad
            outer[a] = outer[a] - diloco_settings.lr * (grad + diloco_settings.momentum * buffer[a])
        new = {a: jnp.asarray(w) for a, w in outer.items()}
        states = [TrainState(s.step, new, s.rest, s.optimizer, s.key) for s in states]
    return outer, means, seen


@pytest.fixture
def float64() -> Iterator[None]:
    """AdamW divides by the size of gradients, which magnifies the rounding of the smallest ones."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        yield


def near(weights: Any, expected: Any, most: float) -> None:
    for a in expected:
        assert relative(weights[a], expected[a]) < most, a


@pytest.mark.slow
@pytest.mark.parametrize("sizes", default({"data": 2}, of=[{"data": 2}, {"data": 4}, {"data": 2, "fsdp": 2}, {"data": 2, "tensor": 2}]))
def test_replicas_are_runs_of_their_own_between_outer_steps(float64: None, sizes: dict[str, int]):
    """AdamW with clipping, three inner steps, two outer ones, and one step more; each loss is over the replica's own targets."""
    training, diloco_settings = Made("dense", ADAMW, precision="float64"), DilocoSettings(every=3)
    some = batches(training.model.config, 7)
    states, metrics = training.over(sizes, diloco_settings).run(some)
    outer, by_hand, seen = oracle(training, some, sizes["data"], diloco_settings)
    near(states[-1].params, outer, 1e-9)
    for r in range(sizes["data"]):
        near({a: w[r] for a, w in states[-1].optimizer["replicas"].items()}, seen[-1][r], 1e-9)
    for values, both in zip(metrics, by_hand, strict=True):
        for name in ("loss", "grad_norm", "lr"):
            assert values[name] == pytest.approx(np.mean([entry[name] for entry in both]), rel=1e-7 if name == "lr" else 1e-10), name
        assert values["targets"] == pytest.approx(sum(entry["targets"] for entry in both), rel=1e-6)
    assert metrics[-1]["lr"] > metrics[0]["lr"], "the schedule goes on"
    targets = [entry["targets"] for entry in by_hand[0]]
    assert min(targets) < 0.7 * max(targets), "the same number of targets would prove less"
    # Outer weights stay between outer steps, and replicas come apart.
    first = {a: np.asarray(w) for a, w in training.params.items()}
    near(states[1].params, first, 1e-12)
    assert all(relative(w[0], w[1]) > 1e-4 for w in states[1].optimizer["replicas"].values())
    assert all((w == w[:1]).all() for w in states[2].optimizer["replicas"].values()), "they go on from the same"
    ways = [np.concatenate([(first[a] - replica[a]).ravel() for a in first]) for replica in seen[2]]
    mean = np.mean(ways, 0)
    assert metrics[2]["outer_grad_norm"] == pytest.approx(np.linalg.norm(mean), rel=1e-6)
    assert metrics[2]["replicas_apart"] == pytest.approx(np.sqrt(np.mean([np.sum((way - mean) ** 2) for way in ways])), rel=1e-6)
    assert metrics[1]["replicas_apart"] == 0 != metrics[2]["replicas_apart"] == metrics[3]["replicas_apart"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dense", "experts", "latent attention", "delta nets"])
@pytest.mark.parametrize("axis", ["fsdp", "tensor", "context"])
def test_another_axis_splits_the_work_within_a_replica(float64: None, kind: str, axis: str):
    """All kinds of layers, with accumulation."""
    training, diloco_settings = Made(kind, ADAMW, accumulate=2, precision="float64"), DilocoSettings(every=2, lr=0.5, momentum=0.8)
    some = batches(training.model.config, 5)
    states, metrics = training.over({"data": 2, axis: 2}, diloco_settings).run(some)
    outer, by_hand, _ = oracle(training, some, 2, diloco_settings)
    near(states[-1].params, outer, 1e-9)
    assert metrics[-1]["loss"] == pytest.approx(np.mean([entry["loss"] for entry in by_hand[-1]]), rel=1e-10)


@pytest.mark.slow
def test_an_outer_step_after_every_step_of_sgd_is_data_parallel_training():
    """With replicas of as many targets, learning rate 1 and no momentum, the mean of the weights is the step of the mean gradient."""
    training = Made("dense", PLAIN)
    some = [batch | {"mask": np.ones((ROWS, LENGTH), np.float32), "segments": np.ones((ROWS, LENGTH), np.int32)}
            for batch in batches(training.model.config, 3)]  # fmt: skip
    states, seen = training.over({"data": 2}, DilocoSettings(every=1, lr=1.0, momentum=0.0)).run(some)
    state, step = training.state(training.optimizer), jax.jit(training.step)
    for batch, values in zip(some, seen, strict=True):
        state, metrics = step(state, batch)
        assert values["loss"] == pytest.approx(float(metrics["loss"]), rel=1e-6)
    near(states[-1].params, jax.device_get(state.params), 1e-5)
    assert all((np.asarray(w) != np.asarray(training.params[a])).any() for a, w in states[-1].params.items())


def test_the_outer_step_is_optax_sgd_with_nesterov_momentum():
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.normal(size=(3, 4)), jnp.float32), "b": jnp.asarray(rng.normal(size=4), jnp.float32)}
    reference = optax.sgd(0.7, momentum=0.9, nesterov=True)
    weights, expected = params, params
    moving: Any = {"momentum": jax.tree.map(jnp.zeros_like, params)}
    state = reference.init(params)
    for _ in range(4):
        replicas = {a: weights[a] + jnp.asarray(rng.normal(size=(3, *w.shape)), jnp.float32) for a, w in params.items()}
        ways = {a: jnp.mean(expected[a] - replica, 0) for a, replica in replicas.items()}
        updates, state = reference.update(ways, state)
        expected = optax.apply_updates(expected, updates)
        weights, moving = diloco.outer_step(weights, moving | {"replicas": replicas}, DilocoSettings(every=1))
        near(weights, expected, 1e-6)


@pytest.mark.slow
def test_muon_has_a_state_of_each_replica():
    """Its state is a tree of other shapes and names."""
    training, diloco_settings = Made("dense", Muon()), DilocoSettings(every=2)
    some = batches(training.model.config, 4)
    states, _ = training.over({"data": 2, "fsdp": 2}, diloco_settings).run(some)
    near(states[-1].params, oracle(training, some, 2, diloco_settings)[0], 1e-4)


# ---------------------------------------------------------------- what is sent


def sent_bytes(program: Any, mesh: Any) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes of collectives by kind: those between replicas, and those within one."""
    replica = np.indices(mesh.devices.shape)[mesh.axis_names.index("data")].ravel()
    between, within = {}, {}
    for collective in collectives(HloModule.read(program.as_text())):
        kinds = between if (replica[collective.groups] != replica[collective.groups[:, :1]]).any() else within
        kinds[collective.kind] = kinds.get(collective.kind, 0) + collective.bytes * collective.times
    return between, within


@pytest.mark.slow
@pytest.mark.parametrize("sizes", default({"data": 2, "fsdp": 2}, of=[{"data": 2, "fsdp": 2}, {"data": 4}, {"data": 2, "tensor": 2}]))
def test_an_inner_step_sends_a_few_numbers_and_an_outer_step_the_weights_once(sizes: dict[str, int]):
    training = Made("dense", ADAMW)
    over, (batch,) = training.over(sizes, DilocoSettings(every=3)), batches(training.model.config, 1)
    of_inner, inside = sent_bytes(over.compiled(over.inner, batch), over.mesh)
    assert set(of_inner) == {"all-reduce"}, "of loss, cross_entropy, grad_norm, lr and targets"
    assert of_inner["all-reduce"] <= 6 * 4
    assert (sum(inside.values()) > 10_000) == (sizes != {"data": 4}), "or nothing would be told from anything"
    of_whole, _ = sent_bytes(over.compiled(over.whole, batch), over.mesh)
    assert set(of_whole) == {"all-reduce"}
    weight_bytes = sum(math.prod(over.places.params[a].shard_shape(w.shape)) * 4 for a, w in training.params.items())
    # And the norms of the metrics.
    assert 0 <= of_whole["all-reduce"] - weight_bytes - of_inner["all-reduce"] <= 4 * 4
    # Without replicas every step sends that.
    plain = jax.jit(training.step)
    with scope(over.mesh, over.settings.table()):
        everywhere = NamedSharding(over.mesh, jax.sharding.PartitionSpec())
        state = jax.device_put(training.state(training.optimizer), everywhere)
        program = plain.lower(state, jax.device_put(batch, batch_sharding(over.mesh))).compile()
    assert sum(sent_bytes(program, over.mesh)[0].values()) >= weight_bytes


def test_what_a_replica_has_is_split_as_weights_are_within_it():
    over = Made("dense", ADAMW).over({"data": 2, "fsdp": 2}, DilocoSettings(every=3))
    state_places = over.places.optimizer
    for address, place in over.places.params.items():
        assert state_places["momentum"][address].spec == place.spec, address
        assert state_places["replicas"][address].spec == jax.sharding.PartitionSpec("data", *place.spec), address
    (adam,) = [part for part in jax.tree.leaves(state_places["inner"], is_leaf=lambda p: hasattr(p, "mu")) if hasattr(part, "mu")]
    assert adam.mu == state_places["replicas"]
    assert adam.count.spec == jax.sharding.PartitionSpec("data")
    assert any("fsdp" in place.spec for place in over.places.params.values())
