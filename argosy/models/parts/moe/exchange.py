"""Sends the rows of tokens to the devices of their experts, and the outputs back, inside a `shard_map`.

Each of the n devices along `experts.axis` has its own rows, and E / n experts. Shapes are static, so compilation fixes how many rows a
device may send to another at once:

    exchange_rows         the capacity
    exchanged_in_rounds   1.25 times an even share of a device's rows, in rounds until all rows are sent. All devices make as many
                          rounds as the device with the most rows to send; usually one

Rounds after the first are a loop whose length is not known before it runs. The loop has its own backward pass, which computes these
rounds again. Memory and bytes sent therefore depend on how uneven the load is, not on how uneven it could be (docs/decisions/0019).
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from argosy.models.parts.einsum import Route
from argosy.models.parts.moe.sorting import inverse, permute_rows, sorted_by
from argosy.models.parts.weight import merge, split
from argosy.observe.hlo.estimate import FILLED
from argosy.observe.hlo.loops import SELDOM

# How many rows a device may send to another at once, as a multiple of an even share of its rows.
ROOM = 1.25


def exchange_rows(experts: Any, rows: Float[Array, "E R D"]) -> Float[Array, "E R D"]:
    """Applies each expert to its R rows. If the devices have the same rows (`experts.together`), each device applies its own experts
    and returns zeros for the others."""
    (E, R, D), local_count = rows.shape, experts.local_experts
    if experts.axis is None:
        return _apply_evenly(experts, rows)
    if experts.together:
        y = _apply_evenly(experts, jax.lax.dynamic_slice_in_dim(rows, experts.first, local_count))
        return jax.lax.dynamic_update_slice_in_dim(jnp.zeros((E, *y.shape[1:]), y.dtype), y, experts.first, 0)
    received = _swapped(experts, rows.reshape(-1, local_count, R, D)).swapaxes(0, 1)
    y = _apply_evenly(experts, received.reshape(local_count, -1, D)).reshape(local_count, -1, R, D)
    return _swapped(experts, y.swapaxes(0, 1)).reshape(E, R, D)


def _apply_evenly(experts: Any, rows: Float[Array, "E R D"]) -> Float[Array, "E R D"]:
    E, R, _ = rows.shape
    expert = jnp.repeat(jnp.arange(E), R, total_repeat_length=E * R)
    return experts(rows.reshape(E * R, -1), Route(jnp.full(E, R, jnp.int32), expert, even=True)).reshape(E, R, -1)


def _swapped(experts: Any, a: Array) -> Array:
    """Sends part i of each device's array to device i, which receives part j from device j (all-to-all)."""
    return jax.lax.all_to_all(a, experts.axis, 0, 0)


