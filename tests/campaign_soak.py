"""A server under random load: nothing leaks, nothing compiles, and every answer is right or a 4xx.

    ./run python tests/campaign_soak.py [minutes=20] [clients=24] [seed=0] [model=FOLDER] [key=value of the server ...]

The server runs in a process of its own, with a cache too small for all of its slots. First some requests are asked one after the
other: with their seeds, they must have the same answers later, whatever runs beside them. Then `clients` tasks ask at random times
for random things: those requests, whole or streamed; structured answers, which must match; log-probabilities of prompts; bodies that
are wrong, which must be refused; answers that are left half-way, and readers that are slow. Clients in processes of their own are
killed (SIGKILL) in the middle of a stream.

Prints a line a minute. At the end all requests have left the server: no pages in use, no more threads and descriptors than
after the first quarter, `argosy:compilations_total` 0, and its memory has grown by less than `GROWTH` since. Exit code 1 otherwise.
"""

import asyncio
import collections
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import jsonschema
from helpers import shared

from argosy.infer.tools.grammar import COMPILING

SERVER = ["port=0", "engine.slots=6", "engine.context=192", "engine.page=8", "engine.pages=30", "limits.seconds=120"]
SERVER += ["warm_up_prompt_logprobs=true", "limits.prompt_logprobs_tokens=192"]
GROWTH = 0.1
PLAIN = 60  # requests whose answers are known
WORDS = """once upon a time there was little girl named Lily who loved to play with her big red ball in the sunny
park""".split()  # noqa: SIM905
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
KILLED = """
import sys, httpx
with httpx.stream("POST", sys.argv[1], content=sys.argv[2], timeout=60) as answer:
    for line in answer.iter_lines():
        print(line, flush=True)
"""
# The first three are zero once nothing runs.
METRICS = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
METRICS += ("argosy:compilations_total", "vllm:num_preemptions_total")


class Server:
    """`argosy serve` in a process of its own."""

    def __init__(self, model: str, words: list[str], log: Path):
        self.log = log
        with log.open("w") as file:
            command = [sys.executable, "-P", "-m", "argosy", "serve", model, *SERVER, *words]
            self.process = subprocess.Popen(command, stderr=file, stdout=file)
        for _ in range(1200):
            if match := re.search(r"ready on (\S+)", log.read_text()):
                self.url = match[1]
                return
            if self.process.poll() is not None:
                break
            time.sleep(0.5)
        self.process.kill()
        raise SystemExit(f"the server did not start:\n{log.read_text()}")

    def state(self) -> dict[str, float]:
        """Megabytes, threads, descriptors and some metrics."""
        folder = Path(f"/proc/{self.process.pid}")
        status = folder.joinpath("status").read_text()
        text = httpx.get(f"{self.url}/metrics", timeout=60).text
        lines = [line.split("{", 1) for line in text.splitlines() if "{" in line]
        metrics = {name: sum(float(rest.split()[-1]) for key, rest in lines if key == name) for name in METRICS}
        mb = int(re.findall(r"VmRSS:\s+(\d+)", status)[0]) / 1024
        return {
            "mb": mb,
            "threads": int(re.findall(r"Threads:\s+(\d+)", status)[0]),
            "files": len(os.listdir(folder / "fd")),
            **metrics,
        }

    def idle(self) -> dict[str, float]:
        """The state once nothing runs."""
        for _ in range(120):
            now = self.state()
            if not any(now[name] for name in METRICS[:3]):
                break
            time.sleep(0.5)
        time.sleep(1)  # connections close
        return self.state()


