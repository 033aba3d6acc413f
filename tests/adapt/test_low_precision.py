"""Products in eight bits: delayed scaling by hand, stochastic rounding by its average, and what is compiled for devices."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import described_tpus, relative
from jax.sharding import NamedSharding, PartitionSpec
from laws.families import CASES, noisy_model, tokens_of

from argosy.adapt.formats.format import Limits
from argosy.adapt.formats.table import FORMATS
from argosy.adapt.low_precision import Product, low_precision_product
from argosy.adapt.rules import LAYERS
from argosy.adapt.scaling import AmaxHistory, LargestMagnitude, next_amax_history, with_scaling
from argosy.adapt.settings import AMAX
from argosy.adapt.training import train_in_few_bits
from argosy.models.parts.stack import Scan, Unroll
from argosy.models.parts.stack.addresses import layer_addresses
from argosy.models.parts.weight import fill, merge, split
from argosy.parallel.mesh import MeshSettings
from argosy.parallel.scope import scope

RNG = np.random.default_rng(0)
EQ = "BTD,DNH->BTNH"
FP8 = Product(EQ, "fp8")


def array(*shape):
    return jnp.asarray(RNG.standard_normal(shape), jnp.float32)


def at_scale(name, x, largest):
    return FORMATS[name].rounded(x, x.shape, Limits(jnp.full((1,) * x.ndim, largest, jnp.float32))).dequantized()


def test_delayed_scales_come_from_the_history():
    """Each factor has one scale, from the largest magnitude remembered; larger numbers saturate."""
    x, w, g = array(2, 3, 8), array(8, 4, 6), array(2, 3, 4, 6)
    history = jnp.asarray([[0.5, 1.0, 0.0], [9.0, 0.1, 0.2], [0.3, 0.0, 2.5]], jnp.float32)
    y, pull = jax.vjp(lambda *of: low_precision_product(FP8, *of), x, w, history)
    qx, qw, qg = at_scale("fp8_e4m3", x, 1.0), at_scale("fp8_e4m3", w, 9.0), at_scale("fp8_e5m2", g, 2.5)
    assert float(jnp.abs(qx).max()) == 1.0
    assert relative(y, jnp.einsum(EQ, qx, qw)) < 1e-6
    dx, dw, seen = pull(g)
    assert relative(dx, jnp.einsum("BTNH,DNH->BTD", qg, qw)) < 1e-6
    assert relative(dw, jnp.einsum("BTD,BTNH->DNH", qx, qg)) < 1e-6
    np.testing.assert_array_equal(seen[:, 0], [np.abs(np.asarray(a)).max() for a in (x, w, g)])
    assert not np.asarray(seen)[:, 1:].any()


def test_without_a_history_the_scale_is_one_and_garbage_is_not_remembered():
    x, w = array(1, 2, 4), array(4, 2, 2)
    y = low_precision_product(FP8, x, w, jnp.zeros((3, 4)))
    exact = [a.astype(jnp.float8_e4m3fn).astype(jnp.float32) for a in (x, w)]
    assert relative(y, jnp.einsum(EQ, *exact)) < 1e-6
    _, pull = jax.vjp(lambda h: low_precision_product(FP8, x.at[0, 0, 0].set(jnp.nan), w, h), jnp.ones((3, 4)))
    seen = np.asarray(pull(jnp.full((1, 2, 2, 2), jnp.inf))[0])
    assert seen[0, 0] == 0
    assert seen[1, 0] == np.abs(np.asarray(w)).max()
    assert seen[2, 0] == 0


def test_a_history_forgets_the_oldest_and_parts_add_to_the_largest():
    history = jnp.arange(24.0).reshape(2, 3, 4)
    first, second = (LargestMagnitude(jnp.zeros_like(history).at[..., 0].set(n)) for n in (5.0, 3.0))
    new = np.asarray(next_amax_history(history, first + second))
    np.testing.assert_array_equal(new[..., 0], np.full((2, 3), 5.0))
    np.testing.assert_array_equal(new[..., 1:], history[..., :-1])


@pytest.mark.parametrize("run", [Unroll(), Scan()], ids=["unroll", "scan"])
def test_each_layer_has_its_own_history(run):
    """In both layouts each product writes its own magnitudes: those of weights are those of the layer's weight."""
    config = CASES["llama-plain"]
    model = noisy_model(config, run)
    names = train_in_few_bits(model, LAYERS, "fp8", history=2)
    fill(model, jax.random.key(0), addresses=layer_addresses(model))
    graph, histories, rest = split(model, AmaxHistory)
    assert len(histories) == len(names)
    tokens = tokens_of(config, length=6)

    def total(histories):
        model = merge(graph, histories, rest)
        with_scaling(model)
        return jnp.square(model(tokens, config.attend(jnp.ones_like(tokens)))[0]).sum()

    seen = jax.jit(jax.grad(total))(histories)
    for name in names:
        got = np.asarray(seen[f"{AMAX}.{name.replace('.', '-')}"])
        w = np.abs(np.asarray(rest[f"{name}.w"]))
        axes = tuple(range(got.ndim - 2, w.ndim))
        np.testing.assert_allclose(got[..., 1, 0], w.max(axes), rtol=1e-6)
        assert (got[..., 0] > 0).all()


