"""The goldens against a fresh run of transformers, and our exports loaded by it: `./run reference check`.

Runs in the environment of make.py. Checked are
    goldens     weights rebuilt from their seeds, and what the stored folder answers
    exports     each golden through `./run convert`, straight and by way of an Argosy checkpoint; stories260K too, from its
                folder and from its GGUF: the tensors, the logits and, where there is a tokenizer, its ids
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from make import GOLDENS, MODELS, answers, build

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("ARGOSY_TEST_DATA") or ROOT.parent / "shared" / "data")
REBUILT = 1e-5  # another processor's matrix products round otherwise
EXPORTED = 2e-5  # of the largest logit


def load(folder: Path) -> torch.nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@torch.no_grad()
def logits_of(model: torch.nn.Module, tokens: np.ndarray) -> np.ndarray:
    return model(torch.from_numpy(np.asarray(tokens))).logits.numpy()


def apart(a: np.ndarray, b: np.ndarray) -> float:
    """Largest difference as a share of the largest magnitude of `b`."""
    return float(np.abs(a - b).max() / np.abs(b).max())


def convert(source: Path, target: Path, *words: str) -> Path:
    subprocess.run([ROOT / "run", "convert", source, target, *words], check=True, stdout=subprocess.DEVNULL)
    return target


def same_weights(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    ours, theirs = a.state_dict(), b.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


def check_golden(name: str) -> str | None:
    """What is wrong with a stored golden, if anything."""
    golden = np.load(GOLDENS / name / "golden.npz")
    seed = int(golden["seed"])
    stored, rebuilt = load(GOLDENS / name), build(name, seed)
    for key, value in rebuilt.state_dict().items():
        if not torch.allclose(value, stored.state_dict()[key], atol=1e-6):
            return f"weights {key} are not those of seed {seed}"
    found = answers(stored, seed)
    if (worst := apart(found["logits"], golden["logits"])) > REBUILT:
        return f"logits {worst:.1e} apart"
    if not (np.array_equal(found["greedy"], golden["greedy"]) and np.array_equal(found["tokens"], golden["tokens"])):
        return "another greedy text"
    return None


def check_export(name: str, folder: Path) -> str | None:
    """What is wrong with a folder that we wrote from a golden, if anything."""
    golden, exported = np.load(GOLDENS / name / "golden.npz"), load(folder)
    if not same_weights(exported, load(GOLDENS / name)):
        return "weights differ"
    worst = apart(logits_of(exported, golden["tokens"]), golden["logits"])
    return None if worst < EXPORTED else f"logits {worst:.1e} apart"


def check_stories(folder: Path) -> str | None:
    """What is wrong with stories260K as we wrote it, if anything."""
    golden = json.loads((DATA / "models" / "stories260k" / "golden.json").read_text(encoding="utf-8"))
    model, tokenizer = load(folder), transformers.AutoTokenizer.from_pretrained(folder)
    for case in golden["cases"]:
        if tokenizer(case["prompt"])["input_ids"] != case["ids"]:
            return f"ids of {case['prompt']!r} are {tokenizer(case['prompt'])['input_ids']}"
        worst = apart(logits_of(model, [case["ids"]])[0, -1], np.array(case["last_logits"]))
        if worst > EXPORTED:
            return f"logits of {case['prompt']!r} {worst:.1e} apart"
    return None


def checks(folder: Path):
    """(what is checked, what is wrong with it or None), one after the other."""
    for name in MODELS:
        yield f"golden {name}", check_golden(name)
    for name in MODELS:
        yield f"export {name}", check_export(name, convert(GOLDENS / name, folder / name))
        checkpoint = convert(GOLDENS / name, folder / f"{name}.argosy", "to=argosy")
        yield f"export {name} by checkpoint", check_export(name, convert(checkpoint, folder / f"{name}.again"))
    for source in ("models/stories260k", "gguf/stories260K-f32.gguf"):
        if (DATA / source).exists():
            yield f"export {source}", check_stories(convert(DATA / source, folder / Path(source).name))


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    wrong = 0
    with tempfile.TemporaryDirectory() as scratch:
        for what, problem in checks(Path(scratch)):
            print(f"{what:50s} {problem or 'ok'}", flush=True)
            wrong += problem is not None
    sys.exit(1 if wrong else 0)
