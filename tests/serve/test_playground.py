"""The page at `/`: what it is served as, to whom, and that it asks for nothing the server does not have."""

import re
from collections.abc import Callable
from dataclasses import replace

import httpx
import pytest
from serve.conftest import inside, listening, serving

from argosy.data.tokenizers.byte import ByteTokenizer
from argosy.data.tokenizers.config import TokenizerConfig
from argosy.infer.lm import LM
from argosy.serve.app import App
from argosy.serve.openai.fields import ChatFields, CompletionFields
from argosy.serve.playground import FOLDER
from argosy.serve.service import Service
from argosy.web.pages import SHARED, TYPES, page_files

Ask = Callable[..., httpx.Response]
SOURCES = {path.name: path.read_text(encoding="utf-8") for path in [*SHARED.iterdir(), *FOLDER.iterdir()]}
SCRIPTS = [name for name in SOURCES if name.endswith(".js")]


def test_every_file_is_served_with_its_type_and_a_strict_policy(ask: Ask):
    assert len(page_files(FOLDER)) == len(SOURCES) >= 6
    for path, file in page_files(FOLDER).items():
        answer = ask("GET", path)
        assert answer.status_code == 200
        assert answer.headers["content-type"].split(";")[0] == TYPES[file.suffix]
        policy = dict(part.strip().partition(" ")[::2] for part in answer.headers["content-security-policy"].split(";"))
        assert policy["default-src"] == "'none'"
        for kind in ("script-src", "style-src", "img-src", "connect-src"):
            assert policy[kind] == "'self'"
        assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
        assert policy["require-trusted-types-for"] == "'script'"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["x-frame-options"] == "DENY"
        assert answer.headers["referrer-policy"] == "no-referrer"
    assert ask("POST", "/", json={}).status_code == 405
    assert ask("GET", "/web/").status_code == ask("GET", "/web/../app.py").status_code == 404


def test_the_page_loads_only_its_own_files_and_holds_no_script():
    page = SOURCES["index.html"]
    assert not re.search(r"\son\w+=|\sstyle=|<style|javascript:", page)
    assert not re.search(r"<script(?![^>]*\ssrc=)", page)
    links = {*re.findall(r'(?:src|href)="(/[^"]*)"', page), *re.findall(r'from "([^"]*)"', "".join(SOURCES[n] for n in SCRIPTS))}
    assert links == set(page_files(FOLDER)) - {"/"}
    addresses = re.findall(r"https?://[^\s\"'`]*", "".join(SOURCES.values()))
    assert set(addresses) == {"http://www.w3.org/2000/svg"}, "the name of a language, which nothing loads"


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_never_read_text_as_html_or_code(name: str):
    assert not re.search(r"(inner|outer)HTML|insertAdjacentHTML|document\.write|\beval\b|Function\(|DOMParser|srcdoc", SOURCES[name])


def test_the_page_needs_no_key_and_knows_nothing_secret(service: Service):
    app = App(service, key="s3cret").asgi

    async def go(client: httpx.AsyncClient) -> None:
        for path in page_files(FOLDER):
            answer = await client.get(path)
            assert answer.status_code == 200
            assert "s3cret" not in answer.text
            assert service.name not in answer.text
        assert 'data-key="true"' in (await client.get("/")).text
        assert (await client.get("/web/model")).status_code == 401
        assert (await client.get("/web/nothing")).status_code == 401
        assert (await client.get("/web/model", headers={"authorization": "Bearer s3cret"})).json()["name"] == "tiny"

    inside(app, go)


def test_a_page_of_another_name_cannot_read_it_from_a_local_server(service: Service):
    app = App(service, local=True).asgi

    async def go(client: httpx.AsyncClient) -> None:
        for path in (*page_files(FOLDER), "/web/model"):
            assert (await client.get(path)).status_code == 200
            assert (await client.get(path, headers={"host": "evil.example"})).status_code == 403

    inside(app, go)


def test_web_false_leaves_nothing_but_the_api(service: Service):
    for key, status in ((None, 404), ("s3cret", 401)):
        app = App(service, key=key, web=False).asgi

        async def go(client: httpx.AsyncClient) -> list[int]:
            return [(await client.get(path)).status_code for path in (*page_files(FOLDER), "/web/model")]

        assert set(inside(app, go)) == {status}
    with listening(service, web=False) as address:
        assert httpx.get(f"{address}/").status_code == 404


def test_the_page_learns_what_the_model_is(ask: Ask, lm: LM):
    assert ask("GET", "/").text.count('data-key="false"') == 1
    expected = {"name": "tiny", "chat": True, "context": 128, "defaults": {"temperature": 1.0}, "logprobs": 5}
    assert ask("GET", "/web/model").json() == expected
    plain = replace(lm, tokenizer=ByteTokenizer(TokenizerConfig()))
    with serving(plain, top_p=0.9) as service:

        async def go(client: httpx.AsyncClient) -> httpx.Response:
            return await client.get("/web/model")

        about = inside(App(service).asgi, go).json()
    assert (about["chat"], about["defaults"]) == (False, {"temperature": 1.0, "top_p": 0.9})


def test_every_setting_of_the_playground_is_a_field_of_both_apis():
    table = SOURCES["playground.js"].partition("const NUMBERS")[2].partition("];\n")[0]
    names = re.findall(r'\["(\w+)"', table)
    assert len(names) == 9
    assert not {*names, "stop"} - set(ChatFields.model_fields)
    assert not {*names, "stop"} - set(CompletionFields.model_fields)


def test_every_metric_of_the_dashboard_is_one_of_the_server(service: Service):
    samples = {sample.name for metric in service.front.metrics.registry.collect() for sample in metric.samples}
    names = samples | {name.removesuffix("_bucket") for name in samples}
    read = set(re.findall(r'["`]((?:vllm|argosy):[\w$]+(?:\{name\}\w*)?)["`]', SOURCES["dashboard.js"]))
    template = "vllm:prefix_cache_${name}_total"
    assert template in read
    metrics = (read - {template}) | {template.replace("${name}", name) for name in ("queries", "hits")}
    assert len(metrics) >= 11
    assert not metrics - names
