"""How many instructions does libtpu schedule for one block of the splash kernels? No TPU is needed.

    JAX_PLATFORMS=cpu python bench/splash_blocks.py [v5e v5p v6e]      # where libtpu is installed

Prints, for a kind of TPU, a size of heads and a side of blocks, the instructions (VLIW bundles) of the forward kernel and the two
backward ones, and of those how many store or load spilled registers. `argosy/ops/attention/splash_blocks.py` holds the sums. A
compilation writes 400 MB of listings to a folder for temporary files; all take about 20 minutes of one core.
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
SIDES, HEADS = (128, 256, 512, 1024), (64, 128, 256)
TOKENS = 2048
KERNELS = ("fwd", "dq", "dkv")
# Columns of the listing of a kernel: those of the slots that load and store spilled registers.
FILLS, SPILLS = 6, 8


def compiled(device: Any, side: int, head: int) -> None:
    """Value and gradient of packed causal attention in bfloat16."""
    import jax
    import jax.numpy as jnp

    from argosy.ops.attention import Score, See
    from argosy.ops.attention import splash as attention_splash

    attention_splash.block_of = lambda *_: side
    on = jax.sharding.SingleDeviceSharding(device)
    shapes = [((1, TOKENS, n, head), jnp.bfloat16) for n in (2, 1, 1)] + [((1, TOKENS), jnp.int32)]
    args = [jax.ShapeDtypeStruct(shape, dtype, sharding=on) for shape, dtype in shapes]

    def loss(q: Any, k: Any, v: Any, segments: Any) -> Any:
        at = jnp.broadcast_to(jnp.arange(TOKENS, dtype=jnp.int32), (1, TOKENS))
        see = See(at, at, segments, segments, aligned=True)
        return jnp.sum(jnp.sin(attention_splash.splash(q, k, v, see, Score(head**-0.5)).astype(jnp.float32)))

    with jax.default_device(device):
        jax.jit(jax.value_and_grad(loss, (0, 1, 2))).lower(*args).compile()


def instructions(folder: Path, kernel: str) -> tuple[int, int]:
    """Of the last compiled kernel of this name: all instructions, and those that spill."""
    listings = folder.glob(f"*splash_mha_{kernel}*final_hlo-static-per-bundle-utilization.txt")
    text = max(listings, key=lambda path: path.stat().st_mtime).read_text(encoding="utf-8")
    rows = [[int(n) for n in line.split()] for line in text.partition("== UTILIZATION:")[2].splitlines() if line.strip()]
    return len(rows), sum(bool(row[FILLS] or row[SPILLS]) for row in rows)


def main() -> None:
    names = sys.argv[1:] or list(TOPOLOGIES)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        os.environ |= {
            "LIBTPU_INIT_ARGS": f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_MIN_LOG_LEVEL": "3",
        }
        from jax.experimental import topologies

        print(f"| TPU | heads | side | {' | '.join(KERNELS)} | sum | with spills |\n|{'---|' * 8}")
        for name in names:
            device = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[name]).devices[0]
            for head in HEADS:
                for side in SIDES:
                    compiled(device, side, head)
                    counts = [instructions(folder, kernel) for kernel in KERNELS]
                    cells = (name, head, side, *(n for n, _ in counts), sum(n for n, _ in counts), sum(s for _, s in counts))
                    print(f"| {' | '.join(map(str, cells))} |", flush=True)
                    for path in folder.iterdir():
                        path.unlink()


if __name__ == "__main__":
    main()
