"""Groups of weights, rates by layer and states in 8 bits: what each weight gets."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from argosy.core.errors import BadInput
from argosy.models.parts.weight import Meaning
from argosy.train.optimizers.adam import AdamW
from argosy.train.optimizers.sgd import SGD
from argosy.train.optimizers.state_types import decode_state, encode_state
from argosy.train.schedule import Constant

STACKED = {
    "embed.w": (Meaning("VD", "V"), 2),
    "layers.block.mlp.up.w": (Meaning("DF", "D"), 3),
    "layers.block.norm.scale": (Meaning("D"), 2),
    "head.w": (Meaning("DV", "D"), 2),
}
SHAPES = {"embed.w": (7, 4), "layers.block.mlp.up.w": (3, 4, 5), "layers.block.norm.scale": (3, 4), "head.w": (4, 7)}
UNROLLED = {name: STACKED[name] for name in ("embed.w", "head.w")} | {
    name.replace("block", str(i)): (meaning, stored - 1)
    for name, (meaning, stored) in STACKED.items()
    if "block" in name
    for i in range(3)
}


def layers(address):
    return [address.replace("block", str(i)) for i in range(3)] if "block" in address else [address]


def moves(settings, meanings=STACKED):
    """What one step adds to weights of ones with gradients of ones, per layer: {name: number}."""
    shapes = {a: SHAPES.get(a) or SHAPES[a.replace(a.split(".")[1], "block")][1:] for a in meanings}
    names = layers if meanings is STACKED else lambda address: [address]
    transform = settings.build(Constant(warmup=0).build(5), meanings, layers=names)
    ones = {a: jnp.ones(s) for a, s in shapes.items()}
    updates, _ = transform.update(ones, transform.init(ones), ones)
    out = {}
    for address, update in updates.items():
        each = np.asarray(update).reshape(len(names(address)), -1)
        assert (each == each[:, :1]).all()
        out |= dict(zip(names(address), each[:, 0].tolist()))
    return out


def group(match, **more):
    return {"match": match} | more


PLAIN = {"learning_rate": 1.0, "weight_decay": 0.5, "clip": None}


def test_rates_decays_and_frozen_weights_are_those_of_the_last_group_that_matches():
    groups = [
        group("layers", rate=0.1),
        group(r"layers\.1", rate=0.25),
        group(r".*\.norm", weight_decay=2.0),
        group("embed", freeze=True),
    ]
    moved_by = moves(SGD(**PLAIN, groups=groups))
    assert moved_by["embed.w"] == 0
    assert moved_by["head.w"] == pytest.approx(-1.5)
    assert [moved_by[f"layers.{i}.mlp.up.w"] for i in range(3)] == pytest.approx([-0.15, -0.375, -0.15])
    assert [moved_by[f"layers.{i}.norm.scale"] for i in range(3)] == pytest.approx([-3.0] * 3)


def test_the_rate_falls_from_layer_to_layer():
    moved_by = moves(SGD(**PLAIN, layer_decay=0.5, groups=[group("head", rate=4)]))
    assert moved_by["head.w"] == pytest.approx(-1.5 * 4)
    assert [moved_by[f"layers.{i}.mlp.up.w"] / -1.5 for i in range(3)] == pytest.approx([0.125, 0.25, 0.5])
    assert moved_by["embed.w"] / -1.5 == pytest.approx(0.0625)


def test_stacked_layers_move_as_single_ones():
    groups = [group(r"layers\.0", freeze=True), group(r"layers\.2\.mlp", rate=0.3, weight_decay=0.0)]
    settings = AdamW(**PLAIN | {"clip": 1.0}, layer_decay=0.7, groups=groups)
    stacked, single = moves(settings), moves(settings, UNROLLED)
    assert stacked.keys() == single.keys()
    assert stacked == pytest.approx(single)
    assert stacked["layers.0.mlp.up.w"] == stacked["layers.0.norm.scale"] == 0


def test_frozen_layers_do_not_count_in_the_clipped_norm():
    """Otherwise the others would move less."""
    settings = {"learning_rate": 1.0, "weight_decay": 0.0, "clip": 1.0}
    moved_by = moves(SGD(**settings, groups=[group("layers", freeze=True)]))
    assert moved_by["head.w"] == pytest.approx(-1 / np.sqrt(28 + 28))


@pytest.mark.parametrize("match, hint", [("embedd", "embed"), (r"layers\.3", "layers"), ("[", "regular expression")])
def test_a_pattern_that_matches_nothing_is_an_error(match, hint):
    with pytest.raises(BadInput) as caught:
        moves(SGD(groups=[group(match, rate=0.5)]))
    assert hint in f"{caught.value.what} {caught.value.hint}"


def test_eight_bits_are_as_fine_as_their_paper():
    """arXiv:2110.02861, appendix F: dynamic quantization of normal numbers has a mean relative error of about 0.02; zeros stay."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((3, 700)), jnp.float32).at[:, 5].set(0)
    codes, scales = encode_state(x, True)
    assert codes.dtype == jnp.uint8
    assert scales.shape == (3, 3)
    back = np.asarray(decode_state(codes, scales, True, jnp.float32))
    assert (back[:, 5] == 0).all()
    assert 0.005 < np.abs(back - np.asarray(x)).mean() / np.abs(np.asarray(x)).mean() < 0.03
    # The largest of a block; there is no level at -1.
    large = np.asarray(x)[:, :256].argmax(1)
    np.testing.assert_allclose(back[np.arange(3), large], np.asarray(x)[np.arange(3), large], rtol=0.02)


def test_the_state_of_small_weights_stays_exact():
    state = AdamW(state="int8").build(Constant().build(5), STACKED).init({a: jnp.ones(s) for a, s in SHAPES.items()})
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state) if leaf.ndim} == {"float32"}
