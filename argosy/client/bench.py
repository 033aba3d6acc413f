"""Loads a server with streamed requests, and measures each with the client's clock.

The time of a request runs from when it is sent to its last token. The time of a token is that of the event that carried it. Token
counts are taken from the server's `usage`. The client's own CPU time is measured too, because a client that is always busy would
measure itself.
"""

import asyncio
import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from argosy.client.bench_data import OUTPUT_LEN, BenchSample, SampleSource, prepare_samples
from argosy.client.client import ConnectionFailed, ask, documents
from argosy.client.http import Http
from argosy.client.settings import BenchSettings
from argosy.core.counts import plural
from argosy.core.errors import ArgosyError

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
# The vocabulary size that is assumed if a server does not report one: every tokenizer has at least 256 tokens, one for each byte.
LEAST_VOCAB = 256


@dataclass
class RequestOutcome:
    """The measurements of one request. Times are in seconds.

    start: the time from the beginning of the round to the start of the request.
    max_tokens: the most output tokens.
    ttft: the time from the start to the first token.
    itls: the times between consecutive events with tokens.
    latency: the time from the start to the last token.
    input_len, output_len: numbers of prompt and completion tokens.
    cached: number of prompt tokens found in the server's prefix cache.
    text: the text of the completion.
    error: the error message; None: the request succeeded.
    """

    start: float
    max_tokens: int = 0
    ttft: float = 0.0
    itls: list[float] = field(default_factory=list)
    latency: float = 0.0
    input_len: int = 0
    output_len: int = 0
    cached: int = 0
    text: str = ""
    error: str | None = None

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first; None: there is no second token."""
        return (self.latency - self.ttft) / (self.output_len - 1) if self.output_len > 1 else None


@dataclass
class BenchRound:
    """The measurements of one round.

    server: index of the server; 1: the second one of a comparison.
    url: the URL of the server.
    model: the name of the model.
    outcomes: the measurements of each request.
    duration: seconds from the first request to the end of the last.
    cpu: CPU seconds that this process used meanwhile.
    """

    server: int
    url: str
    model: str
    outcomes: list[RequestOutcome]
    duration: float
    cpu: float


class BenchServer:
    """A server to be measured.

    Args:
        url: the URL of the server.
        key: the API key; None: none.
        say: called with a progress message after each request.
    """

    def __init__(self, url: str, settings: BenchSettings, key: str | None, say: Callable[[str], None] | None = None):
        self.http = Http(url, key=key, seconds=settings.timeout)
        self.settings, self.say = settings, say
        self.model, self.vocab = settings.model or "", settings.vocab or LEAST_VOCAB

    async def find(self) -> None:
        """Asks the server for the name of its model and the size of the vocabulary, and sets `model` and `vocab`.

        Raises:
            ConnectionFailed, RequestRefused: the server cannot be reached, or refuses the request.
        """
        if self.settings.model and self.settings.vocab:
            return
        with self._address_in_errors():
            listing = await ask(self.http, "GET", "/v1/models")
        cards = listing.get("data") if isinstance(listing, dict) else None
        if not isinstance(cards, list) or not all(isinstance(card, dict) for card in cards):
            raise ConnectionFailed(f"{self.http.url} lists no models at /v1/models", hint="is it a server of OpenAI's API?")
        card = next((c for c in cards if self.settings.model in (None, c.get("id"))), {})
        self.model = self.settings.model or str(card.get("id", ""))
        meta = card.get("meta")
        vocab = meta.get("n_vocab") if isinstance(meta, dict) else None
        if self.settings.vocab is None and isinstance(vocab, int) and vocab > 1:
            self.vocab = vocab

    async def round(self, source: SampleSource, seed: int, vocab: int, place: int = 0) -> BenchRound:
        """Runs one round: a first request, warm-up requests, then the requests that are measured.

        Args:
            source: the source of prompts.
            seed: rounds with equal seeds have equal prompts, except for random token ids of different servers.
            vocab: random token ids are below this.
            place: index of the server.

        Raises:
            ConnectionFailed, RequestRefused: the first request fails.
        """
        settings = self.settings
        extra = 1 + settings.num_warmups
        samples = source.samples(extra + settings.num_prompts, seed, vocab, place)
        samples = await prepare_samples(self.http, source, samples, self.model, settings.api)
        with self._address_in_errors():
            await self._send(RequestOutcome(0.0), samples[0], time.perf_counter(), source)
        await self._send_all(samples[1:extra], [0.0] * (extra - 1), source)
        delays = arrivals(settings, np.random.default_rng([settings.seed, seed, 1]))
        # Garbage is collected now, because a collection during the round would be measured as time of the server.
        gc.collect()
        cpu, start = time.process_time(), time.perf_counter()
        outcomes = await self._send_all(samples[extra:], delays, source)
        spent, cpu = time.perf_counter() - start, time.process_time() - cpu
        return BenchRound(place, self.http.url, self.model, outcomes, spent, cpu)

    @contextmanager
    def _address_in_errors(self) -> Iterator[None]:
        """Adds the server's URL to errors that are raised inside."""
        try:
            yield
        except ArgosyError as error:
            error.where = error.where or (None if self.http.url in error.what else f"said {self.http.url}")
            raise

    async def _send_all(self, samples: Sequence[BenchSample], delays: Sequence[float], source: SampleSource) -> list[RequestOutcome]:
        """Sends each sample after its delay, in seconds from now, and waits for all responses."""
        most = self.settings.max_concurrency
        gate = asyncio.Semaphore(most) if most else None
        start, ended = time.perf_counter(), 0

        async def measure(sample: BenchSample) -> RequestOutcome:
            nonlocal ended
            if gate is not None:
                await gate.acquire()
            outcome = RequestOutcome(time.perf_counter() - start)
            try:
                await self._send(outcome, sample, start + outcome.start, source)
            except ArgosyError as error:
                outcome.error = error.what
            finally:
                if gate is not None:
                    gate.release()
            ended += 1
            if self.say is not None:
                self.say(f"{ended:,} of {plural(len(samples), 'request')} to {self.http.url}")
            return outcome

        async with asyncio.TaskGroup() as group:
            tasks = []
            for sample, delay in zip(samples, delays):
                if (wait := start + delay - time.perf_counter()) > 0:
                    await asyncio.sleep(wait)
                tasks.append(group.create_task(measure(sample)))
        return [task.result() for task in tasks]

    async def _send(self, outcome: RequestOutcome, sample: BenchSample, start: float, source: SampleSource) -> None:
        """Sends one request, and fills in its outcome in place.

        Raises:
            ConnectionFailed, RequestRefused: there is no whole response.
        """
        last, usage = start, None
        body = self.body(sample, source)
        outcome.max_tokens = body["max_tokens"]
        async with (
            self.http.send("POST", PATHS[self.settings.api], body) as reply,
            aclosing(documents(reply)) as stream,
        ):
            async for document in stream:
                usage = document.get("usage") or usage
                text = event_text(document)
                if text is None:
                    continue
                now = time.perf_counter()
                if last == start:
                    outcome.ttft = now - start
                else:
                    outcome.itls.append(now - last)
                last = now
                outcome.text += text
        outcome.latency = last - start
        usage = usage if isinstance(usage, dict) else {}
        prompt, answer = usage.get("prompt_tokens"), usage.get("completion_tokens")
        if not isinstance(prompt, int) or not isinstance(answer, int):
            raise ConnectionFailed("the server sent no `usage`, so tokens cannot be counted")
        outcome.input_len, outcome.output_len = prompt, answer
        outcome.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        if last == start:
            raise ConnectionFailed("the stream held no token")

    def body(self, sample: BenchSample, source: SampleSource) -> dict[str, Any]:
        """The body of the request for a sample."""
        settings = self.settings
        body: dict[str, Any] = {"model": self.model, "temperature": settings.temperature, "stream": True}
        body |= {"max_tokens": sample.output_len or OUTPUT_LEN, "stream_options": {"include_usage": True}}
        if settings.api == "completions":
            body["prompt"] = sample.prompt
        else:
            chat = isinstance(sample.prompt, list)
            body["messages"] = sample.prompt if chat else [{"role": "user", "content": sample.prompt}]
        if source.is_random if settings.ignore_eos is None else settings.ignore_eos:
            body["ignore_eos"] = True
        for name in ("top_p", "top_k"):
            if (value := getattr(settings, name)) is not None:
                body[name] = value
        return body


