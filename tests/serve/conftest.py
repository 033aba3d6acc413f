"""A tiny model with byte tokens, served: inside a test's own event loop, and over a socket."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any

import httpx
import pytest

from argosy.data.tokenizers.byte import ByteTokenizer
from argosy.data.tokenizers.config import TokenizerConfig
from argosy.infer.engine.engine import Engine
from argosy.infer.engine.request import Event, Request
from argosy.infer.lm import LM
from argosy.infer.sampling.sample import Sampling
from argosy.infer.settings import EngineSettings
from argosy.models import FAMILIES
from argosy.serve import run
from argosy.serve.app import App
from argosy.serve.engine.encoder import EncoderService
from argosy.serve.engine.front import Front
from argosy.serve.metrics import EngineMetrics
from argosy.serve.service import Service
from argosy.serve.settings import ServerLimits, ServeSettings
from argosy.web.process import bound_socket, server_address
from argosy.weights.build import random_model

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'wizard' %}{{ raise_exception('no wizards') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}{% if tools %}[{{ tools[0].function.name }}]{% endif %}"
    "{% for d in documents or [] %}({{ d.title }}){% endfor %}{% if enable_thinking is false %}!{% endif %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
EOS = frozenset({ByteTokenizer.eos})
SIZES = EngineSettings(slots=4, page=8, context=128, pages=64, budget=64, budget_decoding=32)
LIMITS = ServerLimits(
    body=20_000, headers=20, answers=16, stops=4, stop_length=20, logprobs=5, prompt_logprobs_tokens=64,
    schema_bytes=3_000, schema_depth=12,
)  # fmt: skip


@pytest.fixture(scope="session")
def lm() -> LM:
    config = FAMILIES["llama"].examples()["plain"].model_copy(update={"vocab": 258})
    return LM(config, random_model(config, 0).module, ByteTokenizer(TokenizerConfig(templates={"default": TEMPLATE})))


@dataclass
class Alone:
    """An answer of the engine to one request that has it for itself, with the programs that the servers here use."""

    text: str
    tokens: list[int]
    logprobs: list[float]
    finish_reason: str | None


def alone(lm: LM, prompt: str | list[int], most: int, seed: int = 0, ends: frozenset[int] = EOS, **sampling: Any) -> Alone:
    engine = Engine(lm.module, SIZES)
    ids = lm.encode(prompt)
    engine.add(Request(ids, most, Sampling(**sampling), ends, seed))
    events = list(engine.run())
    sampled = events[:-1] if events[-1].finish_reason == "stop" else events
    tokens = [event.token for event in sampled if event.token is not None]
    return Alone(lm.tokenizer.decode(tokens), tokens, [event.logprob for event in sampled], events[-1].finish_reason)


class Says(Front):
    """A front whose answers are a text, a byte at a time, whatever is asked; then they end. The engine behind it rests.

    said: the text. waits: answers come only after this is set.
    """

    said = ""
    waits: asyncio.Event | None = None

    @asynccontextmanager
    async def open(self, requests: Sequence[Request], *more: Any, **options: Any) -> AsyncIterator[Any]:
        yield Spoken(self, requests)


class Spoken:
    """What `Answers` is to a front."""

    def __init__(self, front: Says, requests: Sequence[Request]):
        self.front, self.requests, self.left = front, requests, set()

    async def __aiter__(self) -> AsyncIterator[tuple[int, Event]]:
        if self.front.waits is not None:
            await self.front.waits.wait()
        for place, request in enumerate(self.requests):
            likeliest = tuple((token, -1.0) for token in range(request.top))
            for i, byte in enumerate(self.front.said.encode()[: request.max_tokens]):
                if place not in self.left:
                    yield place, Event(place, byte, -0.5, "length" if i + 1 == request.max_tokens else None, top=likeliest)
            if place not in self.left and len(self.front.said.encode()) < request.max_tokens:
                yield place, Event(place, ByteTokenizer.eos, -0.5, "stop", top=likeliest)

    def end(self, place: int, reason: str) -> None:
        self.left.add(place)

    def reused(self, place: int) -> int:
        return 3


@contextmanager
def serving(
    lm: LM,
    limits: ServerLimits = LIMITS,
    templates: bool = False,
    kind: type[Front] = Front,
    more: Any = None,
    sizes: EngineSettings = SIZES,
    draft: Any = None,
    **defaults: Any,
) -> Iterator[Service]:
    """A service whose thread ends with the block, and with no page in use. more: further arguments of the service."""
    engine = Engine(lm.module, sizes, draft=draft)
    front = kind(engine, limits, EngineMetrics("tiny", engine))
    front.start()
    kwargs = {"request_templates": templates} | (more or {})
    try:
        yield Service(lm, "tiny", front, limits, {"temperature": 1.0} | defaults, Random(0), **kwargs)
    finally:
        front.close()
    if front.failure is None:
        assert engine.pages.used == 0


@pytest.fixture(scope="module")
def service(lm: LM) -> Iterator[Service]:
    with serving(lm) as service:
        yield service


@pytest.fixture(scope="module")
def ask(service: Service) -> Callable[..., httpx.Response]:
    """`ask(method, path, ...)`: one request to the application, without a socket."""
    app = App(service).asgi

    def ask(method: str, path: str, **options: Any) -> httpx.Response:
        async def send(client: httpx.AsyncClient) -> httpx.Response:
            return await client.request(method, path, **options)

        return inside(app, send)

    return ask


def inside(app: Any, do: Callable[[httpx.AsyncClient], Awaitable[Any]]) -> Any:
    """What `do` makes of a client of the application, in a fresh event loop."""

    async def go() -> Any:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client:
            return await do(client)

    return asyncio.run(go())


@pytest.fixture(scope="module")
def url(service: Service) -> Iterator[str]:
    """The address of the service. Not for tests to start while their output is captured: uvicorn configures logging, which closes the
    stream of absl's handler unless that is the current stderr."""
    with listening(service) as address:
        yield address


@contextmanager
def listening(service: Service | EncoderService, **settings: Any) -> Iterator[str]:
    """A real server in a thread, on a free port of the loopback, until the block ends."""
    serve_settings = ServeSettings(port=0, drain=30, **settings)
    listener, stop, ready = bound_socket(serve_settings.host, serve_settings.port), threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: run.serve_until(service, serve_settings, listener, stop=stop.is_set, ready=ready.set))
    address = server_address(listener, serve_settings)
    thread.start()
    assert ready.wait(60)
    try:
        yield address
    finally:
        stop.set()
        thread.join(60)
    assert not thread.is_alive()
