"""`argosy bench serve`: exact lengths, vLLM's figures, honest failures, fair comparisons."""

import asyncio
import json
import statistics
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serve.fakes import END, MODELS, STREAM, Hangup, chunk, event, fake, response, tokens

from argosy.cli import main
from argosy.cli.flags import BENCH_SERVE, CHAT, RUN_BATCH, Flags, translate_flags
from argosy.cli.verbs.bench import address
from argosy.client.bench import BenchRound, BenchServer, RequestOutcome, arrivals, event_text, run_bench
from argosy.client.bench_data import BenchSample, SampleSource
from argosy.client.bench_report import compare_rounds, comparison_text, request_details, round_figures, round_text
from argosy.client.settings import BatchSettings, BenchSettings, ChatSettings
from argosy.core.errors import ArgosyError, BadInput
from argosy.core.settings import Settings, read_settings, words_layer


def settings_of(*words: str) -> BenchSettings:
    return read_settings(BenchSettings, words_layer(list(words))).value


def run_rounds(script: Any, *words: str) -> tuple[list[BenchRound], Any]:
    """The rounds of a scripted server, and the server."""
    settings = settings_of(*words)

    async def go() -> tuple[list[BenchRound], Any]:
        async with fake(script) as server:
            return await run_bench([BenchServer(server.url, settings, None)], SampleSource(settings), 1), server

    return asyncio.run(go())


async def good(path: str, body: Any, send: Callable[[bytes], Awaitable[None]]) -> None:
    """A server that does as it is told."""
    if path == "/v1/models":
        return await send(MODELS)
    for part in tokens(body["max_tokens"], len(body["prompt"])):
        await send(part)
        await asyncio.sleep(0)


# ---------------------------------------------------------------- our own server