def event_text(document: dict[str, Any]) -> str | None:
    """The text of an event of the stream; None if the event carries no token, as the one that opens a chat completion."""
    choices = document.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        return None
    if "delta" not in choices[0]:
        text = choices[0].get("text")
        return text if isinstance(text, str) else ""
    delta = choices[0]["delta"] or {}
    text = delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning")
    if text or delta.get("tool_calls") or choices[0].get("finish_reason"):
        return text if isinstance(text, str) else ""
    # An event with only a role comes before the first token.
    return None if "role" in delta or not delta else ""


def arrivals(settings: BenchSettings, random: np.random.Generator) -> list[float]:
    """The time at which each request is sent, in seconds. As in vLLM, gaps have a gamma distribution, and are scaled so that the last
    request is sent at the time that the rate implies. Otherwise different seeds would have different rates."""
    count, rate = settings.num_prompts, settings.request_rate
    if math.isinf(rate):
        return [0.0] * count
    gaps = random.gamma(settings.burstiness, 1 / (rate * settings.burstiness), count)
    times = np.cumsum(gaps)
    return (times * (count / rate / times[-1])).tolist()


async def run_bench(servers: Sequence[BenchServer], source: SampleSource, rounds: int) -> list[BenchRound]:
    """Runs `rounds` rounds on each server, in the order A B B A A B B A ... Each round sends equal requests to all servers, except that
    random token ids differ. Closes the connections at the end."""
    try:
        for server in servers:
            await server.find()
        vocab = min(server.vocab for server in servers)
        bench_rounds = []
        for k in range(rounds):
            places = range(len(servers))
            for place in places if k % 2 == 0 else reversed(places):
                bench_rounds.append(await servers[place].round(source, k, vocab, place))
        return bench_rounds
    finally:
        for server in servers:
            await server.http.close()
