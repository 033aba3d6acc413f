"""Sizes the KV cache by the memory that it may take, and allocates it."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jaxtyping import Array

from argosy.core.errors import BadInput
from argosy.core.process.resident import drop
from argosy.infer.placement import Home, home_mesh
from argosy.infer.settings import EngineSettings
from argosy.models.parts.attention.cache import (
    AttentionWindow,
    Caches,
    Specs,
    bytes_of_caches,
    constrain_caches,
    empty_pools,
    layouts,
)
from argosy.models.parts.weight import Leaves
from argosy.observe.environment import memory_bytes
from argosy.observe.readable import format_bytes
from argosy.ops.programs.programs import Program, Programs
from argosy.parallel.scope import default_device, scope

# A mesh of devices that are here, or of devices that are only described.
AnyMesh = Mesh | AbstractMesh
# CACHE, OF_FREE: in the memory of a CPU, the cache takes at most this many bytes and this share of the free memory, unless one sequence
# needs more. OF_DEVICE: on other devices it takes this share of the memory that the weights leave free. Activations, logits and XLA's
# programs need the rest.
CACHE, OF_FREE, OF_DEVICE = 4e9, 0.25, 0.8


def room_for_cache(weights: Leaves, copies: int = 1, memory: int | None = None) -> float:
    """The number of bytes that a cache may take on each device that holds these weights.

    Args:
        copies: number of engines in this process, each with its own cache. On a CPU they share the memory.
        memory: the number from the settings (`engine.memory`), returned as it is; None: computed from free memory.
    """
    if memory is not None:
        return float(memory)
    devices = {device for a in weights.values() if isinstance(a, jax.Array) for device in a.devices()}
    stats = [device.memory_stats() or {} for device in devices if device.platform != "cpu"]
    if stats and all("bytes_limit" in device_stats for device_stats in stats):
        return OF_DEVICE * min(device_stats["bytes_limit"] - device_stats["bytes_in_use"] for device_stats in stats)
    return host_room(memory_bytes()[1]) / max(len(devices) * copies, 1)


def host_room(free: float | int | None) -> float:
    """The number of bytes that all caches together may take in the memory of a CPU.

    Args:
        free: free bytes of memory; None: unknown.
    """
    return CACHE if free is None else min(CACHE, _in_steps(OF_FREE * free))


def _in_steps(room: float) -> float:
    """Rounds a number of bytes down to a multiple of 500 MB, or of 50 MB if it is smaller. Programs are compiled for the size of the
    cache, and free memory differs at each start: without rounding, every start would compile them again."""
    step = next((step for step in (5e8, 5e7) if room >= step), 1)
    return room // step * step


class WindowShare(NamedTuple):
    """The most pages that one sequence keeps for the layers with one sliding window.

    decoding: pages while it decodes.
    filling: pages while its prompt is computed.
    """

    decoding: int
    filling: int


class CacheSize(NamedTuple):
    """The size of a paged cache.

    pages: number of pages for layers that attend to the whole sequence.
    windows: number of pages for the layers of each sliding window.
    """

    pages: int
    windows: dict[AttentionWindow, int]


@dataclass(frozen=True)
class CacheNeeds:
    """The memory that the cache of a model takes.

    specs: what each layer caches.
    page: tokens per page.
    dtype: the model's type.
    longest: the most tokens of one sequence.
    windows: the sliding windows whose layers have pools of their own, with the pages of one sequence there.
    narrow: the quantized type of the cache, as in `empty_pools`; None: not quantized.
    """

    specs: Specs
    page: int
    dtype: Any
    longest: int
    windows: Mapping[AttentionWindow, WindowShare]
    narrow: str | None = None

    @property
    def pages(self) -> int:
        """The most pages of one sequence."""
        return -(-self.longest // self.page)

    def empty(self, slots: int, extent: CacheSize) -> Caches:
        """Empty caches: page pools of this size, and the states of `slots` slots. Sequences in them may be rolled back to any
        length."""
        options: Any = {"longest": self.longest, "slack": self.longest, "windows": extent.windows, "narrow": self.narrow}
        return empty_pools(self.specs, slots, extent.pages, self.page, self.dtype, **options)

    def bytes(self, mesh: AnyMesh | None, extent: CacheSize) -> int:
        """The bytes that the page pools take on each device, without the states of slots."""
        return bytes_on_each(self.specs, mesh, lambda: self.empty(0, extent))

    def size(self, slots: int, pages: int) -> CacheSize:
        """The sizes of all pools, given `pages` for the layers that attend to the whole sequence.

        The pools of sliding windows have room for as many decoding sequences of the longest length as those pages hold, at most
        `slots`, and for two prompts more, because a step computes few prompts at a time."""
        count = max(1.0, min(slots, pages / self.pages))
        windows = {w: int(count * share.decoding + min(count, 2) * share.filling) for w, share in self.windows.items()}
        return CacheSize(pages, windows)

    def fitting(self, slots: int, room: float, mesh: AnyMesh | None, besides: int = 0, *, strict: bool = False) -> CacheSize:
        """The largest pools that fit into `room`, with pages for at most `slots` sequences of the longest length and at least one.

        Args:
            room: bytes on each device.
            besides: bytes that other caches, such as a draft model's, take on each device for each page.
            strict: raise an error if there is not room for one sequence, rather than exceed `room`.

        Raises:
            BadInput: there is not room for one sequence, and `strict` is set.
        """
        # Bytes are piecewise linear in the number of sequences: the first two each count with a prompt, further ones without.
        one, two, three = (self.bytes(mesh, self.size(3, n * self.pages)) + besides * n * self.pages for n in (1, 2, 3))
        if strict and room < one:
            need = f"a sequence of {self.longest:,} tokens takes {format_bytes(one)} of cache"
            problem = f"engine.memory = {format_bytes(room)}, and {need}"
            raise BadInput(problem, hint="more, or a shorter `engine.context`")
        first, then = max(two - one, 1), max(three - two, 1)
        count = max(1.0, min(slots, 1 + (room - one) / first if room < two else 2 + (room - two) / then))
        return self.size(slots, int(count * self.pages))


def cache_needs(specs: Specs, settings: EngineSettings, dtype: Any, longest: int) -> CacheNeeds:
    """The memory that the cache of an engine takes. The layers of a sliding window have pools of their own, unless the window covers
    the whole sequence, or is a chunk whose length is no multiple of the page.

    Args:
        longest: the most tokens of one sequence.

    Raises:
        BadInput: a quantized cache would be no smaller, because the model has no attention, or heads so short that the scales take
            what the values save.
    """
    page, drafts = settings.page, 0 if settings.speculative is None else settings.speculative.tokens
    queries = 1 + drafts, max(settings.budget, settings.budget_decoding, 1 + drafts)
    distinct_windows = {spec.window for spec, _ in specs.values() if spec.window and not (spec.chunked and spec.window.tokens % page)}
    windows = {window: WindowShare(*(window.pages(n, page) for n in queries)) for window in sorted(distinct_windows)}
    short = {window: share for window, share in windows.items() if share.filling < -(-longest // page)}
    needs = CacheNeeds(specs, page, dtype, longest, short, settings.cache_dtype)
    if needs.narrow is not None:
        _check_smaller(needs)
    return needs


def check_sequence_fits(pages: int, page: int, longest: int) -> None:
    """Raises BadInput if a cache of this many pages holds no sequence of `longest` tokens."""
    if pages * page < longest:
        problem = f"a cache of {pages} pages of {page} tokens holds no sequence of {longest}"
        raise BadInput(problem, hint="more `engine.pages`, or a shorter `engine.context`")


def _check_smaller(needs: CacheNeeds) -> None:
    """Raises BadInput if a quantized cache would be no smaller."""
    eight, plain = (replace(needs, narrow=form, page=1, windows={}).bytes(None, CacheSize(1, {})) for form in (needs.narrow, None))
    if eight < plain:
        return
    bytes_ = f"a token takes {eight} bytes, and {plain} in {jnp.dtype(needs.dtype).name}"
    why = bytes_ if plain else "the model caches nothing per token"
    raise BadInput(f"engine.cache_dtype={needs.narrow} saves no memory: {why}", hint="leave it out")


def bytes_on_each(specs: Specs, mesh: AnyMesh | None, empty: Callable[[], Caches]) -> int:
    """The bytes of caches on each device.

    Args:
        mesh: the devices that the caches are split over; None: one device.
        empty: returns empty caches. It is only traced.
    """
    if mesh is None:
        return bytes_of_caches(jax.eval_shape(empty))
    with scope(mesh):
        caches = jax.eval_shape(empty)
        places = layouts(specs, caches)
    shares = jax.tree.map(lambda a, spec: math.prod(NamedSharding(mesh, spec).shard_shape(a.shape)) * a.dtype.itemsize, caches, places)
    return sum(jax.tree.leaves(shares))


def allocate_caches(specs: Specs, home: Home, empty: Callable[[], Caches]) -> Caches:
    """Allocates the caches that `empty` returns on the devices of `home`."""
    if home is None:
        return empty()
    if (mesh := home_mesh(home)) is not None:
        with scope(mesh):
            return jax.jit(lambda: constrain_caches(specs, empty()))()
    with jax.default_device(next(iter(home.device_set))):
        return jax.device_put(empty(), home)


def reserve_caches(specs: Specs, home: Home, empty: Callable[[], Caches], programs: Programs | None = None) -> Caches:
    """As `allocate_caches`, for caches that live as long as the engine.

    On a CPU the memory of a pool is physically allocated when it is first written, so a large pool costs only what is used of it. The
    arrays are allocated one after the other, so that at the peak the zeros of only one take memory.

    Args:
        programs: the engine's programs, among which the programs that write zeros are compiled; None: others.
    """
    device = default_device() if home is None else next(iter(home.device_set))
    if device.platform != "cpu" or home_mesh(home) is not None:
        return allocate_caches(specs, home, empty)
    programs = programs or Programs()

    def allocated(a: jax.ShapeDtypeStruct) -> jax.Array:
        with jax.default_device(device):
            zeros = jax.block_until_ready(programs.prepared(_zeros(a.shape, a.dtype), "pool")())
        # XLA has written zeros. The system takes their memory back, and reading it gives zeros again.
        drop(zeros.unsafe_buffer_pointer(), zeros.nbytes)
        return zeros if home is None else jax.device_put(zeros, home)

    return jax.tree.map(allocated, jax.eval_shape(empty))


def describe_pools(home: Home, empty: Callable[[], Caches], programs: Programs) -> Caches:
    """The shapes of the caches that `reserve_caches` will return on a CPU; allocates nothing. It queues the programs of
    `reserve_caches` for compilation first, so that `reserve_caches` can run while the other programs are compiled."""
    caches = jax.eval_shape(empty)
    with jax.default_device(default_device() if home is None else next(iter(home.device_set))):
        for a in jax.tree.leaves(caches):
            programs(_zeros(a.shape, a.dtype), "pool")
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=home), caches)


@lru_cache(maxsize=64)
def _zeros(shape: tuple[int, ...], dtype: Any) -> Program:
    def zeros() -> Array:
        return jnp.zeros(shape, dtype)

    return Program(zeros)
