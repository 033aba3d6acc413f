"""Laws of optimizers, each over everything registered: equal to a reference over 20 steps, restored bit for bit, decaying what should
decay, descending, and sharded as their weights."""

import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from optimizer_cases import AFTER, STEPS, gradient, start
from optimizer_cases import SHAPES as SMALL

from argosy.models.parts.weight import Meaning
from argosy.parallel.mesh import MeshSettings
from argosy.parallel.place import like_weights
from argosy.train.optimizers import OPTIMIZERS
from argosy.train.optimizers.schedule_free import average_of
from argosy.train.schedule import Constant
from argosy.train.state import flatten_state, unflatten_state

GOLDEN = Path(__file__).parents[1] / "goldens" / "optimizers.npz"
EXACT = 1e-6
MEANINGS = {"w": (Meaning("DM", "D"), 2), "b": (Meaning("M"), 1)}

# Weights in layers and experts, whose shapes mislead.
STACKED = {
    "embed.w": (Meaning("VD", "V"), 2),
    "layers.block.attn.q.w": (Meaning("DNH", "D"), 4),
    "layers.block.moe.up.w": (Meaning("EDM", "D", "E"), 4),
    "layers.block.norm.scale": (Meaning("D"), 2),
}
SHAPES = {
    "embed.w": (16, 8),
    "layers.block.attn.q.w": (2, 8, 2, 4),
    # Square ones: the null space of a wide one's preconditioner has any basis, so rounding decides.
    "layers.block.moe.up.w": (2, 4, 8, 8),
    "layers.block.norm.scale": (2, 8),
}


def golden(case, names=tuple(SMALL)):
    def weights():
        with np.load(GOLDEN) as arrays:
            return {name: arrays[f"{case}/{name}"] for name in names}

    return weights


def weights_after(rule):
    """The weights by a NumPy transcription: `rule(t, name, weight, gradient, memory)` -> the new weight; t counts from 1."""

    def weights():
        now, memory = start(), {name: {} for name in SMALL}
        out = {name: [] for name in SMALL}
        for step in range(STEPS):
            grads = gradient(step, now)
            now = {name: rule(step + 1, name, w, grads[name], memory[name]) for name, w in now.items()}
            for name, w in now.items():
                out[name] += [w] if step + 1 in AFTER else []
        return {name: np.stack(each) for name, each in out.items()}

    return weights


def by_optax(transform):
    """The weights by a transformation of Optax's own, with the rate in it."""

    def weights():
        now = {name: jnp.asarray(w) for name, w in start().items()}
        state, out = transform.init(now), {name: [] for name in now}
        for step in range(STEPS):
            grads = {n: jnp.asarray(g) for n, g in gradient(step, {n: np.asarray(w) for n, w in now.items()}).items()}
            with jax.numpy_dtype_promotion("standard"):
                updates, state = transform.update(grads, state, now)
            now = optax.apply_updates(now, updates)
            for name, w in now.items():
                out[name] += [np.asarray(w)] if step + 1 in AFTER else []
        # Its Adam for the rest has Nesterov's momentum too.
        return {"w": np.stack(out["w"])}

    return weights


def dozat(t, name, w, g, memory):
    """NAdam, Dozat 2016, with a constant momentum; decoupled decay of matrices."""
    m = memory["m"] = 0.9 * memory.get("m", 0) + 0.1 * g
    v = memory["v"] = 0.99 * memory.get("v", 0) + 0.01 * g**2
    mean = 0.9 * m / (1 - 0.9 ** (t + 1)) + 0.1 * g / (1 - 0.9**t)
    return w - 0.01 * (mean / (np.sqrt(v / (1 - 0.99**t)) + 1e-8) + (0.1 * w if name == "w" else 0))


def root(a, power):
    values, vectors = np.linalg.eigh(a)
    return (vectors * values**power) @ vectors.T


def gupta(t, name, w, g, memory):
    """Shampoo, Gupta et al. 2018, algorithm 1: sums from 1e-8 of the largest eigenvalue, no momentum; Adam for vectors."""
    if name == "b":
        m, v = memory["m"], memory["v"] = g, 0.999 * memory.get("v", 0) + 0.001 * g**2
        return w - 0.1 * m / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
    left_factor, right = memory["l"], memory["r"] = memory.get("l", 0) + g @ g.T, memory.get("r", 0) + g.T @ g
    ridge = [a + 1e-8 * np.linalg.eigvalsh(a)[-1] * np.eye(6) for a in (left_factor, right)]
    return w - 0.1 * root(ridge[0], -0.25) @ g @ root(ridge[1], -0.25)


