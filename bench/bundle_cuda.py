"""Does the program of a bundle compile for an H100, on a machine without one?

    JAX_PLATFORMS=cpu CUDA_VISIBLE_DEVICES=-1 python bench/bundle_cuda.py BUNDLE [batch=16] [length=128]

In an environment with jax[cuda12]; no driver is needed. Prints for each signature: seconds to compile, and bytes of weights,
outputs and temporaries. Nothing is run.
"""

import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
from jax._src import xla_bridge
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from paged_cuda import H100

from argosy.export.bundle import Bundle
from argosy.export.calls import filled_inputs


def main(words: Sequence[str]) -> None:
    sizes = {"batch": 16, "length": 128} | {name: int(size) for name, size in (word.split("=") for word in words if "=" in word)}
    bundle = Bundle.open(next(word for word in words if "=" not in word))
    canonicalize = xla_bridge.canonicalize_platform
    # "gpu" is not resolved where no GPU is (github.com/jax-ml/jax/issues/23971).
    xla_bridge.canonicalize_platform = lambda name: "cuda" if name in ("gpu", "cuda") else canonicalize(name)
    topology: Any = topologies.get_topology_desc(platform="cuda", topology_name="", target_config=H100, topology="1x1x1")
    place = SingleDeviceSharding(topology.devices[0])
    print("| signature | compiled in s | weights, MB | outputs | temporaries |\n| --- | --- | --- | --- | --- |")
    for name, signature in bundle.manifest.signatures.items():
        program = next(program for program in signature.programs if "cuda" in program.platforms)
        weights = {name: bundle.weight(name) for name in signature.weights}
        inputs = filled_inputs(signature, sizes | program.shapes)
        arguments = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), (weights, inputs))
        begin = time.perf_counter()
        compiled = jax.jit(bundle.exported(program).call).trace(*arguments).lower(lowering_platforms=("cuda",)).compile()
        memory: Any = compiled.memory_analysis()
        argument_mb = memory.argument_size_in_bytes / 1e6
        print(
            f"| {name} | {time.perf_counter() - begin:.1f} | {argument_mb:.1f} | "
            f"{memory.output_size_in_bytes / 1e6:.2f} | {memory.temp_size_in_bytes / 1e6:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