def exchanged_in_rounds(
    experts: Any,
    x: Float[Array, "X D"],
    scales: Float[Array, "A"] | None,
    expert: Int[Array, "A"],
    order: Int[Array, "A"],
    sizes: Int[Array, "E"],
) -> Float[Array, "A D"]:
    """Computes the output of each assignment's expert. The outputs are sorted by expert, and zero where an assignment has no expert.

    Args:
        x: the vectors of the tokens.
        scales: a factor on the expert's input for each assignment. None: 1.
        expert: the expert of each assignment; E for none. The k assignments of a token are consecutive.
        order: the order of assignments that sorts them by expert.
        sizes: the number of assignments of each expert.
    """
    n, local_count = experts.shares, experts.local_experts
    A, k = len(expert), len(expert) // len(x)
    counts = jnp.sum(sizes.reshape(n, local_count), 1)
    starts = jnp.cumsum(counts) - counts
    # A token goes to an expert at most once.
    most = len(x) * min(k, local_count)
    places = min(most, math.ceil(ROOM * A / n))
    graphs, leaves = zip(*(split(part) for part in (experts.gate, experts.up, experts.down)))

    def at(i: Any, counts: Array, starts: Array) -> Int[Array, "n places"]:
        """Returns the index of the sorted assignment in each place of round i; A for none."""
        p = i * places + jnp.arange(places)
        return jnp.where(p < counts[:, None], starts[:, None] + p, A)

    def of_round(i: Any, leaves: Any, x: Array, scales: Array | None, expert: Array, order: Array, at: Array) -> Array:
        """Computes the experts' outputs for the rows of round i, [n * places, D]."""
        filled, picked = at < A, order[jnp.minimum(at, A - 1)]
        rows = x[picked // k]
        if scales is not None:
            rows = rows * scales[picked][..., None].astype(x.dtype)
        rows = _swapped(experts, jnp.where(filled[..., None], rows, 0))
        local_id = _swapped(experts, jnp.where(filled, expert[picked] - local_count * jnp.arange(n)[:, None], local_count)).reshape(-1)
        parts = (merge(graph, part) for graph, part in zip(graphs, leaves))
        local = experts._replace(**dict(zip(("gate", "up", "down"), parts)))
        inward = sorted_by(local_id, local_count)
        outward = inverse(inward)
        route = Route(jnp.bincount(local_id, length=local_count).astype(jnp.int32), jnp.minimum(local_id[inward], local_count - 1))
        # The scope names the percentage of a round's places that an even load fills.
        with jax.named_scope(f"{FILLED}{round(100 * A / (n * places))}"):
            y = local(permute_rows(rows.reshape(-1, x.shape[-1]), inward, outward), route)
        return _swapped(experts, permute_rows(y, outward, inward).reshape(n, places, -1)).reshape(n * places, -1)

    def work(i: Any, args: Any) -> Array:
        leaves, x, scales, expert, order, counts, starts = args
        return of_round(i, leaves, x, scales, expert, order, at(i, counts, starts))

    def where(i: Any, args: Any) -> Array:
        return at(i, *args[-2:]).reshape(-1)

    args, most_rounds = (leaves, x, scales, expert, order, counts, starts), -(-most // places)
    if most_rounds == 1:
        rounds = jnp.asarray(1)
    else:
        # All devices make the same number of rounds, also along axes that do not split the experts. Otherwise one would wait forever.
        busiest = jax.lax.pmax(jnp.max(counts), tuple(jax.sharding.get_abstract_mesh().axis_names))
        rounds = (busiest + places - 1) // places
    return in_rounds(work, where, args, (A, x.shape[-1]), rounds, single=most_rounds == 1)


def in_rounds(
    work: Callable[[Any, Any], Array],
    where: Callable[[Any, Any], Array],
    args: Any,
    shape: tuple[int, int],
    rounds: Int[Array, ""],
    *,
    single: bool,
) -> Float[Array, "A D"]:
    """Computes rows in rounds: starts from zeros, and in round i sets the rows `where(i, args)` to `work(i, args)`.

    The backward pass keeps the residuals of the first round and computes the others again. Integer arguments have no gradient.

    Args:
        work: computes the rows of round i.
        where: the indexes of these rows. No row may be in two rounds.
        shape: the shape of the result.
        rounds: the number of rounds, at least 1.
        single: whether there is always one round. `rounds` is then not read.
    """
    flat, tree = jax.tree.flatten(args)
    inexact = [i for i, a in enumerate(flat) if jnp.issubdtype(a.dtype, jnp.inexact)]

    def of_inexact(i: Any, flat: list[Array]) -> Callable[[list[Array]], Array]:
        def run(some: list[Array]) -> Array:
            whole = dict(enumerate(flat)) | dict(zip(inexact, some))
            return work(i, jax.tree.unflatten(tree, [whole[at] for at in range(len(flat))]))

        return run

    def added(flat: list[Array], first: Array, rounds: Array) -> Array:
        args = jax.tree.unflatten(tree, flat)
        y = jnp.zeros(shape, first.dtype).at[where(0, args)].set(first, mode="drop")
        if single:
            return y
        with jax.named_scope(SELDOM):
            return jax.lax.fori_loop(1, rounds, lambda i, y: y.at[where(i, args)].set(work(i, args), mode="drop"), y)

    @jax.custom_vjp
    def run(flat: list[Array], rounds: Array) -> Array:
        return added(flat, work(0, jax.tree.unflatten(tree, flat)), rounds)

    def forward(flat: list[Array], rounds: Array) -> tuple[Array, Any]:
        first, pull = jax.vjp(of_inexact(0, flat), [flat[at] for at in inexact])
        return added(flat, first, rounds), (flat, rounds, pull)

    def backward(residuals: Any, g: Array) -> Any:
        flat, rounds, pull = residuals
        args = jax.tree.unflatten(tree, flat)

        def of(i: Any) -> Array:
            return g.at[where(i, args)].get(mode="fill", fill_value=0)

        def step(i: Any, sums: list[Array]) -> list[Array]:
            (gradients,) = jax.vjp(of_inexact(i, flat), [flat[at] for at in inexact])[1](of(i))
            return [a + b for a, b in zip(sums, gradients)]

        (sums,) = pull(of(0))
        with jax.named_scope(SELDOM):
            sums = sums if single else jax.lax.fori_loop(1, rounds, step, sums)
        out = {i: np.zeros(a.shape, jax.dtypes.float0) for i, a in enumerate(flat)} | dict(zip(inexact, sums))
        return [out[i] for i in range(len(flat))], np.zeros(jnp.shape(rounds), jax.dtypes.float0)

    run.defvjp(forward, backward)
    return run(flat, rounds)
