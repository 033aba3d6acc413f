"""Rounding methods on one model: perplexity on text that calibration did not see, error of outputs, CPU seconds, peak memory.

    ./run python bench/quantize_methods.py MODEL CALIBRATION.txt TEST.txt presets=w4 methods=nearest!,mse!,gptq samples=64 sequence=512

Each row is a process of its own, `argosy quantize` and then `argosy eval`. A method with `!` gets no data. `windows` limits the text of
the evaluation. `tasks=arc_easy,lambada folder=FOLDER limit=100` adds their accuracy. `embed=yes`, for an encoder: the mean cosine of
embeddings of lines of the text with those of the model as it is.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from argosy import load

WORDS = {"presets": "w4", "methods": "nearest,mse!,mse,gptq", "samples": "64", "sequence": "512", "windows": "40"}
WORDS |= {"embed": "no", "tasks": "", "folder": "", "limit": "100"}


def argosy(*words: str) -> tuple[dict[str, Any], Any]:
    """What a verb prints as JSON, and the resources that its process used."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen([sys.executable, "-m", "argosy", *words, "--json"], stdout=out, stderr=err)
        _, status, usage = os.wait4(process.pid, 0)
        out.seek(0)
        err.seek(0)
        if status:
            sys.exit(err.read())
        return json.loads(out.read()), usage


def measures(model: str, text: str, how: dict[str, str], exact: np.ndarray | None) -> tuple[dict[str, float], np.ndarray | None]:
    """Perplexity and the accuracy of each task; of an encoder the mean cosine with `exact`, embeddings of the model as it is, and its
    embeddings."""
    if how["embed"] == "yes":
        lines = [line for line in Path(text).read_text(encoding="utf-8").splitlines() if len(line) > 40]
        found = np.asarray(load(model).embed(lines[: int(how["windows"])]))
        return {"cosine": 1.0 if exact is None else float(np.mean(np.sum(found * exact, -1)))}, found
    words = [f"text={text}", "tasks=perplexity", f"window={how['sequence']}", f"limit={how['windows']}"]
    out = {"perplexity": argosy("eval", model, *words)[0]["tasks"]["perplexity"]["perplexity"]}
    if how["tasks"]:
        words = [f"tasks={how['tasks']}", f"data={how['folder']}", f"limit={how['limit']}"]
        out |= {name: task["acc"] for name, task in argosy("eval", model, *words)[0]["tasks"].items()}
    return out, None


def main(model: str, calibration: str, test: str, *words: str) -> None:
    how = WORDS | dict(word.split("=", 1) for word in words)
    before, exact = measures(model, test, how, None)
    print(f"as it is: {', '.join(f'{name} {value:.4f}' for name, value in before.items())}", flush=True)
    heads = "".join(f"{name:>16}" for name in before)
    print(f"{'preset':10} {'method':12} {heads} {'output':>8} {'bits':>6} {'seconds':>8} {'CPU s':>8} {'peak MB':>8}")
    for preset in how["presets"].split(","):
        for method in how["methods"].split(","):
            data = [f"data.source={calibration}", f"samples={how['samples']}", f"data.sequence={how['sequence']}"]
            data = [] if method.endswith("!") else data
            with tempfile.TemporaryDirectory() as folder:
                start = time.monotonic()
                out = str(Path(folder) / "out")
                chosen = [f"method={method.rstrip('!')}"] if method != "nearest!" else []
                result, used = argosy("quantize", model, out, f"preset={preset}", *chosen, *data)
                seconds = time.monotonic() - start
                errors = [row["output_error"] for row in result["weights"] if row.get("output_error") is not None]
                numbers, size = (sum(row[name] for row in result["weights"]) for name in ("numbers", "bytes"))
                mean = f"{sum(errors) / len(errors):.4f}" if errors else ""
                found = "".join(f"{value:16.4f}" for value in measures(out, test, how, exact)[0].values())
            costs = f"{seconds:8.1f} {used.ru_utime + used.ru_stime:8.1f} {used.ru_maxrss / 1e3:8.0f}"
            print(f"{preset:10} {method:12} {found} {mean:>8} {8 * size / numbers:6.2f} {costs}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
