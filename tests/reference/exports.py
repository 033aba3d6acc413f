"""What check.py loads with transformers and PEFT, written by Argosy in one process: `./run python tests/reference/exports.py
SCRATCH NAME ...`. For each golden: NAME.base (its model), NAME (through `convert`), NAME.again (by way of a checkpoint), and
where there is a golden of an adapter NAME.adapter, and NAME.KIND for each kind that a run can train: the run directory, with
expected.npy, what the loaded run answers. `scores` is a reward model's run."""

import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from golden_weights import write_model

import argosy
from argosy.jobs.convert import convert

GOLDENS = Path(__file__).parents[1] / "goldens"
TRAINED = {
    "lora": ["adapter=lora"],
    "rslora": ["adapter=lora", "adapter.rslora=true"],
    "pissa": ["adapter=lora", "adapter.init=pissa"],
    "dora": ["adapter=dora"],
    "whole": ["adapter=lora", "adapter.train=[embed, .*norm]"],
}
STEPS = ["steps=3", "data.source=synthetic", "data.sequence=32", "data.batch=8", "eval.batches=0", "optimizer.learning_rate=1e-2"]


def export(name: str, scratch: Path) -> None:
    base = write_model(GOLDENS / "models" / name, scratch / f"{name}.base")
    convert(str(base), scratch / name, "hub", None)
    convert(str(base), scratch / f"{name}.argosy", "argosy", None)
    convert(str(scratch / f"{name}.argosy"), scratch / f"{name}.again", "hub", None)
    adapter = GOLDENS / "adapters" / name
    if adapter.exists():
        argosy.load(base, adapter=adapter).save(scratch / f"{name}.adapter", format="peft")
        tokens = np.load(GOLDENS / "models" / name / "golden.npz")["tokens"]
        for kind, words in TRAINED.items():
            run = scratch / f"{name}.{kind}"
            argosy.fit("tiny", *STEPS, *words, f"model={base}", f"dir={run}", "adapter.rank=2")
            np.save(run / "expected.npy", argosy.load(run).logits(tokens))


def scores(scratch: Path) -> None:
    """A reward model of the kind that PEFT calls SEQ_CLS: scores.base, which has a vocabulary of bytes, and the run `scores`."""
    sizes = ["model.vocab=258", "model.width=16", "model.layers=2", "model.ffn=32", "model.heads=2", "model.context=64"]
    common = ["eval.batches=0", "data.sequence=32", "optimizer.learning_rate=1e-2"]
    base, run, data = scratch / "scores.base", scratch / "scores", scratch / "pairs.jsonl"
    argosy.fit("tiny", *sizes, *common, "steps=1", "data.source=synthetic", f"dir={scratch / 'scores.first'}")
    convert(str(scratch / "scores.first"), base, "hub", None)
    pairs = [{"prompt": f"{i}:", "chosen": " 1", "rejected": " no"} for i in range(16)]
    data.write_text("".join(json.dumps(pair) + "\n" for pair in pairs), encoding="utf-8")
    words = ["data.tokenizer=byte", "data.batch=16", "data.held_out=0", "adapter=lora", "adapter.rank=2", "steps=1"]
    argosy.fit("reward", *common, *words, f"model={base}", f"dir={run}", f"data.source={data}")
    tokens = np.random.default_rng(0).integers(0, 256, (4, 20))
    np.save(run / "tokens.npy", tokens)
    np.save(run / "expected.npy", argosy.load(run).rewards([row.tolist() for row in tokens]))


if __name__ == "__main__":
    scores(Path(sys.argv[1]))
    for name in sys.argv[2:]:
        export(name, Path(sys.argv[1]))
