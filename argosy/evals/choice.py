"""Evaluates multiple choice by log-likelihood, and the last word of LAMBADA.

    acc        whether the right choice has the highest log-likelihood
    acc_norm   whether it has the highest log-likelihood per byte, which does not favor short choices

The blank before a choice is not counted. lm-evaluation-harness counts characters for `acc_norm`, which differs only for text beyond
ASCII; its `acc_bytes` counts bytes. The first of equal choices is taken, as there.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from argosy.evals.likelihood import Pair, Tick, chat_pair, likelihoods, pair
from argosy.evals.plan import PlannedTask
from argosy.evals.prompts import after_blank, choices, examples, question
from argosy.evals.settings import EvalSettings
from argosy.evals.statistics import RowScores

Found = tuple[list[RowScores], int]
Make = Callable[[Any, int, str, str], Pair]


def evaluate_multiple_choice(lm: Any, planned: PlannedTask, settings: EvalSettings, tick: Tick) -> Found:
    """Evaluates multiple choice. Returns the accuracies of each row, and the number of sequences that were cut to the context."""
    task, before = planned.task, examples(planned, settings.seed)
    make: Make = chat_pair if settings.chat else pair
    pairs: list[Pair] = []
    places: list[list[int]] = []
    for number, row in enumerate(planned.rows):
        if task.layout == "options":
            both = [(context.rstrip(), after_blank(row["continuation"])) for context in row["context_options"]]
        else:
            both = [(question(task, row), choice) for choice in choices(task, row)]
        places.append(list(range(len(pairs), len(pairs) + len(both))))
        pairs += [make(lm, number, before(number) + context, rest) for context, rest in both]
    scored = likelihoods(lm, pairs, settings.batch, tick)
    row_scores = []
    for number, (row, its) in enumerate(zip(planned.rows, places, strict=True)):
        logprobs = np.array([scored.likelihoods[i].logprob for i in its])
        values = {"acc": float(logprobs.argmax() == row["gold"])}
        if task.layout == "choices":
            sizes = np.array([max(len(choice.strip().encode()), 1) for choice in choices(task, row)])
            values["acc_norm"] = float((logprobs / sizes).argmax() == row["gold"])
        row_scores.append(RowScores(number, values, {}, {"logprobs": logprobs.tolist(), "gold": row["gold"]}))
    return row_scores, scored.truncated


def evaluate_continuation(lm: Any, planned: PlannedTask, settings: EvalSettings, tick: Tick) -> Found:
    """Evaluates continuations. Returns for each row whether all tokens of the continuation are the most likely ones (`acc`) and its
    loss in nats, and the number of sequences that were cut to the context."""
    task, before = planned.task, examples(planned, settings.seed)
    make: Make = chat_pair if settings.chat else pair
    pairs = [
        make(lm, number, before(number) + question(task, row), after_blank(row["continuation"]))
        for number, row in enumerate(planned.rows)
    ]
    scored = likelihoods(lm, pairs, settings.batch, tick)
    row_scores = [
        RowScores(number, {"acc": float(likelihood.greedy), "loss": -likelihood.logprob}, {}, {"continuation": row["continuation"]})
        for number, (row, likelihood) in enumerate(zip(planned.rows, scored.likelihoods, strict=True))
    ]
    return row_scores, scored.truncated