def shi(t, name, w, g, memory):
    """Shi et al. 2023: averages with bias correction, roots every third step, the norm of Adam's update."""
    m = memory["m"] = 0.9 * memory.get("m", 0) + 0.1 * g
    v = memory["v"] = 0.95 * memory.get("v", 0) + 0.05 * g**2
    adam = m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.95**t)) + 1e-8)
    if name == "b":
        return w - 0.01 * adam
    for side, a in (("l", g @ g.T), ("r", g.T @ g)):
        memory[side] = 0.95 * memory.get(side, 0) + 0.05 * a
        if (t - 1) % 3 == 0:
            hat = memory[side] / (1 - 0.95**t)
            memory[f"{side}_root"] = root(hat + 1e-8 * np.linalg.eigvalsh(hat)[-1] * np.eye(6), -0.25)
    move = memory["l_root"] @ m @ memory["r_root"]
    return w - 0.01 * move * np.linalg.norm(adam) / np.linalg.norm(move)


def dettmers(t, name, w, g, memory):
    """Adam with states in 8 bits, arXiv:2110.02861: one block a row here. The levels are those of bitsandbytes."""
    with np.load(GOLDEN) as arrays:
        tables = {"m": arrays["levels/signed"], "v": arrays["levels/unsigned"]}

    def store_state(state, x):
        scale = np.abs(x).max(-1, keepdims=True)
        nearest = np.abs((x / scale)[..., None] - np.sort(tables[state])).argmin(-1)
        memory[state] = np.sort(tables[state])[nearest] * scale

    m, v = 0.9 * memory.get("m", 0) + 0.1 * g, 0.99 * memory.get("v", 0) + 0.01 * g**2
    store_state("m", m)
    store_state("v", v)
    return w - 0.01 * m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.99**t)) + 1e-8)


# {case: (optimizer, its settings, the reference's weights)}. The decay of vectors is that of the references.
CASES = {
    "adamw": ("adamw", {"learning_rate": 0.01, "b2": 0.99, "eps": 1e-7, "weight_decay": 0.1, "decay": "all"}, golden("adamw")),
    "nadamw": ("nadamw", {"learning_rate": 0.01, "b2": 0.99, "weight_decay": 0.1}, weights_after(dozat)),
    "lion": ("lion", {"learning_rate": 0.01, "weight_decay": 0.1, "decay": "all"}, golden("lion")),
    "sgd": ("sgd", {"learning_rate": 0.01, "momentum": 0.8, "weight_decay": 0}, golden("sgd")),
    "sgd_nesterov": ("sgd", {"learning_rate": 0.01, "momentum": 0.8, "nesterov": True, "weight_decay": 0}, golden("sgd_nesterov")),
    "rmsprop": ("rmsprop", {"learning_rate": 0.01, "b2": 0.9, "eps": 1e-6, "momentum": 0.5, "weight_decay": 0}, golden("rmsprop")),
    "rmsprop_centered": (
        "rmsprop",
        {"learning_rate": 0.01, "b2": 0.9, "eps": 1e-6, "centered": True, "weight_decay": 0},
        golden("rmsprop_centered"),
    ),
    "adan": ("adan", {"learning_rate": 0.01, "weight_decay": 0}, golden("adan")),
    "adafactor": ("adafactor", {"learning_rate": 0.01, "weight_decay": 0, "factored": 1}, golden("adafactor")),
    "muon": (
        "muon",
        {"learning_rate": 0.02, "weight_decay": 0.1, "momentum": 0.9},
        by_optax(optax.contrib.muon(0.02, beta=0.9, weight_decay=0.1)),
    ),
    "soap": ("soap", {"learning_rate": 0.01, "b1": 0.95, "b2": 0.9, "every": 3, "weight_decay": 0}, golden("soap", ["w"])),
    "shampoo": ("shampoo", {"learning_rate": 0.01, "b2": 0.95, "eps": 1e-8, "every": 3, "weight_decay": 0}, weights_after(shi)),
    "shampoo_sums": (
        "shampoo",
        {"learning_rate": 0.1, "b1": 0, "b2": 1, "eps": 1e-8, "every": 1, "graft": "none", "weight_decay": 0},
        weights_after(gupta),
    ),
    "schedule_free": (
        "schedule_free",
        {"learning_rate": 0.01, "b2": 0.99, "weight_decay": 0.1, "decay": "all"},
        golden("schedule_free_average"),
    ),
    "prodigy": ("prodigy", {"b2": 0.99, "weight_decay": 0.1, "decay": "all", "distance": 1e-2}, golden("prodigy")),
    "prodigy_corrected": (
        "prodigy",
        {"b2": 0.99, "weight_decay": 0, "distance": 1e-3, "bias_correction": True, "safeguard_warmup": True},
        golden("prodigy_corrected"),
    ),
    "lookahead": (
        "adamw",
        {"learning_rate": 0.01, "b2": 0.99, "weight_decay": 0, "lookahead": {"every": 3, "rate": 0.4}},
        golden("lookahead"),
    ),
    "int8": ("adamw", {"learning_rate": 0.01, "b2": 0.99, "weight_decay": 0, "state": "int8"}, weights_after(dettmers)),
}


