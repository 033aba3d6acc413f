"""Memory of a training step for each `execution.offload`, compiled for a described TPU v5e; nothing runs.

    ./run python bench/offload_tpu.py

It needs libtpu, which `./run test -m tpu` installs into .argosy/libtpu. A dense model of 1,024 features and 8 scanned layers,
4 x 256 tokens, bfloat16, AdamW. Prints one table, MB of each chip by `memory_analysis`.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / ".argosy" / "libtpu"))
os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "TPU_MIN_LOG_LEVEL": "3", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}

WAYS = ("none", "optimizer", "weights")


def main() -> None:
    from jax.experimental import topologies

    from argosy.models.parts.stack import Scan
    from argosy.parallel.mesh import MeshSettings
    from argosy.train.optimizers.adam import AdamW
    from tools.devices import config_of, lowered_step

    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
    print("| chips | remat | offload | arguments, device | temporaries, device | arguments, host | temporaries, host |")
    print("|---|---|---|---|---|---|---|")
    for count, remat in ((1, "full"), (4, "full"), (1, "dots"), (1, "none")):
        for offload in WAYS:
            model = config_of("dense", width=1024, ffn=4096, vocab=4096, layers=8).build(Scan(remat))
            mesh = MeshSettings(fsdp=count).build(devices[:count])
            m = lowered_step(model, mesh, 4, 256, "bfloat16", optimizer=AdamW(), offload=offload).compile().memory_analysis()
            sizes = (m.argument_size_in_bytes, m.temp_size_in_bytes, m.host_argument_size_in_bytes, m.host_temp_size_in_bytes)
            print(f"| {count} | {remat} | {offload} | {' | '.join(f'{n / 1e6:,.0f}' for n in sizes)} |", flush=True)


if __name__ == "__main__":
    main()
