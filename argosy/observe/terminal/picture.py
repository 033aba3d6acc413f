"""Formats a run as text: one line per step, or the live picture of a terminal.

The curve is recomputed only when there are new numbers. Another thread may draw it while numbers arrive. This module knows nothing of
streams, and uses only two classes of Rich.
"""

import math
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from argosy.core.counts import plural
from argosy.observe.readable import count_text, decimals, flops_text, format_bytes, format_duration, harmless, one_line
from argosy.observe.terminal import curve

# The most points of the curve. With more, neighbors are averaged.
POINTS = 4096
PLOT_WIDTH, PLOT_HEIGHT, SAMPLE_LINES = 76, 8, 4
# The columns and lines of the smallest terminal in which a curve is drawn.
NARROW, LOW = 40, 18
# The number of latest logged steps from which the remaining time is estimated.
RATE_WINDOW = 20
# The metrics of the two completions that an objective compares: rewards, or the scores of right and wrong steps.
SIDES = ("rewards/chosen", "rewards/rejected", "scores/right", "scores/wrong")
# The number of classes whose metrics fit into a line.
MOST_CLASSES = 8
PREFERENCES = ("rewards/accuracy", "accuracy", "rewards/margin", *SIDES)
# The x axis is logarithmic if it ends at least this many times later than it begins.
LOG_FROM = 50.0
# The unit that a run counts, unless its header names another: images, or rows.
TOKEN = "token"


class Picture:
    """The state of a run, which can be drawn as a line or as the live picture."""

    def __init__(self, x: str = "auto"):
        self.x, self.steps, self.now, self.is_over = x, 0, 0, False
        # Tokens of a step, with which the rate of the first logged step becomes an estimate of the time. 0: unknown.
        self.tokens_per_step = 0
        self.unit = TOKEN
        self.sample: tuple[int, str, str] | None = None  # step, prompt, text
        self.numbers: Mapping[str, float] = {}
        self.evals: dict[int, Mapping[str, float]] = {}
        self._losses: list[curve.Point] = []
        self._times: deque[tuple[float, int]] = deque(maxlen=RATE_WINDOW)
        self._began = time.monotonic()
        self._drawn: tuple[Any, curve.Plot] | None = None

    def step(self, step: int, numbers: Mapping[str, float]) -> None:
        self.now, self.numbers = step, numbers
        self._times.append((time.monotonic(), step))
        # A run that learns from rewards has a loss near 0 all the time, so its rewards are drawn.
        value = numbers.get("reward", numbers.get("loss", math.nan))
        if math.isfinite(value):
            self._losses.append((float(step), value))
        if len(self._losses) > POINTS:
            self._losses = curve.halve_points(self._losses)

    def evaluation(self, step: int, numbers: Mapping[str, float]) -> None:
        self.evals[step] = numbers

    @property
    def left_s(self) -> float | None:
        """The estimated seconds to the last step, from the latest logged steps, or from the rate of a single one. None if unknown."""
        if not self._times or not self.steps:
            return None
        if len(self._times) < 2:
            rate = self.numbers.get("tokens_per_s", 0.0)
            return (self.steps - self.now) * self.tokens_per_step / rate if rate and self.tokens_per_step else None
        (t0, step0), (t1, step1) = self._times[0], self._times[-1]
        return (self.steps - step1) * (t1 - t0) / (step1 - step0) if step1 > step0 else None

    def place(self, step: int) -> str:
        """Returns `step  40/300`, with the same width for every step of the run."""
        return f"step {step:>{len(str(self.steps))}}/{self.steps}" if self.steps else f"step {step}"

    def line(self) -> str:
        """Returns the last step in one line."""
        remaining = f"  {format_duration(self.left_s)} left" if self.left_s else ""
        words = "  ".join(filter(None, (step_text(self.numbers, self.unit), preference_text(self.numbers))))
        return f"{self.place(self.now)}  {words}{remaining}"

    # ---------------------------------------------------------------- the live picture

    def drawn(self, width: int, height: int) -> Any:
        """Returns the whole picture for a terminal of this size in characters."""
        from rich.console import Group

        rows = self._plot_rows(width, height) if self._losses and width >= NARROW and height >= LOW else []
        rows += [line_of(line[: width - 1]) for line in self._number_lines()]
        return Group(*rows, self._bar(width), *self._sample_rows(width, height))

    def _plot_rows(self, width: int, height: int) -> list[Any]:
        plot = self._plot(min(width - 2, PLOT_WIDTH), min(PLOT_HEIGHT, height - 10))
        rows = [line_of("")]
        for label, row in zip(plot.labels, plot.rows):
            text = line_of(label, "dim")
            text.append(row, "cyan")
            text.highlight_regex(curve.MARK, "bold yellow")
            rows.append(text)
        return [*rows, line_of(plot.axis, "dim"), line_of(plot.below, "dim")]

    def _plot(self, width: int, height: int) -> curve.Plot:
        key = (width, height, self.now, len(self.evals))
        if self._drawn is None or self._drawn[0] != key:
            # Copies, because the run continues during the drawing.
            losses, evals = list(self._losses), list(self.evals.items())
            first = losses[0][0]
            points = [(float(s), n.get("eval_reward", n.get("eval_loss", math.nan))) for s, n in evals]
            marks = [mark for mark in points if math.isfinite(mark[1])]
            marks = [mark for mark in marks if mark[0] >= first]
            log_x = self.x == "log" or (self.x == "auto" and self.steps >= LOG_FROM * first)
            plot = curve.plot(losses, marks, width - 8, height, log_x=log_x and first > 0)
            self._drawn = key, plot
        return self._drawn[1]

    def _number_lines(self) -> list[str]:
        if not self.numbers:
            return [f"no step logged yet, {format_duration(time.monotonic() - self._began)}"] if not self.is_over else []
        lines = [step_text(self.numbers, self.unit), *filter(None, [preference_text(self.numbers)])]
        if self.evals:
            step = max(list(self.evals))
            lines.append(f"{curve.MARK} {evaluation_text(self.evals[step])} at step {step}")
        return lines

    def _bar(self, width: int) -> Any:
        share = self.now / self.steps if self.steps else 0.0
        words = f" {self.place(self.now)}  {share:4.0%}  {self._remaining()}"
        cells = max(0, min(width - 1, PLOT_WIDTH) - len(words))
        full = int(share * cells)
        text = line_of("━" * full, "green" if self.now >= self.steps else "cyan")
        text.append("━" * (cells - full), "dim")
        text.append(words[: width - 1])
        return text

    def _remaining(self) -> str:
        if self.steps and self.now >= self.steps:
            return f"{format_duration(time.monotonic() - self._began)} in all"
        if self.is_over:
            return "stopped"
        if self.left_s is None:
            return ""
        return f"{format_duration(max(0.0, self.left_s - (time.monotonic() - self._times[-1][0])))} left"

    def _sample_rows(self, width: int, height: int) -> list[Any]:
        if self.sample is None or height < LOW + 4:
            return []
        from rich.cells import chop_cells

        step, prompt, text = self.sample
        lines = harmless(prompt + text).strip("\n").splitlines() or [""]
        pieces = [piece for line in lines for piece in chop_cells(line, max(2, width - 3)) or [""]]
        # The number of lines is constant, so that the picture does not jump.
        pieces = pieces[:SAMPLE_LINES] + [""] * (SAMPLE_LINES - len(pieces))
        title = f"sample at step {step}, prompt {one_line(prompt)}" if prompt else f"sample at step {step}"
        return [line_of(title, "dim"), *(line_of(f"  {piece}", "italic") for piece in pieces)]


