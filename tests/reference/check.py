"""The goldens against a fresh run of transformers and PEFT, and our exports loaded by them: `./run reference check [NAME ...]`.

Runs in the environment of make.py. Checked are
    goldens     what the stored recipe for the weights answers
    exports     each golden through `./run convert`, straight and by way of an Argosy checkpoint; stories260K too, from its
                folder and from its GGUF: the tensors, the logits and, where there is a tokenizer, its ids
    adapters    each adapter through `lm.save(format="peft")`: PEFT's logits with it
    runs        an adapter of each kind that a run trains, and a reward model with one: PEFT's logits with the run's `adapter/`, beside
                those of the loaded run

The figures of the exports go to tests/goldens/exports.json, for the table of docs/reference/families.md.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import peft
import torch
import transformers
from adapters import ADAPTERS
from make import GOLDENS, answers, load
from variants import MODELS

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("ARGOSY_TEST_DATA") or ROOT.parent / "shared" / "data")
FIGURES = GOLDENS.parent / "exports.json"
# As exports.py trains them.
TRAINED = ("lora", "rslora", "pissa", "dora", "whole")
AGAIN = 1e-5  # another processor's matrix products round otherwise
EXPORTED = 2e-5  # of the largest logit


def relative_difference(model: torch.nn.Module, name: str) -> float:
    """The largest difference from a golden's answer, as a share of its largest number."""
    golden = np.load(GOLDENS / name / "golden.npz")
    seed = json.loads((GOLDENS / name / "tensors.json").read_text(encoding="utf-8"))["seed"]
    output, key = answers(model, seed), "logits" if "logits" in golden else "hidden"
    return float(np.abs(output[key] - golden[key]).max() / np.abs(golden[key]).max())


def same_weights(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    ours, theirs = a.state_dict(), b.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


def convert(source: Path, target: Path, *words: str) -> Path:
    subprocess.run([ROOT / "run", "convert", source, target, *words], check=True, capture_output=True)
    return target


def check_golden(name: str, folder: Path) -> str | None:
    """What is wrong with a stored golden, if anything."""
    worst = relative_difference(load(folder), name)
    return None if worst < AGAIN else f"{worst:.1e} apart"


def check_export(name: str, folder: Path, base: Path, figures: dict[str, float]) -> str | None:
    """What is wrong with a folder that we wrote from a golden, if anything."""
    exported = load(folder)
    if not same_weights(exported, load(base)):
        return "weights differ"
    figures[name] = relative_difference(exported, name)
    return None if figures[name] < EXPORTED else f"{figures[name]:.1e} apart"


@torch.no_grad()
def check_adapter(name: str, base: Path, folder: Path) -> str | None:
    """What is wrong with an adapter that we read and wrote again, if anything."""
    golden = np.load(ADAPTERS / name / "golden.npz")
    model = peft.PeftModel.from_pretrained(load(base), folder).eval()
    logits = model(torch.from_numpy(golden["tokens"]), use_cache=False).logits.numpy()
    worst = float(np.abs(logits - golden["logits"]).max() / np.abs(golden["logits"]).max())
    return None if worst < EXPORTED else f"{worst:.1e} apart"


@torch.no_grad()
def check_run(name: str, base: Path, run: Path) -> str | None:
    """What is wrong with the adapter that a run trained, if anything."""
    tokens, expected = np.load(GOLDENS / name / "golden.npz")["tokens"], np.load(run / "expected.npy")
    model = load(base)
    plain = model(torch.from_numpy(tokens), use_cache=False).logits.numpy()
    logits = peft.PeftModel.from_pretrained(model, run / "adapter").eval()(torch.from_numpy(tokens), use_cache=False).logits.numpy()
    worst, moved_by = (float(np.abs(a - expected).max() / np.abs(expected).max()) for a in (logits, plain))
    return f"{worst:.1e} apart" if worst >= EXPORTED else None if moved_by > 1e-3 else "nothing was trained"


@torch.no_grad()
def check_scores(base: Path, run: Path) -> str | None:
    """What is wrong with the reward model that a run trained, if anything."""
    tokens, expected = np.load(run / "tokens.npy"), np.load(run / "expected.npy")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, attn_implementation="eager")
    model = peft.PeftModel.from_pretrained(model.float(), run / "adapter").eval()
    # One row at a time: the library needs a padding token to find the last token of several.
    scores = np.concatenate([model(torch.from_numpy(row[None]), use_cache=False).logits.numpy()[0] for row in tokens])
    worst = float(np.abs(scores - expected).max() / np.abs(expected).max())
    return f"{worst:.1e} apart" if worst >= EXPORTED else None


@torch.no_grad()
def check_stories(folder: Path) -> str | None:
    """What is wrong with stories260K as we wrote it, if anything."""
    golden = json.loads((DATA / "models" / "stories260k" / "golden.json").read_text(encoding="utf-8"))
    model, tokenizer = load(folder), transformers.AutoTokenizer.from_pretrained(folder)
    for case in golden["cases"]:
        if tokenizer(case["prompt"])["input_ids"] != case["ids"]:
            return f"ids of {case['prompt']!r} are {tokenizer(case['prompt'])['input_ids']}"
        logits, expected = model(torch.tensor([case["ids"]])).logits[0, -1].numpy(), np.array(case["last_logits"])
        worst = np.abs(logits - expected).max() / np.abs(expected).max()
        if worst > EXPORTED:
            return f"logits of {case['prompt']!r} {worst:.1e} apart"
    return None


def checks(folder: Path, names: list[str]) -> Iterator[tuple[str, str | None]]:
    """(what is checked, what is wrong with it or None), one after the other."""
    figures = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
    subprocess.run([ROOT / "run", "python", Path(__file__).with_name("exports.py"), folder, *names], check=True)
    yield "run of a reward model", check_scores(folder / "scores.base", folder / "scores")
    for name in names:
        base = folder / f"{name}.base"
        yield f"golden {name}", check_golden(name, base)
        yield f"export {name}", check_export(name, folder / name, base, figures)
        yield f"export {name} by checkpoint", check_export(name, folder / f"{name}.again", base, figures)
        FIGURES.write_text(json.dumps(dict(sorted(figures.items())), indent=1) + "\n")
        if (ADAPTERS / name).exists():
            yield f"adapter {name}", check_adapter(name, base, folder / f"{name}.adapter")
            for kind in TRAINED:
                yield f"run {name} {kind}", check_run(name, base, folder / f"{name}.{kind}")
    for source in ("models/stories260k", "gguf/stories260K-f32.gguf"):
        if (DATA / source).exists():
            yield f"export {source}", check_stories(convert(DATA / source, folder / f"{Path(source).name}.hub"))


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    wrong = 0
    with tempfile.TemporaryDirectory() as scratch:
        for what, problem in checks(Path(scratch), sys.argv[1:] or list(MODELS)):
            print(f"{what:50s} {problem or 'ok'}", flush=True)
            wrong += problem is not None
    sys.exit(1 if wrong else 0)
