"""Renders a run as one self-contained HTML page, which needs no network and no fonts and can be read without scripts.

The page begins with a sentence that summarizes the run. All contents come from a `RunRecord` of `jobs.history.report`, and unknown
facts are left out. Everything from a run is treated as text: it is escaped, and control characters are replaced.
"""

import base64
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_high
from typing import TYPE_CHECKING, Any

from argosy.core.counts import plural
from argosy.observe.faults import bad_steps, faults_text, row
from argosy.observe.life import DOWN, LOST, WAITING, Account
from argosy.observe.metrics import by_step
from argosy.observe.readable import change, count_text, decimals, flops_text, format_bytes, format_duration, harmless
from argosy.observe.report.answers import answers_section
from argosy.observe.report.charts import Series, bar, chart
from argosy.observe.report.pieces import code_of, html_table, html_text, legend_of, section_of, swatch_of
from argosy.observe.report.style import page
from argosy.observe.stragglers import stragglers
from argosy.observe.terminal.curve import Point

if TYPE_CHECKING:
    from argosy.observe.profile.table import Profile

# The causes in the order of their colors.
CAUSES = ("step", "data", "compile", "evaluation", "samples", "checkpoint", "start", "rollouts", "other")
# The colors of further causes, which stand out.
COLORS = {LOST: 4, DOWN: 8, WAITING: 5}
DEFAULT, TYPED = "default", ("command line", "fit(...)")
# The numbers of an evaluated task that are not metrics.
NO_METRICS = ("stderr", "n", "tokens", "truncated", "shots", "seconds", "against")
# The data sources that consist of Python's own code.
PYTHON = ("stdlib", "docstrings")
# The objective that predicts the next token.
TOKENS = "next_token"


@dataclass(frozen=True)
class SavedCheckpoint:
    """A stored checkpoint."""

    step: int
    size_bytes: int
    eval_loss: float | None = None


@dataclass(frozen=True)
class Evaluated:
    """The result of `argosy eval` on one task.

    step: the step of the checkpoint, None if unknown.
    numbers: metrics and their standard errors by name (`acc`, `stderr`, `acc_norm`, `acc_norm_stderr`), and the number of rows `n`.
    """

    task: str
    step: int | None
    numbers: Mapping[str, Any]


@dataclass(frozen=True)
class RunRecord:
    """The facts of a run that the report shows.

    name: the name of the run directory.
    state: done, stopped or running.
    lines: the lines of metrics.jsonl.
    steps: the planned number of steps.
    facts: the header of the run, by name: model, family, parameters, vocab, data, optimizer, device.
    settings: (key, value, who set it) of each setting.
    checkpoints: the stored checkpoints.
    environment: the facts of the machine and its software, by name.
    command: the command that runs the run again.
    date: the date of the report, "" if unknown.
    story: the results of `argosy quickstart` with the run: proof, export.
    evaluations: the results of evaluations.
    answers: the lines of answers.jsonl, for a run that learns from rewards.
    images: the image grids that the run drew: (step, the kind of weights or sampler that drew it, PNG file).
    """

    name: str
    state: str
    lines: Sequence[Mapping[str, Any]] = ()
    steps: int | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    settings: Sequence[tuple[str, str, str]] = ()
    checkpoints: Sequence[SavedCheckpoint] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    command: str = ""
    date: str = ""
    story: Mapping[str, Any] = field(default_factory=dict)
    evaluations: Sequence[Evaluated] = ()
    answers: Sequence[Mapping[str, Any]] = ()
    images: Sequence[tuple[int, str, bytes]] = ()
    # The time by cause over all starts; None for runs that did not record it.
    life: Account | None = None
    # The tables of the newest capture by the profiler.
    profile: "Profile | None" = None