# ---------------------------------------------------------------- words


# The entries of a header that take whole lines.
WIDE = (
    *("command", "versions", "weights", "adapter", "tokenizer", "corpus", "rollout", "samplers", "environment", "rewards", "whole"),
    "tuned",
    "memory",
)


def header_lines(facts: Mapping[str, Any]) -> list[str]:
    """Formats a run's header, with long entries on lines of their own and short ones in two columns."""
    facts = dict(facts)
    tokens, steps, unit = facts.pop("tokens_per_step", None), facts.pop("steps", None), facts.pop("unit", TOKEN)
    work, devices = facts.pop("flops_per_step", None), facts.pop("devices", 1)
    facts.pop("vocab", None)
    wide = {
        name: text
        for name in WIDE
        if (text := _wide(name, facts.pop(name, None)))
    }
    short: dict[str, str] = {}
    if "model" in facts:
        short["model"] = str(facts.pop("model"))
    if "parameters" in facts:
        short["parameters"] = f"{facts.pop('parameters'):,}"
    if "device" in facts:
        short["devices"] = f"{devices} x {facts.pop('device')}"
    if steps:
        short["steps"] = f"{steps:,}" + (f" x {plural(tokens, unit)}" if tokens else "")
    if work:
        short["compute"] = f"{flops_text(work)} a step"
    if steps and tokens:
        short["total"] = f"{count_text(tokens * steps)} {unit}s" + (f", {flops_text(work * steps)}" if work else "")
    short |= {name: str(value) for name, value in facts.items()}
    cells = [f"{name:<12}{value}" for name, value in short.items()]
    pairs = [f"{left:<38}  {right}".rstrip() for left, right in zip(cells[::2], [*cells[1::2], ""])]
    return [*(f"{name:<12}{wide[name]}" for name in wide), *pairs]


