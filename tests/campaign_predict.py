"""A server of bundles under random load, while its models are replaced: no request is lost, no answer is wrong, nothing leaks.

    ./run python tests/campaign_predict.py [reloads=100] [minutes=20] [clients=16] [seed=0] [key=value of the server ...]

The server runs in a process of its own. First a model is replaced `reloads` times by one with other weights, by the API and by the
poll in turn, while clients ask without pause: every request is answered by a version that is there, and rightly. Then, for `minutes`,
clients ask for random things: right requests over REST, binary or JSON; bodies that are wrong, which must be refused; bodies that
arrive slowly or end halfway; connections that are dropped. Client processes are killed in the middle of a request.

Prints a line a minute. At the end nothing waits, there are no more threads and descriptors than after the first quarter, and memory has
grown by less than `GROWTH` since. Exit code 1 otherwise.
"""

import asyncio
import collections
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import jax.numpy as jnp
import numpy as np

import argosy

GROWTH = 0.1
WIDTH = 24
KILLED = """
import socket, sys, time
host, port = sys.argv[1].split(":")
s = socket.create_connection((host, int(port)))
s.sendall(b"POST /v2/models/scaled/infer HTTP/1.1\\r\\nHost: localhost\\r\\nContent-Length: 4000\\r\\n\\r\\n" + b"{" * 2000)
print("half", flush=True)
time.sleep(60)
"""


def write_model(folder: Path, gain: float) -> None:
    """y = gain * x + 1, with some weights so that memory that is not let go shows."""
    table = jnp.full((WIDTH, 20_000), gain / 20_000, jnp.float32)

    def call(x: Any) -> Any:
        return {"y": x * jnp.sum(table, 1) + 1}

    part = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(part, ignore_errors=True)
    argosy.export(call, (jnp.zeros((1, WIDTH)),), part, platforms=["cpu"], batch="symbolic")
    part.replace(folder)


class Server:
    """`argosy predict` in a process of its own."""

    def __init__(self, repository: Path, words: list[str], log: Path):
        self.log = log
        with log.open("w") as file:
            command = [sys.executable, "-P", "-m", "argosy", "predict", str(repository), "port=0", "poll=0.3", *words]
            self.process = subprocess.Popen(command, stderr=file, stdout=file)
        for _ in range(600):
            if match := re.search(r"ready on (http\S+)", log.read_text()):
                self.url = match[1].rstrip(",")
                return
            if self.process.poll() is not None:
                break
            time.sleep(0.2)
        self.process.kill()
        raise SystemExit(f"the server did not start:\n{log.read_text()}")

    def state(self) -> dict[str, float]:
        """Megabytes, threads, descriptors, and requests that wait."""
        folder = Path(f"/proc/{self.process.pid}")
        status = folder.joinpath("status").read_text()
        text = httpx.get(f"{self.url}/metrics", timeout=60).text
        waiting = sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith("nv_inference_pending_request_count{"))
        mb = int(re.findall(r"VmRSS:\s+(\d+)", status)[0]) / 1024
        threads = int(re.findall(r"Threads:\s+(\d+)", status)[0])
        return {"mb": mb, "threads": threads, "files": len(os.listdir(folder / "fd")), "waiting": waiting}


def request(rng: random.Random) -> tuple[np.ndarray, dict[str, Any]]:
    rows = rng.choice((1, 1, 1, 2, 5, 40))
    x = np.asarray([[rng.uniform(-4, 4) for _ in range(WIDTH)] for _ in range(rows)], np.float32)
    return x, {"inputs": [{"name": "x", "shape": list(x.shape), "datatype": "FP32", "data": x.ravel().tolist()}]}


def wrong_body(rng: random.Random) -> bytes:
    _, body = request(rng)
    good, input_tensor = json.dumps(body).encode(), body["inputs"][0]
    changed = [
        {"shape": [3, WIDTH]}, {"datatype": "FP64"}, {"name": "z"}, {"data": ["a"] * WIDTH}, {"shape": [-1]}, {"data": None},
        {"shape": [1 << 40, WIDTH]}, {"datatype": "BYTES"}, {"parameters": {"binary_data_size": 10}},
    ]  # fmt: skip
    kinds = [
        good[: rng.randrange(len(good) - 1)],
        b"[]",
        b"\xff\xfe",
        *(json.dumps({"inputs": [input_tensor | c]}).encode() for c in changed),
    ]
    return rng.choice(kinds)


