"""Rules that match, rules that do not, and weights that move from one model to another."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import LOGIT_ROUNDING, relative
from laws.families import CASES, forward, noisy_model, tokens_of

from argosy.adapt.formats.table import NF4
from argosy.adapt.lora import DoRA, LoRA
from argosy.adapt.quant import Scheme, int8, quantized_einsum
from argosy.adapt.surgery import find, freeze, graft, swap, thaw
from argosy.core.errors import BadInput
from argosy.models.parts.attention.attend import Packed
from argosy.models.parts.einsum import Einsum, Route
from argosy.models.parts.stack import Scan, Unroll
from argosy.models.parts.stack.addresses import layer_addresses
from argosy.models.parts.weight import fill, merge, split, undrawn, variables

CONFIG = CASES["llama-plain"]


@pytest.mark.parametrize("run", [Unroll(), Scan()], ids=["unroll", "scan"])
def test_a_rule_for_the_kind_works_in_either_layout(run):
    matches = find(CONFIG.build(run), r"layers\.block\.attn\.[qk]")
    assert len(matches) == (2 if run.stacked else 2 * CONFIG.layers)


def test_a_rule_for_one_layer_needs_layers_apart():
    assert list(find(CONFIG.build(Unroll()), r"layers\.1\.attn\.q")) == ["layers.1.attn.q"]
    with pytest.raises(BadInput, match="nothing"):
        find(CONFIG.build(Scan()), r"layers\.1\.attn\.q")


@pytest.mark.parametrize("act", [find, lambda m, w: swap(m, w, int8), freeze, lambda m, w: graft(m, {}, w)])
def test_a_rule_that_matches_nothing_is_an_error(act):
    with pytest.raises(BadInput):
        act(noisy_model(CONFIG, Unroll()), r"layers\.block\.attention\.q")


def test_a_rule_that_is_no_expression_is_an_error():
    with pytest.raises(BadInput, match="regular expression"):
        find(CONFIG.build(), "layers.(")


def test_freeze_and_thaw_say_what_they_touched():
    model = noisy_model(CONFIG, Unroll())
    before = len(split(model, nnx.Param)[1])
    frozen = freeze(model, r"layers\.block\.mlp\..*\.w")
    assert len(frozen) == 3 * CONFIG.layers
    assert len(split(model, nnx.Param)[1]) == before - len(frozen)
    assert sorted(thaw(model, ".*")) == sorted(frozen)
    assert len(split(model, nnx.Param)[1]) == before


def test_quantised_weights_cannot_be_thawed():
    model = noisy_model(CONFIG, Unroll())
    swap(model, r"layers\..*", int8)
    freeze(model, r"norm\.scale")
    assert thaw(model, ".*") == ["norm.scale"]
    assert not any(isinstance(v, nnx.Param) for a, v in variables(model).items() if a.endswith((".values", "q.scale")))
    with pytest.raises(BadInput, match="quantized"):
        thaw(model, r"layers\..*\.attn\.q\..*")


def test_int8_is_put_on_plain_weights_alone():
    model = noisy_model(CONFIG, Unroll())
    swap(model, r"layers\.0\.attn\.q", int8)
    with pytest.raises(BadInput, match="quantized already"):
        swap(model, r"layers\.0\.attn\.q", int8)
    swap(model, r"layers\.0\.attn\.k", lambda of: LoRA(of, 2, 4.0))
    with pytest.raises(BadInput, match="has an adapter"):
        swap(model, r"layers\.0\.attn\.k", int8)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_int8_is_off_by_half_a_step_at_most(dtype):
    """Scales kept in bfloat16 would make it three quarters."""
    einsum = Einsum("BTD,DF->BTF", {"D": 64, "F": 48})
    w = jax.random.normal(jax.random.key(0), (64, 48), dtype)
    einsum.w.set_value(w)
    quantized = int8(einsum)
    steps = np.abs(np.asarray(w, np.float64) - np.asarray(quantized.weight.dequantized(), np.float64))
    steps /= np.abs(np.asarray(w, np.float64)).max(0) / 127
    assert 0.45 < steps.max() < 0.5 + 1e-3
    # Each column alone: what comes out is the dequantized column, not one scaled by a rounded scale.
    y = quantized(jnp.eye(64, dtype=dtype)[None])
    assert np.abs(np.asarray(y[0], np.float64) - np.asarray(quantized.weight.dequantized(dtype), np.float64)).max() == 0


def test_an_outlier_word_of_an_embedding_costs_the_others_nothing():
    einsum = Einsum("BTV,VD->BTD", {"V": 50, "D": 16})
    w = np.random.default_rng(0).standard_normal((50, 16)).astype(np.float32)
    w[7] *= 100
    einsum.w.set_value(jnp.asarray(w))
    embedding = int8(einsum)
    assert embedding.scale.shape == (50, 1)
    words = np.asarray([*range(7), *range(8, 50)])
    for got in (embedding.take(jnp.asarray(words)), embedding.via("BTD,VD->BTV", jnp.eye(16)[None])[0].T[words]):
        assert np.linalg.norm(np.asarray(got) - w[words]) / np.linalg.norm(w[words]) < 0.01


def test_graft_then_fill_draws_only_what_was_missing():
    source, target = noisy_model(CONFIG, Unroll()), CONFIG.build(Unroll())
    addresses = graft(target, split(source)[1], r"(?!head).*")
    assert undrawn(target) == ["head.w"]
    assert fill(target, jax.random.key(0), addresses=layer_addresses(target)) == ["head.w"]
    mine, theirs = split(target)[1], split(source)[1]
    assert all((np.asarray(mine[a]) == np.asarray(theirs[a])).all() for a in addresses)
    assert (np.asarray(mine["head.w"]) != np.asarray(theirs["head.w"])).any()


def test_graft_refuses_other_shapes():
    other = CASES["llama-window"]
    with pytest.raises(BadInput, match="shape"):
        graft(CONFIG.build(), split(noisy_model(other, Unroll()))[1], r"layers\.0\.attn\.q\.w")


def test_lora_merged_is_the_same_model():
    model, tokens = noisy_model(CONFIG, Unroll()), tokens_of(CONFIG)
    swap(model, r"layers\.block\.attn\..*", lambda of: LoRA(of, 2, 4.0))
    fill(model, jax.random.key(2), addresses=layer_addresses(model))
    for name, v in variables(model).items():
        if name.endswith(".b") and isinstance(v, nnx.LoRAParam):
            node = find(model, name.rsplit(".", 1)[0].replace(".", r"\."))[name.rsplit(".", 1)[0]]
            node.b.set_value(0.1 * jax.random.normal(jax.random.key(3), node.b.shape))
    packed = Packed(jnp.ones_like(tokens))
    adapted = np.asarray(forward(model)(tokens, packed)[0])
    swap(model, r"layers\.block\.attn\..*", lambda of: of.merged())
    merged = np.asarray(forward(model)(tokens, packed)[0])
    plain = np.asarray(forward(noisy_model(CONFIG, Unroll()))(tokens, packed)[0])
    assert np.abs(adapted - plain).max() > 1e-2 * np.abs(plain).max(), "the adapter did nothing"
    assert relative(adapted, merged) < LOGIT_ROUNDING


def test_lora_by_hand():
    """W x + (alpha / rank) B A x, through the call, another equation, and the lookup of rows."""
    rng = np.random.default_rng(0)
    w, a, b = (rng.standard_normal(s).astype(np.float32) for s in ((7, 5), (7, 2), (2, 5)))
    lora = LoRA(Einsum("BTV,VD->BTD", {"V": 7, "D": 5}), 2, 6.0)
    lora.of.w.set_value(jnp.asarray(w))
    lora.a.set_value(jnp.asarray(a))
    lora.b.set_value(jnp.asarray(b))
    whole = w + 6.0 / 2 * a @ b
    x, h = (jnp.asarray(rng.standard_normal((1, 3, n)), jnp.float32) for n in (7, 5))
    assert np.abs(np.asarray(lora(x)) - np.asarray(x) @ whole).max() < 1e-5
    assert np.abs(np.asarray(lora.via("BTD,VD->BTV", h)) - np.asarray(h) @ whole.T).max() < 1e-5
    assert np.abs(np.asarray(lora.take(jnp.asarray([[4, 0]]))) - whole[[4, 0]]).max() < 1e-5


@pytest.mark.parametrize("make", [lambda e: e, int8, lambda e: LoRA(e, 2, 4.0)], ids=["float", "int8", "lora"])
def test_grouped_weights_choose_by_route(make):
    """Rows sorted by expert against one product an expert."""
    sizes, dims = np.asarray([3, 0, 4], np.int32), {"E": 3, "D": 6, "M": 5}
    einsum = Einsum("XD,EDM->XM", dims, bias=True)
    fill(einsum, jax.random.key(0), addresses=lambda a: [a])
    einsum.b.set_value(jax.random.normal(jax.random.key(4), einsum.b.shape))
    w, b = np.asarray(einsum.w.get_value()), np.asarray(einsum.b.get_value())
    swapped = make(einsum)
    fill(swapped, jax.random.key(1), addresses=lambda a: [a])
    x = jnp.asarray(np.random.default_rng(0).standard_normal((7, 6)), jnp.float32)
    expert = np.repeat(np.arange(3), sizes)
    got = swapped(x, Route(jnp.asarray(sizes), jnp.asarray(expert)))
    expected = np.stack([x[i] @ w[e] + b[e] for i, e in enumerate(expert)])
    assert np.abs(np.asarray(got) - expected).max() < (0.05 if make is int8 else 1e-5)
    with pytest.raises(ValueError, match="route"):
        swapped(x)


def test_dora_by_hand():
    """m (W + gain B A) / |W + gain B A| by output channel, through the call, another equation, and once settled."""
    rng = np.random.default_rng(0)
    w, a, b, m = (rng.standard_normal(s).astype(np.float32) for s in ((7, 5), (7, 2), (2, 5), (5,)))
    dora = DoRA(Einsum("BTD,DF->BTF", {"D": 7, "F": 5}), 2, 6.0)
    dora.of.w.set_value(jnp.asarray(w))
    for variable, array in ((dora.a, a), (dora.b, b), (dora.m, m)):
        variable.set_value(jnp.asarray(array))
    whole = w + 6.0 / 2 * a @ b
    whole = whole * m / np.linalg.norm(whole, axis=0)
    x, h = (jnp.asarray(rng.standard_normal((1, 3, n)), jnp.float32) for n in (7, 5))
    assert np.abs(np.asarray(dora(x)) - np.asarray(x) @ whole).max() < 1e-5
    assert np.abs(np.asarray(dora.via("BTF,DF->BTD", h)) - np.asarray(h) @ whole.T).max() < 1e-5
    assert np.abs(np.asarray(dora.merged().w[...]) - whole).max() < 1e-5
    dora.settle()
    assert np.abs(np.asarray(dora(x)) - np.asarray(x) @ whole).max() < 1e-5


def test_the_norm_of_dora_is_constant_for_the_gradient():
    """Section 4.3 of the paper, and PEFT: dy/dB without the term through the norm."""
    rng = np.random.default_rng(1)
    w, a, b, m = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((7, 5), (7, 2), (2, 5), (5,)))
    x = jnp.asarray(rng.standard_normal((1, 3, 7)), jnp.float32)
    dora = DoRA(Einsum("BTD,DF->BTF", {"D": 7, "F": 5}), 2, 2.0)
    dora.of.w.set_value(w)
    dora.a.set_value(a)
    dora.m.set_value(m)
    dora.b.set_value(b)
    graph, leaves = split(dora)

    def ours(b):
        return jnp.sum(merge(graph, leaves | {"b": b})(x))

    ratio = m / jnp.linalg.norm(w + a @ b, axis=0)
    expected = jax.grad(lambda b: jnp.sum((x @ w + x @ a @ b) * ratio))(b)
    assert np.abs(np.asarray(jax.grad(ours)(b) - expected)).max() < 1e-5


@pytest.mark.parametrize("iterations", [None, 8])
@pytest.mark.parametrize("eq", ["BTD,DNH->BTNH", "BTNH,NHD->BTD", "XD,EDM->XM"])
def test_pissa_starts_from_the_largest_singular_values(eq: str, iterations: int | None):
    """gain A B is the best approximation of each matrix: what remains has the singular values from the third on."""
    lora = LoRA(Einsum(eq, {"D": 12, "N": 2, "H": 6, "E": 3, "M": 10}), 2, 3.0, start=True)
    rng = np.random.default_rng(2)
    w = rng.standard_normal([lora.sizes[x] for x in lora.spec]).astype(np.float32)
    for variable, array in lora.start_from(w, iterations).items():
        getattr(lora, variable).set_value(jnp.asarray(array))
    np.testing.assert_array_equal(np.asarray(lora.a[...]), np.asarray(lora.a0[...]))
    delta = lora.gain * np.einsum(f"{lora.letters_a},{lora.letters_b}->{lora.spec}", lora.a[...], lora.b[...])
    order = [lora.spec.index(x) for x in lora.group + lora.inner] + [lora.spec.index(x) for x in lora.spec if x in lora.out]
    inner = int(np.prod([lora.sizes[x] for x in lora.inner]))
    many = lora.sizes["E"] if lora.group else 1
    matrices, rest = (array.transpose(order).reshape(many, inner, -1) for array in (w, w - delta))
    tolerance = 1e-4 if iterations is None else 0.1
    for whole, residual in zip(matrices, rest, strict=True):
        smallest = np.linalg.svd(whole, compute_uv=False)[2:]
        assert np.abs(np.linalg.svd(residual, compute_uv=False)[: len(smallest)] - smallest).max() < tolerance


def test_pissa_starts_at_the_base_exactly():
    lora = LoRA(Einsum("BTD,DF->BTF", {"D": 12, "F": 10}), 2, 3.0, start=True)
    rng = np.random.default_rng(3)
    w = rng.standard_normal((12, 10)).astype(np.float32)
    lora.of.w.set_value(jnp.asarray(w))
    for variable, array in lora.start_from(w).items():
        getattr(lora, variable).set_value(jnp.asarray(array))
    x = jnp.asarray(rng.standard_normal((1, 3, 12)), jnp.float32)
    np.testing.assert_array_equal(np.asarray(lora(x)), np.asarray(lora.of(x)))


# Of normal weights in blocks of 64, root mean square: nf4 by simulation, int8 one step of 127 over sqrt(12).
ERRORS = {"nf4": (0.085, 0.105), "int4": (0.10, 0.13), "int8": (0.003, 0.012)}


@pytest.mark.parametrize("format", ERRORS)
@pytest.mark.parametrize("eq", ["BTD,DNH->BTNH", "BTNH,NHD->BTD", "XD,EDM->XM"])
def test_a_format_loses_what_its_bits_cost(eq: str, format: str):
    dims = {"D": 256, "N": 2, "H": 64, "E": 2, "M": 64}
    einsum = Einsum(eq, dims)
    fill(einsum, jax.random.key(0), addresses=lambda a: [a])
    w = np.asarray(einsum.w[...])
    narrow = quantized_einsum(einsum, Scheme(format))
    assert narrow.shape == w.shape
    error = np.linalg.norm(np.asarray(narrow.weight.dequantized()) - w) / np.linalg.norm(w)
    low, high = ERRORS[format]
    assert low < error < high
    bits = 8 * sum(v.get_value().nbytes for v in (narrow.values, narrow.scale)) / w.size
    assert bits == 4.5 if format != "int8" else bits < 9


def test_nf4_codes_are_the_nearest_levels():
    """The table of arXiv:2305.14314, appendix E; each level comes back exactly, and a value between two takes the nearer one."""
    levels = np.asarray(NF4, np.float32)
    w = np.stack([levels * 3, (levels + 0.01) * np.float32(0.5)]).reshape(32, 1)
    w[16 + 15] = 0.5
    einsum = Einsum("BTD,DF->BTF", {"D": 32, "F": 1})
    einsum.w.set_value(jnp.asarray(w))
    narrow = quantized_einsum(einsum, Scheme("nf4", 16))
    expected = np.concatenate([levels * 3, levels * 0.5])
    np.testing.assert_allclose(np.asarray(narrow.weight.dequantized())[:, 0], expected, rtol=1e-6)
    assert narrow.values.shape == (16, 1)


def test_an_odd_axis_is_quantized_without_packing():
    einsum = Einsum("BTD,DF->BTF", {"D": 15, "F": 3})
    fill(einsum, jax.random.key(0), addresses=lambda a: [a])
    narrow = quantized_einsum(einsum, Scheme("nf4", 4))
    assert narrow.values.shape == (15, 3)
    assert narrow.scale.shape == (5, 3), "blocks of the largest divisor up to four"
    x = jax.random.normal(jax.random.key(1), (1, 2, 15))
    assert np.abs(np.asarray(narrow(x) - x @ narrow.weight.dequantized())).max() < 1e-6


@pytest.mark.parametrize("format", ["nf4", "int8"])
def test_the_backward_pass_keeps_no_floats_of_a_quantized_weight(format: str):
    einsum = Einsum("BTD,DF->BTF", {"D": 64, "F": 48})
    fill(einsum, jax.random.key(0), addresses=lambda a: [a])
    narrow = quantized_einsum(einsum, Scheme(format))
    x = jax.random.normal(jax.random.key(1), (1, 2, 64))
    _, backward = jax.vjp(narrow, x)
    floats = [leaf for leaf in jax.tree.leaves(backward) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    assert max((leaf.size for leaf in floats), default=0) < 64 * 48
    (dx,) = backward(jnp.ones((1, 2, 48)))
    assert np.abs(np.asarray(dx - jnp.ones((1, 2, 48)) @ narrow.weight.dequantized().T)).max() < 1e-5
