"""The engine of rollouts: whose arrays it holds, what is rounded anew, and which copies are noticed as changed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from laws.families import CASES, noisy_model

from argosy.adapt.quant import QuantizedEinsum
from argosy.adapt.settings import LAYERS
from argosy.adapt.surgery import find
from argosy.models.parts.stack import Scan, Unroll
from argosy.models.parts.weight import abstract, split, variables
from argosy.rl.rollouts.settings import Rollout
from argosy.run.rl.rollout_engine import RolloutEngine, checksums
from argosy.train.state import TrainState

CASE = CASES["llama-plain"]


def engine(**settings) -> tuple[RolloutEngine, TrainState]:
    module = noisy_model(CASE, Unroll())
    graph, weights = split(module)
    rollout_engine = RolloutEngine(CASE, graph, abstract(module), jnp.float32, None, Rollout(**settings))
    return rollout_engine, TrainState(jnp.int32(0), weights, {}, None, jax.random.key(0))


def scale_weights(state: TrainState) -> TrainState:
    return TrainState(state.step, {a: leaf * 1.5 for a, leaf in state.params.items()}, {}, None, state.key)


def test_on_the_same_devices_nothing_is_copied():
    rollout_engine, state = engine()
    for now in (state, scale_weights(state)):
        module = rollout_engine(rollout_engine.weights(now)).module
        assert all(v.get_value() is now.params[address] for address, v in variables(module).items())


@pytest.mark.slow
def test_on_other_devices_answers_are_the_same():
    rollout_engine, state = engine()
    apart, _ = engine(devices=2)
    prompts = [[5, 9, 100], [17]]
    for now in (state, scale_weights(state)):
        lm = apart(apart.weights(now))
        assert {d for v in variables(lm.module).values() for d in v.get_value().devices()} == set(jax.devices()[-2:])
        mine, theirs = (
            e(e.weights(now)).generate(prompts, 4, ignore_eos=True) for e in (apart, rollout_engine)
        )
        assert [completion.tokens for completion in mine] == [completion.tokens for completion in theirs]


@pytest.mark.slow
def test_rounded_weights_of_scanned_layers_answer_as_those_of_unrolled_ones():
    outputs = []
    for layout in (Unroll(), Scan()):
        module = noisy_model(CASE, layout)
        graph, weights = split(module)
        rollout_engine = RolloutEngine(CASE, graph, abstract(module), jnp.float32, None, Rollout(weights="int8"))
        (answer,) = rollout_engine(weights).generate([[5, 9, 100]], 4, ignore_eos=True)
        outputs.append(answer.tokens)
    assert outputs[0] == outputs[1]


def test_weights_are_rounded_anew_for_each_rollout():
    rollout_engine, state = engine(weights="int8")
    for now in (state, scale_weights(state)):
        layers = find(rollout_engine(rollout_engine.weights(now)).module, LAYERS)
        assert layers
        for name, layer in layers.items():
            assert isinstance(layer, QuantizedEinsum)
            w = np.asarray(now.params[f"{name}.w"])
            rounded = np.asarray(layer.values[...], np.float32) * np.asarray(layer.scale[...])
            assert np.abs(rounded - w).max() <= np.abs(w).max() / 127, name


def test_a_checksum_notices_a_bit_and_an_exchange():
    a = jnp.arange(12, dtype=jnp.float32).reshape(3, 4)
    exchanged = a[jnp.asarray([1, 0, 2])]
    flipped = a.at[2, 3].set(np.nextafter(np.float32(11), np.float32(12)))
    half = a.astype(jnp.bfloat16)
    sums = np.asarray(checksums([a, a + 0, exchanged, a.T.reshape(3, 4), flipped]))
    assert sums[0] == sums[1]
    assert len(set(sums[1:].tolist())) == 4
    far = jnp.arange(128, dtype=jnp.float32).reshape(2, 64)
    assert len({*np.asarray(checksums([far, far.at[0, 40].set(far[1, 9]).at[1, 9].set(far[0, 40])])).tolist()}) == 2
    assert np.asarray(checksums([half]))[0] != np.asarray(checksums([-half]))[0]
