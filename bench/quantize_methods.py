"""Presets and rounding methods on one model: error, bits, perplexity on text that calibration did not see, accuracy, seconds, tokens/s.

    ./run python bench/quantize_methods.py MODEL CALIBRATION.txt TEST.txt presets=w4 methods=nearest!,mse!,gptq samples=64 sequence=512

A cell is a preset by a method: `argosy quantize`, a process of its own, and then the folder is measured here. Rows come as JSON in
`results=FILE.jsonl` and as a table at the end; a cell that the file has is not measured again, so the command goes on after a kill.
Methods: those of `argosy quantize`; with `!` one gets no data; `hadamard+` or `quarot+` in front rotates first; `qwix` is the same
preset by Qwix (`qwix_model.py`), which rounds to nearest. A preset that ends in .yml is a file of rules. `windows` limits the text.
`tasks=arc_easy,lambada folder=FOLDER limit=50` adds accuracies. `embed=yes`, for an encoder: the mean cosine of embeddings of lines of
the text with those of the model as it is. `speed=yes`: tokens a second of one greedy stream, for the first method of a preset, since a
method changes none of it.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from qwix_model import NoQwix, QwixScorer, qwix_model

from argosy import load
from argosy.core.errors import UserError
from argosy.evals.settings import EvalSettings
from argosy.jobs import evaluate

WORDS = {"presets": "w4", "methods": "nearest,mse!,mse,gptq", "samples": "64", "sequence": "512", "windows": "40"}
WORDS |= {"embed": "no", "tasks": "", "folder": "", "limit": "100", "speed": "no", "results": ""}
TOKENS = 48
COLUMNS = ("preset", "method", "bits", "error", "output error", "perplexity", "cosine", "tokens/s", "seconds", "CPU s", "peak MB")


def argosy(*words: str) -> tuple[dict[str, Any], float, float]:
    """What a verb prints as JSON, the CPU seconds of its process, and its peak memory in MB.

    The peak is that of /proc: `ru_maxrss` counts the process that it was forked from too.

    Raises:
        RuntimeError: it failed, with its first line.
    """
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen([sys.executable, "-m", "argosy", *words, "--json"], stdout=out, stderr=err)
        peak, status = 0.0, 0
        while True:
            match = re.search(r"VmHWM:\s*(\d+) kB", Path(f"/proc/{process.pid}/status").read_text())
            peak = float(match[1]) / 1e3 if match else peak
            done, status, usage = os.wait4(process.pid, os.WNOHANG)
            if done:
                break
            time.sleep(0.1)
        out.seek(0)
        err.seek(0)
        if status:
            lines = err.read().splitlines()
            raise RuntimeError(next((line for line in lines if line.startswith("error:")), lines[-1] if lines else "no word"))
        return json.loads(out.read()), usage.ru_utime + usage.ru_stime, peak


def measures(lm: Any, text: str, options: dict[str, str], exact: np.ndarray | None) -> tuple[dict[str, float], np.ndarray | None]:
    """Perplexity and the accuracy of each task; of an encoder the mean cosine with `exact`, embeddings of the model as it is, and its
    embeddings."""
    if options["embed"] == "yes":
        lines = [line for line in Path(text).read_text(encoding="utf-8").splitlines() if len(line) > 40]
        embeddings = np.asarray(lm.embed(lines[: int(options["windows"])]))
        return {"cosine": 1.0 if exact is None else float(np.mean(np.sum(embeddings * exact, -1)))}, embeddings
    settings = [EvalSettings(text=text, tasks="perplexity", window=int(options["sequence"]), limit=int(options["windows"]))]
    if options["tasks"]:
        settings.append(EvalSettings(tasks=options["tasks"], data=options["folder"], limit=int(options["limit"])))
    out: dict[str, float] = {}
    for setting in settings:
        planned, others = evaluate.prepare_tasks(__file__, setting)
        document, _ = evaluate.evaluate(lm, planned, setting, others, lambda *_: None, lambda: False)
        for name, task in document["tasks"].items():
            out |= {name: task["perplexity"]} if name == "perplexity" else {name: 100 * task["acc"]}
    return out, None


def speed(lm: Any) -> float:
    """Tokens a second of one greedy stream after a prompt of 16 tokens, the best of three."""
    prompt, times = list(range(5, 21)), []
    for tokens in (1, 2 * TOKENS, 1, 2 * TOKENS, 1, 2 * TOKENS, 1, 2 * TOKENS):
        start = time.perf_counter()
        lm.generate([prompt], max_tokens=tokens, temperature=0.0, ignore_eos=True)
        times.append(time.perf_counter() - start)
    # The first two compile.
    return (2 * TOKENS - 1) / min(long - short for short, long in zip(times[2::2], times[3::2], strict=True))


def qwix_cell(model: str, preset: str, test: str, options: dict[str, str], exact: np.ndarray | None) -> dict[str, Any]:
    """A cell of Qwix.

    Raises:
        NoQwix: it cannot.
    """
    if options["embed"] == "yes":
        raise NoQwix("embeddings are read by another method than `__call__`, which Qwix does not intercept")
    lm = load(model)
    start = time.monotonic()
    module = qwix_model(lm.module, preset, lm.config.attend, jnp.ones((1, 64), jnp.int32))
    jax.block_until_ready(jax.tree.leaves(module))
    seconds = time.monotonic() - start
    scorer = QwixScorer(module, lm.config.attend)
    lm.sequences = lambda: scorer  # type: ignore[method-assign]
    return measures(lm, test, options, exact)[0] | {"seconds": seconds}


def cell(
    model: str, preset: str, method: str, files: tuple[str, str], options: dict[str, str], exact: Any, timed: bool
) -> dict[str, Any]:
    """What one preset by one method costs."""
    calibration, test = files
    if method == "qwix":
        return qwix_cell(model, preset, test, options, exact)
    rotate, _, name = method.rstrip("!").rpartition("+")
    rounding = f"{'rules' if preset.endswith('.yml') else 'preset'}={preset}"
    words = [f"rotate={rotate}"] if rotate else []
    words += [f"method={name}"] if name != "nearest" else []
    if not method.endswith("!"):
        words += [f"data.source={calibration}", f"samples={options['samples']}", f"data.sequence={options['sequence']}"]
    with tempfile.TemporaryDirectory() as folder:
        start, out = time.monotonic(), str(Path(folder) / "out")
        result, spent, peak = argosy("quantize", model, out, rounding, *words)
        row: dict[str, Any] = {"seconds": time.monotonic() - start, "CPU s": spent, "peak MB": peak}
        weights = result["weights"]
        numbers, size = (sum(weight[key] for weight in weights) for key in ("numbers", "bytes"))
        row |= {"bits": 8 * size / numbers, "error": float(np.mean([weight["error"] for weight in weights]))}
        errors = [weight["output_error"] for weight in weights if weight.get("output_error") is not None]
        row |= {"output error": float(np.mean(errors))} if errors else {}
        lm = load(out)
        row |= measures(lm, test, options, exact)[0]
        return row | ({"tokens/s": speed(lm)} if timed else {})


def shown(rows: list[dict[str, Any]]) -> str:
    """The rows as a table of Markdown."""
    tasks = [key for key in dict.fromkeys(key for row in rows for key in row) if key not in (*COLUMNS, "refused")]
    heads = [key for key in (*COLUMNS[:7], *tasks, *COLUMNS[7:]) if any(key in row for row in rows)]
    digits = {"bits": 2, "error": 4, "output error": 4, "perplexity": 3, "cosine": 4}
    lines = ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
    for row in rows:
        numbers = {key: f"{value:.{digits.get(key, 1)}f}" for key, value in row.items() if not isinstance(value, str)}
        texts = [(row | numbers).get(key, "") for key in heads]
        lines.append("| " + " | ".join(texts) + " |" + (f" {row['refused']}" if "refused" in row else ""))
    return "\n".join(lines)


def main(model: str, calibration: str, test: str, *words: str) -> None:
    options = WORDS | dict(word.split("=", 1) for word in words)
    file = Path(options["results"]) if options["results"] else None
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file and file.exists() else []
    lm = load(model)
    # The embeddings of the model as it is are needed again, so this row is never skipped for an encoder.
    before, exact = measures(lm, test, options, None) if options["embed"] == "yes" or not rows else ({}, None)
    cells = [("as it is", "")] if not rows else []
    cells += [(preset, method) for method in options["methods"].split(",") for preset in options["presets"].split(",")]
    for preset, method in cells:
        if any((row["preset"], row["method"]) == (preset, method) for row in rows):
            continue
        row: dict[str, Any] = {"preset": preset, "method": method}
        timed = options["speed"] == "yes" and not any(earlier["preset"] == preset for earlier in rows)
        try:
            row |= before | ({"tokens/s": speed(lm)} if timed else {}) if not method else {}
            row |= cell(model, preset, method, (calibration, test), options, exact, timed) if method else {}
        except (NoQwix, RuntimeError, UserError) as error:
            row["refused"] = str(error)
        lm = None
        rows.append(row)
        print(json.dumps(row), flush=True)
        if file:
            with file.open("a") as out:
                out.write(json.dumps(row) + "\n")
    print(shown(rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
