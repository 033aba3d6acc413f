"""The TPU kernel for pages: called as its own reference wants it, over joined pools, and compiled by the real compiler."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import described_tpus
from jax.sharding import NamedSharding, PartitionSpec

from argosy.core.errors import Unsupported
from argosy.infer.forward.passes import OneProgram
from argosy.infer.forward.step import PageTables, StepSizes
from argosy.models.llama import LlamaConfig
from argosy.models.parts.attention.cache import AttentionWindow, empty_pools, layouts
from argosy.models.parts.weight import abstract, logical, split
from argosy.ops.attention import Score
from argosy.ops.op import implementations
from argosy.ops.paged import ragged as paged_ragged
from argosy.ops.paged.attention import join_heads, keys_and_values, paged_attention, paged_reference, with_longer_heads
from argosy.parallel.mesh import MeshSettings
from argosy.parallel.rules import DEFAULT, shardings
from argosy.parallel.scope import scope


def inputs_of(T, score, lengths):
    """Rows whose last tokens are padding. What no row owns is NaN."""
    rng = np.random.default_rng(0)
    pages, page, P, N, K, H = 24, 4, 6, 6, 2, 128
    lengths = np.asarray(lengths, np.int32)
    keys, values = (jnp.asarray(rng.normal(size=(pages, page, K, H)), jnp.float32) for _ in range(2))
    table = np.full((len(lengths), P), -1, np.int32)
    free = iter(rng.permutation(pages))
    for row, length in zip(table, lengths):
        row[: -(-length // page)] = [next(free) for _ in range(-(-length // page))]
    owned = np.zeros((pages, page), bool)
    for row, length in zip(table, lengths):
        owned[row[np.arange(length) // page], np.arange(length) % page] = True
    keys, values = (jnp.where(owned[..., None, None], a, jnp.nan) for a in (keys, values))
    q = jnp.asarray(rng.normal(size=(len(lengths), T, N, H)), jnp.float32)
    new = np.minimum(np.minimum([T, 1, T, 2], T)[: len(lengths)], lengths)
    at = jnp.asarray((lengths - new)[:, None] + np.arange(T), jnp.int32)
    return (q, (keys, values), jnp.asarray(table), jnp.asarray(lengths), at, score), np.arange(T) < new[:, None]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"window": 5}, {"cap": 3.0}])
@pytest.mark.parametrize("T", [1, 4])
def test_it_is_called_as_its_reference_wants_it(T, options):
    """JAX's own reference of its kernel, through our call, gives what ours gives. The kernel itself runs on TPUs alone."""
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ref_ragged_paged_attention

    (q, pools, *rest), real = inputs_of(T, Score(0.3, **options), [7, 21, 0, 14])
    y = paged_ragged._call(ref_ragged_paged_attention, q, join_heads(*pools), *rest)
    expected = paged_reference(q, pools, *rest)
    np.testing.assert_allclose(y[real], expected[real], atol=1e-5)


def test_both_layouts_of_pools_give_the_same():
    (q, pools, *rest), real = inputs_of(4, Score(0.3), [7, 21, 0, 14])
    both = join_heads(*pools)
    assert all(np.array_equal(a, b, equal_nan=True) for a, b in zip(keys_and_values([both]), pools))
    for name in ("reference", "blocked"):
        with implementations(paged_attention=name):
            separate, two, filled = (
                paged_attention(q, layout, *rest) for layout in (pools, (both,), (with_longer_heads(both, 160),))
            )
            narrow = paged_attention(q, (with_longer_heads(both, 160),), *rest, lse=True)
        np.testing.assert_array_equal(np.asarray(separate)[real], np.asarray(two)[real])
        assert filled.shape == narrow[0].shape == separate.shape
        for other in (filled, narrow[0]):
            np.testing.assert_allclose(np.asarray(separate)[real], np.asarray(other)[real], rtol=1e-6)


def test_what_it_cannot_do_is_refused():
    (q, pools, *rest), _ = inputs_of(4, Score(0.3), [7, 21])
    with implementations(paged_attention="ragged"), pytest.raises(Unsupported, match="is for TPUs"):
        paged_attention(q, pools, *rest)
    assert paged_ragged.ragged_refusal(8, 128, jnp.bfloat16) is None
    assert all("not 128" in (paged_ragged.ragged_refusal(8, size, jnp.bfloat16) or "") for size in (64, 256))
    assert "tile" in (paged_ragged.ragged_refusal(3, 128, jnp.float32) or "")
    assert "int8" in (paged_ragged.ragged_refusal(8, 128, jnp.int8) or "")


@pytest.mark.tpu
@pytest.mark.parametrize(
    ("name", "tensor", "window"),
    [("v5e:2x2", 1, None), ("v6e:2x2", 1, None), ("v6e:2x2", 2, None), ("v6e:2x2", 1, 256), ("v5p:2x2x1", 1, None)],
)
def test_a_step_of_the_engine_compiles_for_a_tpu(name, tensor, window, monkeypatch):
    """Decoding rows beside prompts: a kernel for each group in each layer, and the pools are updated in place. Several devices share
    the heads; a layer with a window has its own pool."""
    devices = described_tpus(monkeypatch, name)[:tensor]
    config = LlamaConfig(vocab=512, width=512, layers=2, heads=4, kv_heads=2, head_size=128, ffn=1024, context=2048)
    config = config if window is None else config.model_copy(update={"window": window, "pattern": "LG"})
    windows = {} if window is None else {AttentionWindow(window): 400}
    model = config.build()
    model.dtype = jnp.bfloat16
    sizes, picks = StepSizes(8, 4, 32, PageTables(16, 128, tuple(windows))), 12
    mesh = MeshSettings(fsdp=1, tensor=tensor).build(devices)
    places = shardings(logical(model), {a: s.shape for a, s in abstract(model).items()}, DEFAULT, mesh)

    def there(shape, dtype, spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    with scope(mesh):
        forward = OneProgram(model)
        spans = {"longest": 2048, "slack": 2048, "windows": windows}
        caches = jax.eval_shape(lambda: empty_pools(forward.specs, 8, 1024, 16, jnp.bfloat16, **spans))
        assert {key for cache in caches.values() for key in cache} == {"kv", *["window.kv" for _ in windows]}
        weights = {a: there(s.shape, jnp.bfloat16, places[a].spec) for a, s in abstract(model).items()}
        pools = jax.tree.map(lambda a, spec: there(a.shape, a.dtype, spec), caches, layouts(forward.specs, caches))
        words = [there((n,), jnp.int32, PartitionSpec()) for n in (8, sizes.words, picks)]
        compiled = forward.program(forward.step_kind).lower(weights, pools, tuple(words[:2]), (words[2],), sizes).compile()
    assert set(split(model)[1]) == set(weights)
    kernels = re.findall('custom_call_target="tpu_custom_call"', compiled.as_text())
    assert len(kernels) >= 2
    cache_bytes = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(caches)) / tensor
    assert compiled.memory_analysis().temp_size_in_bytes < cache_bytes, "the pools are not copied"
