"""Training in few bits: forward passes are those of the quantized model, gradients those of rounded factors, by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import relative
from laws.families import CASES, STRUCTURES, noisy_model, tokens_of

from argosy.adapt.formats.table import FORMATS
from argosy.adapt.low_precision import Product, low_precision_product
from argosy.adapt.quant import Scheme, apply_schemes, by_layer, int8
from argosy.adapt.rules import LAYERS, QuantizedTraining, Rule, preset_rules, schemes_of
from argosy.adapt.surgery import find, swap
from argosy.adapt.training import LowPrecisionEinsum, train_in_few_bits, train_quantization_aware
from argosy.core.errors import BadInput
from argosy.models.parts.stack import Scan, Unroll
from argosy.models.parts.stack.addresses import layer_addresses
from argosy.models.parts.weight import fill, merge, split

RNG = np.random.default_rng(0)


def array(*shape):
    return jnp.asarray(RNG.standard_normal(shape), jnp.float32)


def forward(model, tokens):
    return model(tokens, model.config.attend(jnp.ones_like(tokens)))[0]


def by_rows(name, x, summed):
    """x rounded with one scale for each row over the summed axes."""
    return FORMATS[name].quantize(x, tuple(n if i in summed else 1 for i, n in enumerate(x.shape))).dequantized()


@pytest.mark.parametrize(("kind", "data", "gradient"), [("int8", "int8", "int8"), ("fp8", "fp8_e4m3", "fp8_e5m2")])
def test_all_three_products_have_rounded_factors(kind, data, gradient):
    x, w, g = array(2, 3, 8), array(8, 4, 6), array(2, 3, 4, 6)
    eq = "BTD,DNH->BTNH"
    y, pull = jax.vjp(lambda x, w: low_precision_product(Product(eq, kind), x, w), x, w)
    assert relative(y, jnp.einsum(eq, by_rows(data, x, [2]), by_rows(data, w, [0]))) < 1e-6
    dx, dw = pull(g)
    assert relative(dx, jnp.einsum("BTNH,DNH->BTD", by_rows(gradient, g, [2, 3]), by_rows(data, w, [1, 2]))) < 1e-6
    assert relative(dw, jnp.einsum("BTD,BTNH->DNH", by_rows(data, x, [0, 1]), by_rows(gradient, g, [0, 1]))) < 1e-6
    assert relative(y, jnp.einsum(eq, x, w)) > 1e-4


@pytest.mark.parametrize("name", STRUCTURES)
def test_the_forward_pass_of_qat_is_that_of_the_quantized_model(name):
    """In both layouts: what is trained is what `argosy quantize` writes."""
    config = CASES[name]
    rules = [Rule(weights="int4", granularity=8, activations="int8")]
    tokens = tokens_of(config)
    for run in (Unroll(), Scan()):
        trained, rounded = noisy_model(config, run), noisy_model(config, run)
        schemes = schemes_of(trained, rules)
        assert train_quantization_aware(trained, schemes) == list(find(rounded, LAYERS))
        apply_schemes(rounded, by_layer(rounded, schemes))
        exact = np.asarray(forward(noisy_model(config, run), tokens))
        expected = np.asarray(forward(rounded, tokens))
        assert relative(forward(trained, tokens), expected) < 1e-5
        assert relative(exact, expected) > 1e-3
        # The weights themselves are the float ones, under their own addresses.
        plain = split(noisy_model(config, run))[1]
        weights = split(trained)[1]
        assert weights.keys() == plain.keys()
        assert all(np.array_equal(weights[address], plain[address]) for address in plain)


@pytest.mark.parametrize("name", STRUCTURES)
@pytest.mark.parametrize("kind", ["qat", "int8", "fp8"])
def test_gradients_are_finite_and_near_those_of_floats(name, kind):
    config = CASES[name]
    tokens = tokens_of(config, length=12)

    def gradients(model):
        graph, leaves = split(model)
        probe = np.random.default_rng(1)
        y = forward(model, tokens)
        weights = jnp.asarray(probe.standard_normal(y.shape), jnp.float32)
        return jax.grad(lambda leaves: (weights * forward(merge(graph, leaves), tokens)).sum(), allow_int=True)(leaves)

    def loss_and_gradients():
        # Without the noise of `noisy_model`, which magnifies rounding through many layers.
        model = config.build(Unroll())
        fill(model, jax.random.key(0), addresses=layer_addresses(model))
        return model

    model = loss_and_gradients()
    if kind == "qat":
        train_quantization_aware(model, schemes_of(model, preset_rules("w8a8")))
    else:
        train_in_few_bits(model, LAYERS, kind)
    got, exact = gradients(model), gradients(loss_and_gradients())
    dots = sizes = others = 0.0
    for address, g in exact.items():
        if g.dtype != jnp.float32:
            continue
        a, b = np.asarray(got[address], np.float64).ravel(), np.asarray(g, np.float64).ravel()
        assert np.isfinite(a).all(), address
        dots, sizes, others = dots + a @ b, sizes + a @ a, others + b @ b
    cosine = dots / (sizes * others) ** 0.5
    # Rounding changes which experts and keys are chosen, and delta nets magnify it.
    dense = name.startswith(("llama", "gemma"))
    assert cosine > ((0.9 if kind == "fp8" else 0.99) if dense else 0.3), cosine
    assert cosine < 1 - 1e-9


def test_what_is_quantized_or_adapted_is_not_trained_in_few_bits():
    model = noisy_model(CASES["llama-plain"], Unroll())
    swap(model, r"layers\..*\.mlp\.up", int8)
    with pytest.raises(BadInput, match="has an adapter or is quantized"):
        train_in_few_bits(model, LAYERS, "int8")


def test_settings_say_what_does_not_fit():
    for wrong, problem in (
        ({"train": "qat"}, "preset or rules"),
        ({"train": "int8", "preset": "w4"}, "preset is for train=qat"),
        ({"train": "qat", "preset": "w4", "rules": "a.yml"}, "preset or rules"),
        ({"where": "embed"}, "where is for"),
    ):
        with pytest.raises(ValueError, match=problem):
            QuantizedTraining(**wrong)
    model = noisy_model(CASES["llama-plain"], Unroll())
    assert QuantizedTraining().put_on(model) == []
    names = QuantizedTraining(train="int8", where=r"layers\..*\.mlp\..*").put_on(model)
    assert {name.split(".")[-1] for name in names} == {"gate", "up", "down"}
    assert sum(isinstance(of, LowPrecisionEinsum) for of in find(model, ".*").values()) == len(names)
    assert Scheme("int8", activations="int8").rounding() is not None