def render_report(record: RunRecord) -> str:
    """Renders the report as an HTML page."""
    parts: list[Callable[[RunRecord], str]] = [
        _head, _samples, _images, _rewards, _answers, _preferences, _losses, _bad, _evaluations, _speed, _profile, _slow,
        _optimizer, _experts,
        _time, _checkpoints, _settings, _environment, _command,
    ]  # fmt: skip
    body = "\n".join(filter(None, (part(record) for part in parts)))
    date = f" on {html_text(record.date)}" if record.date else ""
    return page(harmless(f"{record.name}: {record.state}"), f"{body}\n<footer>Made by Argosy{date}</footer>")


def numbers(lines: Sequence[Mapping[str, Any]], key: str) -> list[Point]:
    """Returns (step, value) of one metric, with the last value that was written for each step. Values that are not finite are left
    out."""
    values = by_step([dict(line) for line in lines if isinstance(line.get("step"), int)], key)
    return [(float(s), float(v)) for s, v in values.items() if isinstance(v, int | float) and math.isfinite(v)]


def seconds_by_cause(lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Returns the seconds by cause, summed over all starts of the run."""
    total: dict[str, float] = {}
    for line in lines:
        spent = line.get("seconds")
        for cause, s in spent.items() if isinstance(spent, Mapping) else ():
            total[cause] = total.get(cause, 0.0) + float(s)
    return total


# ---------------------------------------------------------------- sections


def _head(record: RunRecord) -> str:
    losses, evals = numbers(record.lines, "loss"), numbers(record.lines, "eval_loss")
    step = int(max((x for x, _ in losses), default=0))
    progress = plural(record.steps or step, "step")
    progress = f"{step:,} of {progress}" if record.steps else progress
    status = f"{record.state}, {progress}" if losses else f"{record.state}; no step has been logged yet"
    facts: list[tuple[str, str, str]] = []
    if parameters := record.facts.get("parameters"):
        facts.append(("parameters", count_text(parameters), f"{parameters:,}"))
    if rewards := numbers(record.lines, "reward"):
        facts.append(("reward", f"{rewards[-1][1]:.3f}", f"{rewards[0][1]:.3f} at step {rewards[0][0]:.0f}"))
    elif losses:
        facts.append(("loss", decimals(losses[-1][1]), f"{decimals(losses[0][1])} at step {losses[0][0]:.0f}"))
    if right := numbers(record.lines, "rewards/accuracy") or numbers(record.lines, "accuracy"):
        facts.append(("accuracy", f"{right[-1][1]:.1%}", f"{right[0][1]:.1%} at step {right[0][0]:.0f}"))
    if evals:
        best, at = min((y, x) for x, y in evals)
        first = f"{decimals(evals[0][1])} before; " if not evals[0][0] else ""
        facts.append(("eval loss", decimals(evals[-1][1]), f"{first}best {decimals(best)} at step {at:.0f}"))
    if eval_rewards := numbers(record.lines, "eval_reward"):
        first = f"{eval_rewards[0][1]:.3f} " + (f"at step {eval_rewards[0][0]:.0f}" if eval_rewards[0][0] else "before")
        facts.append(("eval reward", f"{eval_rewards[-1][1]:.3f}", f"{first}; greedy answers to held-out prompts"))
    if bits := numbers(record.lines, "eval_bits_per_byte"):
        perplexity = numbers(record.lines, "eval_perplexity")
        under = f"perplexity {perplexity[-1][1]:.4g}" if perplexity else ""
        facts.append(("bits per byte", f"{bits[-1][1]:.3f}", under))
    if tokens := numbers(record.lines, "tokens"):
        work = record.facts.get("flops_per_step")
        facts.append((f"{_unit(record)}s", count_text(tokens[-1][1]), flops_text(work * step) if work else f"{tokens[-1][1]:,.0f}"))
    if speed := numbers(record.lines, "tokens_per_s"):
        facts.append((f"{_unit(record)}s/s", f"{median_high([y for _, y in speed]):,.0f}", "median"))
    if spent := seconds_by_cause(record.lines):
        facts.append(("time", format_duration(sum(spent.values())), "all sessions"))
    cells = "".join(f"<div><dt>{a}</dt><dd>{html_text(b)}<small>{html_text(c)}</small></dd></div>" for a, b, c in facts)
    device = record.facts.get("device")
    about = [str(record.facts[key]) for key in ("model", "data", "optimizer") if record.facts.get(key)]
    about += [f"{record.facts.get('devices', 1)} x {device}"] if device else []
    lines = [" · ".join(about), str(record.facts.get("corpus") or "")]
    line = "".join(f'<p class="soft">{html_text(text)}</p>' for text in lines if text)
    return (
        f"<header><h1>{html_text(record.name)}</h1>"
        f"<p class=lead>{html_text(summary_sentence(record))}</p><p>{html_text(status)}</p>{line}"
        f"{_checks(record)}<dl class=facts>{cells}</dl></header>"
    )


def summary_sentence(record: RunRecord) -> str:
    """Summarizes the run in one sentence, such as "A 919k-parameter Llama learned to write Python in 40 s; killed at step 25 of 40, a
    second run finished bit-identical.".
    """
    parameters, family = record.facts.get("parameters"), str(record.facts.get("family") or "model")
    family = {"gpt2": "GPT-2", "gpt_oss": "gpt-oss"}.get(
        family, family.replace("_", " ").capitalize() if family != "model" else family
    )
    subject = f"A {count_text(parameters)}-parameter {family}" if parameters else f"A {family}"
    source = str(record.facts.get("data") or "")
    if source in PYTHON:
        learned = "write Python"
        did = {"done": f"learned to {learned}", "running": f"is learning to {learned}"}.get(
            record.state, f"began to learn to {learned}"
        )
    else:
        on = f" on {source}" if source else ""
        did = {"done": f"was trained{on}", "running": f"is being trained{on}"}.get(
            record.state, f"was trained part of the way{on}"
        )
    spent = sum(seconds_by_cause(record.lines).values())
    took = f" in {format_duration(spent)}" if spent and record.state == "done" else ""
    name = "reward" if numbers(record.lines, "reward") else "loss"
    values = numbers(record.lines, name)
    fell = f"; its {name} went from {change(values[0][1], values[-1][1])}" if len(values) > 1 else ""
    return f"{subject} {did}{took}{proof_words(record.story) or fell}."


def proof_words(story: Mapping[str, Any]) -> str:
    """Describes the outcome of the run that a quickstart killed; empty if there was none."""
    proof = story.get("proof")
    if not isinstance(proof, Mapping) or "killed_at" not in proof:
        return ""
    outcome = (
        "a second run finished bit-identical" if proof.get("holds") else "a second run did NOT finish as it would have"
    )
    return f"; killed at step {proof['killed_at']} of {proof.get('steps', '?')}, {outcome}"


def _checks(record: RunRecord) -> str:
    """Lists the checks that a quickstart made."""
    proof, exported = record.story.get("proof"), record.story.get("export")
    checks: list[tuple[bool, str]] = []
    if isinstance(proof, Mapping) and "killed_at" in proof:
        verdict = "equal, bit for bit" if proof.get("holds") else "DIFFER"
        text = f"A second run was killed with SIGKILL at step {proof['killed_at']} and resumed from the checkpoint of step "
        text += f"{proof.get('resumed_from')}: {proof.get('steps')} losses and all weights {verdict}"
        checks.append((bool(proof.get("holds")), text))
    if isinstance(exported, Mapping) and isinstance(exported.get("largest_difference"), int | float):
        difference, size = exported["largest_difference"], format_bytes(exported.get("bytes", 0))
        text = f"Exported as a Hugging Face folder ({size}) and loaded back: largest difference of a logit {difference:g}"
        checks.append((difference < 1e-3, text))
    rows = "".join(
        f"<li{'' if good else ' class=bad'}><b>{'✓' if good else '✗'}</b>{html_text(text)}</li>" for good, text in checks
    )
    return f"<ul class=checks>{rows}</ul>" if rows else ""


def _losses(record: RunRecord) -> str:
    losses, evals = numbers(record.lines, "loss"), numbers(record.lines, "eval_loss")
    if not losses and not evals:
        return ""
    series = [Series("loss", losses, color=0), Series("eval", evals, is_dots=True, color=1)]
    if numbers(record.lines, "reward"):
        return section_of("Loss", chart(series, "loss by step", y="loss of the policy", height=240))
    if record.facts.get("objective", TOKENS) != TOKENS:
        # The loss of a preference or a divergence is no log-probability of a token, so it has no level of guessing.
        return section_of("Loss", legend_of(series) + chart(series, "loss by step", y="loss", height=320))
    vocab = record.facts.get("vocab")
    level = (
        (math.log(vocab), f"guessing: ln {vocab:,} = {math.log(vocab):.2f}")
        if isinstance(vocab, int) and vocab > 1
        else None
    )
    picture = chart(series, "loss by step", y="loss, nats per token", height=320, level=level)
    return section_of("Loss", legend_of(series) + picture)


def _bad(record: RunRecord) -> str:
    """Renders the skipped steps and the rollbacks."""
    faults = bad_steps(record.lines)
    if not faults:
        return ""
    rows = [tuple(map(html_text, row(fault))) for fault in faults]
    table = html_table(("step", "batch", "found", "then"), rows, numeric=0)
    return section_of("Bad steps", f"<p>{html_text(faults_text(faults))}</p>" + table)


def _profile(record: RunRecord) -> str:
    if record.profile is None:
        return ""
    # Imported here because it imports numpy, which reports without a capture do not need.
    from argosy.observe.report.profiled import profile_section

    return profile_section(record.profile)


def _slow(record: RunRecord) -> str:
    """Renders the processes that the others waited for."""
    rows = [tuple(map(html_text, straggler)) for straggler in stragglers(record.lines)]
    return section_of("Slow processes", html_table(("steps", "process", "what"), rows, numeric=0)) if rows else ""


def _rewards(record: RunRecord) -> str:
    """Renders the mean reward of the completions of each rollout, and of greedy completions of held-out prompts."""
    rewards, evals = numbers(record.lines, "reward"), numbers(record.lines, "eval_reward")
    if not rewards:
        return ""
    series = [Series("reward", rewards, color=0), Series("held-out prompts, greedy", evals, is_dots=True, color=1)]
    return section_of("Reward", legend_of(series) + chart(series, "reward by step", y="mean reward", height=320))


def _preferences(record: RunRecord) -> str:
    """Renders the curves of preference objectives: accuracy, margin, and the rewards of chosen and rejected completions."""
    plots = (
        (("rewards/accuracy", "accuracy"), "accuracy", True), (("rewards/margin",), "margin", True),
        (("rewards/chosen", "rewards/rejected"), "reward", False), (("scores/right", "scores/wrong"), "score of a step", False),
        (("logps/chosen", "logps/rejected"), "log-probability", False),
    )  # fmt: skip
    out = ""
    for keys, title, zero in plots:
        series: list[Series] = []
        for key in keys:
            name = key.rpartition("/")[2]
            series.append(Series(name, numbers(record.lines, key), color=len(series)))
            series.append(Series(f"{name}, held out", numbers(record.lines, f"eval_{key}"), is_dots=True, color=len(series)))
        if any(curve.points for curve in series):
            picture = chart(series, f"{title} by step", y=title, width=420, height=240, zero=zero)
            out += f"<div>{legend_of(series)}{picture}</div>"
    return section_of("Preferences", f'<div class="pair">{out}</div>') if out else ""


def _answers(record: RunRecord) -> str:
    return answers_section(record.answers)


def metrics_of(numbers: Mapping[str, Any]) -> list[tuple[str, float, float | None]]:
    """Returns (metric, value, standard error) for the numbers of one task. The error is None where unknown."""
    names = [name for name in numbers if name not in NO_METRICS and not name.endswith("_stderr")]
    metrics = []
    for i, name in enumerate(names):
        value, error = numbers[name], numbers.get("stderr" if i == 0 else f"{name}_stderr")
        if isinstance(value, int | float) and not isinstance(value, bool):
            metrics.append((name, float(value), float(error) if isinstance(error, int | float) else None))
    return metrics


def metric_text(value: float) -> str:
    """Formats a metric with four decimals, a small one with three digits and a large one with six."""
    return decimals(value) if abs(value) < 1000 else f"{value:,.6g}"


def _evaluations(record: RunRecord) -> str:
    rows = []
    for evaluation in record.evaluations:
        for i, (metric, value, error) in enumerate(metrics_of(evaluation.numbers)):
            first = (html_text(evaluation.task), "" if evaluation.step is None else f"{evaluation.step:,}") if i == 0 else ("", "")
            n = evaluation.numbers.get("n")
            many = f"{n:,}" if i == 0 and isinstance(n, int) else ""
            spread = "" if error is None else f"± {metric_text(error)}"
            rows.append((first[0], html_text(metric), first[1], metric_text(value), spread, many))
    head = ("task", "metric", "step", "value", "standard error", "rows")
    return section_of("Evaluations", html_table(head, rows, numeric=2)) if rows else ""


def _speed(record: RunRecord) -> str:
    speed = numbers(record.lines, "tokens_per_s")
    if not speed:
        return ""
    each = f"{_unit(record)}s"
    picture = chart([Series(f"{each}/s", speed, color=2)], f"{each}/s", y=f"{each}/s", height=220, zero=True)
    return section_of(f"{each.capitalize()} per second", picture)


def _unit(record: RunRecord) -> str:
    """Returns the unit that the run counts: token, image or row."""
    return str(record.facts.get("unit", "token"))


def _optimizer(record: RunRecord) -> str:
    return _pairs(record, "Optimizer", (("lr", "learning rate", 3), ("grad_norm", "gradient norm", 4)))


def _experts(record: RunRecord) -> str:
    """Renders the curves of the load of experts, where 1 is a perfectly even load."""
    loads = (("expert_load_max", "fullest expert, in even loads", 3), ("router_balance", "balance loss", 4))
    shares = (
        ("experts_idle", "share of experts without a token", 2),
        ("experts_dropped", "share of assignments dropped", 1),
    )
    return _pairs(record, "Experts", loads + shares)


def _pairs(record: RunRecord, heading: str, curves: Sequence[tuple[str, str, int]]) -> str:
    out = ""
    for key, title, color in curves:
        if points := numbers(record.lines, key):
            picture = chart(
                [Series(title, points, False, color, key == "lr")],
                f"{title} by step",
                y=title,
                width=420,
                height=240,
                zero=True,
            )
            out += f"<div>{picture}</div>"
    return section_of(heading, f'<div class="pair">{out}</div>') if out else ""


def _time(record: RunRecord) -> str:
    life = record.life
    spent = {cause: s for cause, s in (life.seconds if life else seconds_by_cause(record.lines)).items() if s > 0}
    if not spent:
        return ""
    names = [*(c for c in CAUSES if c in spent), *(c for c in spent if c not in CAUSES)]
    parts = [(name, spent[name], _color(name)) for name in names]
    total = sum(spent.values())
    rows = [(swatch_of(color) + html_text(name), f"{s:,.1f}", f"{s / total:.1%}") for name, s, color in parts]
    rows.append(("all", f"{total:,.1f}", ""))
    sessions = sum(isinstance(line.get("seconds"), Mapping) for line in record.lines)
    title = "Time by cause" + (f", {plural(sessions, 'session')}" if sessions > 1 else "")
    if life is None:
        return section_of(title, bar(parts, "share of time by cause") + html_table(("cause", "seconds", "share"), rows, "few"))
    title = "Time by cause" + (f", {plural(life.starts, 'start')}" if life.starts > 1 else "")
    summary = f"<p>{html_text(life.words())}</p>"
    table = html_table(("cause", "seconds", "share"), rows, "few")
    return section_of(title, bar(parts, "share of time by cause") + summary + table + _by_process(life))


def _color(cause: str) -> int:
    return COLORS.get(cause, CAUSES.index(cause) if cause in CAUSES else len(CAUSES) - 1)


def _by_process(life: Account) -> str:
    """Renders the seconds by cause of each process, for a run with several processes."""
    if not life.by_process:
        return ""
    causes = [cause for cause in (*CAUSES, WAITING, LOST, DOWN) if any(s.get(cause) for s in life.by_process.values())]
    rows = [(str(process), *(f"{s.get(c, 0.0):,.1f}" for c in causes)) for process, s in life.by_process.items()]
    return f"<h3>by process, seconds</h3>{html_table(('process', *causes), rows)}"


def _samples(record: RunRecord) -> str:
    lines = [dict(line) for line in record.lines]
    prompts = by_step(lines, "prompt")
    samples = [(s, str(prompts.get(s) or ""), str(t)) for s, t in by_step(lines, "sample").items()]
    if not samples:
        return ""
    blocks = [_sample(*sample) for sample in samples]
    rest = (
        f"<details><summary>{plural(len(blocks) - 1, 'earlier sample')}</summary>{''.join(blocks[:-1])}</details>"
        if len(blocks) > 1
        else ""
    )
    return section_of("What it writes", blocks[-1] + rest)


def _images(record: RunRecord) -> str:
    """Renders the image grids of the last step that has some, and those of earlier steps."""
    if not record.images:
        return ""
    steps = sorted({step for step, _, _ in record.images})
    grids = {step: [_grid(*image) for image in record.images if image[0] == step] for step in steps}
    earlier = "".join("".join(grids[step]) for step in steps[:-1])
    rest = f"<details><summary>earlier steps</summary>{earlier}</details>" if earlier else ""
    return section_of("What it draws", "".join(grids[steps[-1]]) + rest)


def _grid(step: int, drawn_by: str, png: bytes) -> str:
    """Renders an image grid, enlarged without smoothing because its images are small."""
    title = f"step {step:,}, {html_text(drawn_by)}"
    source = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    return f'<h3>{title}</h3><img alt="{title}" src="{source}" style="width:100%;max-width:40em;image-rendering:pixelated">'


def _sample(step: int, prompt: str, text: str) -> str:
    """Renders a sample, with the prompt in a soft color."""
    prompt_html = f'<span class="prompt">{html_text(prompt)}</span>' if prompt else ""
    return f"<h3>step {step:,}</h3><pre>{prompt_html}{html_text(text.rstrip())}</pre>"


def _checkpoints(record: RunRecord) -> str:
    if not record.checkpoints:
        return ""
    # In a run that learns from rewards, the loss of a checkpoint is its negated reward.
    rewarded = bool(numbers(record.lines, "eval_reward"))
    sign, name = (-1, "eval reward") if rewarded else (1, "eval loss")
    rows = [
        (f"{c.step:,}", format_bytes(c.size_bytes), "" if c.eval_loss is None else decimals(sign * c.eval_loss))
        for c in record.checkpoints
    ]
    return section_of("Checkpoints kept", html_table(("step", "size", name), rows, "few", numeric=0))


def _settings(record: RunRecord) -> str:
    if not record.settings:
        return ""
    head = ("setting", "value", "set by")
    rows = [(f"<code>{html_text(k)}</code>", f"<code>{html_text(v)}</code>", html_text(who)) for k, v, who in record.settings]
    overrides = [row for row, (_, _, who) in zip(rows, record.settings) if who != DEFAULT]
    overrides.sort(key=lambda row: row[2] not in TYPED)
    defaults = [row for row, (_, _, who) in zip(rows, record.settings) if who == DEFAULT]
    out = html_table(head, overrides, numeric=3) if overrides else ""
    if defaults:
        table = html_table(head, defaults, numeric=3)
        out += f"<details><summary>{len(defaults)} left at their defaults</summary>{table}</details>"
    return section_of("Settings", out)


def _environment(record: RunRecord) -> str:
    rows = [(html_text(name), html_text(value)) for name, value in record.environment.items()]
    return section_of("Environment", html_table(("", ""), rows, "few", numeric=2)) if rows else ""


def _command(record: RunRecord) -> str:
    return section_of("Run it again", code_of(record.command)) if record.command else ""
