"""Rotations leave the function of a model as it is, or are refused by name; Hadamard matrices by their definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import relative
from laws.families import CASES, noisy_model, parameters_of, tokens_of

from argosy.adapt.hadamard import hadamard_rotation
from argosy.adapt.rotation import RotatedTensors, rotation_plan
from argosy.core.errors import BadInput, Unsupported
from argosy.core.formats import Arrays
from argosy.models.parts.attention.attend import Packed
from argosy.models.parts.stack import Scan, Unroll
from argosy.models.parts.weight import put, split
from argosy.ops.hadamard import paley_part

ONLINE = ("ffn", "heads", "keys")


@jax.jit
def forward(model, tokens):
    return model(tokens, model.config.attend(jnp.ones_like(tokens)))[0]


@pytest.mark.parametrize("n", [1, 2, 8, 12, 20, 24, 28, 36, 44, 60, 64, 576, 960])
def test_hadamard_matrices_are_orthogonal_with_entries_of_one_size(n):
    matrix, is_hadamard = hadamard_rotation(n, 3)
    assert is_hadamard
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(n), atol=1e-12)
    np.testing.assert_allclose(np.abs(matrix), n**-0.5, rtol=1e-12)
    assert n < 8 or not np.array_equal(matrix, hadamard_rotation(n, 4)[0])


@pytest.mark.parametrize("n", [3, 6, 14, 22, 100, 344])
def test_other_sizes_are_orthogonal(n):
    matrix, is_hadamard = hadamard_rotation(n, 3)
    assert is_hadamard == (paley_part(n)[0] is not None)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(n), atol=1e-12)


@pytest.mark.parametrize("name", parameters_of(CASES))
def test_a_rotated_model_is_the_same_function(name):
    """Over all examples of all families: logits are equal, and every weight on the stream is another."""
    config = CASES[name]
    model = noisy_model(config, Unroll())
    leaves = {a: np.asarray(w) for a, w in split(model)[1].items()}
    try:
        rotated = RotatedTensors(config, Arrays(leaves))
    except Unsupported:
        return  # the next test says for which
    other = rotated.config.build(Unroll())
    put(other, {name: jnp.asarray(rotated.read(name)) for name in rotated.names})
    tokens = tokens_of(config)
    expected = np.asarray(forward(model, tokens))
    assert relative(forward(other, tokens), expected) < 2e-5
    changed = [a for a in rotated.plan.turns if a in leaves]
    assert all(relative(rotated.read(a), leaves[a]) > 1e-2 for a in changed)
    assert {a for a in leaves if leaves[a].shape and not np.array_equal(rotated.read(a), leaves[a])} >= set(changed)


@pytest.mark.parametrize("name", parameters_of(CASES, ("llama", "gpt_oss")))
def test_what_is_rotated_while_the_model_runs_changes_no_number(name):
    """As QuaRot's: the model computes what it did, with weights that are others, in both layouts."""
    config = CASES[name]
    leaves = {a: np.asarray(w) for a, w in split(noisy_model(config, Unroll()))[1].items()}
    try:
        rotated, online = RotatedTensors(config, Arrays(leaves)), RotatedTensors(config, Arrays(leaves), ONLINE)
    except Unsupported:
        return
    tokens = tokens_of(config)
    expected = np.asarray(forward(noisy_model(config, Unroll()), tokens))
    other = online.config.build(Unroll())
    assert online.config.rotations == ONLINE
    put(other, {name: jnp.asarray(online.read(name)) for name in online.names})
    assert relative(forward(other, tokens), expected) < 3e-5
    downs = [a for a in leaves if ".mlp." in a and a.endswith("down.w")]
    assert downs
    assert all(relative(online.read(a), rotated.read(a)) > 1e-2 for a in downs)
    # Without its part of the work, each rotation changes the function.
    across_heads = any(turn.kind == "online" for a, turns in online.plan.turns.items() if a.endswith("o.w") for turn in turns)
    for omitted in ("ffn", "heads") if across_heads else ("ffn",):
        partial = online.config.model_copy(update={"rotations": tuple(rotation for rotation in ONLINE if rotation != omitted)}).build(
            Unroll()
        )
        put(partial, {name: jnp.asarray(online.read(name)) for name in online.names})
        assert relative(forward(partial, tokens), expected) > 1e-3, omitted


