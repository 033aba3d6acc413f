"""Does the kernel of paged attention compile for an H100, on a machine without one?

    JAX_PLATFORMS=cpu CUDA_VISIBLE_DEVICES=-1 python bench/paged_cuda.py      # in an environment with jax[cuda12]; no driver is needed

Prints for shapes of five models: seconds of tracing, lowering by Triton and compiling, and bytes of temporaries. Nothing is run.
"""

import os
import time
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_gpu_autotune_level=0")

import jax
import jax.numpy as jnp
from jax._src import xla_bridge
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from argosy.ops.attention import Score
from argosy.ops.paged.triton import triton

# NVIDIA's data sheet of the H100 SXM, in the form of XLA's `GpuTargetConfigProto`.
H100 = """gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 84978434048
  shared_memory_per_block_optin: 232448 cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 8 } runtime_version { major: 12 minor: 8 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
# rows, queries of a row, heads, key heads, size of a head, type, window, cap
SHAPES = {
    "Llama 3 8B": (32, 1, 32, 8, 128, jnp.bfloat16, None, None),
    "the same, chunks of 4": (8, 4, 32, 8, 128, jnp.float32, None, None),
    "SmolLM2 135M": (64, 1, 9, 3, 64, jnp.float32, None, None),
    "gpt-oss 20B": (16, 1, 64, 8, 64, jnp.bfloat16, 128, None),
    "Gemma 2 9B": (8, 4, 16, 8, 256, jnp.bfloat16, 1024, 50.0),
}


def main() -> None:
    canonicalize = xla_bridge.canonicalize_platform
    # "gpu" is not resolved where no GPU is (github.com/jax-ml/jax/issues/23971).
    xla_bridge.canonicalize_platform = lambda name: "cuda" if name in ("gpu", "cuda") else canonicalize(name)
    topology: Any = topologies.get_topology_desc(platform="cuda", topology_name="", target_config=H100, topology="1x1x1")
    place = SingleDeviceSharding(topology.devices[0])
    described = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=place)  # noqa: E731
    print("| model | seconds | temporaries, MB |\n|---|---|---|")
    for name, (rows, queries, heads, keys, size, dtype, window, cap) in SHAPES.items():
        score = Score(size**-0.5, window=window, cap=cap)
        pool = described((4096, 16, keys, size), dtype)
        inputs = described((rows, queries, heads, size), dtype), (pool, pool), described((rows, 512), jnp.int32)
        inputs = (*inputs, described((rows,), jnp.int32), described((rows, queries), jnp.int32))
        begin = time.perf_counter()
        traced = jax.jit(lambda *a, score=score: triton(*a, score)).trace(*inputs)
        program = traced.lower(lowering_platforms=("cuda",)).compile()
        assert "triton" in (program.as_text() or "")
        memory: Any = program.memory_analysis()
        print(f"| {name} | {time.perf_counter() - begin:.1f} | {memory.temp_size_in_bytes / 1e6:.1f} |", flush=True)


if __name__ == "__main__":
    main()
