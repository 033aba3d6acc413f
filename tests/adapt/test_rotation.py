"""Rotations leave the function of a model as it is, or are refused by name; Hadamard matrices by their definition."""

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import relative
from laws.families import CASES, built, marked, tokens_of

from argosy.adapt.hadamard import hadamard_rotation, paley_part
from argosy.adapt.rotation import RotatedTensors, rotation_plan
from argosy.core.errors import Unsupported
from argosy.core.formats import Arrays
from argosy.models.parts.stack import Unroll
from argosy.models.parts.weight import put, split


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


@pytest.mark.parametrize("name", marked(CASES))
def test_a_rotated_model_is_the_same_function(name):
    """Over all examples of all families: logits are equal, and every weight on the stream is another."""
    config = CASES[name]
    model = built(config, Unroll())
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


def test_which_structures_are_refused():
    """By the name of the part that does not allow it; all others are rotated."""
    said = dict.fromkeys(("gemma", "olmo"), "post_attn_norm")
    said |= {"deepseek": "DeepSeekDecoder", "gpt2": "LayerNorm", "bert": "TextEncoder"}
    said |= {"clip_text": "ClipTextEncoder", "t5": "T5Encoder"}
    for name, config in CASES.items():
        why = None if name in ("gemma-1", "deepseek-2", "deepseek-2-lite") else said.get(name.split("-")[0])
        why = "scores texts" if why is None and config.scored else why
        if why is None:
            assert rotation_plan(config).turns, name
            continue
        with pytest.raises(Unsupported, match=f"rotate=hadamard: .*{why}") as error:
            rotation_plan(config)
        assert error.value.hint


def test_outliers_of_a_channel_are_spread():
    """What the rotation is for: one channel of the stream fifty times as large costs four bits most of their precision."""
    config = CASES["llama-plain"]
    leaves = {a: np.array(w) for a, w in split(built(config, Unroll()))[1].items()}
    leaves["layers.1.attn.q.w"][5] *= 50
    w = RotatedTensors(config, Arrays(leaves)).read("layers.1.attn.q.w")
    peak = lambda a: np.abs(a).max(0).mean() / np.sqrt(np.square(a).mean())  # noqa: E731
    assert peak(w) < 0.6 * peak(leaves["layers.1.attn.q.w"])
