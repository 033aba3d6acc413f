"""The report of `argosy quantize`: perplexity is that of `argosy eval`, the page holds every matrix, mistakes come before work."""

import json
import re
from pathlib import Path

import pytest
from helpers import shared
from typer.testing import CliRunner

from argosy.cli.verbs.quantize import app
from argosy.core.errors import BadInput
from argosy.observe.report.quantized import histogram, recommendation, render_quantization


def run(*words: object):
    return CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)


def test_the_page_of_a_quantized_model(tmp_path: Path):
    from argosy.evals.plan import plan
    from argosy.evals.settings import EvalSettings
    from argosy.infer.load import load_lm
    from argosy.jobs.evaluate import evaluate

    source, text = shared("models/stories260k"), tmp_path / "text.txt"
    text.write_text(shared("text/tinystories_sample.txt").read_text(encoding="utf-8")[:6000], encoding="utf-8")
    page = tmp_path / "page.html"
    done = run(source, tmp_path / "out", "preset=w4a4", f"text={text}", "windows=3", f"report={page}", "--json")
    result = json.loads(done.stdout)
    settings = EvalSettings(tasks="perplexity", data=str(text), limit=3)
    for key, model in (("before", source), ("after", tmp_path / "out")):
        document, _ = evaluate(load_lm(model), plan(settings), settings, {}, lambda *_: None, lambda: False)
        assert result["perplexity"][key] == pytest.approx(document["tasks"]["perplexity"]["perplexity"], rel=1e-9)
    assert result["perplexity"]["after"] > result["perplexity"]["before"]
    assert result["source_bytes"] > result["bytes"]
    html = page.read_text(encoding="utf-8")
    assert all(f">{row['name']}<" in html for row in result["weights"])
    assert "Perplexity grew by" in html or "perplexity grew by" in html
    assert "preset=w4a4" in html
    assert "src=" not in html
    counts = [int(n) for n in re.findall(r'class="tick x"[^>]*>(\d+)<', html)]
    assert sum(counts) == len(result["weights"])


def result_of(after: float | None, **more):
    row = {"name": "layers.0.attn.q", "weights": "int4", "granularity": 64, "activations": None}
    row |= {"numbers": 100, "bytes": 56, "error": 0.1}
    summary = {"tensors": 1, "bytes": 400, "largest": ["<b>embed</b>"]}
    measured = {} if after is None else {"perplexity": {"before": 10.0, "after": after, "tokens": 99.0}}
    return {"source": "a", "target": "b", "weights": [row], "kept": summary, "bytes": 456, "seconds": 1.0, **measured, **more}


def test_a_gguf_file_has_a_report_too(tmp_path: Path):
    text, page = tmp_path / "text.txt", tmp_path / "page.html"
    text.write_text(shared("text/tinystories_sample.txt").read_text(encoding="utf-8")[:3000], encoding="utf-8")
    words = ["preset=q8_0", f"text={text}", "windows=1", f"report={page}", "--json"]
    result = json.loads(run(shared("models/stories260k"), tmp_path / "out.gguf", *words).stdout)
    assert result["perplexity"]["after"] == pytest.approx(result["perplexity"]["before"], rel=0.02)
    assert all(f">{row['name']}<" in page.read_text(encoding="utf-8") for row in result["weights"])


@pytest.mark.parametrize(
    ("after", "pattern"),
    [
        *((10.05, "^Use it:"), (10.3, "^Use it where"), (11.0, "try method=gptq"), (14.0, "^Do not use it")),
        (None, "^The cost is not known"),
    ],
)
def test_the_recommendation_follows_from_the_numbers(after, pattern):
    assert re.search(pattern, recommendation(result_of(after)))


def test_a_calibrated_model_is_not_told_to_calibrate():
    assert "gptq" not in recommendation(result_of(11.0, samples=4))
    row = {"output_error": 0.05, "nearest_error": None}
    result = result_of(11.0, samples=4)
    result["weights"][0] |= row
    assert "0.0500" in render_quantization(result)


def test_names_are_text():
    page = render_quantization(result_of(10.0), "argosy quantize '<script>'")
    assert "<b>embed" not in page
    assert "<script>'" not in page


def test_every_value_is_in_a_bin():
    counts = [int(n) for n in re.findall(r">(\d+)</text>", histogram([0.0, 0.1, 0.1, 0.2]))]
    assert sorted(counts) == [1, 1, 2]
    assert "<svg" in histogram([0.0])


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["report=page.txt"], "does not end in .html"),
        (["report=gone/page.html"], "no folder"),
        (["text=gone.txt"], "gone.txt"),
        (["windows=3"], "windows is for text"),
        (["rotate=quarot", "to=compressed-tensors"], "rotate=quarot is for Argosy's own format"),
    ],
)
def test_mistakes_are_said_before_work(words, problem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput, match=problem):
        run(shared("models/stories260k"), tmp_path / "out", "preset=w4", *words)
    assert not list(tmp_path.iterdir())
