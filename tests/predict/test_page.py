"""The page of a server of bundles: what it is served as, what it knows, and that its form gets right answers in a browser."""

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from predict_servers import serving, write_scaled
from serve import browser
from serve.browser import Page

from argosy.predict.page import FOLDER
from argosy.web.pages import SHARED, TYPES, page_files

SOURCES = {path.name: path.read_text(encoding="utf-8") for path in (*SHARED.iterdir(), *FOLDER.iterdir())}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("repository")
    write_scaled(folder / "scaled" / "1", 2.0)
    write_scaled(folder / "scaled" / "2", 3.0)
    (folder / "scaled" / "config.yml").write_text("versions: all\n")
    (folder / "broken" / "1").mkdir(parents=True)
    (folder / "broken" / "1" / "manifest.json").write_text("{")
    with serving(folder, "api_key=s3cret") as (address, _):
        yield address


def test_the_page_needs_no_key_and_its_facts_do(server: str):
    with httpx.Client(base_url=server) as client:
        for path, file in page_files(FOLDER).items():
            answer = client.get(path)
            assert answer.status_code == 200
            assert answer.headers["content-type"].split(";")[0] == TYPES[file.suffix]
            assert "default-src 'none'" in answer.headers["content-security-policy"]
            assert b"s3cret" not in answer.content
        assert b'data-key="true"' in client.get("/").content
        assert client.get("/web/models").status_code == 401
        models = client.get("/web/models", headers={"x-api-key": "s3cret"}).json()
    assert [(model["name"], model["version"], model["ready"]) for model in models] == [
        ("broken", "1", False), ("scaled", "1", True), ("scaled", "2", True)
    ]  # fmt: skip
    assert models[0]["reason"]
    assert models[1]["signatures"][0]["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 3]}]


def test_the_page_loads_only_its_own_files():
    page, scripts = SOURCES["index.html"], SOURCES["models.js"]
    assert not re.search(r"\son\w+=|\sstyle=|<style|javascript:", page)
    links = {*re.findall(r'(?:src|href)="(/[^"]*)"', page), *re.findall(r'from "([^"]*)"', scripts + SOURCES["charts.js"])}
    assert links == set(page_files(FOLDER)) - {"/"}
    assert not re.search(r"(inner|outer)HTML|insertAdjacentHTML|document\.write|\beval\b|Function\(|DOMParser|srcdoc", scripts)


@pytest.mark.slow
@pytest.mark.skipif(browser.path() is None, reason="no Chromium on this machine")
def test_the_form_calls_a_signature_and_shows_what_is_refused(server: str):
    with browser.opened() as page:
        page.looks(1200, 900)
        page.open(f"{server}/")
        page.until("!document.querySelector('#key').hidden")
        page.type("#key-value", "s3cret")
        page.press("Enter")
        page.until("document.querySelectorAll('#models tbody tr').length == 3")
        assert page.run("document.querySelector('#models tbody').innerText").startswith("broken\t1\t")
        page.run("const v = document.querySelector('#version'); v.value = 'scaled 2'; v.dispatchEvent(new Event('change')); 0")
        answer_form(page, "[[1, 2, 3]]", "#outputs", "3, 6, 9")
        answer_form(page, "[[1, 2]]", "#refused", "shape [1, 2]")
        answer_form(page, "one", "#refused", "lists of numbers as JSON")
        page.until("document.querySelectorAll('#charts svg').length == 4")
        page.until("[...document.querySelectorAll('#models tbody tr')].at(-1).innerText.includes('\\t1\\t1\\t')")
        assert [error for error in page.errors if " 400 " not in error and " 401 " not in error] == []


def answer_form(page: Page, text: str, place: str, expected: str) -> None:
    page.run("document.querySelector('#fields textarea').value = ''; 0")
    page.type("#fields textarea", text)
    page.run("document.querySelector('#inputs').requestSubmit(); 0")
    page.until(f"document.querySelector({place!r}).textContent.includes({expected!r})")


def test_a_server_without_the_page_has_none(tmp_path: Path):
    write_scaled(tmp_path / "scaled" / "1", 2.0)
    with serving(tmp_path, "page=false") as (address, _), httpx.Client(base_url=address) as client:
        assert client.get("/").status_code == client.get("/web/models").status_code == 404
        assert client.get("/v2/models/scaled").status_code == 200