@pytest.mark.slow
def test_a_server_is_measured_over_http(url: str, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    words = "num_prompts=6 input_len=20 output_len=7 range_ratio=0.5 max_concurrency=3 metric_percentiles=50,99.9"
    saved = tmp_path / "result.json"
    assert main(["bench", "serve", url, *words.split(), f"save={saved}", "goodput=ttft:600000", "--json"]) == 0
    out, err = capsys.readouterr()
    figures = json.loads(out)
    whole = json.loads(saved.read_text())
    # The server runs in this process too.
    assert all("this client was busy" in line for line in err.splitlines())
    assert (figures["completed"], figures["failed"], figures["model_id"]) == (6, 0, "tiny")
    assert figures["total_input_tokens"] == sum(whole["input_lens"])
    assert figures["total_output_tokens"] == sum(whole["output_lens"])
    assert all(10 <= n <= 30 for n in whole["input_lens"])
    assert all(3 <= n <= 10 for n in whole["output_lens"])
    assert len(set(whole["input_lens"])) > 1
    assert figures["request_goodput"] == figures["request_throughput"] == pytest.approx(6 / figures["duration"])
    assert figures["max_concurrent_requests"] <= 3
    assert {"p50_ttft_ms", "p99.9_e2el_ms", "mean_tpot_ms", "std_itl_ms"} <= set(figures)
    for ttft, itls, latency in zip(whole["ttfts"], whole["itls"], whole["latencies"]):
        assert ttft + sum(itls) == pytest.approx(latency)
        assert ttft > 0
    assert 0 < figures["client_cpu"] < 3


def test_prompts_reach_the_server_in_exactly_the_length_that_was_asked(url: str):
    settings = settings_of("num_prompts=4", "input_len=33", "output_len=5")
    server = BenchServer(url, settings, None)
    [round] = asyncio.run(run_bench([server], SampleSource(settings), 1))
    assert server.vocab == 258
    assert [(outcome.input_len, outcome.output_len, outcome.error) for outcome in round.outcomes] == [(33, 5, None)] * 4


@pytest.mark.slow
def test_chats_of_a_file_are_asked(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "chats.jsonl"
    lines = [{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}, {"prompt": "hello", "max_tokens": 2}]
    file.write_text("\n".join(map(json.dumps, lines)))
    assert main(["bench", "serve", url, f"data={file}", "num_prompts=4", "api=chat", "ignore_eos=true", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["completed"] == 4
    assert 8 <= figures["total_output_tokens"] <= 12
    # Random token ids as the text of a message.
    words = "api=chat num_prompts=2 input_len=8 output_len=2"
    assert main(["bench", "serve", url, *words.split(), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["total_output_tokens"] == 4


def test_answers_of_sharegpt_are_as_long_as_their_own(url: str, tmp_path: Path):
    file = tmp_path / "sharegpt.json"
    turns = [("what is it", "a test"), ("x", "too short a question"), ("ask again", "once more")]
    talks = [{"conversations": [{"from": "human", "value": q}, {"from": "gpt", "value": a}]} for q, a in turns]
    file.write_text(json.dumps([*talks, {"conversations": []}, {"id": 3}]))
    settings = settings_of(f"data={file}", "num_prompts=3", "ignore_eos=true")
    [round] = asyncio.run(run_bench([BenchServer(url, settings, None)], SampleSource(settings), 1))
    assert {outcome.output_len for outcome in round.outcomes} == {len("a test"), len("once more")}
    assert len(round.outcomes) == 3


# ---------------------------------------------------------------- servers that fail


def test_failures_are_counted_and_the_first_is_told(capsys: pytest.CaptureFixture[str]):
    count = 0

    async def script(path: str, body: Any, send: Callable[[bytes], Awaitable[None]]) -> None:
        nonlocal count
        if path == "/v1/models":
            return await send(MODELS)
        count += 1
        head, first, *rest = tokens(4, 10)
        if count == 3:
            await send(response(b'{"error": {"message": "overloaded"}}', "500 Internal Server Error"))
        elif count == 4:
            await send(head + first)
            raise Hangup
        elif count == 5:
            await send(head + first + chunk(b"data: {mal\n\n"))
            raise Hangup
        elif count == 6:
            await send(STREAM + event({"choices": [{"text": "a"}]}) + END)
        elif count == 7:
            await send(STREAM + event({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 0}}) + END)
        else:
            await send(head + first + b"".join(rest))

    settings = "num_prompts=8 input_len=10 output_len=4 max_concurrency=1"
    [round], _ = run_rounds(script, *settings.split())
    figures = round_figures(round, settings_of(*settings.split()))
    assert (figures["completed"], figures["failed"]) == (3, 5)
    assert figures["first_error"] == "overloaded"
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (30, 12)
    errors = [outcome.error or "" for outcome in round.outcomes]
    for problem, text in zip(("overloaded", "broke off", "no JSON", "no `usage`", "no token"), errors[1:]):
        assert problem in text
    assert "3 of 8, 5 failed" in round_text(figures, settings_of(*settings.split()))


def test_a_failed_request_fails_the_command(capsys: pytest.CaptureFixture[str], url: str):
    # The context has 128 tokens: the first request is refused, and that is the whole answer.
    assert main(["bench", "serve", url, "num_prompts=2", "input_len=200", "output_len=2"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: 200 tokens of prompt")
    assert f"said {url}" in err
    words = "num_prompts=3 input_len=100 range_ratio=0.4 output_len=2 seed=1"
    assert main(["bench", "serve", url, *words.split(), "--json"]) == 1
    out, err = capsys.readouterr()
    failed = json.loads(out)["failed"]
    assert 0 < failed < 3
    assert f"{failed} of 3 requests to {url} failed, the first: 1" in err


def test_an_answer_that_is_too_short_is_told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    from argosy.cli.verbs.bench import warn

    settings = settings_of("num_prompts=1")
    round = BenchRound(0, "http://h", "m", [RequestOutcome(0, max_tokens=9, output_len=3, latency=1.0)], 1.0, 0.9)
    warn(round, round_figures(round, settings), settings)
    err = capsys.readouterr().err
    assert "1 answers of http://h are shorter than requested" in err
    assert "this client was busy for 90%" in err


# ---------------------------------------------------------------- the load


def test_no_more_requests_are_open_than_allowed():
    _, server = run_rounds(good, "num_prompts=12", "input_len=3", "output_len=3", "max_concurrency=4")
    assert server.most == 4
    _, server = run_rounds(good, "num_prompts=12", "input_len=3", "output_len=3")
    assert server.most > 8, "all at once"


def test_warm_ups_are_asked_but_not_counted():
    [round], server = run_rounds(good, "num_prompts=2", "num_warmups=3", "input_len=3", "output_len=3")
    assert server.paths == ["/v1/models", *["/v1/completions"] * 6]
    assert len(round.outcomes) == 2


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_arrivals_have_the_rate_and_the_spread_that_were_asked(burstiness: float):
    settings = settings_of("num_prompts=4000", "request_rate=50", f"burstiness={burstiness}")
    times = arrivals(settings, np.random.default_rng(0))
    gaps = np.diff([0.0, *times])
    assert times[-1] == pytest.approx(80.0)
    assert (gaps >= 0).all()
    # The coefficient of variation of a gamma distribution; its own standard error here is below 0.05 of it.
    assert np.std(gaps) / np.mean(gaps) == pytest.approx(burstiness**-0.5, rel=0.15)
    assert arrivals(settings_of("num_prompts=3"), np.random.default_rng(0)) == [0.0, 0.0, 0.0]


def test_requests_are_sent_when_they_are_due(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("argosy.client.bench.arrivals", lambda *_: [0.0, 0.1, 0.25])
    [round], _ = run_rounds(good, "num_prompts=3", "input_len=3", "output_len=2")
    starts = [outcome.start for outcome in round.outcomes]
    assert starts[1] >= 0.1
    assert starts[2] >= 0.25


def test_random_prompts_are_exact_repeatable_and_of_their_own():
    settings = settings_of("input_len=40", "output_len=20", "range_ratio=0.25", "prefix_len=5", "seed=3")
    source = SampleSource(settings)
    first, again = source.samples(200, 0, 50), source.samples(200, 0, 50)
    assert first == again
    inputs, outputs = [len(s.prompt) - 5 for s in first], [s.output_len for s in first]
    assert (min(inputs), max(inputs), min(outputs), max(outputs)) == (30, 50, 15, 25)
    assert len({tuple(s.prompt[:5]) for s in [*first, *source.samples(3, 1, 50)]}) == 1, "all begin with the prefix"
    assert len({tuple(s.prompt) for s in first}) == 200
    assert {token for s in first for token in s.prompt} == set(range(50))
    other = source.samples(200, 0, 50, server=1)
    assert [len(s.prompt) for s in other] == [len(s.prompt) for s in first]
    assert not {tuple(s.prompt) for s in other} & {tuple(s.prompt) for s in first}
    assert [len(s.prompt) for s in source.samples(200, 1, 50)] != [len(s.prompt) for s in first]


@pytest.mark.parametrize(
    "text, expected",
    [
        ("one\n\ntwo\n", [BenchSample("one", 128), BenchSample("two", 128)]),
        ('{"prompt": "a"}\n{"prompt": [1, 2], "max_tokens": 7}', [BenchSample("a", 128), BenchSample([1, 2], 7)]),
        ("\ufeffone", [BenchSample("one", 128)]),
    ],
)
def test_files_of_prompts_are_read(tmp_path: Path, text: str, expected: list[BenchSample]):
    file = tmp_path / "prompts"
    file.write_text(text, encoding="utf-8")
    source = SampleSource(settings_of(f"data={file}"))
    assert source.file == expected
    many = source.samples(5, 0, 10)
    assert len(many) == 5
    assert all(sample in expected for sample in many)
    assert SampleSource(settings_of(f"data={file}", "output_len=3")).samples(1, 0, 10)[0].output_len == 3


@pytest.mark.parametrize(
    "text, words, problem",
    [
        ("", [], "holds no prompts"),
        ("[]", [], "holds no prompts"),
        ("[broken", [], "is no JSON"),
        ('{"prompt": "a"}\nbroken', [], "line 2 of .* is no JSON"),
        ('{"prompt": ""}', [], "line 1 of .* has no `prompt`"),
        ('{"prompt": "a", "max_tokens": 0}', [], "no whole `max_tokens`"),
        ('{"messages": [{"role": "user", "content": "a"}]}', [], "holds chats"),
        ('{"prompt": [1]}', ["api=chat"], "holds token ids"),
    ],
)
def test_files_without_prompts_are_refused(tmp_path: Path, text: str, words: list[str], problem: str):
    file = tmp_path / "prompts"
    file.write_text(text)
    with pytest.raises(BadInput, match=problem):
        SampleSource(settings_of(f"data={file}", *words))
    with pytest.raises(BadInput, match="cannot read"):
        SampleSource(settings_of(f"data={tmp_path / 'missing'}"))


@pytest.mark.parametrize(
    "document, text",
    [
        ({"choices": [{"text": "a"}]}, "a"),
        ({"choices": [{"text": ""}]}, ""),
        ({"choices": [{"delta": {"role": "assistant", "content": ""}}]}, None),
        ({"choices": [{"delta": {"content": "a"}}]}, "a"),
        ({"choices": [{"delta": {"reasoning_content": "hm"}}]}, "hm"),
        ({"choices": [{"delta": {}, "finish_reason": "stop"}]}, ""),
        ({"choices": []}, None),
        ({"choices": [], "usage": {}}, None),
    ],
)
def test_only_events_with_tokens_count(document: dict[str, Any], text: str | None):
    assert event_text(document) == text


# ---------------------------------------------------------------- the figures


def test_figures_are_those_of_vllm():
    outcomes = [
        RequestOutcome(0.0, 4, 0.1, [0.05, 0.15], 0.3, 10, 3, text="abc"),
        RequestOutcome(0.2, 4, 0.3, [], 0.3, 20, 1),
        RequestOutcome(0.6, 4, 0.2, [0.1] * 4, 0.6, 30, 5),
        RequestOutcome(0.1, 4, error="gone"),
    ]
    settings = settings_of("goodput=ttft:250 tpot:99", "metric_percentiles=50,100")
    round = BenchRound(0, "http://h", "m", outcomes, 2.0, 0.1)
    figures = round_figures(round, settings)
    assert (figures["completed"], figures["failed"], figures["first_error"]) == (3, 1, "gone")
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (60, 9)
    assert figures["request_throughput"] == 1.5
    assert (figures["output_throughput"], figures["total_token_throughput"]) == (4.5, 34.5)
    assert figures["max_concurrent_requests"] == 2, "the third begins after the second has ended"
    assert figures["client_cpu"] == 0.05
    assert figures["request_rate"] == "inf"
    ttft, tpot = [100, 300, 200], [1000 * 0.2 / 2, 1000 * 0.4 / 4]
    itl = [50, 150, 100, 100, 100, 100]
    for name, values in {"ttft": ttft, "tpot": tpot, "itl": itl, "e2el": [300, 300, 600]}.items():
        assert figures[f"mean_{name}_ms"] == pytest.approx(statistics.mean(values))
        assert figures[f"median_{name}_ms"] == figures[f"p50_{name}_ms"] == pytest.approx(statistics.median(values))
        assert figures[f"std_{name}_ms"] == pytest.approx(statistics.pstdev(values))
        assert figures[f"p100_{name}_ms"] == pytest.approx(max(values))
    assert figures["request_goodput"] == 0, "a limit of 99 ms is below both tpots, and 250 below the second ttft"
    assert round_figures(round, settings_of("goodput=ttft:250 tpot:101"))["request_goodput"] == 1.0
    assert round_figures(round, settings_of())["request_goodput"] is None
    # 3 tokens within the first second of the clock, then 1, and 2 of the third answer's 5.
    assert figures["max_output_tokens_per_s"] == pytest.approx(6)
    assert request_details(round)["errors"] == ["", "", "", "gone"]
    assert request_details(round)["generated_texts"][0] == "abc"
    assert not any("tpot" in name for name in round_figures(round, settings_of("percentile_metrics=ttft")))


def test_nothing_completed_is_zeros_and_no_crash():
    round = BenchRound(0, "http://h", "m", [RequestOutcome(0.0, error="gone")], 1.0, 0.0)
    figures = round_figures(round, settings_of())
    assert (figures["output_throughput"], figures["mean_ttft_ms"], figures["max_concurrent_requests"]) == (0, 0, 0)


@pytest.mark.slow
def test_two_servers_alternate_and_are_compared():
    order: list[str] = []

    async def go() -> list[BenchRound]:
        def script(name: str) -> Any:
            async def one(path: str, body: Any, send: Callable[[bytes], Awaitable[None]]) -> None:
                order.append(name)
                await good(path, body, send)

            return one

        async with fake(script("a")) as a, fake(script("b")) as b:
            servers = [BenchServer(url, settings, None) for url in (a.url, b.url)]
            return await run_bench(servers, SampleSource(settings), 2)

    settings = settings_of("num_prompts=1", "input_len=3", "output_len=2", "against=http://h")
    rounds = asyncio.run(go())
    assert "".join(order) == "ab" + "aabbbbaa"
    assert [bench_round.server for bench_round in rounds] == [0, 1, 1, 0]

    figures = [round_figures(bench_round, settings) | {"server": bench_round.server} for bench_round in rounds]
    for entry, rate in zip(figures, (10.0, 5.0, 7.0, 14.0)):
        entry["output_throughput"] = rate
    document = compare_rounds(figures, "http://a", "http://b")
    assert document["median"]["output_throughput"] == 12.0
    assert document["median_against"]["output_throughput"] == 6.0
    assert document["ratio"]["output_throughput"] == 2.0
    text = comparison_text(document, settings)
    assert "12.0 (10.0 to 14.0)" in text
    assert "2.000" in text


@pytest.mark.slow
def test_a_server_may_be_compared_with_itself(url: str, capsys: pytest.CaptureFixture[str]):
    words = f"against={url} num_prompts=2 input_len=24 output_len=2 rounds=1 seed=9"
    assert main(["bench", "serve", url, *words.split(), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [bench_round["server"] for bench_round in document["rounds"]] == [0, 1]
    assert [bench_round["total_cached_tokens"] for bench_round in document["rounds"]] == [0, 0], "no prompt was asked before"


# ---------------------------------------------------------------- the command


@pytest.mark.parametrize(
    "words, problem, hint",
    [
        (["bench", "serve", "num_prompts=3"], "which server?", "first word"),
        (["bench", "serve", "http://h", "num_prompt=3"], "unknown setting `num_prompt`", "num_prompts"),
        (["bench", "serve", "http://h", "goodput=ttf:3"], "unknown metric `ttf`", "ttft"),
        (["bench", "serve", "http://h", "goodput=ttft"], "the limit of ttft", "ttft:200"),
        (["bench", "serve", "http://h", "metric_percentiles=101"], "101", "0 to 100"),
        (["bench", "serve", "http://h", "percentile_metrics=x"], "unknown metric `x`", "ttft"),
        (["bench", "serve", "ftp://h"], "no address of a server", "http://"),
        (["bench", "serve", "http://h", "save=/no/such/x.json"], "no folder", ""),
        (["bench", "serve", "http://h", "data=/no/such"], "cannot read", "data=random"),
        (["bench", "serve", "http://h", "--save-result"], "no such option", "save=FILE"),
        (["bench", "serve", "http://h", "--dataset-name", "sonnet"], "--dataset-name sonnet", ""),
        (["bench", "srve"], "no such command 'srve'", "serve"),
    ],
)
def test_mistakes_are_answered(words: list[str], problem: str, hint: str, capsys: pytest.CaptureFixture[str]):
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert problem in err
    assert hint in err
    assert len(err.splitlines()) <= 5


def test_flags_of_vllm_bench_are_settings():
    words = "--base-url http://h:1 --num-prompts 5 --goodput ttft:200 tpot:50 --backend openai-chat --ignore-eos seed=2"
    settings = translate_flags(words.split(), BENCH_SERVE)
    assert settings == ["url=http://h:1", "num_prompts=5", "goodput=ttft:200 tpot:50", "api=chat", "ignore_eos=true", "seed=2"]
    url, rest = address(settings)
    assert url == "http://h:1"
    assert settings_of(*rest).goods == {"ttft": 200.0, "tpot": 50.0}
    assert address(["seed=1", "http://h:1/?a=b", "api=chat"]) == ("http://h:1/?a=b", ["seed=1", "api=chat"])


@pytest.mark.parametrize("flags, schema", [(BENCH_SERVE, BenchSettings), (RUN_BATCH, BatchSettings), (CHAT, ChatSettings)])
def test_every_flag_names_a_setting(flags: Flags, schema: type[Settings]):
    words = [*flags.switches.values(), *(words for choice in flags.choices.values() for words in choice.values())]
    names = {*flags.settings.values(), *(word.partition("=")[0] for several in words for word in several)}
    for name in names - {"url"}:
        kind: Any = schema
        for part in name.split("."):
            assert part in kind.model_fields, name
            kind = kind.model_fields[part].annotation
    assert not set(flags.settings) & set(flags.answers)


def test_settings_are_documented():
    text = (Path(__file__).parents[2] / "docs" / "guides" / "clients.md").read_text(encoding="utf-8")
    for schema in (BenchSettings, BatchSettings, ChatSettings):
        assert not [name for name in schema.model_fields if f"`{name}`" not in text]


def test_the_first_error_stops_everything():
    async def script(path: str, body: Any, send: Callable[[bytes], Awaitable[None]]) -> None:
        await send(response(b'{"data": "none"}') if path == "/v1/models" else MODELS)

    with pytest.raises(ArgosyError, match="lists no models"):
        run_rounds(script, "num_prompts=1")