def distances(case):
    """The largest difference from the reference after each of the steps of AFTER, over the largest weight. In float64: what is
    compared is the algorithm, not rounding."""
    name, settings, reference = CASES[case]
    with jax.enable_x64(True):
        expected = reference()
        optimizer = OPTIMIZERS[name](clip=None, **settings)
        transform = optimizer.build(Constant(warmup=4 if name == "schedule_free" else 0).build(STEPS), MEANINGS)
        params = {a: jnp.asarray(w) for a, w in start().items()}
        state, out = transform.init(params), []
        for step in range(STEPS):
            grads = {a: jnp.asarray(g) for a, g in gradient(step, {a: np.asarray(w) for a, w in params.items()}).items()}
            updates, state = transform.update(grads, state, params)
            params = {a: params[a] + updates[a] for a in params}
            if step + 1 in AFTER:
                seen = average_of(state, params) or params
                i = AFTER.index(step + 1)
                out.append(max(np.abs(np.asarray(seen[a]) - expected[a][i]).max() / np.abs(expected[a][i]).max() for a in expected))
    return out


@pytest.mark.parametrize("case", CASES)
def test_twenty_steps_equal_those_of_the_reference(case, monkeypatch):
    # So that the 36 numbers of the test are stored in 8 bits.
    monkeypatch.setattr("argosy.train.optimizers.state_types.FEWEST", 1)
    assert max(distances(case)) < EXACT, distances(case)


def test_every_optimizer_has_a_reference():
    assert {name for name, _, _ in CASES.values()} == set(OPTIMIZERS)


# ---------------------------------------------------------------- laws without a reference

# By default the laws run over one of each kind.
QUICK = ("soap", "schedule_free")


def some(names):
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in names]


# The peak learning rate for the laws below; Prodigy's is a factor, and it begins at a distance that suits them.
RATES = {"prodigy": {"learning_rate": 1.0, "distance": 0.01}, "adafactor": {"learning_rate": 0.05, "factored": 4}}


def optimizer_of(name, **settings):
    fields = {"learning_rate": 0.02} | RATES.get(name, {}) | settings
    if name in ("soap", "shampoo"):
        fields |= {"every": 3}
    return OPTIMIZERS[name](**fields)


def weights(seed=1, scale=1.0):
    rng = np.random.default_rng(seed)
    return {a: jnp.asarray(scale * rng.standard_normal(s), jnp.float32) for a, s in SHAPES.items()}


def update_of(transform):
    @jax.jit
    def update(params, state, grads):
        updates, state = transform.update(grads, state, params)
        return {a: params[a] + updates[a] for a in params}, state

    return update


@pytest.mark.parametrize("name", some(OPTIMIZERS))
def test_the_state_is_restored_bit_for_bit(name):
    """By the names that checkpoints give its arrays."""
    transform = optimizer_of(name, state="int8" if name == "lion" else "float32").build(Constant(warmup=0).build(10), STACKED)
    update, params = update_of(transform), weights()
    state = transform.init(params)
    for step in range(4):
        params, state = update(params, state, weights(10 + step))
    stored = {key: np.asarray(leaf) for key, leaf in flatten_state(state).items()}
    assert len(stored) == len(jax.tree.leaves(state))
    again = unflatten_state(jax.eval_shape(transform.init, params), {key: jnp.asarray(a) for key, a in stored.items()})
    other = dict(params)
    for step in range(4, 6):
        params, state = update(params, state, weights(10 + step))
        other, again = update(other, again, weights(10 + step))
    assert all((np.asarray(params[a]) == np.asarray(other[a])).all() for a in params)
    assert all((np.asarray(a) == np.asarray(b)).all() for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(again), strict=True))


