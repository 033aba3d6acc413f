"""What a second copy of a model costs on the devices of a CPU, and what routing by prefix finds.

    ./run python bench/copies_cpu.py start MODEL-or-PRESET [slots=8 context=512]    warm-up and memory of 1 and 2 copies
    ./run python bench/copies_cpu.py route MODEL                                    prompt tokens found in the caches of 2 copies

Two copies on one CPU share its cores, so they answer no faster: this measures what starting them costs. Each start is a process of
its own; CPU seconds hardly depend on other load. Programs are kept in a temporary folder, which is empty for the cold start.

The routing serves conversations whose turns come in random order, several at a time. Slack: how much busier than the least busy copy
the one with the longest cached prefix may be; `turns`: prefixes are not looked at.
"""

import asyncio
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

COPIES = (1, 2)
CONVERSATIONS, TURNS, ASKED, ANSWERED = 12, 5, 40, 20
FLAG = "--xla_force_host_platform_device_count"


def started(model: str, copies: int, slots: int, context: int) -> dict[str, float]:
    """Starts the engines of a server; figures of this process."""
    import argosy
    from argosy.infer.settings import EngineSettings
    from argosy.serve.engine.engines import build_front
    from argosy.serve.settings import ServeSettings

    lm = argosy.load(model, random=None if Path(model).exists() else 0)
    before, begun = time.process_time(), time.perf_counter()
    loaded = rss()
    settings = ServeSettings(copies=copies, engine=EngineSettings(slots=slots, context=context))
    front = build_front(lm, "model", settings, None)
    figures = {"cpu_s": time.process_time() - before, "wall_s": time.perf_counter() - begun, "loaded_mb": loaded, "mb": rss()}
    figures["programs"] = sum(engine.stats.compilations for engine in front.engines)
    caches = [cache for engine in front.engines for cache in engine.runner.caches.values()]
    figures["cache_mb"] = sum(a.nbytes for cache in caches for a in cache.values()) / 1e6
    front.close()
    return figures


def rss() -> float:
    """Resident memory in MB; where the system does not say, its peak."""
    status = Path("/proc/self/status")
    if status.exists():
        return int(status.read_text(encoding="utf-8").partition("VmRSS:")[2].split()[0]) / 1e3
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def starts(model: str, slots: str, context: str) -> None:
    for copies in COPIES:
        with tempfile.TemporaryDirectory() as folder:
            for cache in ("cold", "warm"):
                more = {"JAX_COMPILATION_CACHE_DIR": folder, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
                env = os.environ | more | {"JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1", "XLA_FLAGS": f"{FLAG}={copies}"}
                words = [sys.executable, __file__, "one", model, str(copies), slots, context]
                done = subprocess.run(words, env=env, check=True, stdout=subprocess.PIPE, text=True)
                figures = json.loads(done.stdout.splitlines()[-1])
                line = f"{copies} copies, cache {cache}: {figures['programs']:3.0f} programs  {figures['cpu_s']:6.1f} CPU s"
                memory = f"{figures['mb']:6.0f} MB ({figures['loaded_mb']:.0f} before, caches {figures['cache_mb']:.0f})"
                print(f"{line}  {figures['wall_s']:6.1f} s  {memory}  load {os.getloadavg()[0]:.1f}", flush=True)


async def talk(front: Any, clients: int) -> tuple[float, list[int]]:
    """The share of prompt tokens that caches had, and the tokens that each copy made."""
    from argosy.infer.engine.request import Request

    rng = random.Random(0)
    idle: list[list[int]] = [[] for _ in range(CONVERSATIONS)]
    requests_left = CONVERSATIONS * TURNS
    before = [engine.stats.drawn_tokens for engine in front.engines]
    prompt_tokens = reused = 0

    async def client() -> None:
        nonlocal prompt_tokens, reused, requests_left
        while requests_left and idle:
            requests_left -= 1
            ids = idle.pop(rng.randrange(len(idle)))
            ids += [rng.randrange(3, 500) for _ in range(ASKED)]
            async with front.open([Request(list(ids), ANSWERED)]) as answers:
                ids += [event.token async for _, event in answers]
                reused += answers.reused(0)
            prompt_tokens += len(ids) - ANSWERED
            if len(ids) < TURNS * (ASKED + ANSWERED):
                idle.append(ids)

    await asyncio.gather(*(client() for _ in range(clients)))
    return reused / prompt_tokens, [engine.stats.drawn_tokens - then for engine, then in zip(front.engines, before)]


def routed(model: str) -> None:
    os.environ["XLA_FLAGS"] = f"{FLAG}=2"
    from argosy.infer.load import load_lm
    from argosy.infer.settings import EngineSettings
    from argosy.serve.engine import replicas as copies
    from argosy.serve.engine.engines import build_front
    from argosy.serve.engine.replicas import ReplicaFront
    from argosy.serve.settings import ServeSettings

    engine = EngineSettings(slots=16, context=512, pages=1024)
    front: Any = build_front(load_lm(model), "model", ServeSettings(copies=2, engine=engine), None)
    by_prefix = ReplicaFront._with_longest_prefix
    for clients in (1, 4, 8):
        for slack, choose in ((0, lambda self, numbers, request: numbers), *((slack, by_prefix) for slack in (0, 2, 4, 8))):
            name = f"slack {slack}" if choose is by_prefix else "turns"
            ReplicaFront._with_longest_prefix = choose
            copies.SLACK = slack
            asyncio.run(front.together(lambda engines: [engine.reset_prefix_cache() for engine in engines]))
            share, drawn_tokens = asyncio.run(talk(front, clients))
            line = f"{clients:3} at a time, {name:7}: {share:4.0%} of prompt tokens cached, tokens of the copies {drawn_tokens}"
            print(line, flush=True)
    front.close()


if __name__ == "__main__":
    what, model, *rest = sys.argv[1:]
    given = dict(word.split("=") for word in rest if "=" in word)
    if what == "one":
        print(json.dumps(started(model, *map(int, rest))))
    elif what == "route":
        routed(model)
    else:
        starts(model, given.get("slots", "8"), given.get("context", "512"))
