"""Memory of training: what was predicted before the first step, and what a process took.

    ./run python bench/memory.py

Each shape is trained for two steps and saved by a process of its own, which tells its VmHWM at the end. Floor: parameters,
gradients and optimizer, 16 bytes a parameter in float32 with AdamW. Prints one table.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

COMMON = ["data.source=synthetic", "model.vocab=8192", "steps=2", "eval.batches=0", "checkpoint.every=2"]
WIDE = ["model.width=512", "model.heads=8", "model.kv_heads=8", "model.ffn=1408", "model.context=1024"]
DEEP = ["model.width=256", "model.layers=12", "model.ffn=704", "model.context=1024", "data.sequence=512"]
SHAPES = {
    "tiny": [],
    "wide, 4 layers, 8 x 256": [*WIDE, "model.layers=4", "data.sequence=256", "data.batch=8"],
    "wide, 4 layers, 8 x 1024": [*WIDE, "model.layers=4", "data.sequence=1024", "data.batch=8"],
    "deep, 12 layers, 8 x 512": [*DEEP, "data.batch=8"],
    "the same, remat=full": [*DEEP, "data.batch=8", "execution.remat=full"],
    "the same, accumulate=4": [*DEEP, "data.batch=8", "accumulate=4"],
}
PROGRAM = """
import json, sys
import argosy
from argosy.core.storage import Store
from argosy.observe.memory import peak_bytes
from argosy.observe.metrics import read
run = argosy.fit("tiny", *sys.argv[2:], f"dir={sys.argv[1]}")
header = next(line["header"] for line in read(Store(run.dir)) if "header" in line)
print(json.dumps({"header": header, "taken": peak_bytes()}))
"""


def main() -> None:
    print("| shape | parameters | state | activations | predicted | taken (VmHWM) | predicted / taken |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, words in SHAPES.items():
        with tempfile.TemporaryDirectory() as scratch:
            command = [sys.executable, "-c", PROGRAM, str(Path(scratch, "run")), *COMMON, *words]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
        result = json.loads(done.stdout.splitlines()[-1])
        need, peak = result["header"]["memory"], result["taken"]
        state = need["parameters"] + need["gradients"] + need["optimizer"]
        cells = [f"{result['header']['parameters']:,}", *(f"{n / 1e6:,.0f} MB" for n in (state, need["activations"]))]
        cells += [f"{n / 1e6:,.0f} MB" for n in (need["total"], peak)]
        print(f"| {name} | {' | '.join(cells)} | {need['total'] / peak:.2f} |", flush=True)


if __name__ == "__main__":
    main()
