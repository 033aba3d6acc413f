"""A model trained further in few bits beside float32, at equal steps: the loss, and what four bits cost afterwards.

    ./run python bench/few_bits_cpu.py MODEL TRAIN.txt TEST.txt [preset=w4a4] [steps=200] [rate=1e-3] [sequence=256] [batch=8]

Prints for each kind of training the perplexity of the test text by the trained weights as floats, and by the folder that `argosy
quantize preset=...` makes of them; and both of the model before.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

OPTIONS = {"preset": "w4a4", "steps": "200", "rate": "1e-3", "sequence": "256", "batch": "8"}


def argosy(*words: str) -> str:
    done = subprocess.run([sys.executable, "-m", "argosy", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    return done.stdout


def perplexity(model: str, text: str, sequence: str) -> float:
    words = [f"text={text}", "tasks=perplexity", f"window={sequence}", "--json"]
    return json.loads(argosy("eval", model, *words))["tasks"]["perplexity"]["perplexity"]


def main(model: str, train: str, test: str, *words: str) -> None:
    options = OPTIONS | dict(word.split("=", 1) for word in words)
    preset, sequence = options["preset"], options["sequence"]
    common = [f"model={model}", f"data.source={train}", f"data.sequence={sequence}", f"data.batch={options['batch']}"]
    common += [f"steps={options['steps']}", f"optimizer.learning_rate={options['rate']}", "optimizer.weight_decay=0"]
    common += ["data.held_out=0", "eval.batches=0", "log.every=1", f"checkpoint.every={options['steps']}"]
    kinds = {"none": [], "int8": ["quant.train=int8"], "fp8": ["quant.train=fp8"]}
    kinds["qat"] = ["quant.train=qat", f"quant.preset={preset}"]
    print(f"{'training':10} {'last losses':>12} {'perplexity':>11} {f'in {preset}':>11}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        before = str(Path(folder) / "before")
        argosy("quantize", model, before, f"preset={preset}")
        perplexities = [perplexity(path, test, sequence) for path in (model, before)]
        print(f"{'(before)':10} {'':>12} {perplexities[0]:11.3f} {perplexities[1]:11.3f}", flush=True)
        for kind, settings in kinds.items():
            run, out = str(Path(folder) / kind), str(Path(folder) / f"{kind}.quantized")
            argosy("train", "pretrain", *common, *settings, f"dir={run}")
            lines = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
            losses = [line["loss"] for line in lines if "loss" in line][-20:]
            argosy("quantize", run, out, f"preset={preset}")
            perplexities = [perplexity(path, test, sequence) for path in (run, out)]
            print(f"{kind:10} {sum(losses) / len(losses):12.4f} {perplexities[0]:11.3f} {perplexities[1]:11.3f}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
