"""What a run shows, on a pipe and at a terminal; the live picture through a small emulator of cursor movements."""

import io
import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import argosy
from argosy.observe.log import Logged
from argosy.observe.terminal.live import REDRAWS_PER_S, Terminal, can_redraw
from argosy.observe.terminal.picture import POINTS, Picture, header_lines, preference_text, step_text
from argosy.run.view import Quiet

FACTS = {
    "parameters": 90368, "steps": 200, "tokens_per_step": 1024, "flops_per_step": 640_000_000,
    "devices": 1, "device": "cpu", "precision": "float32", "layers": "unroll",
}  # fmt: skip
EVIL = "\x1b[31mred\x1b]0;title\x07 [bold]not markup[/bold]\r\nnext"


class Screen(io.StringIO):
    """A terminal that remembers what was written."""

    encoding = "utf-8"  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]

    def isatty(self) -> bool:
        return True

    def shown(self) -> list[str]:
        """The lines that stand on it, by the escape codes it was sent."""
        lines, row, column = [""], 0, 0
        for code, move, count, letter in re.findall(r"(\x1b\[([0-9;?]*)([A-Za-z]))|([\s\S])", self.getvalue()):
            if letter == "\n":
                row, column = row + 1, 0
                lines += [""] * (row >= len(lines))
            elif letter == "\r":
                column = 0
            elif letter:
                lines[row] = f"{lines[row]:{column}}"[:column] + letter + lines[row][column + 1 :]
                column += 1
            elif code and count == "A":
                row = max(0, row - int(move or 1))
            elif code and count == "K":
                lines[row] = "" if move == "2" else lines[row][:column]
        return [line.rstrip() for line in lines]


def drive(view: Terminal | Logged, steps: int = 200, every: int = 5) -> None:
    view.header(FACTS)
    for step in range(every, steps + 1, every):
        view.step(step, {"loss": 1 + 4 / step, "tokens_per_s": 45123.4, "lr": 3e-3, "grad_norm": 0.834})
    view.evaluation(steps, {"eval_loss": 1.25, "eval_perplexity": 3.49, "eval_bits_per_byte": 0.9})
    view.sample(steps, "def ", EVIL)


def test_runs_on_images_count_images():
    assert any("4 x 64 images" in line for line in header_lines({"steps": 4, "tokens_per_step": 64, "unit": "image"}))
    assert any("256 images" in line for line in header_lines({"steps": 4, "tokens_per_step": 64, "unit": "image"}))
    assert step_text({"tokens_per_s": 12.0}, "image") == "12 images/s"


def test_a_pipe_gets_one_plain_line_a_step():
    out = io.StringIO()
    with Terminal(out) as view:
        view.say("going on")
        drive(view)
    lines = out.getvalue().splitlines()
    assert lines[0] == "going on"
    assert sum("  loss " in line for line in lines) == 40
    first = r"step   5/200  loss 1\.8000  45,123 tokens/s  lr 3\.00e-03  grad norm 0\.834  4\.4 s left"
    assert re.fullmatch(first, lines[5])
    assert lines[-2] == "step 200/200  eval loss 1.2500  perplexity 3.49  0.900 bits/byte"
    assert lines[-1] == "step 200/200  prompt: def   sample: ·[31mred·]0;title· [bold]not markup[/bold]·\\nnext"
    assert not re.search(r"[^\n -~·]", out.getvalue())


class Dead(Screen):
    """A terminal or pipe that is gone after some writes."""

    def __init__(self, error: OSError, writes: int):
        super().__init__()
        self.error, self.left, self.failures = error, writes, 0

    def write(self, text: str) -> int:
        self.left -= 1
        if self.left < 0:
            self.failures += 1
            raise self.error
        return super().write(text)


@pytest.mark.parametrize("error", [BrokenPipeError(32, "Broken pipe"), OSError(5, "Input/output error")])
@pytest.mark.parametrize("live", [False, True], ids=["plain", "live"])
def test_a_display_that_is_gone_raises_nothing_and_is_not_tried_again(monkeypatch, live, error):
    monkeypatch.setenv("TERM", "xterm")
    out, lines = Dead(error, 5), []
    with Terminal(out, live=live) as view:
        drive(view)
        drive(Logged(view, lines.append))
        view.close()
    assert out.failures == 1
    assert sum("  loss " in line for line in lines) == 40


