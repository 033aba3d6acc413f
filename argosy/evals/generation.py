"""Generates answers greedily with the inference engine, many at a time, and judges them.

The context must have room for an answer of `max_tokens`, or of half of the context if that is less. A longer prompt is cut to its last
tokens. With a chat template, no stop string ends an answer, because chat models end their turn themselves, and an answer may have at
least `CHAT` tokens.
"""

from typing import Any

from argosy.evals import extract
from argosy.evals.instruction_following import ifeval
from argosy.evals.likelihood import Tick
from argosy.evals.plan import PlannedTask
from argosy.evals.prompts import examples, question
from argosy.evals.settings import EvalSettings
from argosy.evals.statistics import RowScores

CHAT = 256


def evaluate_generation(lm: Any, planned: PlannedTask, settings: EvalSettings, tick: Tick) -> tuple[list[RowScores], int]:
    """Returns for each row whether the generated answer is right, and the number of prompts that were cut."""
    texts, cut = generate_completions(lm, planned, settings, tick)
    row_scores = []
    for number, (row, text) in enumerate(zip(planned.rows, texts, strict=True)):
        strict, flexible = extract.is_right(planned.task, row, text)
        values = {"exact_match": float(strict), "exact_match_flexible": float(flexible)}
        answer = {"text": text, "target": extract.expected_answer(planned.task, row)}
        row_scores.append(RowScores(number, values, {}, answer))
    return row_scores, cut


def evaluate_instructions(lm: Any, planned: PlannedTask, settings: EvalSettings, tick: Tick) -> tuple[list[RowScores], int]:
    """Returns for each row how many of its instructions the generated answer follows, and the number of prompts that were cut."""
    texts, cut = generate_completions(lm, planned, settings, tick)
    both = zip(planned.rows, texts, strict=True)
    return [ifeval.instruction_accuracies(number, row, text) for number, (row, text) in enumerate(both)], cut


def generate_completions(lm: Any, planned: PlannedTask, settings: EvalSettings, tick: Tick) -> tuple[list[str], int]:
    """Generates the answer to each row. Returns the answers, and the number of prompts that were cut."""
    task, before = planned.task, examples(planned, settings.seed)
    limit = settings.max_tokens or (max(task.max_tokens, CHAT) if settings.chat else task.max_tokens)
    room = lm.config.context - min(limit, lm.config.context // 2)
    prompts = [_ids(lm, before(number) + question(task, row), settings) for number, row in enumerate(planned.rows)]
    stop = [] if settings.chat else list(task.stop)
    run = lm.pieces([ids[-room:] for ids in prompts], limit, stop=stop, temperature=0.0)
    done = 0
    try:
        for piece in run:
            done += piece.done
            tick(done)
    finally:
        run.close()
    return [completion.text for completion in run.completions], sum(len(ids) > room for ids in prompts)


def _ids(lm: Any, text: str, settings: EvalSettings) -> list[int]:
    if settings.chat:
        return lm.chat_prompt([{"role": "user", "content": text}])
    return lm.encode(text)