def plain_request(rng: random.Random) -> dict[str, Any]:
    """One whose answer is the same each time."""
    words = [rng.choice(WORDS) for _ in range(rng.choice((1, 3, 8, 20, 40)))]
    body: dict[str, Any] = {"prompt": " ".join(words), "seed": rng.randrange(1 << 30)}
    body["max_tokens"] = rng.choice((1, 4, 12, 30, 60))
    body["temperature"] = rng.choice((0, 0, 0.7, 1.3))
    if body["temperature"]:
        body |= rng.choice(({}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_k": 50, "top_p": 0.8}))
    body |= rng.choice(({}, {"presence_penalty": 0.5}, {"repetition_penalty": 1.2}, {"logprobs": 3}, {"n": 3}, {"stop": ["ly", "."]}))
    body |= rng.choice(({}, {}, {"ignore_eos": True}, {"min_tokens": 1}, {"echo": True}, {"logit_bias": {"5": -100}}))
    return body


def wrong_body(rng: random.Random) -> bytes:
    good = json.dumps(plain_request(rng)).encode()
    kinds = [
        good[: rng.randrange(len(good) - 1)],
        b'{"prompt": "a", "max_tokens": -3}',
        b'{"prompt": "a", "temperature": "hot"}',
        b'{"prompt": "a", "n": 1000000}',
        b'{"prompt": [[1, 99999999]]}',
        b'{"prompt": "a", "best_of": 4}',
        b'{"prompt": "' + b"a " * 5000 + b'"}',
        b'{"prompt": "a", "structured_outputs": {"json": {"type": 7}}}',
        b"[" * 100_000,
        bytes(rng.randrange(256) for _ in range(40)),
    ]
    return rng.choice(kinds)


def texts_of(choices: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(c["text"], c["finish_reason"]) for c in sorted(choices, key=lambda c: c["index"])]


class Soak:
    def __init__(self, server: Server, rng: random.Random):
        self.server, self.rng = server, rng
        self.url = f"{server.url}/v1/completions"
        self.known: list[tuple[dict[str, Any], list[tuple[str, str]]]] = []
        self.counts: collections.Counter[str] = collections.Counter()
        self.faults: list[str] = []

    def fault(self, text: str) -> None:
        self.faults.append(text)
        print(f"FAULT {text}", flush=True)

    async def ask_known(self, client: httpx.AsyncClient) -> None:
        self.known = []
        for _ in range(PLAIN):
            body = plain_request(self.rng)
            answer = await client.post(self.url, json=body)
            answer.raise_for_status()
            self.known.append((body, texts_of(answer.json()["choices"])))

    async def fill_threads(self, client: httpx.AsyncClient) -> None:
        """As many grammars at once as the server compiles, each slow and new: its pool of threads is full from here on."""
        kinds = [{f"key{i}x{j}": {"type": "integer"} for j in range(600)} for i in range(2 * COMPILING)]
        bodies = [{"prompt": "a", "max_tokens": 1, "structured_outputs": {"json": {"properties": kind}}} for kind in kinds]
        for answer in await asyncio.gather(*(client.post(self.url, json=body) for body in bodies)):
            answer.raise_for_status()

    async def whole(self, client: httpx.AsyncClient) -> None:
        body, expected = self.rng.choice(self.known)
        answer = await client.post(self.url, json=body)
        if answer.status_code == 503:
            return self.counts.update(["503"])
        if answer.status_code != 200 or texts_of(answer.json()["choices"]) != expected:
            self.fault(f"{body}: {answer.status_code} {answer.text[:300]} not {expected}")

    async def streamed(self, client: httpx.AsyncClient, *, leaves: bool = False, slow: bool = False) -> None:
        body, expected = self.rng.choice(self.known)
        outcomes: dict[int, list[str]] = collections.defaultdict(lambda: ["", ""])
        async with client.stream("POST", self.url, json=body | {"stream": True}) as answer:
            if answer.status_code == 503:
                return self.counts.update(["503"])
            pieces = 0
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                pieces += 1
                for choice in json.loads(line[6:]).get("choices", ()):
                    outcomes[choice["index"]][0] += choice["text"]
                    outcomes[choice["index"]][1] = choice["finish_reason"] or outcomes[choice["index"]][1]
                if leaves and pieces >= self.rng.randrange(1, 8):
                    return
                if slow:
                    await asyncio.sleep(self.rng.random() / 2)
        if [tuple(outcomes[i]) for i in sorted(outcomes)] != expected:
            self.fault(f"streamed {body}: {dict(outcomes)} not {expected}")

    async def left(self, client: httpx.AsyncClient) -> None:
        await self.streamed(client, leaves=True)

    async def slow(self, client: httpx.AsyncClient) -> None:
        await self.streamed(client, slow=True)

    async def cancelled(self, client: httpx.AsyncClient) -> None:
        """Leaves before anything came."""
        body, _ = self.rng.choice(self.known)
        try:
            await asyncio.wait_for(client.post(self.url, json=body), self.rng.random())
        except TimeoutError:
            pass

    async def structured(self, client: httpx.AsyncClient) -> None:
        which = self.rng.choice(("json", "regex", "choice"))
        constraint = {"json": SCHEMA, "regex": r"\d{2}-[ab]{1,4}", "choice": ["left", "right"]}[which]
        body = {"prompt": "a", "max_tokens": 80, "temperature": 1, "structured_outputs": {which: constraint}}
        answer = await client.post(self.url, json=body)
        if answer.status_code == 503:
            return self.counts.update(["503"])
        (choice,) = answer.json()["choices"]
        if choice["finish_reason"] == "length":
            return self.counts.update(["cut short"])
        text = choice["text"]
        try:
            if which == "json":
                jsonschema.validate(json.loads(text), SCHEMA)
            elif (which == "regex" and not re.fullmatch(str(constraint), text)) or (which == "choice" and text not in constraint):
                raise ValueError
        except (ValueError, jsonschema.ValidationError):
            self.fault(f"structured {which}: {text!r}")

    async def scored(self, client: httpx.AsyncClient) -> None:
        body = {"prompt": " ".join(self.rng.choices(WORDS, k=25)), "max_tokens": 0, "echo": True, "logprobs": 2}
        answer = await client.post(self.url, json=body)
        if answer.status_code not in (200, 503):
            self.fault(f"scored: {answer.status_code} {answer.text[:200]}")

    async def wrong(self, client: httpx.AsyncClient) -> None:
        body = wrong_body(self.rng)
        answer = await client.post(self.url, content=body, headers={"content-type": "application/json"})
        if (not 400 <= answer.status_code < 500 and answer.status_code != 503) or "error" not in answer.json():
            self.fault(f"wrong body {body[:100]!r}: {answer.status_code}")

    async def killed(self, client: httpx.AsyncClient) -> None:
        body = json.dumps({"prompt": "once", "max_tokens": 150, "ignore_eos": True, "stream": True})
        command = (sys.executable, "-c", KILLED, self.url, body)
        child = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        assert child.stdout is not None
        await child.stdout.readline()
        child.kill()
        await child.wait()

    async def client(self, until: float) -> None:
        kinds = [*[self.whole, self.streamed] * 6, *[self.left, self.wrong] * 2]
        kinds += [self.slow, self.cancelled, self.structured, self.scored]
        async with httpx.AsyncClient(timeout=180) as client:
            while time.monotonic() < until:
                kind = self.killed if self.rng.random() < 0.005 else self.rng.choice(kinds)
                try:
                    await kind(client)
                except Exception as error:
                    self.fault(f"{kind.__name__}: {error!r}")
                self.counts[kind.__name__] += 1
                await asyncio.sleep(self.rng.expovariate(2))

    async def watch(self, until: float, states: list[dict[str, float]]) -> None:
        start = time.monotonic()
        while (remaining := until - time.monotonic()) > 0:
            await asyncio.sleep(min(60, remaining))
            states.append(await asyncio.to_thread(self.server.state))
            rounded = {name.split(":")[-1]: round(value, 2) for name, value in states[-1].items()}
            print(f"{(time.monotonic() - start) / 60:5.1f} min {sum(self.counts.values()):6,} requests {rounded}", flush=True)

    async def run(self, minutes: float, clients: int) -> list[dict[str, float]]:
        async with httpx.AsyncClient(timeout=180) as client:
            await self.ask_known(client)
            await self.scored(client)
            await self.fill_threads(client)
        until, states = time.monotonic() + 60 * minutes, []
        await asyncio.gather(self.watch(until, states), *(self.client(until) for _ in range(clients)))
        return states


def main(words: list[str]) -> int:
    options: dict[str, str] = dict(word.split("=", 1) for word in words)
    minutes, clients, seed = float(options.pop("minutes", 20)), int(options.pop("clients", 24)), int(options.pop("seed", 0))
    model = options.pop("model", None) or str(shared("models/stories260k"))
    with tempfile.TemporaryDirectory() as folder:
        server = Server(model, [f"{key}={value}" for key, value in options.items()], Path(folder) / "log")
        try:
            soak = Soak(server, random.Random(seed))
            states = asyncio.run(soak.run(minutes, clients))
            after = server.idle()
        finally:
            server.process.send_signal(signal.SIGTERM)
            code = server.process.wait(timeout=60)
        log = server.log.read_text()
    before = states[len(states) // 4]
    early = before["mb"]
    checks = {
        "requests that are still there": any(after[name] for name in METRICS[:3]),
        "compilations": after["argosy:compilations_total"],
        "threads": after["threads"] > before["threads"],
        "descriptors": after["files"] > before["files"],
        "memory": states[-1]["mb"] > (1 + GROWTH) * early,
        "exit code": code != 143,
        "traceback": "Traceback" in log,
        "no preemption": not after["vllm:num_preemptions_total"],
    }
    for name, wrong in checks.items():
        if wrong:
            soak.fault(f"{name}: before {before}, after {after}, code {code}")
    print(f"{sum(soak.counts.values()):,} requests in {minutes:g} minutes: {dict(soak.counts)}")
    print(f"memory {early:.0f} MB after a quarter, {states[-1]['mb']:.0f} MB at the end; {len(soak.faults)} faults")
    return 1 if soak.faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