def test_a_view_that_raises_is_dropped_and_the_log_goes_on():
    class Gone(Quiet):
        steps = 0

        def step(self, step: int, numbers: object) -> None:
            self.steps += 1
            raise BrokenPipeError(32, "Broken pipe")

    lines, view = [], Gone()
    log = Logged(view, lines.append)
    drive(log)
    log.close()
    assert view.steps == 1
    assert sum("  loss " in line for line in lines) == 40
    assert sum("the display failed (Broken pipe)" in line for line in lines) == 1


@pytest.mark.parametrize(
    ("tty", "encoding", "variables", "live"),
    [
        (True, "utf-8", {"TERM": "xterm"}, True),
        (False, "utf-8", {"TERM": "xterm"}, False),
        (True, "utf-8", {"TERM": "dumb"}, False),
        (True, "utf-8", {"TERM": "xterm", "NO_COLOR": "1"}, False),
        (True, "utf-8", {"TERM": "xterm", "NO_COLOR": ""}, True),
        (True, "ascii", {"TERM": "xterm"}, False),
        (True, "utf-8", {}, False),
    ],
)
def test_live_only_where_it_can_be(monkeypatch, tty, encoding, variables, live):
    for name in ("TERM", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    stream = Screen()
    stream.isatty, stream.encoding = lambda: tty, encoding
    assert can_redraw(stream) == live


def test_the_live_picture_is_replaced_in_place(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "40")
    out = Screen()
    with Terminal(out, live=True) as view:
        drive(view)
        view.say("words [i]above[/i]")
        view.close()
        view.close()
    lines = out.shown()
    text = "\n".join(lines)
    assert max(map(len, lines)) <= 80
    for phrase in ("parameters  90,368", "step 200/200  100%", "● eval loss 1.2500", "sample at step 200", "loss 1.0200"):
        assert text.count(phrase) == 1, phrase
    assert text.index("words [i]above[/i]") < text.index("┤") < text.index("loss 1.0200") < text.index("step 200/200")
    assert "·[31mred·]0;title· [bold]not markup[/bold]" in text
    assert "\x1b[31mred" not in out.getvalue()
    assert "\x07" not in out.getvalue()
    assert sum("│" in line or "┤" in line for line in lines) == 8


@pytest.mark.parametrize(("width", "height"), [(1, 1), (8, 3), (20, 5), (39, 50), (60, 12), (80, 17), (300, 100)])
def test_any_terminal_will_do(width, height):
    from rich.console import Console

    view = Terminal(io.StringIO(), live=False)
    drive(view)
    out = io.StringIO()
    Console(file=out, width=width, height=height, force_terminal=True, color_system=None).print(
        view.picture.drawn(width, height)
    )
    plain = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())
    assert all(len(line) <= width for line in plain.splitlines())


