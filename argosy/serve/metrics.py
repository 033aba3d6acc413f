"""Prometheus metrics under vLLM's names, so that dashboards and autoscalers for vLLM work.

A name of vLLM is used only with vLLM's meaning. Only the event loop updates metrics. Gauges are read from the engine on each scrape.

Every engine of a server has its own series, with the label `engine` ("0" for the first). As in vLLM, there are no series of totals.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from argosy.infer.engine.engine import Engine
    from argosy.infer.prompt_logprobs import PromptScorer
    from argosy.infer.speculation.speculate import Speculation

CONTENT_TYPE = CONTENT_TYPE_LATEST

# Upper bounds of the buckets of histograms, as in vLLM.
FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
BETWEEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
REQUEST_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
TOKENS = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))
LABELS = ("model_name", "engine")


class ServerMetrics:
    """The metrics that every kind of model has.

    Args:
        model: the model's name.
        compiled: returns the number of programs compiled so far.
        number: index of the engine on the server.
    """

    def __init__(self, model: str, compiled: Callable[[], int], number: int = 0):
        self.registry = CollectorRegistry()
        self._labels = (model, str(number))
        self._seen: dict[Counter, int] = {}
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of the answers that began.")
        self.rejections = self._counter("admission_rejections", "Requests refused because the queue is full.")
        self._ended = Counter(
            "vllm:request_success", "Answers that ended.", (*LABELS, "finished_reason"), registry=self.registry
        )
        self.whole = self._histogram("e2e_request_latency_seconds", "Arrival to end.", REQUEST_S)
        self.queued = self._histogram(
            "request_queue_time_seconds", "Arrival to the first step of an answer.", REQUEST_S
        )
        self.prompt = self._histogram("request_prompt_tokens", "Tokens of a prompt.", TOKENS)
        compilations = Counter(
            "argosy:compilations", "Programs compiled after warm-up; without it, since the start.", LABELS, registry=self.registry
        )
        self.compilations = compilations.labels(*self._labels)
        # Programs that are counted elsewhere.
        self._programs: list[tuple[Counter, Callable[[], int]]] = [(self.compilations, compiled)]
        self.ready()

    def _gauge(self, name: str, about: str) -> Gauge:
        return Gauge(f"vllm:{name}", about, LABELS, registry=self.registry).labels(*self._labels)

    def _counter(self, name: str, about: str) -> Counter:
        return Counter(f"vllm:{name}", about, LABELS, registry=self.registry).labels(*self._labels)

    def _histogram(self, name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(f"vllm:{name}", about, LABELS, buckets=buckets, registry=self.registry)
        return histogram.labels(*self._labels)

    def began(self, prompt: int, queued: float) -> None:
        """Counts a completion that has begun.

        Args:
            prompt: number of its prompt tokens.
            queued: seconds from its arrival to its first step.
        """
        self.prompt_tokens.inc(prompt)
        self.prompt.observe(prompt)
        self.queued.observe(queued)

    def ended(self, reason: str, seconds: float) -> None:
        """Counts a completion that has ended.

        Args:
            reason: its finish reason: stop, length, blocked, repetition or abort.
            seconds: seconds from its arrival to its end.
        """
        self._ended.labels(*self._labels, reason).inc()
        self.whole.observe(seconds)

    def ready(self) -> None:
        """Called before the first request. Programs compiled so far will not be counted."""
        self._seen |= {counter: count() for counter, count in self._programs}

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        self.refresh()
        return generate_latest(self.registry)

    def refresh(self) -> None:
        """Updates the counters whose values are counted elsewhere."""
        for counter, count in self._programs:
            self._advance(counter, count())

    def _advance(self, counter: Counter, now: int) -> None:
        counter.inc(now - self._seen.get(counter, 0))
        self._seen[counter] = now


class EngineMetrics(ServerMetrics):
    """The metrics of a model that generates text."""

    def __init__(self, model: str, engine: "Engine", number: int = 0):
        self.engine = engine
        # Set by the front. The programs that score prompts are counted too.
        self.prompts: PromptScorer | None = None
        super().__init__(model, lambda: engine.stats.compilations + self._prompt_programs(), number)
        compilations = Counter(
            "argosy:prompt_logprobs_compilations", "Those of them that only requests for log-probabilities of prompts need.",
            LABELS, registry=self.registry,
        )  # fmt: skip
        self.prompt_compilations = compilations.labels(*self._labels)
        self._programs.append((self.prompt_compilations, self._prompt_programs))
        scheduler = engine.scheduler
        self._gauge("num_requests_running", "Answers being generated.").set_function(lambda: len(scheduler.running))
        self._gauge("num_requests_waiting", "Answers that wait.").set_function(lambda: scheduler.waiting)
        self._gauge("kv_cache_usage_perc", "Share of the cache's pages in use, 0 to 1.").set_function(
            lambda: scheduler.used
        )
        self.cached_tokens = self._counter("prompt_tokens_cached", "Those of them found in the prefix cache.")
        self.generated_tokens = self._counter("generation_tokens", "Tokens generated.")
        self.cache_queries = self._counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self.cache_hits = self._counter("prefix_cache_hits", "Prompt tokens found there.")
        self.preemptions = self._counter(
            "num_preemptions", "Answers whose cache was given to others and computed again."
        )
        # As in vLLM, the labels hold the information, and the value is the time. It has no label for the engine, so the first engine
        # has the series for all engines.
        self._lora = None
        self.sharing: Sequence[Engine] = [engine]
        if engine.adapters is not None and number == 0:
            labels = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
            about = "Adapters of running and of waiting answers."
            self._lora = Gauge("vllm:lora_requests_info", about, labels, registry=self.registry)
        self.first_token = self._histogram("time_to_first_token_seconds", "Arrival to first token.", FIRST_TOKEN_S)
        self.between = self._histogram("inter_token_latency_seconds", "Between two steps that make tokens of an answer.", BETWEEN_S)
        self.generation = self._histogram("request_generation_tokens", "Tokens of an answer.", TOKENS)
        self._speculation = _Speculation(self) if engine.speculation is not None else None

    def admitted(self, prompt: int, reused: int, queued: float) -> None:
        """Counts a request that the engine began.

        Args:
            prompt: number of its prompt tokens.
            reused: number of prompt tokens that were found in the prefix cache.
            queued: seconds that it waited.
        """
        self.began(prompt, queued)
        self.cache_queries.inc(prompt)
        self.cached_tokens.inc(reused)
        self.cache_hits.inc(reused)

    def answered(self, reason: str, generated: int, seconds: float) -> None:
        """Counts a request that ended.

        Args:
            reason: its finish reason.
            generated: number of generated tokens.
            seconds: duration of the request.
        """
        self.ended(reason, seconds)
        self.generation.observe(generated)

    def _prompt_programs(self) -> int:
        return 0 if self.prompts is None else self.prompts.compilations

    def refresh(self) -> None:
        self._advance(self.preemptions, self.engine.scheduler.preemptions)
        if self._speculation is not None:
            self._speculation.advance(self.engine.speculation)
        if self._lora is not None:
            in_use = zip(*(engine.adapters_in_use() for engine in self.sharing))
            running, waiting = (",".join(sorted({name for names in each for name in names})) for each in in_use)
            self._lora.clear()
            self._lora.labels(str(self.engine.settings.lora.adapters), running, waiting).set_to_current_time()
        super().refresh()


class AllMetrics(Collector):
    """The metrics of all engines of one server, as one text. Each name occurs once, with the series of all engines."""

    def __init__(self, members: Sequence[EngineMetrics]):
        self.members = members
        # Requests are refused before an engine is chosen for them.
        self.rejections = members[0].rejections
        members[0].sharing = [member.engine for member in members]

    def ready(self) -> None:
        """As `ServerMetrics.ready`."""
        for member in self.members:
            member.ready()

    def text(self) -> bytes:
        """As `ServerMetrics.text`."""
        for member in self.members:
            member.refresh()
        return generate_latest(self)

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for member in self.members:
            for metric in member.registry.collect():
                if metric.name in families:
                    families[metric.name].samples.extend(metric.samples)
                else:
                    families[metric.name] = metric
        yield from families.values()


class _Speculation:
    """The metrics of speculative decoding."""

    def __init__(self, metrics: EngineMetrics):
        self._metrics = metrics
        self._steps = metrics._counter("spec_decode_num_drafts", "Rows of drafts that were verified.")
        self._drafted = metrics._counter("spec_decode_num_draft_tokens", "Tokens drafted.")
        self._accepted = metrics._counter("spec_decode_num_accepted_tokens", "Drafts that were accepted.")
        name, about = "vllm:spec_decode_num_accepted_tokens_per_pos", "Drafts that were accepted, by their place in the row."
        self._places = Counter(name, about, (*LABELS, "position"), registry=metrics.registry)

    def advance(self, speculation: "Speculation | None") -> None:
        """Updates the counters from the engine's counts."""
        if speculation is None:
            return
        counts = [(self._steps, speculation.rows), (self._drafted, speculation.drafted), (self._accepted, sum(speculation.accepted))]
        counts += [(self._places.labels(*self._metrics._labels, str(at)), n) for at, n in enumerate(speculation.accepted)]
        for counter, count in counts:
            self._metrics._advance(counter, count)


class EncoderMetrics(ServerMetrics):
    """The metrics of an encoder. A text that gets its embedding counts as a completion.

    Args:
        running: returns the number of texts in the current forward pass.
        waiting: returns the number of texts that wait.
    """

    def __init__(self, model: str, compiled: Callable[[], int], running: Callable[[], int], waiting: Callable[[], int]):
        super().__init__(model, compiled)
        self._gauge("num_requests_running", "Texts in the current forward pass.").set_function(running)
        self._gauge("num_requests_waiting", "Texts that wait.").set_function(waiting)
