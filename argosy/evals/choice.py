"""Multiple choice by log-likelihood, and the last word of LAMBADA.

acc: the right choice has the highest log-likelihood. acc_norm: per byte of the choice, which does not favor short ones. The bytes are
those of the choice without the blank before it; lm-evaluation-harness counts characters there, which differs for text beyond ASCII
only, and calls the bytes `acc_bytes`. The first of equal ones counts, as there.
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
    """The accuracy of each row, and how many sequences were cut to the context."""
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
    """Whether each token of each continuation is the likeliest, its loss in nats, and how many sequences were cut."""
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