@pytest.mark.parametrize("name", parameters_of(CASES, ("llama",)))
def test_rotations_are_the_same_in_scanned_layers(name):
    config = CASES[name]
    if not config.causal:
        with pytest.raises(ValueError, match="rotations are built for models that predict tokens"):
            type(config).model_validate(config.model_dump() | {"rotations": ("ffn",)})
        return
    # Attention of these families is latent or gated, and has no heads and keys to rotate.
    rotations = ("ffn",) if name.partition("-")[0] in ("deepseek", "qwen3_next") else ONLINE
    config = config.model_copy(update={"rotations": rotations})
    tokens = tokens_of(config)
    assert relative(forward(noisy_model(config, Scan()), tokens), forward(noisy_model(config, Unroll()), tokens)) < 2e-5


def test_keys_are_spread_before_they_are_kept(monkeypatch):
    """One feature of every key fifty times as large: after the rotation no feature of what the cache holds is."""
    config = CASES["llama-plain"]
    leaves = {a: np.array(w) for a, w in split(noisy_model(config, Unroll()))[1].items()}
    leaves["layers.0.attn.k.w"][..., 3] *= 50
    peaks, keys, attend = [], [], Packed.__call__
    monkeypatch.setattr(
        Packed, "__call__", lambda self, q, kv, *rest, **options: keys.append(kv["k"]) or attend(self, q, kv, *rest, **options)
    )
    for rotations in ((), ("keys",)):
        model = config.model_copy(update={"rotations": rotations}).build(Unroll())
        put(model, {a: jnp.asarray(w) for a, w in leaves.items()})
        keys.clear()
        forward.__wrapped__(model, tokens_of(config))
        k = np.asarray(keys[0])
        peaks.append(np.abs(k).max(-1).mean() / np.sqrt(np.square(k).mean()))
    assert peaks[1] < 0.75 * peaks[0]


def test_a_model_is_rotated_once():
    config = CASES["llama-plain"].model_copy(update={"rotations": ("ffn",)})
    with pytest.raises(Unsupported, match="rotated already"):
        rotation_plan(config, ONLINE)
    # Its weights may still be rotated as others are.
    leaves = {a: np.asarray(w) for a, w in split(noisy_model(config, Unroll()))[1].items()}
    rotated = RotatedTensors(config, Arrays(leaves))
    other = rotated.config.build(Unroll())
    put(other, {name: jnp.asarray(rotated.read(name)) for name in rotated.names})
    tokens = tokens_of(config)
    assert relative(forward(other, tokens), forward(noisy_model(config, Unroll()), tokens)) < 2e-5


def test_which_structures_are_refused():
    """By the name of the part that does not allow it; all others are rotated."""
    problems = dict.fromkeys(("gemma", "olmo"), "post_attn_norm")
    problems |= {"deepseek": "DeepSeekDecoder", "gpt2": "LayerNorm", "bert": "TextEncoder"}
    problems |= {"clip_text": "ClipTextEncoder", "t5": "T5Encoder"}
    for name, config in CASES.items():
        why = None if name in ("gemma-1", "deepseek-2", "deepseek-2-lite") else problems.get(name.split("-")[0])
        why = "scores texts" if why is None and config.scored else why
        for online in ((), ONLINE):
            if why is None:
                assert rotation_plan(config, online).turns, name
                continue
            with pytest.raises(Unsupported, match=f"rotate: .*{why}") as error:
                rotation_plan(config, online)
            assert error.value.hint


def test_a_rotation_that_no_layer_has_is_refused():
    """Latent attention has no heads to rotate: the setting would change nothing."""
    config = CASES["deepseek-2"]
    for rotation in ("heads", "keys"):
        with pytest.raises(BadInput, match=f"rotations has `{rotation}`"):
            config.model_copy(update={"rotations": (rotation,)}).build(Unroll())
    config.model_copy(update={"rotations": ("ffn",)}).build(Unroll())


def test_outliers_of_a_channel_are_spread():
    """What the rotation is for: one channel of the stream fifty times as large costs four bits most of their precision."""
    config = CASES["llama-plain"]
    leaves = {a: np.array(w) for a, w in split(noisy_model(config, Unroll()))[1].items()}
    leaves["layers.1.attn.q.w"][5] *= 50
    w = RotatedTensors(config, Arrays(leaves)).read("layers.1.attn.q.w")
    peak = lambda a: np.abs(a).max(0).mean() / np.sqrt(np.square(a).mean())  # noqa: E731
    assert peak(w) < 0.6 * peak(leaves["layers.1.attn.q.w"])
