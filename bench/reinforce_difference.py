"""How far are the log-probabilities of the engine and of the trainer apart, at the tokens that the engine drew?

    ./run python bench/reinforce_difference.py [MODEL ...]

They are one model in two programs: the engine computes a token at a time over pages, the trainer whole packed rows. For each structure
of the house (small models with random weights), for stories260K and for each MODEL, 64 answers of 32 tokens are sampled in a run of
`grpo` with float32 activations. Printed: the largest and the mean difference in nats, and the effective share of the importance
weights, for the engine with the trainer's weights and with weights rounded to int8.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import argosy
from argosy.core.settings import dump
from argosy.core.storage import Store
from argosy.observe.metrics import by_step, read
from argosy.run.settings.run import Run
from tools.seams import examples

STORIES = Path(__file__).parents[2] / "shared" / "data" / "models" / "stories260k"
STRUCTURES = {
    "dense": "llama-plain", "windows and soft caps": "gemma-2", "experts": "mixtral-plain", "shared experts": "qwen-2-experts",
    "latent attention, experts": "deepseek-3", "sinks, experts": "gpt_oss-plain", "delta nets, experts": "qwen3_next-plain",
}  # fmt: skip
NAMES = ("sampler/difference_max", "sampler/difference_mean", "sampler/effective")
COMMON = [
    "data.sequence=48", "data.batch=64", "data.held_out=0", "rollout.completions=8", "rollout.tokens=32", "rollout.ignore_eos=true",
    "eval.batches=0", "optimizer.learning_rate=1e-5", "precision=float32",
]  # fmt: skip


def words_of(case: Any) -> list[str]:
    """A model's configuration as words of a run."""
    model = dump(Run(model=case.model_copy(update={"vocab": 258, "context": 256})))["model"]

    def flat(tree: dict[str, Any], way: str) -> list[str]:
        words: list[str] = []
        for name, value in tree.items():
            here = f"{way}.{name}"
            words += flat(value, here) if isinstance(value, dict) else [f"{here}={json.dumps(value)}"]
        return words

    return flat({name: value for name, value in model.items() if name != "preset"}, "model")


def measured(folder: Path, words: list[str]) -> list[float]:
    """The differences of the first rollout of a run."""
    run = Path(tempfile.mkdtemp(dir=folder))
    run_words = [f"data.source={folder / 'prompts.jsonl'}", f"reward={folder / 'rewards.py'}:length", f"dir={run}"]
    argosy.fit("grpo", *words, *COMMON, *run_words, steps=1)
    return [by_step(read(Store(run)), name)[1] for name in NAMES]


def main(models: list[str]) -> None:
    cases = examples()
    words_by_name: dict[str, list[str]] = {name: words_of(cases[case]) for name, case in STRUCTURES.items()}
    words_by_name |= {Path(path).name: [f"model={path}"] for path in [str(STORIES), *models]}
    print("| model | engine | largest difference, nats | mean | effective share |\n|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as where:
        folder = Path(where)
        (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"{i} + {i} ="}) + "\n" for i in range(8)))
        (folder / "rewards.py").write_text("def length(completions):\n    return [float(len(text)) for text in completions]\n")
        for name, words in words_by_name.items():
            for kind in ("same", "int8"):
                most, mean, share = measured(folder, [*words, f"rollout.weights={kind}"])
                print(f"| {name} | {kind} | {most:.1e} | {mean:.1e} | {share:.6f} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
