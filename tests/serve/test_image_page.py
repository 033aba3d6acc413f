"""The page of a server of images: what it is served as, and that it draws in a browser."""

import re
from collections.abc import Iterator

import pytest
from serve import browser
from serve.image_servers import class_pipeline, serving

from argosy.serve.images.app import FOLDER
from argosy.web.pages import SHARED, page_files

SOURCES = {path.name: path.read_text(encoding="utf-8") for path in (*SHARED.iterdir(), *FOLDER.iterdir())}


@pytest.fixture
def address() -> Iterator[str]:
    with serving(class_pipeline(), api_key="s3cret") as (url, _, _):
        yield url


def test_the_page_loads_only_its_own_files():
    page, script = SOURCES["index.html"], SOURCES["draw.js"]
    assert not re.search(r"\son\w+=|\sstyle=|<style|javascript:", page)
    links = {*re.findall(r'(?:src|href)="(/[^"]*)"', page), *re.findall(r'from "([^"]*)"', script)}
    # Charts are for other pages.
    assert links == set(page_files(FOLDER)) - {"/", "/web/charts.js"}
    assert not re.search(r"(inner|outer)HTML|insertAdjacentHTML|document\.write|\beval\b|Function\(|DOMParser|srcdoc", script)


@pytest.mark.slow
@pytest.mark.skipif(browser.path() is None, reason="no Chromium on this machine")
def test_the_page_draws_and_shows_what_is_refused(address: str):
    with browser.opened() as page:
        page.looks(1200, 900)
        page.open(f"{address}/")
        page.until("!document.querySelector('#key').hidden")
        page.type("#key-value", "s3cret")
        page.press("Enter")
        page.until("document.querySelector('#about').textContent.includes('8x8 pixels')")
        page.errors.clear()
        page.type("#prompt", "fox")
        page.run("document.querySelector('#n').value = 2; document.querySelector('#seed').value = 7")
        page.click("#draw")
        page.until("document.querySelectorAll('canvas').length === 2 && !document.querySelector('.unfinished')")
        page.until("!document.querySelector('#draw').disabled")
        assert page.run("[...document.querySelectorAll('figcaption')].map(one => one.textContent)") == [
            "fox · seed 7, image 2", "fox · seed 7, image 1",
        ]  # fmt: skip
        # Drawn, and not in one color.
        assert page.run("new Set(document.querySelector('canvas').getContext('2d').getImageData(0, 0, 8, 8).data).size") > 20
        assert page.run("document.querySelector('#refused').textContent") == ""
        assert page.errors == []
        page.run("document.querySelector('#prompt').value = 'foxy'")
        page.click("#draw")
        page.until("document.querySelector('#refused').textContent.includes('no class')")
        assert page.run("document.querySelectorAll('canvas').length") == 2