def test_an_exception_closes_the_picture(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    out, before = Screen(), threading.active_count()
    view = Terminal(out)

    def run() -> None:
        with view:
            view.header(FACTS)
            view.step(5, {"loss": 2.0})
            assert threading.active_count() == before + 1
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run()
    end = time.monotonic() + 5  # the thread wakes once more to see that it is over
    while threading.active_count() > before and time.monotonic() < end:
        time.sleep(0.01)
    assert threading.active_count() == before
    assert "stopped" in out.shown()[-2]
    output = out.getvalue()
    view.say("after")
    assert out.getvalue() == output + "after\n"
    hidden, shown = output.rfind("\x1b[?25l"), output.rfind("\x1b[?25h")
    assert hidden < shown


def test_redraws_are_bounded_however_fast_steps_are(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    times: list[float] = []
    with Terminal(Screen()) as view:
        draw = view.picture.drawn
        monkeypatch.setattr(view.picture, "drawn", lambda *size: (times.append(time.monotonic()), draw(*size))[1])
        view.header(FACTS | {"steps": 10**7})
        start, step = time.monotonic(), 0
        while time.monotonic() - start < 1.2:
            step += 1
            view.step(step, {"loss": 2.0})
        running = [t for t in times if t - start > 0.05]
    assert step > 5000
    assert 2 <= len(running) <= 1.2 * REDRAWS_PER_S + 1
    assert len(view.picture._losses) <= POINTS


def test_time_left_is_judged_by_the_last_steps(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    picture = Picture()
    picture.steps = 1000
    assert picture.left_s is None
    for step in range(10, 510, 10):
        now[0] += 100.0 if step <= 100 else 2.0
        picture.step(step, {"loss": 1.0})
    assert picture.left_s == pytest.approx(500 * 0.2)
    assert picture.line() == "step  500/1000  loss 1.0000  1 min 40 s left"


def test_the_first_line_has_an_estimate(monkeypatch):
    """From its rate, since no second line gives a duration. 10 steps of 100 tokens at 50 tokens/s took 20 s."""
    out = io.StringIO()
    with Terminal(out, live=False) as view:
        view.header({"steps": 1000, "tokens_per_step": 100})
        view.step(10, {"loss": 2.0, "tokens_per_s": 50.0})
    assert out.getvalue().splitlines()[-1] == "step   10/1000  loss 2.0000  50 tokens/s  33 min 00 s left"


def test_numbers_that_are_none_do_not_stop_the_picture():
    picture = Picture()
    picture.step(1, {"loss": float("nan")})
    picture.evaluation(1, {"eval_loss": float("inf")})
    picture.drawn(80, 40)
    picture.step(2, {"loss": 1.0})
    picture.drawn(80, 40)
    assert picture._losses == [(2.0, 1.0)]


def test_facts_that_are_not_known_beforehand_are_reported():
    text = "\n".join(header_lines({"steps": 3, "reward": "exact match"}))
    assert "steps       3" in text
    assert "reward      exact match" in text


def test_a_long_fact_does_not_run_into_the_next():
    assert header_lines({"ends": "by data.epochs, before steps=500", "precision": "float32"}) == [
        "ends        by data.epochs, before steps=500  precision   float32"
    ]
    assert header_lines({"layers": "unroll", "products": "xla"}) == ["layers      unroll                      products    xla"]


def test_importing_it_does_not_import_rich():
    listed = "[m for m in sys.modules if m in ('rich', 'jax', 'numpy')]"
    code = f"import json, sys, argosy.observe.terminal.live; print(json.dumps({listed}))"
    environment = {**os.environ, "PYTHONPATH": str(Path(argosy.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert json.loads(done.stdout) == []


def test_the_load_of_experts_is_reported():
    assert step_text({"loss": 1.0, "expert_load_max": 1.74, "experts_dropped": 0.143}) == (
        "loss 1.0000  fullest expert 1.7x  dropped 14.3%"
    )


def test_the_share_of_cut_answers_is_reported():
    from argosy.observe.terminal.picture import step_text

    assert step_text({"reward": 0.5, "answers/tokens": 12.0, "answers/cut": 0.25}) == "reward 0.500  answers of 12 tokens, 25% cut"
    assert step_text({"reward": 0.5, "answers/tokens": 12.0, "answers/cut": 0.0}) == "reward 0.500  answers of 12 tokens"


def test_what_a_step_compares_is_reported():
    """As DPO logs it, a reward model (no margin of KTO), and a process reward model."""
    view, screen = Terminal(stream := io.StringIO(), live=False), Screen()
    pairs = {"rewards/accuracy": 0.625, "rewards/margin": 0.12345, "rewards/chosen": 0.1, "rewards/rejected": -0.02345}
    view.header({"steps": 4})
    view.step(2, {"loss": 0.65, "lr": 5e-7} | pairs)
    view.evaluation(2, {"eval_loss": 0.5} | {f"eval_{name}": x for name, x in pairs.items()})
    words = "accuracy 62.5%  margin 0.123 (chosen 0.1, rejected -0.0234)"
    lines = stream.getvalue().splitlines()[-2:]
    assert lines == [f"step 2/4  loss 0.6500  lr 5.00e-07  {words}", f"step 2/4  eval loss 0.5000  {words}"]
    with Terminal(screen, live=True) as live:
        live.header({"steps": 4})
        live.step(2, {"loss": 0.65} | pairs)
    assert words in screen.shown()
    labeled = {"rewards/accuracy": 1.0, "rewards/chosen": 2.0, "rewards/rejected": 1.0}
    assert preference_text(labeled) == "accuracy 100.0%  chosen 2, rejected 1"
    assert preference_text({"accuracy": 0.5, "scores/right": 0.25, "scores/wrong": -0.25}) == "accuracy 50.0%  right 0.25, wrong -0.25"
    assert not preference_text({"loss": 1.0, "reward": 0.5})