def _wide(name: str, value: Any) -> str:
    """Formats a header entry that takes a whole line: bytes by kind, versions by package, or text."""
    if not value:
        return ""
    if name == "memory":
        return memory_words(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    return str(value)


def memory_words(sizes: Mapping[str, int]) -> str:
    """Formats memory as `814 MiB: parameters 3.50 MiB, ...`. `sizes`: the bytes by kind, in `total`, and in the memory of the `host`,
    which the total does not include."""
    kinds = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in sizes.items() if kind not in ("total", "host") and size)
    host = f"; {format_bytes(sizes['host'])} in the host's memory" if sizes.get("host") else ""
    return f"{format_bytes(sizes['total'])}: {kinds}{host}"


def step_text(numbers: Mapping[str, float], unit: str = TOKEN) -> str:
    """Formats the most important metrics of a step.

    Args:
        unit: the unit that the run counts, such as token.
    """
    words = [f"reward {numbers['reward']:.3f}"] if "reward" in numbers else []
    if "answers/tokens" in numbers:
        turns = f" in {numbers['turns']:.1f} turns" if "turns" in numbers else ""
        cut = f", {numbers['answers/cut']:.0%} cut" if numbers.get("answers/cut") else ""
        words.append(f"answers of {plural(round(numbers['answers/tokens']), 'token')}{turns}{cut}")
    if "loss" in numbers:
        words.append(f"loss {decimals(numbers['loss'])}")
    if "tokens_per_s" in numbers:
        words.append(f"{numbers['tokens_per_s']:,.0f} {unit}s/s")
    if "lr" in numbers:
        words.append(f"lr {numbers['lr']:.2e}")
    if "grad_norm" in numbers:
        words.append(f"grad norm {numbers['grad_norm']:.3g}")
    if "expert_load_max" in numbers:
        words.append(f"fullest expert {numbers['expert_load_max']:.1f}x")
    if "experts_dropped" in numbers:
        words.append(f"dropped {numbers['experts_dropped']:.1%}")
    return "  ".join(words)


def preference_text(numbers: Mapping[str, float], before: str = "") -> str:
    """Formats the metrics of a step that compares completions: `accuracy 75.0%  margin 0.12 (chosen 0.1, rejected -0.02)`. Empty for
    other steps. `before`: the prefix of the names, `eval_` for evaluations."""
    preferences = {name: numbers[before + name] for name in PREFERENCES if before + name in numbers}
    accuracy = next((preferences[name] for name in ("rewards/accuracy", "accuracy") if name in preferences), None)
    words = [] if accuracy is None else [f"accuracy {accuracy:.1%}"]
    each = ", ".join(f"{name.partition('/')[2]} {x:.3g}" for name, x in preferences.items() if name in SIDES)
    if "rewards/margin" in preferences:
        words.append(f"margin {preferences['rewards/margin']:.3g}" + (f" ({each})" if each else ""))
    elif each:
        words.append(each)
    return "  ".join(words)


def evaluation_text(numbers: Mapping[str, float]) -> str:
    """Formats the metrics of an evaluation."""
    words = [f"eval loss {decimals(numbers['eval_loss'])}"] if "eval_loss" in numbers else []
    if "eval_reward" in numbers:
        words.append(f"eval reward {numbers['eval_reward']:.3f} of {numbers['eval_prompts']:.0f} greedy answers")
    if "eval_perplexity" in numbers:
        words.append(f"perplexity {numbers['eval_perplexity']:.4g}")
    if "eval_bits_per_byte" in numbers:
        words.append(f"{numbers['eval_bits_per_byte']:.3f} bits/byte")
    words += filter(None, [preference_text(numbers, "eval_")])
    for name in ("auc", "recall@1", "recall@10", "recall@50"):
        if f"eval_{name}" in numbers:
            best = f" (best {numbers[f'eval_best_{name}']:.4f})" if f"eval_best_{name}" in numbers else ""
            words.append(f"{name.replace('auc', 'AUC')} {numbers[f'eval_{name}']:.4f}{best}")
    if "eval_best_loss" in numbers:
        words[0] += f" (best {decimals(numbers['eval_best_loss'])})"
    if "eval_majority_accuracy" in numbers:
        words[-1] += f" (the most frequent class alone: {numbers['eval_majority_accuracy']:.1%})"
    if "eval_f1_macro" in numbers:
        classes = {name.removeprefix("eval_f1/"): value for name, value in numbers.items() if name.startswith("eval_f1/")}
        each = ", ".join(f"{name} {value:.2f}" for name, value in classes.items()) if len(classes) <= MOST_CLASSES else ""
        words.append(f"F1 {numbers['eval_f1_macro']:.3f}" + (f" ({each})" if each else ""))
    return "  ".join(words)


def line_of(text: str, style: str = "") -> Any:
    """Returns a line for Rich, which is cut at the width of the terminal. Markup in the text is not interpreted."""
    from rich.text import Text

    return Text(text, style=style, no_wrap=True, overflow="ellipsis", end="\n")
