"""Does training attention compile to cuDNN's kernels for an H100, on a machine without one?

    JAX_PLATFORMS=cpu CUDA_VISIBLE_DEVICES=-1 python bench/attention_cuda.py    # where jax[cuda12] is; no driver

Prints for value and gradient of several shapes: the kernels of the program and seconds of compiling. Nothing is run; cuDNN builds
its plans on a device.
"""

import os
import re
import time
from functools import partial
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_gpu_autotune_level=0")

import jax
import jax.numpy as jnp
from jax._src import xla_bridge
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec
from paged_cuda import H100

from argosy.models.parts.stack.remat import rematerialize
from argosy.ops.attention import Score, See, attention
from argosy.parallel.mesh import MeshSettings
from argosy.parallel.scope import scope

# rows, tokens, heads, key heads, sizes of keys and values, window, segments, causal, remat, devices
SHAPES = {
    "Llama 3 8B, packed": (2, 4096, 32, 8, 128, 128, None, True, True, "none", 1),
    "the same, recomputed": (2, 4096, 32, 8, 128, 128, None, True, True, "full", 1),
    "the same, on 8 devices": (8, 4096, 32, 8, 128, 128, None, True, True, "full", 8),
    "whole rows": (2, 4096, 32, 8, 128, 128, None, False, True, "none", 1),
    "whole rows, a window": (2, 4096, 32, 8, 128, 128, 1024, False, True, "none", 1),
    "packed, a window, odd": (2, 1023, 9, 3, 64, 64, 128, True, True, "none", 1),
    "an encoder": (8, 512, 12, 12, 64, 64, None, True, False, "none", 1),
    "odd sizes of heads": (2, 256, 6, 2, 80, 76, None, True, True, "dots", 1),
}


def program(
    devices: Any, rows: int, T: int, N: int, K: int, H: int, U: int, window: Any, packed: bool, causal: bool, remat: Any
) -> str:
    """The compiled program for value and gradient."""
    score = Score(H**-0.5, window)

    def loss(q: Any, k: Any, v: Any, segments: Any) -> Any:
        at = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (rows, T))
        segment_ids = segments if packed else None
        see = See(at, at, segment_ids, segment_ids, causal=causal, aligned=True)
        # The sines keep XLA from finding that nothing depends on the output.
        attend = rematerialize(lambda q, k, v: jnp.sin(attention(q, k, jnp.sin(v), see, score)), remat)
        return jnp.sum(attend(q, k, v).astype(jnp.float32))

    n = len(devices)
    mesh = MeshSettings(fsdp=n // 2 or 1, tensor=2 if n > 1 else 1).build(devices)
    place = NamedSharding(mesh, PartitionSpec("fsdp"))
    described = partial(jax.ShapeDtypeStruct, sharding=place)
    inputs = [described((rows, T, heads, size), jnp.bfloat16) for heads, size in ((N, H), (K, H), (K, U))]
    with scope(mesh):
        traced = jax.jit(jax.value_and_grad(loss, (0, 1, 2))).trace(*inputs, described((rows, T), jnp.int32))
        return traced.lower(lowering_platforms=("cuda",)).compile().as_text() or ""


def main() -> None:
    canonicalize = xla_bridge.canonicalize_platform
    # "gpu" is not resolved where no GPU is (github.com/jax-ml/jax/issues/23971).
    xla_bridge.canonicalize_platform = lambda name: "cuda" if name in ("gpu", "cuda") else canonicalize(name)
    print("| attention | kernels | seconds |\n|---|---|---|")
    for name, (*shape, count) in SHAPES.items():
        topology: Any = topologies.get_topology_desc(
            platform="cuda", topology_name="", target_config=H100, topology=f"1x1x{count}"
        )
        begin = time.perf_counter()
        kernels = re.findall(r'custom_call_target="__cudnn\$([^"]*)"', program(topology.devices, *shape))
        print(f"| {name} | {', '.join(kernels)} | {time.perf_counter() - begin:.1f} |", flush=True)


if __name__ == "__main__":
    main()
