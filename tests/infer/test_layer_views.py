"""Scanned layers on a CPU: decoded as unrolled ones, over the memory of the stacked weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import default
from laws.families import CASES, FULL_OF, STRUCTURES, noisy_model

from argosy.adapt.quant import int8
from argosy.adapt.surgery import swap
from argosy.infer.cpu.views import LayerViews, is_on_one_cpu
from argosy.infer.forward.passes import forward_of
from argosy.infer.lm import LM
from argosy.models.parts.stack import Scan, Unroll
from argosy.models.parts.stack.addresses import to_layers
from argosy.models.parts.weight import split, variables

PROMPTS = [[5, 9, 23, 7], [17]]


VIEWED = [(case, quantized) for quantized in (False, True) for case in STRUCTURES]
BY_DEFAULT = {(FULL_OF["qwen3_next"], False)}


@pytest.mark.parametrize(
    ("case", "quantized"), [pytest.param(*view, marks=() if view in BY_DEFAULT else pytest.mark.slow) for view in VIEWED]
)
def test_views_are_the_weights_by_layer(case, quantized):
    model = noisy_model(CASES[case], Scan())
    if quantized:
        swap(model, ".*", int8)
    views_of, weights = LayerViews(model), split(model)[1]
    views, copies = views_of.of(weights), to_layers(model, {address: np.asarray(w) for address, w in weights.items()})
    assert views.keys() == copies.keys() == split(views_of.model)[1].keys()
    for name, view in views.items():
        assert view.dtype == copies[name].dtype, name
        np.testing.assert_array_equal(view, copies[name], err_msg=name)


def test_aligned_layers_are_not_copied():
    model = noisy_model(CASES["llama-plain"], Scan())
    views_of, weights = LayerViews(model), split(model)[1]
    views = views_of.of(weights)
    aligned = 0
    for name, (address, layer) in views_of.stored.items():
        view, whole = views[name], weights[address]
        if layer is None or layer * view.nbytes % 64 or whole.unsafe_buffer_pointer() % 64:
            continue
        aligned += 1
        assert view.unsafe_buffer_pointer() == whole.unsafe_buffer_pointer() + layer * view.nbytes, name
    assert aligned > 4


@pytest.mark.slow
def test_a_training_step_reuses_the_memory_of_weights_that_were_decoded_from():
    """A view that is alive when an array is donated would make XLA copy it."""
    config = CASES["llama-plain"]
    model = noisy_model(config, Scan())
    for v in variables(model).values():
        v.set_value(jnp.copy(v.get_value()))  # other tests share those of `noisy_model`
    lm = LM(config, model)
    lm.generate(PROMPTS, 3, ignore_eos=True)
    weights = split(model)[1]
    before = {address: a.unsafe_buffer_pointer() for address, a in weights.items()}
    after = jax.jit(lambda w: jax.tree.map(lambda a: a + 1, w), donate_argnums=0)(weights)
    assert {address: a.unsafe_buffer_pointer() for address, a in after.items()} == before


def test_changed_weights_are_decoded_from():
    config = CASES["llama-plain"]
    scanned = LM(config, noisy_model(config, Scan()))
    before = scanned.generate(PROMPTS, 4, ignore_eos=True)
    for v in variables(scanned.module).values():
        v.set_value(v.get_value()[..., ::-1])
    after = scanned.generate(PROMPTS, 4, ignore_eos=True)
    fresh = LM(config, scanned.module).generate(PROMPTS, 4, ignore_eos=True)
    assert [c.tokens for c in after] == [c.tokens for c in fresh] != [c.tokens for c in before]


@pytest.mark.parametrize("case", default(FULL_OF["qwen3_next"], of=STRUCTURES))
def test_caches_of_scanned_layers_are_those_of_unrolled_ones(case):
    scanned, unrolled = (forward_of(model, split(model)[1]) for model in (noisy_model(CASES[case], run) for run in (Scan(), Unroll())))
    assert scanned.specs == unrolled.specs
    assert unrolled.preparation.views is None


def test_weights_that_are_not_in_the_memory_of_one_cpu_have_no_views():
    assert not is_on_one_cpu({"w": jax.ShapeDtypeStruct((2,), jnp.float32)})
    assert is_on_one_cpu({"w": jnp.zeros(2)})
