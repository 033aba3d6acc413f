"""What experts and modules ahead add to training: biases that load moves, auxiliary losses, the loss of later tokens."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import relative
from laws.families import CASES, noisy_model
from train.test_next_token import batch_of

from argosy.models.parts.attention.attend import Packed
from argosy.models.parts.stack import Scan, Unroll
from argosy.models.parts.stack.addresses import to_layers
from argosy.models.parts.weight import Moved, merge, split, variables
from argosy.train.objectives.loss import Loss, WeightedMean
from argosy.train.objectives.next_token import NextToken
from argosy.train.objectives.routers import with_routers
from argosy.train.schedule import Constant
from argosy.train.state import TrainState, split_trained
from argosy.train.step import make_step

KEY = jax.random.key(0)
RATE = 1e-3


def case(layers=2, **moe):
    """One layer without experts, the others with them, and the module ahead: what compiles soon."""
    config = CASES["deepseek-3"]
    return config.model_copy(update={"layers": layers, "dense": 1, "moe": config.moe.model_copy(update=moe)})


def loss_of(model, batch, **options):
    graph, weights = split(model)
    return jax.jit(lambda w, b: NextToken(head="logits", **options)({"model": merge(graph, w)}, b, KEY))(weights, batch)


def update_once(model, batch, accumulate=1):
    """The state before and after one update with a learning rate of 0: only what is moved by load can move."""
    graph, params, rest = split_trained(model)
    transform = optax.sgd(0.0)
    state = TrainState.start(params, rest, transform.init(params), 0)
    step = make_step(graph, NextToken(head="logits"), transform, Constant(warmup=0).build(10), accumulate=accumulate)
    after, metrics = jax.jit(step)(state, batch)
    return state, after, metrics


def loads_of(model, batch):
    """The load of each layer by the per-layer name of its bias, asked of the model directly."""
    graph, weights = split(model)
    x, _, aux = jax.jit(lambda w, b: merge(graph, w).hidden(b["tokens"], Packed(b["segments"])))(weights, batch)
    layers = [i for i, layer in enumerate(model.layers.plan) if layer.kind == "experts"]
    out = {f"layers.{i}.mlp.bias": n for i, n in zip(layers, aux["experts"]["load"], strict=True)}
    s = np.asarray(batch["segments"])
    last = np.pad(s[:, 1:], ((0, 0), (0, 1))) != s
    attend = Packed(jnp.asarray(np.where(last, 0, s)))
    later = jnp.pad(batch["tokens"][:, 1:], ((0, 0), (0, 1)))
    ahead = jax.jit(lambda w, *a: merge(graph, w).ahead(1, *a)[2]["load"])
    return out | {"mtp.0.block.mlp.bias": ahead(weights, x, later, attend)}


@pytest.mark.slow
@pytest.mark.parametrize(("run", "accumulate"), [(Unroll(), 1), (Scan(), 2)])
def test_biases_move_against_the_load_in_every_layout(run, accumulate):
    """Up where fewer tokens than even went, down where more, by the rate, in each layer and in the module ahead."""
    batch = jax.tree.map(lambda a: jnp.concatenate([a, a]), batch_of())
    expected = {a: np.asarray(n) for a, n in loads_of(noisy_model(case(layers=3), Unroll()), batch).items()}
    assert len(expected) == 3
    model = noisy_model(case(layers=3), run)
    before, after, _ = update_once(model, batch, accumulate)
    old, new = (to_layers(model, state.rest) for state in (before, after))
    assert set(old) == set(expected)
    for name, load in expected.items():
        step = np.asarray(new[name]) - np.asarray(old[name])
        np.testing.assert_allclose(step, RATE * np.sign(load.mean() - load), atol=1e-7, err_msg=name)
        assert {-1, 1} <= set(np.sign(step)), name
    assert all((np.asarray(after.params[a]) == np.asarray(w)).all() for a, w in before.params.items())


def test_biases_are_not_trained():
    model = noisy_model(case(layers=3), Scan())
    moved_weights = {a for a, v in variables(model).items() if isinstance(v, Moved)}
    assert moved_weights == {"layers.experts.mlp.bias", "mtp.0.block.mlp.bias"}
    assert not moved_weights & set(split_trained(model)[1])


def test_auxiliary_losses_count():
    batch, weights = batch_of(), {"balance": 0.01, "z_loss": 0.003}
    plain, with_aux = (loss_of(noisy_model(case(**w), Unroll()), batch) for w in ({}, weights))
    balance, z = (float(with_aux.metrics[name].value()) for name in ("router_balance", "router_z"))
    assert balance > 1
    assert z > 0
    added = float(with_aux.loss.value()) - float(plain.loss.value())
    assert added == pytest.approx(0.01 * balance + 0.003 * z, rel=1e-3)
    assert float(with_aux.metrics["expert_load_max"].value()) > 1


def test_experts_that_tell_nothing_are_an_error():
    model = SimpleNamespace(config=case())
    loss = Loss(WeightedMean(jnp.float32(1), jnp.float32(1)), {})
    with pytest.raises(ValueError, match="none of its layers has"):
        with_routers(loss, model, {"dense": {}}, jnp.ones(1))


# ---------------------------------------------------------------- further ahead


@pytest.mark.slow
def test_the_loss_of_later_tokens_by_hand():
    """Each target of a text but its last two, weighed by the mask of what is predicted, as a part of the whole loss."""
    batch, model = batch_of(), noisy_model(case(), Unroll())
    tokens, segments, targets, mask = (np.asarray(batch[n]) for n in ("tokens", "segments", "targets", "mask"))
    graph, weights = split(model)
    x = jax.jit(lambda w: merge(graph, w).hidden(batch["tokens"], Packed(batch["segments"]))[0])(weights)

    @jax.jit
    def later(weights, x, text):
        model = merge(graph, weights)
        return jax.nn.log_softmax(model.unembed(model.ahead(1, x, text, Packed(jnp.ones_like(text)))[0]))

    total = weight = 0.0
    for row, low, high in ((0, 0, 7), (0, 7, 12), (1, 0, 9)):
        text = jnp.asarray(tokens[row : row + 1, low + 1 : high])
        logits = np.asarray(later(weights, x[row : row + 1, low : high - 1], text))[0]
        for t in range(high - 1 - low):
            total -= logits[t, targets[row, low + t + 1]] * mask[row, low + t + 1]
            weight += mask[row, low + t + 1]
    with_it, without = (loss_of(model, batch, mtp=w) for w in (0.3, 0.0))
    assert relative(with_it.metrics["mtp_cross_entropy"].value(), total / weight) < 1e-5
    assert float(with_it.loss.total - without.loss.total) == pytest.approx(0.3 * total, rel=1e-3)
    assert "mtp_cross_entropy" not in without.metrics
    assert (segments[0, :7] == 1).all()


def test_targets_beyond_a_text_count_nothing():
    """The second text of a row may be another: what is predicted in the first stays."""
    model, batch = noisy_model(case(), Unroll()), batch_of()
    first = jnp.asarray(np.asarray(batch["segments"]) == 1, jnp.float32).at[1].set(0)
    batch["mask"] = jnp.ones_like(batch["mask"]) * first
    other = dict(batch, tokens=batch["tokens"].at[0, 7:].set(5), targets=batch["targets"].at[0, 7:].set(9))
    whole, two = (loss_of(model, b).metrics["mtp_cross_entropy"] for b in (batch, other))
    assert float(whole.weight) == 6
    assert float(whole.total) == pytest.approx(float(two.total), rel=1e-6)


@pytest.mark.slow
def test_the_module_ahead_learns_and_all_of_it():
    model, batch = noisy_model(case(), Unroll()), batch_of()
    graph, params, rest = split(model, nnx.Param)

    def ahead(params):
        return NextToken(head="logits")({"model": merge(graph, params, rest)}, batch, KEY).metrics["mtp_cross_entropy"].value()

    descend = jax.jit(jax.value_and_grad(ahead))
    first, grads = descend(params)
    dead = [a for a, g in grads.items() if a.startswith("mtp.") and not np.abs(np.asarray(g)).max() > 0]
    assert not dead
    for _ in range(5):
        params = jax.tree.map(lambda w, g: w - 0.05 * g, params, descend(params)[1])
    assert float(descend(params)[0]) < float(first) - 0.1
