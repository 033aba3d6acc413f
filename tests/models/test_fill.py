"""Random starts: the numbers of a weight depend on the key and its own name, whatever program draws them."""

import jax
import numpy as np
import pytest
from laws.families import CASES

from argosy.models.parts import weight
from argosy.models.parts.stack import Scan, Unroll
from argosy.models.parts.stack.addresses import layer_addresses, to_layers
from argosy.models.parts.weight import fill, split
from argosy.run.settings.recipe_files import preset_config


def filled_model(config, run, seed=7):
    model = config.build(run)
    fill(model, jax.random.key(seed), addresses=layer_addresses(model))
    return {name: np.asarray(a) for name, a in to_layers(model, split(model)[1]).items()}


@pytest.fixture(scope="module")
def start():
    return filled_model(preset_config("argosy-1m"), Unroll())


def test_a_seed_draws_the_numbers_it_always_drew(start):
    """A changed draw is another model under the same seed. To the last bit but one, which is the compiler's."""
    golden = {
        "embed.w": [-0.0216651689, 0.0311425887, 0.0307812318, 0.025762096],
        "layers.2.attn.q.w": [0.0680845678, -0.0115264673, -0.0306698382, -0.0434983969],
        "layers.0.mlp.down.w": [-0.0876704976, 0.00724465819, 0.0848742649, -0.0511846878],
    }
    for name, numbers in golden.items():
        assert np.allclose(start[name].ravel()[[0, 1, 777, -1]], numbers, rtol=1e-6, atol=0), name


def test_scan_and_unroll_start_equal_bit_for_bit(start):
    scanned = filled_model(preset_config("argosy-1m"), Scan())
    assert set(scanned) == set(start)
    assert all(np.array_equal(scanned[name], a) for name, a in start.items())


@pytest.mark.parametrize(("run", "at_once"), [(Unroll(), 1 << 30), (Scan(), 1 << 12)], ids=["one program", "chunks"])
def test_a_large_model_draws_the_same_numbers_in_bounded_chunks(monkeypatch, run, at_once):
    config = CASES["llama-plain"]
    small = filled_model(config, run)
    monkeypatch.setattr(weight, "SMALL", 0)
    monkeypatch.setattr(weight, "AT_ONCE", at_once)
    chunks = []
    count = weight._chunks
    monkeypatch.setattr(weight, "_chunks", lambda kinds: [chunks.append(c) or c for c in count(kinds)])
    large = filled_model(config, run)
    assert set(large) == set(small)
    for name, a in small.items():
        assert np.allclose(large[name], a, rtol=3e-7, atol=0), name
    assert (len(chunks) == 1) == (at_once == 1 << 30)
