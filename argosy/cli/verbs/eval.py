"""`argosy eval MODEL [tasks=NAME,... data=PATH ...]`."""

import time
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from argosy.cli.output import Doing, answer, conclude, say
from argosy.core.addresses import is_missing
from argosy.core.process import signals
from argosy.core.settings import read_settings, words_layer
from argosy.evals.settings import IMAGES, EvalSettings
from argosy.jobs import evaluate, machine
from argosy.observe.readable import columns, one_line
from argosy.observe.report.page import metric_text, metrics_of
from argosy.run.settings.recipe_files import no_model

app = typer.Typer(rich_markup_mode=None, add_completion=False)

# Seconds between two lines of progress where lines do not replace each other.
QUIET_S = 10.0


@app.command("eval")
def evaluates(
    model: Annotated[
        str, typer.Argument(help="Hub folder, .gguf file, run, checkpoint or hf:OWNER/NAME", show_default=False)
    ],
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[tasks=NAME,... data=PATH ...]",
            help="settings: " + ", ".join(EvalSettings.model_fields),
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON document on stdout")] = False,
) -> None:
    """Evaluates a model: perplexity, multiple choice, exact match, IFEval, vectors of texts, drawn images."""
    settings = read_settings(EvalSettings, words_layer(words or [])).value
    if settings.tasks == IMAGES:
        _images(model, settings, as_json)
        return
    planned, others = evaluate.prepare_tasks(model, settings)
    say(f"{one_line(model)}: {', '.join(map(str, planned))}")
    with Doing() as doing:
        doing("loading jax")
        machine.start_jax()
        from argosy.evals.run import check_evaluable
        from argosy.jobs.api import load

        doing(f"loading {model}")
        lm = load(model, dtype=settings.dtype, adapter=settings.adapter, quantization=settings.quantization)
        lm.say = doing
        check_evaluable(lm, settings, planned)
        doing.done()
        with signals.asked_to_stop("stopping; the tasks that are finished are printed; again to end now") as stop:
            document, stopped = evaluate.evaluate(lm, planned, settings, others, Steps(doing), stop)
    run_dir = evaluate.keep(model, settings, document)
    # Without a file that holds the results, the answer is all there is of them.
    tell = conclude if run_dir is not None or settings.rows else answer
    tell(_table(document["tasks"]) if document["tasks"] else "no task was finished", document, as_json)
    if run_dir is not None:
        say(f"added to {run_dir}, whose report.html shows it")
    if stopped:
        raise typer.Exit(stop.code)


def _images(model: str, settings: EvalSettings, as_json: bool) -> None:
    """Evaluates a run that draws images."""
    if is_missing(model):
        raise no_model(model)
    with Doing() as doing:
        doing("loading jax")
        machine.start_jax()
        from argosy.jobs.evaluate_images import evaluate_images

        document = evaluate_images(model, settings, doing)
        doing.done()
    run_dir = evaluate.keep(model, settings, document)
    answer(_table(document["tasks"]), document, as_json)
    if run_dir is not None:
        say(f"added to {run_dir}, whose report.html shows it")


class Steps:
    """Shows how far a task is: each change on a terminal, elsewhere a line every ten seconds."""

    def __init__(self, doing: Doing):
        self.doing, self.shown_s = doing, time.monotonic()

    def __call__(self, planned: Any, done: int, of: int) -> None:
        if not self.doing.is_live and time.monotonic() - self.shown_s < QUIET_S:
            return
        self.shown_s = time.monotonic()
        self.doing(f"{planned.task.name}: {done} of {of} rows" if of else f"{planned.task.name}: {done} window{'s' * (done != 1)}")


def _table(tasks: Mapping[str, Mapping[str, Any]]) -> str:
    """The results as text: a line for each metric, and what was cut; then the differences, if there are any."""
    rows, notes, differences = [], [], []
    for name, numbers in tasks.items():
        for i, (metric, value, error) in enumerate(metrics_of(numbers)):
            plus = "" if error is None else f"± {metric_text(error)}"
            rows.append([name if i == 0 else "", metric, metric_text(value), plus, f"{numbers['n']:,}" if i == 0 else ""])
        if numbers["n"] == 1:
            notes.append(f"{name}: a single row has no standard error")
        if "stretches" in numbers.get("rows", ""):
            notes.append(f"{name}: n counts {numbers['rows']}, because there are few windows")
        if numbers["truncated"]:
            notes.append(f"{name}: {numbers['truncated']:,} sequences lost tokens from the left, to fit the context")
        for metric, comparison in numbers.get("against", {}).items():
            interval = comparison["interval"]
            between = "" if interval is None else f"{interval[0]:+.4f} to {interval[1]:+.4f}"
            difference = "" if comparison["difference"] is None else f"{comparison['difference']:+.4f}"
            differences.append([name, metric, difference, between, f"{comparison['n']:,}"])
    parts = [columns(("task", "metric", "value", "stderr", "n"), rows, figures=(2, 3, 4)), *notes]
    if differences:
        head = ("task", "metric", "difference", "95 % interval", "n")
        parts.append("\n" + columns(head, differences, figures=(2, 3, 4)))
    return "\n".join(parts)


