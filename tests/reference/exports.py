"""What check.py loads with transformers and PEFT, written by Argosy in one process: `./run python tests/reference/exports.py
SCRATCH NAME ...`. For each golden: NAME.base (its model), NAME (through `convert`), NAME.again (by way of a checkpoint), and
NAME.adapter where there is a golden of an adapter."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from golden_weights import write_model

import argosy
from argosy.jobs.convert import convert

GOLDENS = Path(__file__).parents[1] / "goldens"


def export(name: str, scratch: Path) -> None:
    base = write_model(GOLDENS / "models" / name, scratch / f"{name}.base")
    convert(str(base), scratch / name, "hub", None)
    convert(str(base), scratch / f"{name}.argosy", "argosy", None)
    convert(str(scratch / f"{name}.argosy"), scratch / f"{name}.again", "hub", None)
    adapter = GOLDENS / "adapters" / name
    if adapter.exists():
        argosy.load(base, adapter=adapter).save(scratch / f"{name}.adapter", format="peft")


if __name__ == "__main__":
    for name in sys.argv[2:]:
        export(name, Path(sys.argv[1]))
