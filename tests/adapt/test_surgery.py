"""Rules that match, rules that do not, and weights that move from one model to another."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import LOGIT_ROUNDING, relative
from laws.families import CASES, built, forward, tokens_of

from argosy.adapt.lora import LoRA
from argosy.adapt.quant import int8
from argosy.adapt.surgery import find, freeze, graft, swap, thaw
from argosy.core.errors import BadInput
from argosy.models.parts.attend import Packed
from argosy.models.parts.einsum import Einsum, Route
from argosy.models.parts.stack import Scan, Unroll, layer_addresses
from argosy.models.parts.weight import fill, split, undrawn, variables

CONFIG = CASES["llama-plain"]


@pytest.mark.parametrize("run", [Unroll(), Scan()], ids=["unroll", "scan"])
def test_a_rule_for_the_kind_works_in_either_layout(run):
    found = find(CONFIG.build(run), r"layers\.block\.attn\.[qk]")
    assert len(found) == (2 if run.stacked else 2 * CONFIG.layers)


def test_a_rule_for_one_layer_needs_layers_apart():
    assert list(find(CONFIG.build(Unroll()), r"layers\.1\.attn\.q")) == ["layers.1.attn.q"]
    with pytest.raises(BadInput, match="nothing"):
        find(CONFIG.build(Scan()), r"layers\.1\.attn\.q")


@pytest.mark.parametrize("act", [find, lambda m, w: swap(m, w, int8), freeze, lambda m, w: graft(m, {}, w)])
def test_a_rule_that_matches_nothing_is_an_error(act):
    with pytest.raises(BadInput):
        act(built(CONFIG, Unroll()), r"layers\.block\.attention\.q")


def test_a_rule_that_is_no_expression_is_an_error():
    with pytest.raises(BadInput, match="regular expression"):
        find(CONFIG.build(), "layers.(")


def test_freeze_and_thaw_say_what_they_touched():
    model = built(CONFIG, Unroll())
    before = len(split(model, nnx.Param)[1])
    frozen = freeze(model, r"layers\.block\.mlp\..*\.w")
    assert len(frozen) == 3 * CONFIG.layers
    assert len(split(model, nnx.Param)[1]) == before - len(frozen)
    assert sorted(thaw(model, ".*")) == sorted(frozen)
    assert len(split(model, nnx.Param)[1]) == before


def test_quantised_weights_cannot_be_thawed():
    model = built(CONFIG, Unroll())
    swap(model, r"layers\..*", int8)
    freeze(model, r"norm\.scale")
    assert thaw(model, ".*") == ["norm.scale"]
    assert not any(isinstance(v, nnx.Param) for a, v in variables(model).items() if a.endswith((".values", "q.scale")))
    with pytest.raises(BadInput, match="quantized"):
        thaw(model, r"layers\..*\.attn\.q\..*")


def test_int8_is_put_on_plain_weights_alone():
    model = built(CONFIG, Unroll())
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
    source, target = built(CONFIG, Unroll()), CONFIG.build(Unroll())
    taken = graft(target, split(source)[1], r"(?!head).*")
    assert undrawn(target) == ["head.w"]
    assert fill(target, jax.random.key(0), addresses=layer_addresses(target)) == ["head.w"]
    mine, theirs = split(target)[1], split(source)[1]
    assert all((np.asarray(mine[a]) == np.asarray(theirs[a])).all() for a in taken)
    assert (np.asarray(mine["head.w"]) != np.asarray(theirs["head.w"])).any()


def test_graft_refuses_other_shapes():
    other = CASES["llama-window"]
    with pytest.raises(BadInput, match="shape"):
        graft(CONFIG.build(), split(built(other, Unroll()))[1], r"layers\.0\.attn\.q\.w")


def test_lora_merged_is_the_same_model():
    model, tokens = built(CONFIG, Unroll()), tokens_of(CONFIG)
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
    plain = np.asarray(forward(built(CONFIG, Unroll()))(tokens, packed)[0])
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
