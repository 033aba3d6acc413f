"""The figures of a benchmark, under vLLM's names: those of one round, and the comparison of two servers."""

import math
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from argosy.client.bench import BenchRound, RequestOutcome
from argosy.client.settings import BenchSettings
from argosy.observe.readable import columns

TITLES = {
    "ttft": "time to first token",
    "tpot": "time per output token, after the first",
    "itl": "time between events with tokens",
    "e2el": "end to end",
}
# Figures of which more is better. Of times, less is better.
RATES = ("request_throughput", "request_goodput", "output_throughput", "total_token_throughput")


def round_figures(round: BenchRound, settings: BenchSettings) -> dict[str, Any]:
    """All figures of a round, by vLLM's names. Times are in milliseconds, except `duration` in seconds. Failed requests count only in
    `failed`."""
    done = [outcome for outcome in round.outcomes if outcome.error is None]
    failed = [outcome for outcome in round.outcomes if outcome.error is not None]
    inputs, outputs = sum(outcome.input_len for outcome in done), sum(outcome.output_len for outcome in done)
    seconds = round.duration
    goods = settings.goods
    figures: dict[str, Any] = {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "backend": "openai" if settings.api == "completions" else "openai-chat",
        "base_url": round.url,
        "model_id": round.model,
        "num_prompts": len(round.outcomes),
        # JSON has no infinity; vLLM writes this word too.
        "request_rate": "inf" if math.isinf(settings.request_rate) else settings.request_rate,
        "burstiness": settings.burstiness,
        "max_concurrency": settings.max_concurrency,
        "duration": seconds,
        "completed": len(done),
        "failed": len(failed),
        "first_error": failed[0].error if failed else None,
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "total_cached_tokens": sum(outcome.cached for outcome in done),
        "request_throughput": len(done) / seconds,
        "request_goodput": sum(is_good(outcome, goods) for outcome in done) / seconds if goods else None,
        "output_throughput": outputs / seconds,
        "total_token_throughput": (inputs + outputs) / seconds,
        "max_output_tokens_per_s": busiest_second(done),
        "max_concurrent_requests": most_at_once(done),
        "client_cpu": round.cpu / seconds,
    }
    for name in settings.metrics:
        figures |= summary_statistics(name, latency_samples(done, name), settings.percentiles)
    return figures


def latency_samples(done: Sequence[RequestOutcome], name: str) -> list[float]:
    """The values of one metric (ttft, tpot, itl or e2el) over all requests, in milliseconds."""
    if name == "itl":
        values = [gap for outcome in done for gap in outcome.itls]
    elif name == "tpot":
        values = [outcome.tpot for outcome in done if outcome.tpot is not None]
    else:
        values = [outcome.ttft if name == "ttft" else outcome.latency for outcome in done]
    return [1000 * value for value in values]


