"""What enters a language model beside token ids, by a toy tower: vectors in place of tokens, and positions with several axes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import relative

from argosy.data.rows.groups import Example, ExampleGroup, GroupRows
from argosy.models.llama import LlamaConfig
from argosy.models.parts.attention.attend import Contiguous, Packed
from argosy.models.parts.attention.cache import contiguous
from argosy.models.parts.attention.rope import angles
from argosy.models.parts.einsum import Einsum
from argosy.models.parts.inputs import Inputs, Overlay, batch_inputs, overlay_fields
from argosy.models.parts.stack import Unroll
from argosy.models.parts.stack.addresses import layer_addresses
from argosy.models.parts.weight import fill, merge, put, split
from argosy.models.settings import Rope
from argosy.train.objectives.next_token import NextToken
from argosy.train.optimizers.adam import AdamW
from argosy.train.schedule import Constant
from argosy.train.state import TrainState, meanings_of, split_trained
from argosy.train.step import make_step

PLACE = 7  # the id that stands where a vector of the tower is
SIZES: dict[str, Any] = {"vocab": 31, "width": 24, "layers": 2, "ffn": 40, "heads": 2, "kv_heads": 1, "context": 64}
CONFIG = LlamaConfig(**SIZES, rope=Rope(sections=(2, 3, 1)))


class Tower(nnx.Module):
    """Patches [B P I] to vectors [B P D]."""

    def __init__(self, numbers: int, width: int):
        self.proj = Einsum("BTI,ID->BTD", {"I": numbers, "D": width}, legend=(("I", "patch"),))

    def __call__(self, patches: Any) -> Any:
        return jnp.tanh(self.proj(patches))


def noisy(module: Any, seed: int = 1) -> Any:
    fill(module, jax.random.key(seed), addresses=layer_addresses(module))
    return module


MODEL = noisy(CONFIG.build(Unroll()))
TOWER = noisy(Tower(5, CONFIG.width))


def seeing(seed: int, length: int = 12, patches: int = 4, at: int = 3) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Ids, vectors, where they stand, and rotary positions of one sequence with one image of 2 x 2 patches."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(8, CONFIG.vocab, length)
    where = np.zeros(length, bool)
    where[at : at + patches] = True
    ids[where] = PLACE
    vectors = np.zeros((length, CONFIG.width), np.float32)
    vectors[where] = TOWER(jnp.asarray(rng.normal(size=(1, patches, 5)), jnp.float32))[0]
    # As Qwen2-VL counts: the patches share their time, and the text goes on behind the largest of the axes.
    positions = np.repeat(np.arange(length)[:, None], 3, 1)
    positions[at : at + patches] = at + np.stack([np.zeros(4, int), [0, 0, 1, 1], [0, 1, 0, 1]], -1)
    positions[at + patches :] -= patches - 2
    return ids, vectors, where, positions


def inputs(*sequences: Any) -> Inputs:
    ids, vectors, where, positions = (jnp.asarray(np.stack(parts)) for parts in zip(*sequences))
    return Inputs(ids.astype(jnp.int32), Overlay(vectors, where), positions.astype(jnp.int32))


def test_vectors_stand_where_tokens_would():
    """A model whose vocabulary holds the vectors as further words gives the same logits."""
    sequence = seeing(0)
    ids, vectors, where, _ = sequence
    model = noisy(LlamaConfig(**SIZES).build(Unroll()))
    wide = noisy(LlamaConfig(**SIZES | {"vocab": SIZES["vocab"] + 4}).build(Unroll()))
    leaves = split(model)[1]
    put(wide, {a: w for a, w in leaves.items() if a not in ("embed.w", "head.w")})
    put(wide, {"embed.w": jnp.concatenate([leaves["embed.w"], jnp.asarray(vectors[where])])})
    words = np.where(where, SIZES["vocab"] + np.cumsum(where) - 1, ids)
    attend = Packed(jnp.ones((1, 12), jnp.int32))
    want = wide.hidden(jnp.asarray(words[None], jnp.int32), attend)[0]
    with_vectors = inputs(sequence)._replace(positions=None)
    assert relative(model.hidden(with_vectors, attend)[0], want) < 1e-5
    assert relative(model.hidden(with_vectors.ids, attend)[0], want) > 0.1


def test_sections_turn_by_their_axes():
    """Against the formula of arXiv:2409.12191, section 2.1: pair i turns by the axis whose section it is in."""
    rope, at = CONFIG.rope, np.asarray([[[3, 5, 9], [2, 2, 2]]])
    freq = rope.base ** -(np.arange(0, 12, 2) / 12)
    want = np.concatenate([at[..., [0]] * freq[:2], at[..., [1]] * freq[2:5], at[..., [2]] * freq[5:]], -1)
    cos, sin = angles(jnp.asarray(at), rope, 12)
    assert relative(cos[:, :, 0], np.cos(want)) < 1e-6
    assert relative(sin[:, :, 0], np.sin(want)) < 1e-6
    plain = angles(jnp.asarray(at[..., 0]), rope, 12)
    assert relative(cos[0, 1], plain[0][0, 1]) < 1e-6
    with pytest.raises(ValueError, match="sections"):
        angles(jnp.asarray(at), Rope(), 12)
    with pytest.raises(ValueError, match="sections"):
        angles(jnp.asarray(at[..., :2]), rope, 12)


def test_packed_equals_alone():
    first, other = seeing(1), seeing(2, at=5)
    row = tuple(np.concatenate(parts) for parts in zip(first, other))
    segments = jnp.asarray([[1] * 12 + [2] * 12])
    together = MODEL.hidden(inputs(row), Packed(segments))[0]
    for start, sequence in ((0, first), (12, other)):
        alone = MODEL.hidden(inputs(sequence), Packed(jnp.ones((1, 12), jnp.int32)))[0]
        assert relative(together[:, start : start + 12], alone) < 1e-5


def test_decoding_equals_the_whole_sequence():
    sequence = inputs(seeing(3))
    whole = MODEL(sequence, Packed(jnp.ones((1, 12), jnp.int32)))[0]
    cache = contiguous(MODEL.layers.holds(), 1, 16, jnp.float32)
    parts = []
    for start, stop in ((0, 5), (5, 6), (6, 12)):
        at = jnp.arange(start, stop)[None]
        here = jax.tree.map(lambda a, s=slice(start, stop): a[:, s], sequence)
        y, cache, _ = MODEL(here, Contiguous(at, jnp.ones_like(at, bool)), cache)
        parts.append(y)
    assert relative(jnp.concatenate(parts, 1), whole) < 1e-5


class WithVectors(NextToken):
    """Next-token prediction over text and vectors."""

    def reads(self) -> Any:
        return super().reads() | overlay_fields(axes=3)


def test_examples_carry_vectors_to_the_objective():
    sequences = [seeing(seed, at=2 + seed) for seed in range(4)]
    examples = [
        Example(
            ids.tolist(),
            weights=(~where).astype(float).tolist(),
            inputs={"overlay": vectors, "overlay_where": where, "rotary_positions": positions.astype(np.int32)},
        )
        for ids, vectors, where, positions in sequences
    ]
    rows = GroupRows([ExampleGroup([example]) for example in examples], 15, CONFIG.vocab)
    for name, field in WithVectors().reads().items():
        assert (rows.fields[name].per, rows.fields[name].at) == (field.per, field.at)
    batch = {name: jnp.asarray(a) for name, a in rows.gather(np.arange(4)).items()}
    assert batch["overlay"].shape == (4, 15, CONFIG.width)
    read = batch_inputs(batch)
    want = inputs(*sequences)
    assert (read.overlay.values[:, :11] == want.overlay.values[:, :11]).all()
    assert (read.positions[:, :11] == want.positions[:, :11]).all()

    graph, params, rest = split_trained(merge(*split(MODEL)))
    rate = Constant(warmup=0).build(20)
    transform = AdamW(learning_rate=1e-2).build(rate, meanings_of(MODEL))
    state = TrainState.start(params, rest, transform.init(params), 0)
    step, losses = jax.jit(make_step(graph, WithVectors(), transform, rate)), []
    for _ in range(20):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.7 * losses[0]
    blind = jax.jit(make_step(graph, WithVectors(), transform, rate))(
        TrainState.start(params, rest, transform.init(params), 0), batch | {"overlay": 0 * batch["overlay"]}
    )[1]
    assert abs(float(blind["loss"]) - losses[0]) > 1e-3


def test_entries_of_one_input_have_one_shape():
    from argosy.core.errors import BadInput

    examples = [Example([1, 2, 3], inputs={"overlay": np.zeros((3, width))}) for width in (4, 5)]
    with pytest.raises(BadInput, match="different shapes"):
        GroupRows([ExampleGroup([example]) for example in examples], 8, 9)
