"""What happens between two steps: the figures of an evaluation, and the seeds of samples."""

import math
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from argosy.observe.goodput import Clock
from argosy.run.hooks import samples
from argosy.run.hooks.evaluation import Evaluation
from argosy.run.hooks.samples import Sampler
from argosy.train.objectives.loss import WeightedMean
from argosy.train.objectives.next_token import NextToken


class Held(list):
    """Held-out batches."""

    bytes_per_token = 2.0

    def rewind(self) -> None:
        pass


def test_an_evaluation_weighs_each_batch_by_its_targets():
    """The last batch is padded: counted like the others, its few targets would weigh as much as all of theirs."""
    sums = [WeightedMean(jnp.float32(total), jnp.float32(weight)) for total, weight in ((30, 10), (40, 10), (1, 1))]
    assembly = SimpleNamespace(evals=Held(sums), place=lambda batch: batch, run=SimpleNamespace(objective=NextToken()))
    evaluation = Evaluation(assembly, 1, *[None] * 4)
    evaluation._program = lambda state, batch: {"loss": batch, "cross_entropy": batch}
    numbers = evaluation.evaluate(None)
    loss = 71 / 21
    assert numbers["eval_loss"] == pytest.approx(loss)
    assert numbers["eval_perplexity"] == pytest.approx(math.exp(loss))
    assert numbers["eval_bits_per_byte"] == pytest.approx(loss / math.log(2) / 2)


def test_an_evaluation_without_a_cross_entropy_reports_the_objectives_own_metrics():
    """A perplexity of rewards means nothing."""
    first, two = (
        {name: WeightedMean(jnp.float32(x), jnp.float32(weight)) for name, weight in (("loss", 2), ("rewards/accuracy", 4))}
        for x in (1, 2)
    )
    assembly = SimpleNamespace(evals=Held([first, two]), place=lambda batch: batch, run=SimpleNamespace(objective=NextToken()))
    evaluation = Evaluation(assembly, 1, *[None] * 4)
    evaluation._program = lambda state, batch: batch
    assert evaluation.evaluate(None) == {"eval_loss": 0.75, "eval_rewards/accuracy": 0.375}


@pytest.mark.parametrize(("last", "count"), [(False, 2), (True, 5)])
def test_a_signal_ends_an_evaluation_between_two_batches_unless_it_is_the_last(last: bool, count: int):
    """`eval.batches` batches of a large model take minutes."""
    seen: list[int] = []
    assembly = SimpleNamespace(evals=Held(range(5)), place=lambda batch: batch, run=SimpleNamespace(objective=NextToken()))
    lines: list[object] = []
    metrics, view = SimpleNamespace(write=lines.append), SimpleNamespace(evaluation=lambda *_: None)
    evaluation = Evaluation(assembly, 9, SimpleNamespace(evaluated=lambda *_: None), metrics, view, Clock(), lambda: len(seen) > 1)  # pyright: ignore[reportArgumentType]
    evaluation._program = lambda state, batch: seen.append(batch) or {"loss": WeightedMean(jnp.float32(1), jnp.float32(1))}
    evaluation(SimpleNamespace(step=9 if last else 3, last=last, state=None))
    assert len(seen) == count
    assert len(lines) == last


def test_a_signal_ends_a_sample_between_two_tokens(monkeypatch: pytest.MonkeyPatch):
    tokens: list[int] = []

    class Answers:
        completions = (SimpleNamespace(text="abcde"),)

        def __iter__(self):
            for token in range(5):
                tokens.append(token)
                yield token

    monkeypatch.setattr(samples, "merge", lambda *_: SimpleNamespace())
    monkeypatch.setattr(samples, "LM", lambda *_: SimpleNamespace(pieces=lambda *_, **__: Answers()))
    sampler = Sampler.__new__(Sampler)
    sampler.assembly = SimpleNamespace(tokenizer=object(), graph=None, decided=SimpleNamespace(dtype=None))  # pyright: ignore[reportAttributeAccessIssue]
    sampler.settings = SimpleNamespace(sample=SimpleNamespace(tokens=5, temperature=1.0), seed=0, model=None)  # pyright: ignore[reportAttributeAccessIssue]
    sampler.prompt = [1]
    state = SimpleNamespace(inference_params={}, rest={}, step=1)
    assert sampler(state, lambda: len(tokens) > 1) is None
    assert tokens == [0, 1]
    assert sampler(state) == "abcde"
