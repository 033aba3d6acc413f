"""Optimizers against their papers' formulas in NumPy, on weights whose shapes mislead."""

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import relative

from argosy.core.errors import BadInput
from argosy.models.parts.weight import Meaning
from argosy.train.optimizers import OPTIMIZERS
from argosy.train.optimizers.adam import AdamW
from argosy.train.optimizers.lion import Lion
from argosy.train.optimizers.muon import Muon
from argosy.train.optimizers.sgd import SGD
from argosy.train.schedule import Constant

RATE = 0.1
MEANINGS = {
    "embed.w": (Meaning("VD", "V"), 2),
    "layers.block.attn.q.w": (Meaning("DNH", "D"), 4),      # [L D N H]
    "layers.block.attn.o.w": (Meaning("NHD", "NH"), 4),
    "layers.block.moe.up.w": (Meaning("EDM", "D", "E"), 4),
    "layers.block.norm.scale": (Meaning("D"), 2),           # [L D]: looks like a matrix, is none
    "layers.block.attn.q.b": (Meaning("NH"), 3),
}
SHAPES = {
    "embed.w": (11, 6),
    "layers.block.attn.q.w": (2, 6, 3, 4),
    "layers.block.attn.o.w": (2, 3, 4, 6),
    "layers.block.moe.up.w": (2, 5, 6, 7),
    "layers.block.norm.scale": (2, 6),
    "layers.block.attn.q.b": (2, 3, 4),
}


def two_steps(optimizer):
    """Weights, gradients of two steps, and weights after them."""
    rng = np.random.default_rng(0)
    start = {a: rng.standard_normal(s).astype(np.float32) for a, s in SHAPES.items()}
    grads = [{a: rng.standard_normal(s).astype(np.float32) for a, s in SHAPES.items()} for _ in range(2)]
    transform = optimizer.build(Constant(warmup=0).build(10), MEANINGS)
    params = {a: jnp.asarray(w) for a, w in start.items()}
    state = transform.init(params)
    for g in grads:
        updates, state = transform.update({a: jnp.asarray(x) for a, x in g.items()}, state, params)
        params = {a: params[a] + updates[a] for a in params}
    return start, grads, params


def decay(address, amount):
    return amount if MEANINGS[address][0].inner else 0.0


def test_adamw():
    start, grads, after = two_steps(AdamW(learning_rate=RATE, weight_decay=0.3, b1=0.8, b2=0.9, eps=1e-3, clip=None))
    for a, w in start.items():
        w, m, v = w.astype(np.float64), 0, 0
        for t, g in enumerate((grads[0][a], grads[1][a]), 1):
            m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g**2
            w = w - RATE * (m / (1 - 0.8**t) / (np.sqrt(v / (1 - 0.9**t)) + 1e-3) + decay(a, 0.3) * w)
        assert relative(after[a], w) < 1e-5, a


def test_lion():
    start, grads, after = two_steps(Lion(learning_rate=RATE, weight_decay=0.3, b1=0.8, b2=0.9, clip=None))
    for a, w in start.items():
        w, m = w.astype(np.float64), 0
        for g in (grads[0][a], grads[1][a]):
            w = w - RATE * (np.sign(0.8 * m + 0.2 * g) + decay(a, 0.3) * w)
            m = 0.9 * m + 0.1 * g
        assert relative(after[a], w) < 1e-5, a


def test_sgd_with_momentum():
    start, grads, after = two_steps(SGD(learning_rate=RATE, weight_decay=0.3, momentum=0.5, clip=None))
    for a, w in start.items():
        w, m = w.astype(np.float64), 0
        for g in (grads[0][a], grads[1][a]):
            m = 0.5 * m + g
            w = w - RATE * (m + decay(a, 0.3) * w)
        assert relative(after[a], w) < 1e-5, a


def test_clipping_scales_the_whole_gradient():
    start, grads, after = two_steps(SGD(learning_rate=RATE, weight_decay=0.0, clip=1.5))
    norms = [np.sqrt(sum((g**2).sum() for g in step.values())) for step in grads]
    assert min(norms) > 1.5
    for a, w in start.items():
        expected = w - RATE * sum(g[a] * 1.5 / n for g, n in zip(grads, norms))
        assert relative(after[a], expected) < 1e-5, a


def newton_schulz(m, steps=5):
    """Jordan et al. 2024: five quintic iterations towards the nearest orthogonal matrix."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = m / (np.linalg.norm(m) + 1e-8)
    wide = x.shape[0] <= x.shape[1]
    x = x if wide else x.T
    for _ in range(steps):
        s = x @ x.T
        x = a * x + (b * s + c * s @ s) @ x
    return x if wide else x.T


def matrices(address, array):
    """The true matrices of a stored array: inputs by outputs, a layer and an expert at a time; how to put them back."""
    shape = array.shape
    if address.endswith("q.w"):
        return [a.reshape(6, 12) for a in array], lambda ms: np.stack([m.reshape(6, 3, 4) for m in ms])
    if address.endswith("o.w"):
        return [a.reshape(12, 6) for a in array], lambda ms: np.stack([m.reshape(3, 4, 6) for m in ms])
    return [a for layer in array for a in layer], lambda ms: np.stack(ms).reshape(shape)


def test_muon_sees_the_true_matrix_of_each_layer_and_expert():
    start, grads, after = two_steps(Muon(learning_rate=RATE, adam_learning_rate=0.01, weight_decay=0.3, momentum=0.9, clip=None))
    for a in ("layers.block.attn.q.w", "layers.block.attn.o.w", "layers.block.moe.up.w"):
        pieces, join = matrices(a, start[a].astype(np.float64))
        gs = [matrices(a, g[a].astype(np.float64))[0] for g in grads]
        new = []
        for i, w in enumerate(pieces):
            m = np.zeros_like(w)
            for t, g in enumerate((gs[0][i], gs[1][i]), 1):
                m = 0.9 * m + 0.1 * g
                nesterov = 0.9 * m / (1 - 0.9 ** (t + 1)) + 0.1 * g / (1 - 0.9**t)
                w = w - RATE * (max(1, w.shape[1] / w.shape[0]) ** 0.5 * newton_schulz(nesterov) + 0.3 * w)
            new.append(w)
        assert relative(after[a], join(new)) < 1e-4, a


def test_muon_leaves_words_norms_and_biases_to_adam():
    start, grads, after = two_steps(Muon(learning_rate=RATE, adam_learning_rate=0.01, weight_decay=0.3, clip=None))
    for a in ("embed.w", "layers.block.norm.scale", "layers.block.attn.q.b"):
        w, m, v = start[a].astype(np.float64), 0, 0
        for t, g in enumerate((grads[0][a], grads[1][a]), 1):
            m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g**2
            w = w - 0.01 * (m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.95**t)) + 1e-8) + decay(a, 0.3) * w)
        assert relative(after[a], w) < 1e-5, a


def test_muon_without_a_matrix_is_refused():
    with pytest.raises(BadInput, match="matrix"):
        Muon().build(Constant().build(10), {"norm.scale": (Meaning("D"), 1)})


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_nothing_to_train_is_refused(name):
    with pytest.raises(BadInput, match="frozen"):
        OPTIMIZERS[name]().build(Constant().build(10), {})


@pytest.mark.parametrize("value", [float("inf"), float("nan"), -1.0])
def test_a_rate_is_a_positive_number(value):
    with pytest.raises(ValueError, match="learning_rate"):
        AdamW(learning_rate=value)