def test_stochastic_rounding_is_right_on_average():
    """The mean over keys approaches the product of the gradient that is not rounded, as nearest does not."""
    x, w = array(1, 4, 8), array(8, 2, 3)
    g = array(1, 4, 2, 3)
    of = Product(EQ, "int8")

    def pulled(key=None):
        return jax.vjp(lambda x, w: low_precision_product(of, x, w, None, key), x, w)[1](g)

    keys = jax.random.key_data(jax.random.split(jax.random.key(1), 4000))
    dx, dw = jax.jit(jax.vmap(pulled))(keys)
    by_row = FORMATS["int8"].quantize
    exact_x = jnp.einsum("BTNH,DNH->BTD", g, by_row(w, (1, 2, 3)).dequantized())
    exact_w = jnp.einsum("BTD,BTNH->DNH", by_row(x, (1, 4, 1)).dequantized(), g)
    for samples, exact, nearest in zip((dx, dw), (exact_x, exact_w), pulled(), strict=True):
        spread = np.asarray(samples).std(0) / 4000**0.5
        assert (np.abs(np.asarray(samples).mean(0) - np.asarray(exact)) < 5 * spread + 1e-6).all()
        assert (np.asarray(samples).std(0) > 0).any()
        assert np.abs(np.asarray(nearest) - np.asarray(exact)).max() > 5 * spread.max()
    again = jax.jit(jax.vmap(pulled))(keys)
    np.testing.assert_array_equal(dx, again[0])


def test_layers_round_by_keys_of_their_own():
    config = CASES["llama-plain"]
    model = noisy_model(config, Scan())
    train_in_few_bits(model, LAYERS, "int8", stochastic=True)
    with_scaling(model, jax.random.key(3))
    data = [np.asarray(m.key[...]) for m in (model.layers.block.attn.q, model.layers.block.mlp.up)]
    rows = np.concatenate(data)
    assert rows.shape == (6, 2)
    assert len(np.unique(rows, axis=0)) == 6


# ---- compiled programs


def gradients_of(kind):
    """Both factors and the gradient to the product and its two gradients, in bfloat16, as a step computes them."""
    of = Product("BTD,DF->BTF", kind)

    def program(x, w, g):
        y, pull = jax.vjp(lambda x, w: low_precision_product(of, x, w).astype(x.dtype), x, w)
        return y, *pull(g)

    return program


SHAPES = [(2, 128, 256), (256, 512), (2, 128, 512)]
FACTORS = {
    "int8": ({"s8"}, {"s8"}, {"s8"}),
    "fp8": ({"f8e4m3fn"}, {"f8e4m3fn", "f8e5m2"}, {"f8e4m3fn", "f8e5m2"}),
}


def factors_of(text):
    """The types of the factors of each product in the text of a compiled program, where they are computed."""
    types = dict(re.findall(r"(%[\w.-]+) = \(?(\w+)\[", text))
    products = re.findall(r" (?:convolution|dot)\((%[\w.-]+), (%[\w.-]+)\)", text)
    return [{types[a], types[b]} for a, b in products]


@pytest.mark.tpu
@pytest.mark.parametrize("topology", ["v5p:2x2x1", "v6e:2x2"])
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_tpus_multiply_eight_bits(monkeypatch, topology, kind):
    """The products of the compiled program have factors of eight bits: none is widened before it."""
    mesh = MeshSettings().build(described_tpus(monkeypatch, topology))
    with scope(mesh):
        place = NamedSharding(mesh, PartitionSpec())
        args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=place) for shape in SHAPES]
        text = jax.jit(gradients_of(kind)).lower(*args).compile().as_text()
    assert sorted(map(sorted, factors_of(text))) == sorted(map(sorted, FACTORS[kind]))


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_programs_for_gpus_ask_for_products_of_eight_bits(monkeypatch, kind):
    """What XLA is given for CUDA; no compiler of it is here."""
    monkeypatch.setattr("argosy.adapt.low_precision.platform", lambda: "gpu")
    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in SHAPES]
    text = jax.jit(gradients_of(kind)).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    products = re.findall(r"stablehlo\.dot_general.* : \(tensor<[\dx]+x(\w+)>, tensor<[\dx]+x(\w+)>\) -> tensor<[\dx]+x(\w+)>", text)
    names = {"i8": "s8", "f8E4M3FN": "f8e4m3fn", "f8E5M2": "f8e5m2"}
    assert sorted(sorted({names[a], names[b]}) for a, b, _ in products) == sorted(map(sorted, FACTORS[kind]))
    assert {out for *_, out in products} == ({"i32"} if kind == "int8" else {"f32"})


def test_products_of_two_types_are_right_where_devices_compute_them(monkeypatch):
    """XLA:CPU computes what it is given for a device too, with the same numbers."""
    x, w, g = array(2, 3, 8), array(8, 4, 6), array(2, 3, 4, 6)
    expected = jax.vjp(lambda x, w: low_precision_product(FP8, x, w), x, w)[1](g)
    monkeypatch.setattr("argosy.adapt.low_precision.platform", lambda: "gpu")
    for gradient_of, other in zip(jax.vjp(lambda x, w: low_precision_product(FP8, x, w), x, w)[1](g), expected, strict=True):
        assert relative(gradient_of, other) < 1e-5
