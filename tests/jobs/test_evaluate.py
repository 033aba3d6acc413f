"""What happens between two steps: the figures of an evaluation, and the seeds of samples."""

import math
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from argosy.jobs.hooks import Evaluation
from argosy.train.objectives import Mean


class Held(list):
    """Held-out batches."""

    bytes_per_token = 2.0

    def rewind(self) -> None:
        pass


def test_an_evaluation_weighs_each_batch_by_its_targets():
    """The last batch is padded: counted like the others, its few targets would weigh as much as all of theirs."""
    sums = [Mean(jnp.float32(total), jnp.float32(weight)) for total, weight in ((30, 10), (40, 10), (1, 1))]
    assembly = SimpleNamespace(evals=Held(sums), place=lambda batch: batch)
    evaluation = Evaluation(assembly, 1, *[None] * 4)
    evaluation._program = lambda state, batch: batch
    numbers = evaluation.evaluate(None)
    loss = 71 / 21
    assert numbers["eval_loss"] == pytest.approx(loss)
    assert numbers["eval_perplexity"] == pytest.approx(math.exp(loss))
    assert numbers["eval_bits_per_byte"] == pytest.approx(loss / math.log(2) / 2)
