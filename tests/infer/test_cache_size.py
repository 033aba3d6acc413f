"""The size of a cache: as large as the room allows, and no larger."""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pydantic import ValidationError

from argosy.core.errors import BadInput
from argosy.infer.engine.cache import CacheNeeds, allocate_caches, cache_needs, reserve_caches
from argosy.infer.engine.engine import Engine
from argosy.infer.forward.passes import OneProgram
from argosy.infer.forward.step import PageTables, StepSizes
from argosy.infer.load import random_lm
from argosy.infer.settings import EngineSettings
from argosy.models import FAMILIES
from argosy.models.parts.attention.cache import AttentionWindow, bytes_of_caches
from argosy.models.parts.stack import Scan, Unroll
from argosy.models.parts.weight import abstract
from argosy.observe.memory import resident_bytes


def needs(family: str, example: str, window: int | None = None) -> CacheNeeds:
    change = {} if window is None else {"window": window}
    config = FAMILIES[family].examples()[example].model_copy(update=change)
    return cache_needs(config.build(Unroll()).layers.holds(), EngineSettings(page=4, budget=32, budget_decoding=32), jnp.float32, 640)


@pytest.mark.parametrize("sequences", [1.3, 1.9, 2.5, 7.2])
@pytest.mark.parametrize("family, example, window", [("gemma", "3", 24), ("llama", "plain", None)])
def test_pools_take_nearly_all_of_the_room_and_never_more(family: str, example: str, window: int | None, sequences: float):
    """Prompts have pages of windows beside those of decoding sequences, up to two of them: so bytes do not grow in one line."""
    needed = needs(family, example, window)
    assert bool(needed.windows) == (window is not None)
    room = 1.0 * needed.bytes(None, needed.size(99, int(sequences * needed.pages)))
    used = needed.bytes(None, needed.fitting(99, room, None))
    assert 0.97 * room <= used <= room


@pytest.mark.skipif(sys.platform != "linux", reason="the system tells no resident memory, or takes no pages back")
def test_a_pool_takes_memory_as_its_pages_are_written():
    """XLA writes zeros when it allocates: a pool of 4 GB was resident before the first request."""
    needed = needs("llama", "plain")
    pages = int(400e6 / needed.bytes(None, needed.size(1, 1000)) * 1000)
    # What XLA itself takes when it compiles for the first time is no part of it.
    reserve_caches(needed.specs, None, lambda: needed.empty(1, needed.size(1, 1)))
    before = resident_bytes()
    caches = reserve_caches(needed.specs, None, lambda: needed.empty(1, needed.size(1, pages)))
    assert bytes_of_caches(caches) > 380e6
    assert resident_bytes() - before < 60e6
    pool = jax.tree.leaves(caches)[0]
    address = pool.unsafe_buffer_pointer()
    pool = jax.jit(lambda a: a.at[7].set(1), donate_argnums=0)(pool)
    assert pool.unsafe_buffer_pointer() == address
    assert resident_bytes() - before < 60e6
    assert np.asarray(pool[6:9]).any((1, 2, 3)).tolist() == [False, True, False]


@pytest.mark.parametrize("form", [None, "int8"])
def test_reserved_caches_are_those_that_were_asked_for(form: str | None):
    needed = needs("gemma", "3", 24)
    needed = CacheNeeds(needed.specs, needed.page, needed.dtype, needed.longest, needed.windows, form)

    def make() -> Any:
        return needed.empty(2, needed.size(2, 2 * needed.pages))

    reserved, allocated = (jax.tree.leaves_with_path(f(needed.specs, None, make)) for f in (reserve_caches, allocate_caches))
    assert [(path, a.shape, a.dtype) for path, a in reserved] == [(path, a.shape, a.dtype) for path, a in allocated]
    assert not any(np.asarray(a).any() for _, a in [*reserved, *allocated])


@pytest.mark.parametrize("window", [None, 24])
def test_a_step_of_several_kinds_of_rows_copies_no_pool(window: int | None):
    """A group that reads the pool before the next group writes to it makes XLA copy it: 3.7 GB in each step of decoding rows beside
    prompts."""
    family, example = ("llama", "plain") if window is None else ("gemma", "3")
    change = {} if window is None else {"window": window}
    model = FAMILIES[family].examples()[example].model_copy(update=change).build(Unroll())
    model.dtype, forward = jnp.float32, OneProgram(model)
    needed = needs(family, example, window)
    windows = {AttentionWindow(window): 2048} if window else {}
    extent = needed.size(4, 2048)._replace(windows=windows)
    caches = jax.eval_shape(lambda: needed.empty(4, extent))
    tables = PageTables(needed.page, 4, tuple(windows))
    for sizes in (StepSizes(4, 2, 32, tables), StepSizes(0, 2, 32, tables, 4, 3)):
        inputs = np.zeros(4, np.int32), np.zeros(sizes.words, np.int32)
        arguments = abstract(model), caches, inputs, (np.zeros(4, np.int32),)
        memory = forward.program(forward.step_kind).lower(*arguments, sizes).compile().memory_analysis()
        assert memory.alias_size_in_bytes >= bytes_of_caches(caches)
        assert memory.temp_size_in_bytes < 0.1 * bytes_of_caches(caches)


def test_the_size_of_the_cache_may_be_given_in_bytes():
    model = random_lm(FAMILIES["llama"].examples()["plain"], 0).module
    size = bytes_of_caches(Engine(model, EngineSettings(page=4, context=32, pages=50)).runner.caches)
    engine = Engine(model, EngineSettings(page=4, context=32, memory=size))
    assert engine.pages.count == 50
    assert bytes_of_caches(engine.runner.caches) == size
    with pytest.raises(BadInput, match=r"engine\.memory = .* a sequence of 32 tokens takes"):
        Engine(model, EngineSettings(page=4, context=32, memory=size // 50))
    with pytest.raises(ValidationError, match="both set the size"):
        EngineSettings(memory=1, pages=1)


@pytest.mark.parametrize("family, example", [("llama", "plain"), ("gemma", "3"), ("qwen3_next", "mixed")])
def test_stacked_caches_have_as_many_layers_as_the_plan_has_of_each_kind(family: str, example: str):
    config = FAMILIES[family].examples()[example]
    stacked, single = (config.build(run()).layers.holds() for run in (Scan, Unroll))
    assert sum(layers or 0 for _, layers in stacked.values()) == len(single) == config.layers
    assert all(layers is None for _, layers in single.values())
    assert max(layers or 0 for _, layers in stacked.values()) > 1
