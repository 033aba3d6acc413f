"""The playground and the dashboard in a real browser. The model is tiny and random: its text is noise, its stream is real."""

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from serve import browser
from serve.browser import Page
from serve.conftest import Says, listening, serving

from argosy.data.tokenizers.byte import ByteTokenizer
from argosy.data.tokenizers.config import TokenizerConfig
from argosy.infer.lm import LM
from argosy.serve.response.choice import ChoicePiece, CompletionChoice
from argosy.serve.service import Service

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(browser.path() is None, reason="no Chromium on this machine"),
]
EVIL = "<img src=/stolen onerror=\"window.hacked=1\"><script>window.hacked=1</script>"
READY = "document.querySelector('#model').textContent"
DONE = "document.querySelector('#stop').disabled && [...document.querySelectorAll('.answer')].length"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Page]:
    with browser.opened() as page:
        yield page


@pytest.fixture(scope="module")
def server(service: Service) -> Iterator[str]:
    with listening(service) as address:
        yield address


@pytest.fixture
def page(chromium: Page, server: str) -> Iterator[Page]:
    """The playground, as somebody sees it for the first time. Nothing may fail in it, and nothing may leave the server."""
    chromium.looks(1200, 900)
    yield open_page(chromium, server)
    assert chromium.errors == []
    assert {url.removeprefix(server)[:1] for url in chromium.requests} == {"/"}


def open_page(page: Page, address: str) -> Page:
    page.open(f"{address}/")
    page.until("document.querySelector('#model').textContent || !document.querySelector('#key').hidden")
    page.run("localStorage.clear(); sessionStorage.clear()")
    page.errors.clear()
    page.requests.clear()
    page.open(f"{address}/")
    return page


def ask(page: Page, prompt: str, columns: int = 1) -> None:
    """Sends a prompt, and returns when it is answered."""
    before = page.run("document.querySelectorAll('.answer').length")
    send(page, prompt)
    page.until(f"document.querySelectorAll('.answer').length == {before + columns} && document.querySelector('#stop').disabled")


def send(page: Page, prompt: str) -> None:
    page.until(READY)
    page.type("#prompt", prompt)
    page.press("Enter")


def texts(page: Page) -> list[str]:
    """The answers, without the tokens that have no text."""
    script = "[...e.childNodes].filter(n => !n.classList?.contains('end')).map(n => n.textContent).join('')"
    return page.run(f"[...document.querySelectorAll('.answer .text')].map(e => {script})")


