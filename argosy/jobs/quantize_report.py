"""The report of `argosy quantize`: the perplexity of a text before and after, as an HTML page."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from argosy.core.errors import BadInput
from argosy.core.storage import Store
from argosy.evals.plan import PlannedTask, plan
from argosy.evals.settings import EvalSettings
from argosy.jobs.convert import open_source
from argosy.jobs.evaluate import evaluate
from argosy.observe.report.quantized import render_quantization
from argosy.weights.build import stored_tokenizer

Say = Callable[[str], None]


def planned_text(source: str, text: str, windows: int) -> tuple[EvalSettings, Sequence[PlannedTask]]:
    """Plans the evaluation of a text.

    Raises:
        UserError: there is no such text or model, or the model has no tokenizer.
    """
    if not Path(text).is_file():
        raise BadInput(f"no file {text}", where="set by text", hint="a text to measure before and after")
    settings = EvalSettings(tasks="perplexity", data=text, limit=windows)
    planned = plan(settings)
    if stored_tokenizer(open_source(source)) is None:
        raise BadInput(f"{source} has no tokenizer, so no text can be measured", where="set by text", hint="leave out `text`")
    return settings, planned


def measure_change(source: str, target: str, settings: EvalSettings, planned: Sequence[PlannedTask], say: Say) -> dict[str, Any]:
    """Measures the perplexity of a text under a model and its quantized version. Returns `before`, `after` and `tokens`."""
    from argosy.infer.load import load_lm

    figures = []
    for model in (source, target):
        say(f"measuring the perplexity of {model}")
        document, _ = evaluate(load_lm(model), planned, settings, {}, lambda *_: None, lambda: False)
        figures.append(document["tasks"]["perplexity"])
    return {"before": figures[0]["perplexity"], "after": figures[1]["perplexity"], "tokens": figures[1]["tokens"]}


def check_report(path: str) -> None:
    """Checks that a page can be written.

    Raises:
        BadInput: the page cannot be written.
    """
    if not path.endswith(".html"):
        raise BadInput(f"report={path} does not end in .html", hint="report=report.html")
    if not Path(path).resolve().parent.is_dir():
        raise BadInput(f"no folder for {path}", where="set by report")


def write_quantization_report(path: str, result: dict[str, Any], command: str) -> None:
    """Writes the page."""
    file = Path(path).resolve()
    Store(file.parent).write_text(file.name, render_quantization(result, command))