class Load:
    """Clients and what they saw. gains: of the versions that may answer."""

    def __init__(self, server: Server, seed: int):
        self.server, self.seed = server, seed
        self.done: collections.Counter[str] = collections.Counter()
        self.faults: list[str] = []
        self.gains: set[float] = {2.0}
        self.over = False

    def fault(self, text: str) -> None:
        self.faults.append(text)
        print(f"FAULT {text[:400]}", flush=True)

    async def right(self, client: httpx.AsyncClient, rng: random.Random) -> None:
        x, body = request(rng)
        if rng.random() < 0.5:
            body["parameters"] = {"binary_data_output": True}
        gains = set(self.gains)
        answer = await client.post("/v2/models/scaled/infer", json=body)
        if answer.status_code != 200:
            return self.fault(f"{answer.status_code} {answer.text}")
        length = answer.headers.get("inference-header-content-length")
        if length is None:
            y = np.asarray(answer.json()["outputs"][0]["data"], np.float32)
        else:
            y = np.frombuffer(answer.content[int(length) :], np.float32)
        if not any(np.allclose(y.reshape(x.shape), gain * x + 1, atol=1e-3) for gain in gains | self.gains):
            return self.fault(f"a wrong answer: {y[:4]} to {x.ravel()[:4]}, gains {gains | self.gains}")
        self.done["right"] += 1

    async def wrong(self, client: httpx.AsyncClient, rng: random.Random) -> None:
        answer = await client.post("/v2/models/scaled/infer", content=wrong_body(rng), headers={"content-type": "application/json"})
        if not 400 <= answer.status_code < 500 or not isinstance(answer.json().get("error"), str):
            return self.fault(f"a wrong body: {answer.status_code} {answer.text}")
        self.done["refused"] += 1

    async def slow(self, rng: random.Random) -> None:
        """A body that arrives in pieces, and may end halfway."""
        at = httpx.URL(self.server.url)
        reader, writer = await asyncio.open_connection(at.host, at.port)
        body = json.dumps(request(rng)[1]).encode()
        head = f"POST /v2/models/scaled/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        data = head.encode() + body
        whole = rng.random() < 0.5
        for i in range(0, len(data) if whole else len(data) // 2, 1 + len(data) // 8):
            writer.write(data[i : i + 1 + len(data) // 8])
            await asyncio.sleep(rng.uniform(0, 0.05))
        if whole:
            first = await reader.readline()
            if b" 200 " not in first:
                self.fault(f"a slow body: {first!r}")
            self.done["slow"] += 1
        else:
            self.done["half"] += 1
        writer.close()

    async def dropped(self, client: httpx.AsyncClient, rng: random.Random) -> None:
        try:
            await client.post("/v2/models/scaled/infer", json=request(rng)[1], timeout=httpx.Timeout(5, read=0.002))
        except httpx.TimeoutException:
            pass
        self.done["dropped"] += 1

    async def killed(self) -> None:
        at = httpx.URL(self.server.url)
        child = await asyncio.create_subprocess_exec(sys.executable, "-c", KILLED, f"{at.host}:{at.port}", stdout=subprocess.PIPE)
        assert child.stdout is not None
        await child.stdout.readline()
        child.send_signal(signal.SIGKILL)
        await child.wait()
        self.done["killed"] += 1

    async def client(self, number: int, mixed: bool) -> None:
        rng = random.Random(f"{self.seed} {number}")
        async with httpx.AsyncClient(base_url=self.server.url, timeout=60) as client:
            while not self.over:
                try:
                    draw = rng.random() if mixed else 0.0
                    if draw < 0.7:
                        await self.right(client, rng)
                    elif draw < 0.85:
                        await self.wrong(client, rng)
                    elif draw < 0.93:
                        await self.slow(rng)
                    elif draw < 0.998:
                        await self.dropped(client, rng)
                    else:
                        await self.killed()
                except Exception as error:
                    self.fault(f"{type(error).__name__}: {error}")
                    await asyncio.sleep(0.5)


async def replace_under_load(load: Load, repository: Path, times: int, clients: int) -> None:
    """Replaces the model under load."""
    tasks = [asyncio.create_task(load.client(i, False)) for i in range(clients)]
    first: dict[str, float] = {}
    async with httpx.AsyncClient(base_url=load.server.url, timeout=60) as client:
        for number in range(times):
            gain, folder = 3.0 + number % 7, repository / "scaled" / str(number + 2)
            load.gains = load.gains | {gain}
            await asyncio.to_thread(write_model, folder, gain)
            if number % 2:
                answer = await client.post("/v2/repository/models/scaled/load", json={})
                if answer.status_code != 200:
                    load.fault(f"load: {answer.text}")
            for _ in range(600):
                if (await client.get("/v2/models/scaled")).json().get("versions") == [folder.name]:
                    break
                await asyncio.sleep(0.05)
            else:
                load.fault(f"version {folder.name} is not loaded")
            await asyncio.sleep(0.05)
            load.gains = {gain}
            shutil.rmtree(repository / "scaled" / str(number + 1))
            if number in (times // 4, times - 1):
                state = await asyncio.to_thread(load.server.state)
                first = first or state
                print(f"after {number + 1} replacements: {load.done['right']:,} answers, {state}", flush=True)
    load.over = True
    await asyncio.gather(*tasks)
    check_growth(load, first, load.server.state())
    load.over = False


def check_growth(load: Load, first: dict[str, float], last: dict[str, float]) -> None:
    if last["mb"] > (1 + GROWTH) * first["mb"]:
        load.fault(f"memory: {first['mb']:.0f} MB, then {last['mb']:.0f}")
    for name in ("threads", "files"):
        if last[name] > first[name] + 4:
            load.fault(f"{name}: {first[name]:.0f}, then {last[name]:.0f}")


async def soak(load: Load, minutes: float, clients: int) -> None:
    """Random requests for so long."""
    tasks = [asyncio.create_task(load.client(1000 + i, True)) for i in range(clients)]
    begin, first = time.monotonic(), None
    for minute in range(max(1, round(minutes))):
        await asyncio.sleep(min(60.0, 60 * minutes))
        state = await asyncio.to_thread(load.server.state)
        print(f"{(time.monotonic() - begin) / 60:.0f} min: {dict(load.done)}, {state}", flush=True)
        if first is None and minute + 1 >= minutes / 4:
            first = state
    load.over = True
    await asyncio.gather(*tasks)
    await asyncio.sleep(2)
    last = await asyncio.to_thread(load.server.state)
    print(f"end: {last}", flush=True)
    check_growth(load, first or last, last)
    if last["waiting"]:
        load.fault(f"{last['waiting']:.0f} requests still wait")


def main(words: list[str]) -> int:
    options = dict(word.split("=", 1) for word in words)
    reloads, minutes = int(options.pop("reloads", 100)), float(options.pop("minutes", 20))
    clients, seed = int(options.pop("clients", 16)), int(options.pop("seed", 0))
    with tempfile.TemporaryDirectory() as folder:
        repository = Path(folder) / "models"
        (repository / "scaled").mkdir(parents=True)
        write_model(repository / "scaled" / "1", 2.0)
        server = Server(repository, [f"{name}={value}" for name, value in options.items()], Path(folder) / "log.txt")
        load = Load(server, seed)
        try:
            if reloads:
                asyncio.run(replace_under_load(load, repository, reloads, min(clients, 8)))
            if minutes:
                asyncio.run(soak(load, minutes, clients))
        finally:
            server.process.terminate()
            code = server.process.wait(60)
        if code != 143:
            load.fault(f"the server ended with {code}")
        if "Traceback" in server.log.read_text():
            load.fault(server.log.read_text()[-3000:])
    print(f"{sum(load.done.values()):,} requests ({dict(load.done)}), {len(load.faults)} faults")
    return bool(load.faults)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
