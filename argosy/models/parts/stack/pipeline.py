"""Pipeline parallelism: each stage is a part of the devices and has some of the layers. Micro-batches go from stage to stage.

GPipe (Huang et al. 2018, arXiv:1811.06965). Weights are stored as for scanned layers and are split along their layer axis over the mesh
axis `stage`: each of S stages has 1/S of a group's repeats. In step t, stage s runs its layers on micro-batch t - s and sends the
result to stage s + 1. M micro-batches take M + S - 1 steps. Each stage is idle in (S - 1) / (M + S - 1) of the time.

With R rounds (Narayanan et al. 2021, arXiv:2104.04473), a group is stored as R groups, and each stage runs its part of every one. A
micro-batch goes through all stages R times. S micro-batches make all their rounds, then the next S, so that the first stage can at once
run what the last stage sends. There are M R + S - 1 steps, each R times shorter.

Only the axis `stage` is manual in the `shard_map`. XLA splits rows, weights and features over the other axes of the mesh as usual.
Groups whose repeats do not divide by the number of stages run on all devices, before or after the pipeline.
"""

from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from argosy.models.parts.attention.attend import Attend
from argosy.models.parts.attention.cache import Caches
from argosy.models.parts.stack import Aux, LayerGroup, Scan, Stack, Streams, group_parts, join_groups, run_group
from argosy.models.parts.stack.remat import Remat, on_picked_weights
from argosy.parallel.scope import activation_spec, axes_in, axis_sizes, platform

AXIS = "stage"
# Aux outputs that are sums over all rows of a call. All others have one entry per row.
SUMMED = ("load",)


