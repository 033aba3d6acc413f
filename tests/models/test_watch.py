"""What layers tell: their queries, keys, values and outputs, however layers run. The model computes what it computes unwatched."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import relative
from laws.families import CASES, STRUCTURES, noisy_model, tokens_of

from argosy.models.parts.attention.attend import Packed
from argosy.models.parts.attention.rope import angles, apply_rope
from argosy.models.parts.stack import Scan, Unroll
from argosy.models.parts.stack.watch import KEYS, OUTPUT, QUERIES, VALUES, Listening, WatchedAttend

SEGMENTS = jnp.asarray(np.repeat([[1] * 5 + [2] * 4 + [0] * 2], 2, 0), jnp.int32)


def told_by(config, run):
    model, tokens = noisy_model(config, run), tokens_of(config, length=11)
    plain, _, aux_before = model.hidden(tokens, Packed(SEGMENTS))
    x, _, aux = model.hidden(tokens, WatchedAttend(Packed(SEGMENTS), outputs=True, heads=True))
    np.testing.assert_allclose(x, plain, rtol=1e-6, atol=1e-6)
    layers_aux, rest = model.layers.layer_aux(aux)
    assert jax.tree.structure(rest) == jax.tree.structure(aux_before)
    return layers_aux


@pytest.mark.slow
@pytest.mark.parametrize("name", STRUCTURES)
def test_scanned_and_rematerialized_layers_tell_what_unrolled_ones_tell(name):
    config = CASES[name]
    layer_aux = told_by(config, Unroll())
    assert len(layer_aux) == config.layers
    for run in (Scan(), Unroll("full"), Scan("dots")):
        for watched, other in zip(told_by(config, run), layer_aux, strict=True):
            assert watched.keys() == other.keys()
            for kind, array in watched.items():
                assert relative(array, other[kind]) < 1e-4, (run, kind)
    # Layers without attention tell their output alone.
    attends = [QUERIES in watched for watched in layer_aux]
    assert all(attends) == (not name.startswith("qwen3_next"))
    assert any(attends)


def test_queries_keys_and_values_by_hand():
    """Of two layers of a Llama, from its weights and the output of the layer before."""
    config = CASES["llama-plain"]
    model, layer_aux = noisy_model(config, Unroll()), told_by(config, Unroll())
    positions = np.concatenate([np.arange(5), np.arange(4), np.arange(2)])
    for i in (1, 2):
        block, each = getattr(model.layers, str(i)), model.layers.plan[i].each
        x = np.asarray(layer_aux[i - 1][OUTPUT], np.float64)
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + config.norm_eps) * np.asarray(block.attn_norm.scale[...], np.float64)
        for kind, of, turns in ((QUERIES, block.attn.q, True), (KEYS, block.attn.k, True), (VALUES, block.attn.v, False)):
            y = np.einsum("btd,dnh->btnh", x, np.asarray(of.w[...], np.float64))
            if turns:
                at = angles(jnp.asarray(positions[None].repeat(2, 0), jnp.int32), each.rope, each.rope.rotated_size(y.shape[-1]))
                y = apply_rope(jnp.asarray(y, jnp.float32), each.rope, at)
            assert relative(layer_aux[i][kind], y) < 1e-4, (i, kind)


@pytest.mark.slow
def test_a_layer_that_attends_twice_is_refused():
    q = jnp.ones((2, 11, 2, 4))
    listening = Listening(WatchedAttend(Packed(SEGMENTS), heads=True))
    from argosy.ops.attention import Score

    listening(q, {"k": q, "v": q}, None, score=Score(1.0))
    with pytest.raises(ValueError, match="attends twice"):
        listening(q, {"k": q, "v": q}, None, score=Score(1.0))