def summary_statistics(name: str, values: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    """Mean, median, standard deviation and percentiles of values, by vLLM's names. As in vLLM, they are 0 if there are no values."""
    array = np.asarray(values or [0.0])
    summary = {f"mean_{name}_ms": float(array.mean()), f"median_{name}_ms": float(np.median(array))}
    summary[f"std_{name}_ms"] = float(array.std())
    return summary | {f"p{p:g}_{name}_ms": float(np.percentile(array, p)) for p in percentiles}


def is_good(outcome: RequestOutcome, goods: dict[str, float]) -> bool:
    """Whether a request is within all limits of `goodput`.

    Args:
        goods: the limit in milliseconds for each metric.
    """
    times = {"ttft": outcome.ttft, "tpot": outcome.tpot or 0.0, "e2el": outcome.latency}
    return all(1000 * times[name] <= limit for name, limit in goods.items())


def busiest_second(done: Sequence[RequestOutcome]) -> float:
    """The most output tokens within one second, counting whole seconds from the start of the round. The tokens of a completion are
    assumed to be spread evenly over its events."""
    buckets: dict[int, float] = {}
    for outcome in done:
        at, each = outcome.start + outcome.ttft, outcome.output_len / (1 + len(outcome.itls))
        for gap in (0.0, *outcome.itls):
            at += gap
            buckets[int(at)] = buckets.get(int(at), 0.0) + each
    return max(buckets.values(), default=0.0)


def most_at_once(done: Sequence[RequestOutcome]) -> int:
    """The most requests that were open at the same time."""
    ends = sorted([(outcome.start, 1) for outcome in done] + [(outcome.start + outcome.latency, -1) for outcome in done])
    return int(max(np.cumsum([step for _, step in ends]), default=0))


def request_details(round: BenchRound) -> dict[str, list[Any]]:
    """The measurements of each request, by vLLM's names. Times are in seconds."""
    outcomes = round.outcomes
    return {
        "input_lens": [outcome.input_len for outcome in outcomes],
        "output_lens": [outcome.output_len for outcome in outcomes],
        "ttfts": [outcome.ttft for outcome in outcomes],
        "itls": [outcome.itls for outcome in outcomes],
        "latencies": [outcome.latency for outcome in outcomes],
        "start_times": [outcome.start for outcome in outcomes],
        "generated_texts": [outcome.text for outcome in outcomes],
        "errors": [outcome.error or "" for outcome in outcomes],
    }


# ---------------------------------------------------------------- for people


def round_text(figures: dict[str, Any], settings: BenchSettings) -> str:
    """Formats the figures of a round as text."""
    goodput = figures["request_goodput"]
    facts = [
        ("requests", f"{figures['completed']:,} of {figures['num_prompts']:,}, {figures['failed']:,} failed"),
        ("seconds", f"{figures['duration']:.2f}"),
        ("input tokens", f"{figures['total_input_tokens']:,}, {figures['total_cached_tokens']:,} of them cached"),
        ("output tokens", f"{figures['total_output_tokens']:,}"),
        ("requests/s", f"{figures['request_throughput']:.2f}"),
        *([("goodput, requests/s", f"{goodput:.2f}")] if goodput is not None else []),
        ("output tokens/s", f"{figures['output_throughput']:.1f}, {figures['max_output_tokens_per_s']:.0f} in the busiest second"),
        ("all tokens/s", f"{figures['total_token_throughput']:.1f}"),
        ("open at once", f"{figures['max_concurrent_requests']:,}"),
        ("CPU of this client", f"{figures['client_cpu']:.1%} of a core"),
    ]
    width = max(len(name) for name, _ in facts)
    lines = [f"{figures['base_url']}  {figures['model_id']}", "", *(f"{name:{width}}  {value}" for name, value in facts), ""]
    kinds = ["mean", "median", "std", *(f"p{p:g}" for p in settings.percentiles)]
    rows = [(TITLES[m], *(f"{figures[f'{kind}_{m}_ms']:.1f}" for kind in kinds)) for m in settings.metrics]
    return "\n".join([*lines, ""]) + columns(("milliseconds", *kinds), rows, figures=range(1, len(kinds) + 1))


def compare_rounds(rounds: Sequence[dict[str, Any]], first: str, second: str) -> dict[str, Any]:
    """Compares two servers: the median of each figure over the rounds of each server, and the ratio of the first server's to the
    second's.

    Args:
        rounds: the figures of all rounds. Their entry `server` is 0 or 1.
        first, second: the URLs of the servers.
    """
    names = [name for name in rounds[0] if name in RATES or name.endswith("_ms") or name in ("duration", "failed")]
    names = [name for name in names if all(record[name] is not None for record in rounds)]

    def medians(which: int) -> dict[str, float]:
        records = [record for record in rounds if record["server"] == which]
        return {name: statistics.median(record[name] for record in records) for name in names}

    a, b = medians(0), medians(1)
    ratios = {name: a[name] / b[name] if b[name] else None for name in names if name != "failed"}
    return {"url": first, "against": second, "median": a, "median_against": b, "ratio": ratios, "rounds": list(rounds)}


def comparison_text(figures: dict[str, Any], settings: BenchSettings) -> str:
    """Formats the comparison of two servers as text: for each figure the median over the rounds, and the lowest and highest round."""
    rounds = figures["rounds"]
    names = [name for name in figures["ratio"] if name != "duration"]
    names = [n for n in names if n in RATES or n.startswith(("median_", *(f"p{p:g}_" for p in settings.percentiles)))]

    def cell(which: int, name: str) -> str:
        values = [record[name] for record in rounds if record["server"] == which]
        return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"

    def ratio(name: str) -> str:
        value = figures["ratio"][name]
        return "" if value is None else f"{value:.3f}"

    rows = [(name, cell(0, name), cell(1, name), ratio(name)) for name in names]
    failed = [sum(record["failed"] for record in rounds if record["server"] == which) for which in (0, 1)]
    rows.append(("failed", f"{failed[0]:,}", f"{failed[1]:,}", ""))
    busy = max(record["client_cpu"] for record in rounds)
    each = len(rounds) // 2
    head = f"A  {figures['url']}\nB  {figures['against']}\n\nmedian of {each} rounds (lowest to highest), in the order A B B A\n\n"
    return head + columns(("", "A", "B", "A / B"), rows, figures=(1, 2, 3)) + f"\n\nCPU of this client: at most {busy:.1%} of a core"