@dataclass(frozen=True)
class Pipeline:
    """Runs layers in pipeline stages. With caches, or without a mesh that has these stages, layers run as in `Scan`: when decoding, all
    stages but one would be idle.

    Args:
        stages: the number of stages.
        microbatches: the number of micro-batches that the rows of a call are split into.
        rounds: how often a micro-batch goes through all stages. The layers of a repeating group are stored in that many arrays.

    Raises:
        ValueError: a call's rows do not divide into the micro-batches.
    """

    stages: int
    microbatches: int
    remat: Remat = "none"
    rounds: int = 1
    stacked = True

    def __call__(
        self, stack: Stack, x: Streams, caches: Caches | None, attend: Attend, condition: Any = None
    ) -> tuple[Streams, Caches | None, Aux]:
        if caches or axis_sizes().get(AXIS, 1) == 1:
            return Scan(self.remat, self.rounds)(stack, x, caches, attend, condition)
        if (rows := _rows(x)) % self.microbatches:
            raise ValueError(f"{rows} rows do not divide into {self.microbatches} microbatches")
        aux, groups = [], list(stack.groups)
        while groups:
            group, graphs, leaves = groups[0], *group_parts(stack, groups[0])
            if group.repeats % self.stages:
                groups, (x, _, group_aux) = groups[1:], run_group(
                    group, graphs, leaves, x, attend, self.remat, condition=condition
                )
            else:
                # The rounds of a group are consecutive groups.
                more = list(takewhile(lambda other: other.round, groups[1:]))
                all_leaves = [leaves, *(group_parts(stack, other)[1] for other in more)]
                groups, (x, group_aux) = groups[1 + len(more) :], self.staged(group, graphs, all_leaves, x, (attend, condition))
            aux.append(group_aux)
        return x, caches, join_groups(aux)

    def staged(
        self, group: LayerGroup, graphs: Any, leaves: list[Any], x: Streams, context: tuple[Attend, Any]
    ) -> tuple[Streams, Aux]:
        """Runs a group of layers over the stages.

        Args:
            graphs: the structure of the layers, by kind.
            leaves: the weights of each round.
            context: the attention strategy and the condition. The leading axis of all their arrays is the batch.
        """
        S, M, R = self.stages, self.microbatches, len(leaves)
        mine = group._replace(repeats=group.repeats // S)
        # A micro-batch takes an equal number of rows from each device that has rows, so no row moves to another device.
        sizes = axis_sizes()
        apart = 1
        for axis in axes_in(activation_spec("B", (_rows(x) // M,))) - {AXIS}:
            apart *= sizes[axis]

        # XLA:CPU aborts on sums of 16-bit numbers over devices in here. All stages but one add zeros, so both dtypes are exact.
        def summable(a: Array) -> Array:
            return a.astype(jnp.float32) if platform() == "cpu" and a.dtype.itemsize < 4 else a

        def cut(a: Array) -> Array:
            return a.reshape(apart, M, a.shape[0] // (apart * M), *a.shape[1:])

        def whole(a: Array) -> Array:
            return a.reshape(-1, *a.shape[2:])

        strategy, form = jax.tree.flatten(context)
        # With several rounds, the last stage sends to the first stage, which runs the next round.
        ring = [(i, (i + 1) % S) for i in range(S)][: S if R > 1 else S - 1]

        def stage(s: Array, leaves: list[Any], x: Streams, strategy: list[Array]) -> tuple[Streams, Aux]:
            s = s[0]
            x = jax.tree.map(lambda a: lax.all_gather(summable(a), AXIS, axis=1, tiled=True).astype(a.dtype), x)

            def of(a: Array, m: Array) -> Array:
                return whole(lax.dynamic_index_in_dim(a, m, 1, keepdims=False))

            def entering(enters: Array, m: Array, received: Streams) -> Streams:
                return jax.tree.map(lambda a, b: jnp.where(enters, of(a, m), b), x, received)

            def send(y: Streams) -> Streams:
                return jax.tree.map(lambda a: lax.ppermute(a, AXIS, ring), y)

            def step(received: Streams, t: Array) -> tuple[Streams, tuple[Streams, Aux]]:
                # Before its first and after its last micro-batch, a stage computes on arbitrary rows. Nothing reads the result.
                inputs = entering(s == 0, jnp.minimum(t, M - 1), received)
                attend, condition = jax.tree.unflatten(form, [of(a, jnp.clip(t - s, 0, M - 1)) for a in strategy])
                y, _, aux = run_group(mine, graphs, leaves[0], inputs, attend, self.remat, condition=condition)
                return send(y), (y, aux)

            def step_of_rounds(received: Streams, t: Array) -> tuple[Streams, tuple[Streams, Aux]]:
                # S micro-batches make all their rounds, then the next S, so that the first stage at once runs what the last one sends.
                i = jnp.clip(t - s, 0, M * R - 1)
                r, m = i // S % R, i // (S * R) * S + i % S
                inputs = entering((s == 0) & (r == 0), m, received)
                y, aux = picked(stacked, r, inputs, jax.tree.unflatten(form, [of(a, m) for a in strategy]))
                return send(y), (y, aux)

            def run(stacked: Any, r: Array, inputs: Streams, context: tuple[Attend, Any]) -> tuple[Streams, Aux]:
                round_leaves = jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, r, keepdims=False), stacked)
                attend, condition = context
                y, _, aux = run_group(
                    mine, graphs, round_leaves, inputs, attend, self.remat, marked=True, condition=condition
                )
                return y, aux

            picked, steps = on_picked_weights(run, self.remat), M * R + S - 1
            stacked = jax.tree.map(lambda *a: jnp.stack(a), *leaves) if R > 1 else None
            first = jax.tree.map(lambda a: of(a, jnp.int32(0)), x)
            _, (y, aux) = lax.scan(step_of_rounds if R > 1 else step, first, jnp.arange(steps))
            y = jax.tree.map(partial(handed_out, s), y)
            aux = jax.tree.map(lambda a: by_round(lax.dynamic_slice_in_dim(a, s, M * R)), aux)
            return y, {kind: {name: jax.vmap(partial(together, name))(a) for name, a in arrays.items()} for kind, arrays in aux.items()}

        def handed_out(s: Array, y: Array) -> Array:
            """Distributes the last stage's outputs of all steps over the stages. Each stage gets an equal share of the rows."""
            output = jnp.where(s == S - 1, last(y[S - 1 :]), 0)
            output = jnp.moveaxis(output.reshape(M, apart, -1, *output.shape[2:]), 0, 1)
            return lax.psum_scatter(summable(output), AXIS, scatter_dimension=1, tiled=True).astype(y.dtype)

        def by_round(a: Array) -> Array:
            """Rearranges outputs [M R ...], in the order of the steps, to [R M ...]."""
            return jnp.moveaxis(a.reshape(M // S, R, S, *a.shape[1:]), 1, 0).reshape(R, M, *a.shape[1:])

        def last(a: Array) -> Array:
            """Returns the outputs of the last round, from outputs [M R ...] in the order of the steps."""
            return a if R == 1 else by_round(a)[-1]

        def together(name: str, a: Array) -> Array:
            """Joins aux outputs [M L ...] of all micro-batches to [L ...] of all rows."""
            if name in SUMMED:
                return jnp.sum(a, 0)
            a = a.reshape(M, a.shape[1], apart, -1, *a.shape[3:])
            return jnp.moveaxis(a, 0, 2).reshape(a.shape[1], -1, *a.shape[4:])

        rows = P(None, AXIS)
        run = jax.shard_map(
            stage,
            in_specs=(P(AXIS), P(AXIS), rows, P()),
            out_specs=(rows, P(None, AXIS)),
            axis_names={AXIS},
            check_vma=False,
        )
        y, aux = run(jnp.arange(S), leaves, jax.tree.map(cut, x), [cut(a) for a in strategy])
        return jax.tree.map(lambda a, like: a.reshape(like.shape), y, x), jax.tree.map(whole, aux)


def _rows(x: Streams) -> int:
    return jax.tree.leaves(x)[0].shape[0]
