"""The server on a CPU, beside llama.cpp's: 128 tokens in, 64 out, at 1, 8 and 32 clients. Linux only.

    ./run python bench/serve_cpu.py MODEL [LLAMA_SERVER GGUF] [serve setting=value ...]

Each server has the machine for itself, and the order is A B B A; `argosy bench serve` is the client of both. Tokens a second are those
of the answers, over all of the time; TTFT is the median time to the first token, TPOT the median time of each further one. CPU: of the
server's process, per token of an answer. RSS: at the end, and the highest.
"""

import json
import os
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

CLIENTS = {1: 6, 8: 32, 32: 96}
PORT, TICK = 8765, os.sysconf("SC_CLK_TCK")


@contextmanager
def running(words: list[str]) -> Iterator[int]:
    """The process of a server that answers, while the block runs."""
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    start = time.perf_counter()
    try:
        while process.poll() is None and time.perf_counter() - start < 300:
            with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=5):
                print(f"  ready after {time.perf_counter() - start:.1f} s", flush=True)
                yield process.pid
                return
            time.sleep(0.1)
        raise SystemExit(f"{words[0]} did not start")
    finally:
        process.terminate()
        process.wait(60)


def cpu_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def megabytes(process: int, name: str) -> float:
    """VmRSS or VmHWM."""
    status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    return int(status.partition(f"{name}:")[2].split()[0]) / 1024


def load(clients: int, prompts: int, seed: int) -> dict[str, Any]:
    words = ["num_prompts=" + str(prompts), f"num_warmups={clients}", f"max_concurrency={clients}", f"seed={seed}"]
    words += ["input_len=128", "output_len=64", f"http://127.0.0.1:{PORT}", "--json"]
    done = subprocess.run([sys.executable, "-m", "argosy", "bench", "serve", *words], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def measured(words: list[str], turn: int) -> dict[int, dict[str, float]]:
    """The figures of one server, by number of clients."""
    figures = {}
    with running(words) as process:
        for clients, prompts in CLIENTS.items():
            cpu = cpu_seconds(process)
            report = load(clients, prompts, 100 * turn + clients)
            tokens = 64 * (prompts + clients)
            figures[clients] = {
                "tokens/s": report["output_throughput"],
                "TTFT ms": report["median_ttft_ms"],
                "TPOT ms": report["median_tpot_ms"],
                "CPU ms": 1e3 * (cpu_seconds(process) - cpu) / tokens,
                "RSS MB": megabytes(process, "VmRSS"),
                "peak MB": megabytes(process, "VmHWM"),
            }
            print(f"  {clients:3} " + "  ".join(f"{k} {v:.1f}" for k, v in figures[clients].items()), flush=True)
    return figures


def main(model: str, *words: str) -> None:
    settings, others = [word for word in words if "=" in word], [word for word in words if "=" not in word]
    servers = {"argosy": [sys.executable, "-m", "argosy", "serve", model, f"port={PORT}", "name=model", *settings]}
    if others:
        llama, gguf = others
        llama_words = ["-t", str(os.cpu_count()), "-c", str(32 * 512), "-np", "32", "--alias", "model"]
        servers["llama.cpp"] = [llama, "-m", gguf, "--port", str(PORT), *llama_words]
    order = [*servers, *reversed(servers)] if len(servers) > 1 else [*servers, *servers]
    figures: dict[str, list[dict[int, dict[str, float]]]] = {name: [] for name in servers}
    for turn, name in enumerate(order):
        print(name, flush=True)
        figures[name].append(measured(servers[name], turn))
    columns = list(figures["argosy"][0][1])
    print("| server | clients | " + " | ".join(columns) + " |\n|---|---|" + "---|" * len(columns))
    for name, turns in figures.items():
        for clients in CLIENTS:
            row = (statistics.median(turn[clients][column] for turn in turns) for column in columns)
            print(f"| {name} | {clients} | " + " | ".join(f"{value:.1f}" for value in row) + " |")


main(*sys.argv[1:])