def slow(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """One step takes so long that an answer of 64 tokens is still under way when the test looks."""
    step = service.front.engine.step
    monkeypatch.setattr(service.front.engine, "step", lambda: (time.sleep(0.15), step())[1])


def speaks(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """The model's answer becomes this text, 20 characters a token."""
    take = CompletionChoice.take

    def speak(self: CompletionChoice, event: Any) -> ChoicePiece:
        at = 20 * len(self.tokens)
        return replace(take(self, event), text=text[at : at + 20])

    monkeypatch.setattr(CompletionChoice, "take", speak)


def test_an_answer_streams_in_and_says_how_fast(page: Page, service: Service, monkeypatch: pytest.MonkeyPatch):
    slow(service, monkeypatch)
    send(page, "Hello")
    page.until("document.querySelector('.answer .text').childNodes.length >= 2")
    assert page.run("!document.querySelector('#stop').disabled"), "text is there before the answer has ended"
    assert page.run("document.querySelector('#turns').getAttribute('aria-busy')") == "true"
    monkeypatch.undo()
    page.until(DONE)
    assert "tokens/s" in page.run("document.querySelector('.note').textContent")
    assert page.run("document.querySelector('#turns').getAttribute('aria-busy')") == "false"
    assert page.run("document.querySelector('.prompt pre').textContent") == "Hello"


def test_shift_enter_starts_a_new_line(page: Page):
    page.until(READY)
    page.type("#prompt", "one")
    page.press("Enter", modifiers=8)
    assert page.run("document.querySelector('#prompt').value") == "one\n"
    assert not texts(page)


@pytest.mark.parametrize("method", ["Escape", "button"])
def test_stop_ends_the_request_in_the_server(page: Page, service: Service, monkeypatch: pytest.MonkeyPatch, method: str):
    slow(service, monkeypatch)
    send(page, "Hello")
    page.until("document.querySelector('.answer .text').textContent.length > 0")
    assert service.front.engine.pages.used > 0
    page.press("Escape") if method == "Escape" else page.click("#stop")
    page.until("document.querySelector('.note').textContent.includes('stopped')")
    end = time.monotonic() + 30
    while service.front.engine.pages.used or service.front.opened:
        assert time.monotonic() < end, "the request still holds pages"
        time.sleep(0.05)
    assert page.run("document.querySelector('.error').textContent") == ""
    assert not page.run("document.querySelector('#send').disabled")


def test_hover_and_arrow_keys_show_log_probabilities(page: Page):
    ask(page, "Hello")
    page.hover(".answer .token:nth-of-type(3)")
    tip = page.until("!document.querySelector('#tip').hidden && document.querySelector('#tip').innerText")
    assert "log-prob −" in tip or "log-prob -" in tip
    shares = "[...table.querySelectorAll('td:last-child')].map(e => parseFloat(e.textContent))"
    tables = page.run(f"[...document.querySelectorAll('#tip table')].map(table => {shares})")
    assert tables, "one for each token; a character may be made of several"
    for shares in tables:
        assert len(shares) == 5
        assert shares == sorted(shares, reverse=True)
        assert 0 < sum(shares) <= 100.5
    page.hover("h1")
    page.until("document.querySelector('#tip').hidden")
    page.run("document.querySelector('.answer .text').focus()")
    page.press("ArrowRight")
    page.press("ArrowRight")
    assert page.run("document.activeElement == document.querySelectorAll('.answer .token')[1]")
    assert page.run("!document.querySelector('#tip').hidden")


def test_two_settings_answer_side_by_side_at_once(page: Page, service: Service, monkeypatch: pytest.MonkeyPatch):
    page.until(READY)
    page.click("#compare")
    page.type("#temperature-0", "0")
    page.type("#temperature-1", "0")
    page.type("#max_tokens-0", "30")
    page.type("#max_tokens-1", "40")
    slow(service, monkeypatch)
    send(page, "Hello")
    notes = page.until("""[...document.querySelectorAll('.answer .text')].every(e => e.textContent)
        && [...document.querySelectorAll('.note')].map(e => e.textContent)""")
    assert notes == ["", ""], "both have text, and none has ended"
    monkeypatch.undo()
    page.until(DONE)
    left_text, right = texts(page)
    assert len(left_text) < len(right)
    assert right.startswith(left_text)
    boxes = page.run("[...document.querySelectorAll('.answer')].map(e => e.getBoundingClientRect().toJSON())")
    assert boxes[0]["top"] == boxes[1]["top"]
    assert boxes[0]["right"] <= boxes[1]["left"]


def test_html_in_an_answer_stays_text(page: Page, monkeypatch: pytest.MonkeyPatch):
    speaks(monkeypatch, EVIL)
    page.until(READY)
    # With this seed the answer has more than the four tokens that the text is given to.
    page.type("#seed-0", "0")
    ask(page, EVIL)
    assert texts(page) == [EVIL]
    assert page.run("document.querySelector('.prompt pre').textContent") == EVIL
    page.open(page.run("location.href"))
    page.until("document.querySelectorAll('.answer').length")
    assert texts(page) == [EVIL], "out of storage too"
    assert page.run("document.querySelectorAll('#turns img, #turns script').length") == 0
    assert page.run("window.hacked") is None
    assert not [url for url in page.requests if "stolen" in url]


def test_a_conversation_is_edited_retried_kept_and_cleared(page: Page, service: Service):
    stored = "JSON.parse(localStorage.getItem('argosy-playground'))"
    page.until(READY)
    page.type("#max_tokens-0", "9")
    ask(page, "one")
    ask(page, "two")
    assert page.run(f"{stored}.turns.map(turn => turn.prompt)") == ["one", "two"]
    page.click("article:first-child .prompt button:nth-of-type(1)")
    page.type("article:first-child .prompt textarea", "three")
    page.press("Enter")
    page.until(f"{DONE} && {stored}.turns.length == 1")
    assert page.run("document.querySelector('.prompt pre').textContent") == "three"
    page.type("#temperature-0", "0")
    for _ in range(2):
        page.run("document.querySelector('.note').textContent = ''")
        page.click("article:first-child .prompt button:nth-of-type(2)")
        page.until(f"{DONE} == 1 && document.querySelector('.note').textContent")
    answers = texts(page)
    page.open(page.run("location.href"))
    page.until("document.querySelectorAll('.answer').length")
    assert texts(page) == answers
    assert page.run("document.querySelector('#temperature-0').value") == "0"
    page.click("#clear")
    assert texts(page) == []
    page.click("#forget")
    page.until(f"{READY} && document.querySelector('#temperature-0').value == ''")
    assert page.run("localStorage.length") == 0


def test_settings_and_history_are_what_the_request_says(page: Page):
    page.until(READY)
    wrap = "window.sent = []; const real = fetch; window.fetch = (...a) => (sent.push(a[1]?.body), real(...a)); 0"
    page.run(wrap)
    fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "repetition_penalty": 1.1, "presence_penalty": 0.2,
              "frequency_penalty": -0.2, "max_tokens": 9, "seed": 7}  # fmt: skip
    for name, value in fields.items():
        page.type(f"#{name}-0", str(value))
    page.type("#system-0", "Be brief.")
    page.type("#stop-0", "END\\n\nQ:")
    ask(page, "one")
    ask(page, "two")
    first, second = (json.loads(body) for body in page.run("sent.filter(Boolean)"))
    assert {name: first[name] for name in fields} == fields
    assert first["stop"] == ["END\n", "Q:"]
    assert (first["logprobs"], first["top_logprobs"], first["stream"]) == (True, 5, True)
    answer = page.run("JSON.parse(localStorage.getItem('argosy-playground')).turns[0].answers[0].text")
    assert second["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "two"},
    ]


def test_a_refusal_is_shown_in_the_servers_words(chromium: Page, page: Page):
    page.until(READY)
    page.type("#temperature-0", "-1")
    send(page, "Hello")
    assert "`temperature`" in page.until("document.querySelector('.error')?.textContent")
    assert len(chromium.errors) == 1
    assert "400" in chromium.errors.pop()


def test_a_model_without_a_chat_template_continues_text(chromium: Page, lm: LM):
    with serving(replace(lm, tokenizer=ByteTokenizer(TokenizerConfig()))) as plain, listening(plain) as address:
        page = open_page(chromium, address)
        page.until(READY)
        assert "no chat template" in page.run("document.querySelector('#mode').textContent")
        assert page.run("document.querySelector('#system-0')") is None
        ask(page, "Once")
        assert texts(page)[0].startswith("Once")
        assert page.run("document.querySelectorAll('.answer .token').length") > 1
        assert f"{address}/v1/completions" in page.requests
        page.hover(".answer .token")
        # In this API's shape, tokens of the same text are one: bytes that are no character.
        page.until("document.querySelectorAll('#tip tr').length >= 3")
        assert chromium.errors == []


def test_the_key_is_asked_for_and_stays_in_the_tab(chromium: Page, lm: LM):
    with serving(lm) as service, listening(service, api_key="s3cret") as address:
        page = open_page(chromium, address)
        page.until("!document.querySelector('#key').hidden")
        assert not [url for url in page.requests if "/v1/" in url or "model" in url or "metrics" in url]
        page.type("#key-value", "wrong")
        page.press("Enter")
        page.until(f"performance.getEntriesByName('{address}/web/model').length == 1")
        page.until("document.activeElement.id == 'key-value'")
        assert page.run(READY) == ""
        page.errors.clear()
        page.type("#key-value", "s3cret")
        page.press("Enter")
        ask(page, "Hello")
        assert page.run("sessionStorage.length") == 1
        assert "s3cret" not in page.run("JSON.stringify(localStorage) + document.documentElement.outerHTML")
        page.click("#forget")
        page.until("!document.querySelector('#key').hidden")
        assert page.run("sessionStorage.length + localStorage.length") == 0
        assert page.errors == []


def test_the_dashboard_draws_what_the_server_does(page: Page, service: Service):
    page.run("location.hash = '#dashboard'")
    page.until("document.querySelectorAll('#charts svg').length == 7")
    label = "[...document.querySelectorAll('#charts svg')].map(e => e.getAttribute('aria-label'))"
    assert page.run(f"{label}[3]") == "Requests: running 0, waiting 0", "gauges need no earlier reading"
    page.run("location.hash = '#playground'")
    ask(page, "Hello")
    page.run("location.hash = '#dashboard'")
    page.until("[...document.querySelectorAll('#charts svg')][0].querySelectorAll('path')[1].getAttribute('d')")
    page.until(f"/^Throughput: prompt [\\d.]+, generated [1-9][\\d.]* tokens\\/s/.test({label}[0])")
    page.until(f"/p50 (≤ )?[\\d.]+, p95 (≤ )?[\\d.]+ m?s/.test({label}[1])")
    metrics: Any = service.front.metrics
    before = f"{metrics.compilations._value.get():,.0f}"
    # This server did not warm up. What was compiled before the page was opened is a number and no alarm.
    later = "Date.now = (clock => () => clock() + 61_000)(Date.now); 0"
    readings = "performance.getEntriesByType('resource').filter(e => e.name.endsWith('/metrics')).length"
    page.run(later)
    # The second that ends after this has begun after the jump of the clock.
    page.until(f"{readings} >= {page.run(readings) + 2}")
    page.until("document.querySelector('#alarm').hidden")
    assert page.run("document.querySelector('#facts').textContent").find(f"Compilations{before}") >= 0
    metrics.compilations.inc(3)
    metrics.prompt_compilations.inc(2)
    alarm = "document.querySelector('#alarm').textContent"
    page.until(f"!document.querySelector('#alarm').hidden && {alarm}.includes('step')")
    message = page.run(alarm)
    assert message.startswith("2 programs were compiled in the last minute for requests with prompt_logprobs")
    assert message.endswith("1 program was compiled in the last minute for a step of the engine: all requests waited.")
    page.run(later)
    page.until("document.querySelector('#alarm').hidden")


def test_a_hidden_page_reads_no_metrics(page: Page):
    page.until(READY)
    page.run("Object.defineProperty(document, 'hidden', {get: () => true, configurable: true}); window.from = performance.now(); 0")
    page.until("performance.now() - from > 4500")
    late = "performance.getEntriesByType('resource').filter(e => e.name.endsWith('/metrics') && e.startTime > from).length"
    assert page.run(late) == 0
    page.run("Object.defineProperty(document, 'hidden', {get: () => false}); 0")
    page.until(f"{late} > 0")


def test_on_a_phone_nothing_is_wider_than_the_screen(page: Page):
    page.looks(400, 800, phone=True)
    page.open(page.run("location.href"))
    page.until(READY)
    assert not page.run("document.querySelector('#settings').open")
    ask(page, "x" * 60)
    for view in ("#playground", "#dashboard"):
        page.run(f"location.hash = '{view}'")
        page.until(f"!document.querySelector('{view}').hidden")
        assert page.run("document.documentElement.scrollWidth") <= 400


def test_every_control_has_a_name(page: Page):
    page.until(READY)
    ask(page, "Hello")
    nameless = """[...document.querySelectorAll('button, input, textarea, a')].filter(e =>
        !e.textContent.trim() && !e.getAttribute('aria-label') && !e.labels?.length).map(e => e.outerHTML)"""
    assert page.run(nameless) == []


METRICS = r"""# HELP x:count_total About "it".
x:count_total{engine="0",model_name="a\"b} c"} 3.0
x:count_total{engine="1",model_name="y"} 4.0
x:wait_seconds_bucket{engine="0",le="0.1",model_name="le=\"9\""} 2.0
x:wait_seconds_bucket{engine="0",le="+Inf",model_name="y"} 5.0
x:wait_seconds_bucket{engine="1",le="0.1",model_name="y"} 1.0
x:wait_seconds_bucket{engine="1",le="+Inf",model_name="y"} 4.0
"""


def test_metrics_and_quantiles_are_read_as_prometheus_does(page: Page):
    def run(script: str) -> Any:
        return page.run(f"import('/web/api.js').then(api => {script})")

    assert run(f"api.metrics({json.dumps(METRICS)}).values") == {"x:count_total": 7}
    assert run(f"api.metrics({json.dumps(METRICS)}).series") == {"x:count_total": 2}
    assert run(f"api.metrics({json.dumps(METRICS)}).buckets['x:wait_seconds'].map(b => b.map(String))") == [
        ["0.1", "3"],
        ["Infinity", "9"],
    ]
    before, now = "[[1, 5], [2, 5], [4, 5], [Infinity, 5]]", "[[1, 5], [2, 9], [4, 13], [Infinity, 15]]"
    assert run(f"api.quantile(0.5, {before}, {now})") == {"value": 2.5, "sign": ""}
    assert run(f"api.quantile(0.95, {before}, {now})") == {"value": 4, "sign": "> "}
    assert run(f"api.quantile(0.3, undefined, {now})") == {"value": 1, "sign": "≤ "}
    assert run(f"api.quantile(0.5, {now}, {now})") is None


def test_a_stream_is_read_however_it_is_cut(page: Page):
    script = """import('/web/api.js').then(async api => {
        const bytes = new TextEncoder().encode('data: {"a":"é\\\\n"}\\n\\n: a comment\\n\\ndata: {"a":2}\\n\\ndata: [DONE]\\n\\n');
        const found = [];
        for (let cut = 1; cut < bytes.length; cut++) {
            const parts = [bytes.slice(0, cut), bytes.slice(cut)];
            const stream = new ReadableStream({ pull(c) { const p = parts.shift(); p ? c.enqueue(p) : c.close(); } });
            const one = [];
            for await (const event of api.events(stream)) one.push(event.a);
            found.push(JSON.stringify(one));
        }
        return [...new Set(found)];
    })"""
    assert page.run(script) == ['["é\\n",2]']
    lost = """import('/web/api.js').then(async api => {
        const stream = new Response('data: {"a":1}\\n\\n').body;
        try { for await (const event of api.events(stream)); } catch (error) { return error.message; }
    })"""
    assert page.run(lost) == "the connection was lost"


def test_thoughts_are_shown_apart_and_are_no_part_of_the_next_prompt(chromium: Page, lm: LM):
    template = TokenizerConfig(templates={"default": "{% for m in messages %}<{{ m.content }}>{% endfor %}{# </think> #}"})
    with serving(LM(lm.config, lm.module, ByteTokenizer(template)), kind=Says) as service, listening(service) as url:
        front: Any = service.front
        front.said = "<think>hm</think>\nHello"
        page = open_page(chromium, url)
        ask(page, "hi")
        assert texts(page) == ["hm\n\nHello"]
        thoughts = "[...document.querySelectorAll('.answer .text .thought')].map(e => e.textContent).join('')"
        assert page.run(thoughts).strip() == "hm"
        # The next prompt is made of what is kept.
        assert page.run("JSON.parse(localStorage.getItem('argosy-playground')).turns[0].answers[0].text") == "Hello"
        assert page.errors == []
