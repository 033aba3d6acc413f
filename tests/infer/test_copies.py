"""Copies of a model on devices of their own."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from infer.test_tensor import SMALL, requests, split_over, tokens

from argosy.core.errors import BadInput
from argosy.infer.engine.cache import room_for_cache
from argosy.infer.engine.engine import Engine
from argosy.infer.engine.replicas import check_device_count, copy_to_devices, model_copies
from argosy.infer.placement import weights_home
from argosy.infer.sampling import sampler
from argosy.infer.settings import MTP, DraftModel, NGram
from argosy.infer.speculation.speculate import verify
from argosy.models import FAMILIES
from argosy.models.parts.weight import put, split
from argosy.weights.build import random_model


def module_of(family: str = "llama", example: str = "plain") -> Any:
    return random_model(FAMILIES[family].examples()[example], 0).module


def pointers(module: Any) -> dict[str, list[int]]:
    """Where the parts of each weight are in memory."""
    weights = split(module)[1]
    return {address: [s.data.unsafe_buffer_pointer() for s in a.addressable_shards] for address, a in weights.items()}


@pytest.mark.parametrize("tensor", [1, 2])
def test_copies_are_on_devices_of_their_own_and_hold_the_weights_of_a_cpu_once(tensor: int):
    module = module_of()
    if tensor == 2:
        split_over(module, 2)
    before, values = pointers(module), {address: np.asarray(a) for address, a in split(module)[1].items()}
    copies = model_copies(module, 3)
    assert copies[0] is module
    for i, copy in enumerate(copies):
        weights = split(copy)[1]
        assert {device.id for a in weights.values() for device in a.devices()} == {*range(i * tensor, (i + 1) * tensor)}
        assert pointers(copy) == before
        for address, a in weights.items():
            assert a.committed
            assert a.sharding.shard_shape(a.shape) == split(module)[1][address].sharding.shard_shape(a.shape)
            np.testing.assert_array_equal(np.asarray(a), values[address])
    assert split(copies[2])[0] == split(module)[0], "one graph, so that programs are traced once"


def test_one_copy_is_the_module_as_it_is():
    module = module_of()
    before = split(module)[1]
    assert model_copies(module, 1) == [module]
    assert all(a is before[address] for address, a in split(module)[1].items())
    assert weights_home(before) is None


def test_a_copy_has_weights_of_its_own():
    first, second = model_copies(module_of(), 2)
    old = {address: np.asarray(a) for address, a in split(first)[1].items()}
    put(second, copy_to_devices({address: a + 1 for address, a in split(first)[1].items()}, jax.devices()[1:2]))
    assert all(np.array_equal(np.asarray(a), old[address]) for address, a in split(first)[1].items())


def test_too_few_devices_are_a_mistake():
    check_device_count(8, 1)
    check_device_count(2, 4)
    check_device_count(1, 100)
    with pytest.raises(BadInput, match="copies = 9, but this process has 8 devices") as error:
        check_device_count(9, 1)
    assert "xla_force_host_platform_device_count=9" in (error.value.hint or "")
    with pytest.raises(BadInput, match="copies = 3 of tensor = 4 devices each, but this process has 8"):
        check_device_count(3, 4)


def test_copies_share_the_memory_that_caches_may_take_on_a_cpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("argosy.infer.engine.cache.memory_bytes", lambda: (16e9, 8e9))
    weights = split(module_of())[1]
    assert [room_for_cache(weights, copies) for copies in (1, 2, 4)] == [2e9, 1e9, 0.5e9]


def test_a_cache_has_the_same_size_though_free_memory_differs_a_little(monkeypatch: pytest.MonkeyPatch):
    """Programs are compiled for it: a start with 1 MB less of free memory found none of those that an earlier one had kept."""
    weights = split(module_of())[1]
    rooms = []
    for free in (20e9, 12.3e9, 12.2e9, 10.1e9, 9.9e9, 1.3e9, 1.25e9, 1e8):
        monkeypatch.setattr("argosy.infer.engine.cache.memory_bytes", lambda free=free: (24e9, free))
        rooms.append(room_for_cache(weights))
    assert rooms == [4e9, 3e9, 3e9, 2.5e9, 2e9, 3e8, 3e8, 2.5e7]


def test_the_state_of_an_engine_is_on_the_device_of_its_copy_and_tied_to_it():
    """State that is tied to no device would make every program compile anew once a step has returned it."""
    for i, copy in enumerate(model_copies(module_of(), 3)):
        engine = Engine(copy, SMALL)
        for a in jax.tree.leaves((engine.runner.caches, engine.runner.slots)):
            assert a.committed
            assert a.devices() == {jax.devices()[i]}
        assert engine.runner.devices == [jax.devices()[i]]


STRUCTURES: list[tuple[str, str, Callable[[], Any]]] = [
    ("llama", "plain", lambda: None),
    ("llama", "plain", lambda: DraftModel(model="itself", tokens=3)),
    ("qwen3_next", "mixed", lambda: NGram(tokens=3, lookup_min=1)),
    ("deepseek", "3", lambda: MTP(tokens=2)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "example", "method"), STRUCTURES)
def test_the_second_copy_answers_as_the_first_and_compiles_nothing_later(family: str, example: str, method: Any):
    settings = SMALL.model_copy(update={"speculative": method()})
    first, second = model_copies(module_of(family, example), 2)
    drafts = isinstance(settings.speculative, DraftModel)
    alone = tokens(Engine(first, settings, draft=first if drafts else None))
    engine = Engine(second, settings, draft=second if drafts else None)
    engine.warm_up()
    programs: list[Any] = [sampler.sample, sampler.write_slot, verify]
    if isinstance(settings.speculative, MTP):
        programs += [engine.speculation.drafter._ahead, engine.speculation.drafter._head]  # pyright: ignore
    sizes = [program.compilations for program in programs]
    assert tokens(engine) == alone
    assert len(alone) == len(requests())
    assert [program.compilations for program in programs] == sizes
