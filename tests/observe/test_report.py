"""The report, read by an HTML parser: whole, harmless, self-contained, and true to the lines it was made from."""

import json
import math
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from argosy.observe.readable import decimals
from argosy.observe.report.charts import (
    BOTTOM,
    COLUMNS,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Series,
    bar,
    chart,
    running_mean,
    thin_points,
)
from argosy.observe.report.page import (
    Evaluated,
    RunRecord,
    SavedCheckpoint,
    numbers,
    render_report,
    seconds_by_cause,
    summary_sentence,
)
from argosy.observe.report.style import SCRIPT

VOID = {"meta", "br", "line", "rect", "path", "circle"}


class Page(HTMLParser):
    """Balanced tags, texts and attributes of a document."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID or tag == "rect":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append((self.open[-1] if self.open else "", data))

    def text(self, tag: str) -> list[str]:
        return [data for inside, data in self.texts if inside == tag]

    def series(self) -> dict[str, list[list[float]]]:
        return {a["data-name"]: json.loads(a["data-points"]) for _, a in self.tags if a.get("data-points")}  # pyright: ignore


def lines(steps: int = 60) -> list[dict]:
    lines_of_run: list[dict] = []
    for step in range(10, steps + 1, 10):
        lines_of_run.append(
            {
                "step": step,
                "loss": 5 - step / 20,
                "tokens": step * 100,
                "lr": 1e-3,
                "grad_norm": 0.5,
                "tokens_per_s": 900.0,
            }
        )
        lines_of_run.append({"step": step, "sample": f"text of step {step}", "prompt": "def "})
    lines_of_run.append({"step": steps, "eval_loss": 2.25, "eval_perplexity": math.exp(2.25), "eval_bits_per_byte": 1.5})
    return lines_of_run


def full(**changes) -> RunRecord:
    parts = {
        "name": "first", "state": "done", "lines": lines(), "steps": 60,
        "facts": {"parameters": 12_345_678, "model": "llama", "flops_per_step": 10**9},
        "settings": [("seed", "3", "command line"), ("data.batch", "8", "recipes/tiny.yml"), ("data.bos", "false", "default")],
        "checkpoints": [SavedCheckpoint(50, 3 << 20), SavedCheckpoint(60, 3 << 20, 2.25)],
        "environment": {"python": "3.11.7", "jax": "0.10.2"}, "command": "argosy train tiny", "date": "2026-11-21",
    }  # fmt: skip
    return RunRecord(**(parts | changes))


def test_a_loss_that_is_of_no_token_is_not_compared_with_guessing():
    facts = {"vocab": 512, "objective": "dpo"}
    assert "nats per token" not in render_report(full(facts=facts))
    assert "guessing" not in render_report(full(facts=facts))
    assert "guessing" in render_report(full(facts=facts | {"objective": "next_token"}))


def test_checkpoints_of_a_run_that_learns_from_rewards_show_rewards():
    rewarded = [{"step": 60, "reward": 0.5, "eval_reward": 0.25, "eval_prompts": 4}]
    page = render_report(full(lines=[*lines(), *rewarded], checkpoints=[SavedCheckpoint(60, 3 << 20, -0.25)]))
    assert "eval reward</th>" in page
    assert "eval loss</th>" not in page
    assert "0.2500" in page
    assert "-0.2500" not in page


def test_what_preferences_are_compared_by_is_plotted():
    same = {"loss": 0.6, "rewards/margin": 0.5, "rewards/rejected": -1.5}
    pairs = [{"step": step, "rewards/accuracy": step / 8, "rewards/chosen": step} | same for step in (2, 4, 6)]
    evaluation = {"step": 6, "eval_loss": 0.5, "eval_rewards/accuracy": 0.875, "eval_rewards/chosen": 4.0}
    page = Page(render_report(full(lines=[*pairs, evaluation], facts={"objective": "dpo"})))
    assert "Preferences" in page.text("h2")
    curves = {name: [y for _, y, *_ in points] for name, points in page.series().items()}
    assert curves["accuracy"] == [0.25, 0.5, 0.75]
    assert curves["accuracy, held out"] == [0.875]
    assert curves["chosen"] == [2, 4, 6]
    assert curves["rejected"] == [-1.5] * 3
    assert curves["margin"] == [0.5] * 3
    assert "75.0%" in page.text("dd")
    assert "Preferences" not in Page(render_report(full())).text("h2")


def test_everything_is_there():
    page = Page(render_report(full()))
    heads = [
        "What it writes",
        "Loss",
        "Tokens per second",
        "Optimizer",
        "Checkpoints kept",
        "Settings",
        "Environment",
        "Run it again",
    ]
    assert page.text("h2") == heads
    assert page.text("h1") == ["first"]
    cells = page.text("dd")
    assert cells == ["12.3M", "2.0000", "2.2500", "1.500", "6.00k", "900"]
    assert "12,345,678" in page.text("small")
    assert [t for t in page.text("td") if "MiB" in t] == ["3.00 MiB"] * 2
    assert page.text("pre") == [f"text of step {s}" for s in (60, 10, 20, 30, 40, 50)] + ["argosy train tiny"]
    assert page.text("span")[:1] == ["def "]
    assert page.text("summary") == ["5 earlier samples", "1 left at their defaults"]


def test_evaluations_are_a_table_of_metrics_with_their_errors():
    acc = {"acc": 0.51, "stderr": 0.02, "acc_norm": 0.43, "acc_norm_stderr": 0.03, "n": 600, "seconds": 3.0, "truncated": 0}
    losses = {"loss": 1.25, "stderr": None, "perplexity": 12345.678, "perplexity_stderr": 2.5, "tokens": 20, "n": 1}
    page = Page(render_report(full(evaluations=[Evaluated("arc_easy", 60, acc), Evaluated("<b>", None, losses)])))
    assert "Evaluations" in page.text("h2")
    cells = page.text("td")
    at = cells.index("arc_easy")
    assert cells[at : at + 6] == ["arc_easy", "acc", "60", "0.5100", "± 0.0200", "600"]
    assert cells[at + 6 : at + 9] == ["acc_norm", "0.4300", "± 0.0300"]
    assert cells[at + 9 : at + 13] == ["<b>", "loss", "1.2500", "1"]
    assert cells[at + 13 : at + 16] == ["perplexity", "12,345.7", "± 2.5000"]


STORY = {
    "proof": {"killed_at": 25, "resumed_from": 20, "steps": 40, "holds": True},
    "export": {"largest_difference": 0.0, "bytes": 3 << 20},
}


def test_it_opens_with_what_happened():
    lines_of_it = [*lines(), {"step": 60, "seconds": {"step": 40.0}}]
    facts = {"parameters": 918_656, "family": "llama", "data": "stdlib"}
    assert summary_sentence(full(lines=lines_of_it, facts=facts, story=STORY)) == (
        "A 919k-parameter Llama learned to write Python in 40 s; "
        "killed at step 25 of 40, a second run finished bit-identical."
    )
    mine = facts | {"data": "mine.txt"}
    assert summary_sentence(full(lines=lines_of_it, facts=mine)) == (
        "A 919k-parameter Llama was trained on mine.txt in 40 s; its loss went from 4.50 to 2.00."
    )
    assert summary_sentence(full(lines=lines_of_it, facts=mine, state="stopped")).startswith(
        "A 919k-parameter Llama was trained part of the way on mine.txt; its loss"
    )
    assert summary_sentence(RunRecord("empty", "stopped")) == "A model was trained part of the way."
    wrong = STORY | {"proof": STORY["proof"] | {"holds": False}}
    assert "did NOT finish" in summary_sentence(full(facts=facts, story=wrong))


def test_what_a_quickstart_proved_is_shown_as_it_is():
    page = Page(render_report(full(story=STORY)))
    checks = page.text("li")
    assert "resumed from the checkpoint of step 20: 40 losses and all weights equal, bit for bit" in checks[0]
    assert "largest difference of a logit 0" in checks[1]
    assert page.text("b") == ["✓", "✓"]
    wrong = {"proof": STORY["proof"] | {"holds": False}, "export": {"largest_difference": 0.5, "bytes": 1}}
    assert Page(render_report(full(story=wrong))).text("b") == ["✗", "✗"]
    assert Page(render_report(full(story={"proof": "torn", "export": None}))).text("li") == []


def test_axes_have_names_and_the_loss_a_line_where_guessing_is():
    page = Page(render_report(full(facts={"vocab": 258})))
    texts = page.text("text")
    assert texts.count("step") == 4
    assert {"loss, nats per token", "tokens/s", "learning rate", "gradient norm"} <= set(texts)
    assert f"guessing: ln 258 = {math.log(258):.2f}" in texts
    level = next(a["d"] for t, a in page.tags if t == "path" and a["class"] == "level")
    assert 0 < float(str(level).removeprefix("M66 ").partition("H")[0]) < 320


def test_what_the_command_line_set_comes_first():
    rows = [("a", "1", "recipes/tiny.yml"), ("b", "2", "default"), ("c", "3", "command line")]
    cells = Page(render_report(full(settings=rows))).text("code")
    assert cells == ["c", "3", "a", "1", "b", "2"]


def test_nothing_is_fetched_and_the_script_is_small():
    text = render_report(full())
    page = Page(text)
    assert not re.search(r"https?:|//[a-z]|url\(|@import|\bfetch\b|XMLHttp", text)
    for _, attributes in page.tags:
        assert not {"src", "href", "srcset", "action", "data"} & set(attributes)
    assert not {"link", "img", "iframe", "object"} & {tag for tag, _ in page.tags}
    assert len(SCRIPT.encode()) < 4096
    assert any(a.get("content", "").startswith("default-src 'none'") for t, a in page.tags if t == "meta")  # pyright: ignore
    assert "prefers-color-scheme:dark" in text


def test_whatever_a_run_holds_is_text():
    evil = "</pre><script>alert(1)</script><img src=x onerror=y>\"'&\x1b[31m\u202e"
    lines_of_run = [{"step": 1, "loss": 1.0}, {"step": 1, "sample": evil}, {"step": 1, "seconds": {evil: 1.0}}]
    record = full(
        name=evil, state=evil, lines=lines_of_run, settings=[(evil, evil, evil)], environment={evil: evil}, command=evil,
        facts={"model": evil, "device": evil}, date=evil,
    )  # fmt: skip
    text = render_report(record)
    page = Page(text)
    assert [tag for tag, _ in page.tags].count("script") == 1
    assert "img" not in {tag for tag, _ in page.tags}
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert page.text("h1")[0].startswith("</pre><script>alert(1)")


def test_what_it_learned_from_is_under_its_name():
    page = Page(render_report(full(facts={"model": "llama", "corpus": "stories: 3 documents <of> text"})))
    assert "stories: 3 documents <of> text" in page.text("p")
    assert "" not in Page(render_report(full(facts={"model": "llama"}))).text("p")


def test_places_of_points_are_short():
    """Thousands of them are in a page: tenths of a pixel are enough."""
    page = Page(chart([Series("loss", [(1.0, 3.0), (2.0, 1.7), (4.0, 1.1)])], "x"))
    places = [place for point in page.series()["loss"] for place in point[2:]]
    assert len(places) == 6
    assert places == [round(place, 1) for place in places]


def test_the_last_line_of_a_step_wins_and_curves_hold_their_values():
    lines_of_run = [{"step": 10, "loss": 9.0}, {"step": 20, "loss": 8.0}, {"step": 10, "loss": 4.0}, {"step": 20, "loss": 3.0}]
    lines_of_run += [{"step": 30, "loss": "nan"}, {"step": 40, "loss": math.inf}, {"step": 40, "eval_loss": 3.5}, {"loss": 1.0}]
    page = Page(render_report(full(lines=lines_of_run)))
    assert [point[:2] for point in page.series()["loss"]] == [[10, 4.0], [20, 3.0]]
    assert [point[:2] for point in page.series()["eval"]] == [[40, 3.5]]
    assert numbers(lines_of_run, "loss") == [(10.0, 4.0), (20.0, 3.0)]


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (4.2386, 2.3449, "4.24 to 2.34"),
        (0.0, 0.5, "0.00 to 0.50"),
        (0.6931, 0.6894, "0.693 to 0.689"),
        (0.00412, 0.00187, "0.0041 to 0.0019"),
        (3e-8, 1.25e-9, "3e-08 to 1.25e-09"),
        (-0.5, 0.25, "-0.50 to 0.25"),
        (1.0, 1.0, "1.00 to 1.00"),
    ],
)
def test_a_small_loss_is_seen_to_change(before: float, after: float, words: str):
    """That of distillation is a divergence of some thousandths."""
    lines_of_run = [{"step": 1, "loss": before}, {"step": 9, "loss": after}]
    page = Page(render_report(full(lines=lines_of_run, facts={"objective": "gkd"})))
    assert f"its loss went from {words}." in page.text("p")[0]


SHOWN = [(2.34567, "2.3457"), (0.0, "0.0000"), (0.0123, "0.0123"), (0.00123456, "0.00123"), (-2e-9, "-2e-09")]


@pytest.mark.parametrize(("x", "words"), SHOWN)
def test_a_loss_has_digits(x: float, words: str):
    assert decimals(x) == words


def test_time_is_added_over_sessions():
    lines_of_run = [
        {"step": 10, "seconds": {"step": 30.0, "compile": 10.0}},
        {"step": 10, "seconds": {"step": 50.0, "data": 10.0}},
    ]
    assert seconds_by_cause(lines_of_run) == {"step": 80.0, "compile": 10.0, "data": 10.0}
    page = Page(render_report(full(lines=lines_of_run)))
    assert "Time by cause, 2 sessions" in page.text("h2")
    rows = page.text("td")
    assert rows[rows.index("80.0") + 1] == "80.0%"
    played = full(lines=[{"step": 1, "seconds": {"rollouts": 60.0, "step": 30.0, "other": 10.0}}])
    rows = Page(render_report(played)).text("td")
    assert rows[rows.index("rollouts") + 1 :][:2] == ["60.0", "60.0%"]
    widths = [float(a["width"]) for t, a in page.tags if t == "rect" and a.get("class", "").startswith("c")]  # pyright: ignore
    assert widths == pytest.approx([576, 72, 72])


def test_a_run_without_any_line_says_so():
    page = Page(render_report(RunRecord("empty", "stopped")))
    assert page.text("h2") == []
    assert "stopped; no step has been logged yet" in page.text("p")


def test_many_samples_are_folded_away():
    lines_of_run = [{"step": s, "sample": f"sample {s}"} for s in range(100)]
    page = Page(render_report(full(lines=lines_of_run, command="")))
    assert page.text("pre")[0] == "sample 99"
    assert "99 earlier samples" in page.text("summary")


def test_curves_stay_inside_their_picture():
    random = np.random.default_rng(0)
    points = [(float(i), float(y)) for i, y in enumerate(random.normal(size=5000) ** 3)]
    page = Page(chart([Series("loss", points), Series("eval", points[::500], is_dots=True)], "x"))
    assert len(page.series()["loss"]) == COLUMNS
    paths = [a["d"] for t, a in page.tags if t == "path" and "line" in a["class"]]  # pyright: ignore
    places = np.array([list(map(float, p.split())) for d in paths for p in re.split("[ML]", d)[1:]])  # pyright: ignore
    assert places[:, 0].min() >= LEFT
    assert places[:, 0].max() <= WIDTH - RIGHT
    assert places[:, 1].min() >= TOP
    assert places[:, 1].max() <= 280 - BOTTOM


def test_an_interval_is_drawn_around_its_line_and_inside_the_picture():
    """Along its lower ends, and back along its upper ones; the axis reaches as far as it does."""
    line, band = [(0.0, 1.0), (10.0, 2.0)], [(0.0, 0.0, 4.0), (10.0, 1.0, 3.0)]
    page = Page(chart([Series("reward", line, band=band, color=2)], "x"))
    ((_, band_path),) = [(t, a) for t, a in page.tags if t == "path" and "band" in a["class"]]  # pyright: ignore
    assert band_path["class"] == "band c2"
    path = str(band_path["d"])
    assert path.endswith("Z")
    places = [tuple(map(float, p.split())) for p in re.split("[ML]", path.removesuffix("Z"))[1:]]
    assert [x for x, _ in places] == [LEFT, WIDTH - RIGHT, WIDTH - RIGHT, LEFT]
    tops = [y for _, y in places]
    # 0 is lowest, 4 highest; 1 and 3 are a quarter and three quarters of the way.
    span = tops[0] - tops[3]
    assert [(tops[0] - top) / span for top in tops] == pytest.approx([0, 0.25, 0.75, 1], abs=1e-3)
    assert min(tops) >= TOP
    assert max(tops) <= 280 - BOTTOM


def test_thinning_and_smoothing_keep_the_mean():
    random = np.random.default_rng(1)
    xs, ys = np.arange(6400.0), random.normal(size=6400)
    thin = thin_points(list(zip(xs.tolist(), ys.tolist())))
    assert len(thin) == COLUMNS
    assert np.mean([y for _, y in thin]) == pytest.approx(ys.mean(), abs=1e-3)
    smooth = running_mean(list(zip(xs.tolist(), ys.tolist())), 51)
    assert [y for _, y in smooth][100] == pytest.approx(ys[75:126].mean())
    assert smooth[0][1] == pytest.approx(ys[0])
    straight = [(float(x), 2.0 * x) for x in range(200)]
    assert np.array(running_mean(straight, 51)) == pytest.approx(np.array(straight))


@pytest.mark.parametrize(
    "points", [[(1.0, 2.0)], [(1.0, 2.0), (2.0, 2.0)], [(0.0, 0.0), (1.0, 1e300)], [(0.0, -1e-12), (9.0, 0.0)]]
)
def test_odd_curves_draw(points):
    svg = chart([Series("loss", points)], "x", zero=True)
    Page(svg)
    assert "nan" not in svg
    assert "inf" not in svg


def test_a_bar_fills_its_width():
    page = Page(bar([("a", 3.0, 0), ("b", 1.0, 1)], "x"))
    rects = [(float(a["x"]), float(a["width"])) for t, a in page.tags if t == "rect"]  # pyright: ignore
    assert rects == [(0.0, 540.0), (540.0, 180.0)]


def test_noise_is_smoothed_and_what_is_exact_is_not():
    random = np.random.default_rng(2)
    points = [(float(i), float(y)) for i, y in enumerate(random.normal(size=200))]
    noisy, exact = Page(chart([Series("loss", points)], "x")), Page(chart([Series("lr", points, is_exact=True)], "x"))
    for page, lines_drawn in ((noisy, 2), (exact, 1)):
        assert sum("line" in (a.get("class") or "") for t, a in page.tags if t == "path") == lines_drawn
    assert [p[1] for p in noisy.series()["loss"]] == pytest.approx([y for _, y in points], rel=1e-5)  # hover: as logged
