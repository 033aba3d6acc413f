"""The engine's step compiled for a TPU, without one: seconds, memory, and the bytes that XLA says a step accesses.

    PYTHONPATH=.argosy/libtpu ./run python bench/engine_tpu.py [PRESET] [TOPOLOGY] [PAGES]

`./run test -m tpu` installs libtpu. A decode step of 32 rows, and one beside 512 prompt tokens, bfloat16, pages of 16 tokens. XLA
counts a pool as read whole by the attention kernel and by each write into it, so `accessed` is of a step with pools of two pages;
what the kernel really reads depends on the lengths of the rows.
"""

import os
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from argosy.infer.forward.passes import OneProgram
from argosy.infer.forward.step import PageTables, StepSizes
from argosy.models.parts.attention.cache import paged
from argosy.models.parts.stack import Scan, Unroll
from argosy.models.parts.weight import abstract
from argosy.parallel.mesh import MeshSettings
from argosy.parallel.scope import scope
from argosy.run.settings.recipe_files import preset_config

# Bytes a second, of one chip: Google's pages of each generation.
BANDWIDTH = {"v5e": 819e9, "v5p": 2765e9, "v6e": 1640e9}
CONTEXT, PAGE, SLOTS = 8192, 16, 32
TABLES = PageTables(PAGE, CONTEXT // PAGE)


def compiled(config: Any, execution: Any, devices: list[Any], pages: int, sizes: StepSizes, picks: int) -> tuple[Any, Any]:
    """A step of the engine, and (weights, pools) as shapes."""
    on = jax.sharding.SingleDeviceSharding(devices[0])
    model = config.build(execution)
    model.dtype = jnp.bfloat16

    def there(a: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(a.shape, jnp.bfloat16 if jnp.issubdtype(a.dtype, jnp.floating) else a.dtype, sharding=on)

    with scope(MeshSettings().build(devices)):
        forward = OneProgram(model)
        pools = jax.eval_shape(lambda: paged(forward.specs, SLOTS, pages, PAGE, jnp.bfloat16, longest=CONTEXT))
        weights, pools = jax.tree.map(there, (abstract(model), pools))
        words = [there(jax.ShapeDtypeStruct((n,), jnp.int32)) for n in (SLOTS, sizes.words, picks)]
        program = forward.program(forward.step_kind).lower(weights, pools, tuple(words[:2]), (words[2],), sizes)
        return program.compile(), (weights, pools)


def accessed(config: Any, devices: list[Any], sizes: StepSizes, picks: int) -> float:
    """Bytes of a step. XLA counts the body of a loop once, so two and four unrolled layers are compiled; each further one costs the
    same."""
    two, four = (
        compiled(config.model_copy(update={"layers": n}), Unroll(), devices, 2, sizes, picks)[0].cost_analysis()["bytes accessed"]
        for n in (2, 4)
    )
    return two + (config.layers - 2) * (four - two) / 2


def main(preset: str = "llama3.1-8b", topology: str = "v6e:2x2", pages: str = "4096") -> None:
    # Read when libtpu is loaded.
    os.environ |= {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_SKIP_MDS_QUERY": "1", "TPU_MIN_LOG_LEVEL": "3"}
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[:1]
    config = preset_config(preset)
    print("| step | compiled in s | weights GB | pools GB | temporaries MB | accessed GB | weights over bandwidth, ms |")
    print("|---|---|---|---|---|---|---|")
    for name, sizes, picks in [
        ("32 decoding rows", StepSizes(32, 0, 0, TABLES), 32),
        ("32 decoding rows, 512 prompt tokens", StepSizes(32, 16, 32, TABLES), 64),
    ]:
        start = time.monotonic()
        program, shapes = compiled(config, Scan(), devices, int(pages), sizes, picks)
        took, temporaries = time.monotonic() - start, program.memory_analysis().temp_size_in_bytes / 1e6
        weights, held = (sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(what)) / 1e9 for what in shapes)
        floor = weights * 1e12 / BANDWIDTH[topology.split(":")[0]]
        moved = accessed(config, devices, sizes, picks) / 1e9
        print(f"| {name} | {took:.0f} | {weights:.2f} | {held:.2f} | {temporaries:.0f} | {moved:.1f} | {floor:.1f} |", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
