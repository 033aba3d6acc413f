"""Sentences a second and latency of /v1/embeddings, closed loop: each client sends its next sentence when it has its vector.

    ./run serve MINILM port=8000
    ./run python bench/embed_http.py http://127.0.0.1:8000 [SECONDS] [SERVER'S PROCESS ID]

Sentences of 20 tokens with [CLS] and [SEP], as ids, base64 vectors. Client and server share the machine; the client writes bytes and
reads bytes, so that it costs little. With the id of the server's process, also its CPU time per sentence, which other load on the
machine hardly changes, and its memory.
"""

import asyncio
import json
import os
import sys
import time
from pathlib import Path

import numpy as np

TICK = 100
CLIENTS = (1, 16)


def requests_of(count: int, host: str) -> list[bytes]:
    """Requests with random words between the ids of [CLS] and [SEP]."""
    draws = np.random.default_rng(0).integers(2000, 20000, (count, 18))
    requests = []
    for row in draws:
        body = json.dumps({"input": [101, *row.tolist(), 102], "encoding_format": "base64"}).encode()
        head = f"POST /v1/embeddings HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        requests.append(head.encode() + body)
    return requests


async def client(host: str, port: int, requests: list[bytes], until: float, took: list[float]) -> None:
    """One client, until the time is up."""
    reader, writer = await asyncio.open_connection(host, port)
    at = 0
    while time.perf_counter() < until:
        begun = time.perf_counter()
        writer.write(requests[at % len(requests)])
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        assert head.startswith(b"http/1.1 200"), head
        await reader.readexactly(int(head.partition(b"content-length:")[2].split()[0]))
        took.append(time.perf_counter() - begun)
        at += 1
    writer.close()


async def load(host: str, port: int, clients: int, seconds: float) -> list[float]:
    """The seconds that each sentence took."""
    took: list[float] = []
    requests = requests_of(64, f"{host}:{port}")
    until = time.perf_counter() + seconds
    parts = [requests[4 * i :] + requests[: 4 * i] for i in range(clients)]
    await asyncio.gather(*(client(host, port, part, until, took) for part in parts))
    return took


def cpu_seconds(process: int) -> float:
    """User and system time of a process, Linux only."""
    fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def main(url: str, seconds: float = 10, process: int | None = None) -> None:
    host, _, port = url.removeprefix("http://").rstrip("/").partition(":")
    for clients in CLIENTS:
        asyncio.run(load(host, int(port), clients, 1))
        cpu = cpu_seconds(process) if process else 0.0
        begun = time.perf_counter()
        took = asyncio.run(load(host, int(port), clients, seconds))
        rate = len(took) / (time.perf_counter() - begun)
        p50, p99 = np.percentile(np.asarray(took) * 1e3, [50, 99])
        line = f"{clients:3} clients  {rate:6.0f} sentences/s  p50 {p50:6.1f} ms  p99 {p99:6.1f} ms"
        if process:
            status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
            memory = int(status.partition("VmRSS:")[2].split()[0]) / 1024
            line += f"  {(cpu_seconds(process) - cpu) / len(took) * 1e3:5.1f} ms CPU each  {memory:.0f} MB"
        print(f"{line}  load {os.getloadavg()[0]:.1f}", flush=True)


if __name__ == "__main__":
    words = sys.argv[1:]
    main(words[0], *[float(word) for word in words[1:2]], *[int(word) for word in words[2:3]])
