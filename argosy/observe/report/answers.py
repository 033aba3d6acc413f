"""Renders the completions of reinforcement learning and distillation as a section of a run's page."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from argosy.observe.metrics import conversation_text
from argosy.observe.report.pieces import html_table, html_text, section_of

# The number of completions that are shown of the best and of the worst, and the most characters of one.
BEST, ANSWER = 4, 400


def answers_section(lines: Sequence[Mapping[str, Any]]) -> str:
    """Renders the best and the worst of the stored completions of the last and of the first rollout. Empty if none were stored.

    Args:
        lines: the lines of answers.jsonl.
    """
    if not lines:
        return ""
    # After a kill, the rollouts since the last checkpoint are written again with the same completions.
    answers = {json.dumps(line, sort_keys=True): line for line in lines}.values()
    rollouts = sorted({int(answer["rollout"]) for answer in answers})
    tables = [_of_rollout(number, [answer for answer in answers if answer["rollout"] == number]) for number in rollouts]
    first = f"<details><summary>the first rollout</summary>{tables[0]}</details>" if len(tables) > 1 else ""
    return section_of("What it answers", tables[-1] + first)


def _of_rollout(number: int, answers: Sequence[Mapping[str, Any]]) -> str:
    ranked = sorted(answers, key=lambda answer: -answer["advantage"])
    selection = ranked if len(ranked) <= 2 * BEST else [*ranked[:BEST], *ranked[-BEST:]]
    names = list(ranked[0]["rewards"])
    # In distillation, completions have no scores.
    rewarded = bool(names) or any(answer["advantage"] for answer in answers)
    scores = (lambda answer: _scores(answer, names)) if rewarded else lambda _: []
    rows = [(_prompt_html(answer["prompt"]), html_text(conversation_text(answer)[:ANSWER]), *scores(answer)) for answer in selection]
    head = ("prompt", "answer", *names, "advantage") if rewarded else ("prompt", "answer")
    return f"<h3>rollout {number:,}</h3>{html_table(head, rows, numeric=2)}"


def _prompt_html(prompt: Any) -> str:
    """Renders a prompt, a text or a list of messages of which the last is shown, in a soft color."""
    text = prompt if isinstance(prompt, str) else str(prompt[-1].get("content", ""))
    return f'<span class="prompt">{html_text(text[:ANSWER])}</span>'


def _scores(answer: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    values = [answer["rewards"].get(name) for name in names]
    return [*("none" if value is None else f"{value:.3g}" for value in values), f"{answer['advantage']:+.2f}"]
