"""Rounding methods on one model: perplexity on text that calibration did not see, error of outputs, CPU seconds, peak memory.

    ./run python bench/quantize_methods.py MODEL CALIBRATION.txt TEST.txt presets=w4 methods=nearest!,mse!,gptq samples=64 sequence=512

Each row is a process of its own, `argosy quantize` and then `argosy eval`. A method with `!` gets no data. `windows` limits the text of
the evaluation.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

WORDS = {"presets": "w4", "methods": "nearest,mse!,mse,gptq", "samples": "64", "sequence": "512", "windows": "40"}


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


def perplexity(model: str, text: str, how: dict[str, str]) -> float:
    words = [f"text={text}", "tasks=perplexity", f"window={how['sequence']}", f"limit={how['windows']}"]
    return argosy("eval", model, *words)[0]["tasks"]["perplexity"]["perplexity"]


def main(model: str, calibration: str, test: str, *words: str) -> None:
    how = WORDS | dict(word.split("=", 1) for word in words)
    print(f"as it is: perplexity {perplexity(model, test, how):.3f}", flush=True)
    print(f"{'preset':10} {'method':24} {'perplexity':>10} {'output':>8} {'bits':>6} {'seconds':>8} {'CPU s':>8} {'peak MB':>8}")
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
                found = perplexity(out, test, how)
            costs = f"{seconds:8.1f} {used.ru_utime + used.ru_stime:8.1f} {used.ru_maxrss / 1e3:8.0f}"
            print(f"{preset:10} {method:24} {found:10.3f} {mean:>8} {8 * size / numbers:6.2f} {costs}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
