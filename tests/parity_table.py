"""The table of docs/reference/families.md: every small reference model, and how far we are from it. `./run docs` prints it there.

A row is one golden of tests/goldens/models: a random model of transformers in odd sizes. Logits and greedy text are compared here
and now; the last column is what `./run reference check` measured when it loaded our exports with transformers.
"""

import json
import sys
import tempfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from golden_weights import CONTEXTS, write_model
from helpers import relative

import argosy
from argosy.jobs.convert import convert
from argosy.jobs.models import family_of
from argosy.models.parts.attention.attend import Bidirectional

GOLDENS = Path(__file__).parent / "goldens" / "models"
EXPORTS = GOLDENS.parent / "exports.json"
PROMPT = 11
COLUMNS = [
    *("family", "reference model", "architecture", "layers", "parameters", "difference", "greedy text"),
    *("folder to Argosy to folder", "our export in transformers"),
]


def row(name: str, scratch: Path, exports: dict[str, float]) -> str:
    golden = dict(np.load(GOLDENS / name / "golden.npz"))
    folder = write_model(GOLDENS / name, scratch / name)
    lm = argosy.load(folder, context=CONTEXTS.get(name))
    if lm.config.causal:
        apart, text = relative(lm.logits(golden["tokens"]), golden["logits"]), greedy(lm, golden["greedy"].tolist())
    else:
        tokens, types, live = (jnp.asarray(golden[name], jnp.int32) for name in ("tokens", "types", "mask"))
        vectors, seen = lm.module.hidden(tokens, Bidirectional(live), types=types)[0], np.asarray(live, bool)
        apart, text = relative(np.asarray(vectors)[seen], golden["hidden"][seen]), "-"
    convert(str(folder), scratch / f"{name}.argosy", "argosy", None)
    convert(str(scratch / f"{name}.argosy"), scratch / f"{name}.hub", "hub", None)
    exact = "exact" if tensors(scratch / f"{name}.hub") == tensors(folder) else "DIFFERS"
    cells = [family_of(lm.config), name, lm.config.to_hub()["model_type"], lm.config.layers, lm.config.parameters()]
    export = f"{exports[name]:.1e}" if name in exports else "-"
    return "| " + " | ".join(map(str, [*cells, f"{apart:.1e}", text, exact, export])) + " |"


def greedy(lm: argosy.LM, row: list[int]) -> str:
    got = lm.generate([row[:PROMPT]], max_tokens=len(row) - PROMPT, temperature=0.0, ignore_eos=True)[0].tokens
    return "equal" if got == row[PROMPT:] else "DIFFERS"


def tensors(folder: Path) -> dict[str, bytes]:
    from safetensors.numpy import load_file

    return {name: array.tobytes() for name, array in load_file(folder / "model.safetensors").items()}


def table() -> str:
    exports = json.loads(EXPORTS.read_text()) if EXPORTS.exists() else {}
    names = sorted(folder.name for folder in GOLDENS.iterdir())
    with tempfile.TemporaryDirectory() as scratch:
        rows = [row(name, Path(scratch), exports) for name in names]
    return "\n".join([f"| {' | '.join(COLUMNS)} |", "|" + " --- |" * len(COLUMNS), *sorted(rows)])


if __name__ == "__main__":
    print(table())