@pytest.mark.parametrize("name", some(OPTIMIZERS))
def test_without_gradients_matrices_decay_and_norms_stay(name):
    transform = optimizer_of(name, weight_decay=0.5, clip=None).build(Constant(warmup=0).build(10), STACKED)
    update, before = update_of(transform), weights()
    params, state = before, transform.init(before)
    for _ in range(2):
        params, state = update(params, state, {a: jnp.zeros_like(w) for a, w in before.items()})
    for a, w in before.items():
        change = np.asarray(params[a] - w)
        if a.endswith("scale"):
            assert (change == 0).all()
        else:
            # Against the weight, and by the same share of it everywhere.
            share = -change / np.asarray(w)
            assert share.min() > 0
            assert share.max() < 1.01 * share.min() + 1e-5


@pytest.mark.parametrize("name", some(OPTIMIZERS))
def test_every_optimizer_descends(name):
    """On a quadratic, from anywhere, the loss falls, and every weight moves."""
    target, params = weights(2), weights(3, 0.1)
    transform = optimizer_of(name, weight_decay=0.0, clip=None).build(Constant(warmup=0).build(50), STACKED)

    def loss(params):
        return sum(jnp.sum((params[a] - target[a]) ** 2) for a in params)

    @jax.jit
    def train(params):
        def step(carry, _):
            params, state = carry
            updates, state = transform.update(jax.grad(loss)(params), state, params)
            return ({a: params[a] + updates[a] for a in params}, state), None

        return jax.lax.scan(step, (params, transform.init(params)), None, 50)[0][0]

    after = train(params)
    assert float(loss(after)) < 0.9 * float(loss(params))
    # Lion's steps may come back to where they began.
    assert all((np.asarray(after[a]) != np.asarray(params[a])).mean() > 0.9 for a in params)


PLACES = {
    "embed.w": PartitionSpec(None, "fsdp"),
    "layers.block.attn.q.w": PartitionSpec(None, "fsdp", "tensor"),
    "layers.block.moe.up.w": PartitionSpec(None, "expert", "fsdp"),
    "layers.block.norm.scale": PartitionSpec(None, "fsdp"),
}


@pytest.mark.parametrize("name", some([*OPTIMIZERS, "int8"]))
def test_the_state_is_sharded_as_its_weights(name, monkeypatch):
    """Each array that has an axis of its weight is split along it, and the update is that of one device."""
    monkeypatch.setattr("argosy.train.optimizers.state_types.FEWEST", 1)
    settings = {"state": "int8"} if name == "int8" else {}
    transform = optimizer_of("adamw" if name == "int8" else name, **settings).build(Constant(warmup=0).build(10), STACKED)
    mesh = MeshSettings(fsdp=2, tensor=2, expert=2).build(jax.devices()[:8])
    params = weights()
    shapes = jax.eval_shape(transform.init, params)
    whole = {a: NamedSharding(mesh, spec) for a, spec in PLACES.items()}
    places = like_weights(shapes, whole, params, mesh)
    for key, place in flatten_state(places).items():
        address = next((a for a in SHAPES if key.endswith(f".{a}")), None)
        if address is None:
            assert place.is_fully_replicated, key
            continue
        leaf, full = flatten_state(shapes)[key].shape, SHAPES[address]
        split = [i for i, axis in enumerate(PLACES[address]) if axis is not None and leaf[i] == full[i]]
        assert [i for i, axis in enumerate(place.spec) if axis is not None] == split, key
    update = jax.jit(lambda p, s, g: transform.update(g, s, p), out_shardings=(whole, places))
    placed, state = jax.device_put(params, whole), jax.jit(transform.init, out_shardings=places)(jax.device_put(params, whole))
    other = transform.init(params)
    for step in range(3):
        updates, state = update(placed, state, jax.device_put(weights(20 + step), whole))
        alone, other = transform.update(weights(20 + step), other, params)
        placed = {a: placed[a] + updates[a] for a in placed}
        params = {a: params[a] + alone[a] for a in params}
    for a, w in params.items():
        # Rounding moves an 8-bit code by one level now and then.
        bound = 2e-2 if name == "int8" else 2e-4
        assert np.abs(np.asarray(placed[a]) - np.asarray(w)).max() < bound * np.abs(np.asarray(w)).max(), a


def test_the_goldens_are_small():
    with zipfile.ZipFile(GOLDEN) as file:
        assert sum(entry.compress_size for entry in file.infolist()) < 40_000
