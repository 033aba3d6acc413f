"""The objective on cases small enough to do by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import relative
from laws.families import CASES, noisy_model

from argosy.models.parts.stack import Unroll
from argosy.models.parts.weight import merge, split
from argosy.train.objectives.next_token import NextToken

KEY = jax.random.key(0)


def batch_of(rows=2, length=12, vocab=113):
    rng = np.random.default_rng(3)
    tokens = rng.integers(0, vocab, (rows, length + 1)).astype(np.int32)
    segments = np.asarray([[1] * 7 + [2] * 5, [1] * 9 + [0] * 3], np.int32)
    mask = rng.random((rows, length)).astype(np.float32) * (segments > 0)
    mask[0, 6] = 0
    arrays = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "segments": segments, "mask": mask}
    return {name: jnp.asarray(array) for name, array in arrays.items()}


class Table(nnx.Module):
    """A model whose logits are a table, row by token: everything can be computed by hand."""

    def __init__(self, table):
        self.table, self.head, self.config = nnx.Param(table), "", None

    def hidden(self, tokens, attend, cache=None):
        return self.table[...][tokens], cache, {}

    def unembed(self, x):
        return x


def test_the_loss_by_hand():
    batch = batch_of(vocab=5)
    table = np.random.default_rng(0).standard_normal((5, 5)).astype(np.float32)
    got = NextToken(head="logits", z_loss=0.1)({"model": Table(jnp.asarray(table))}, batch, KEY)
    logits = table[np.asarray(batch["tokens"])].astype(np.float64)
    lse = np.log(np.exp(logits).sum(-1))
    nll = lse - np.take_along_axis(logits, np.asarray(batch["targets"])[..., None], -1)[..., 0]
    mask = np.asarray(batch["mask"])
    assert relative(got.loss.total, (mask * (nll + 0.1 * lse**2)).sum()) < 1e-6
    assert relative(got.loss.weight, mask.sum()) < 1e-6
    assert relative(got.metrics["cross_entropy"].value(), (mask * nll).sum() / mask.sum()) < 1e-6
    assert relative(got.metrics["z_loss"].value(), 0.1 * (mask * lse**2).sum() / mask.sum()) < 1e-6


def test_a_masked_target_changes_nothing():
    model, batch = noisy_model(CASES["llama-plain"], Unroll()), batch_of()
    changed = dict(batch)
    hidden = np.asarray(batch["mask"]) == 0
    changed["targets"] = jnp.where(jnp.asarray(hidden), 0, batch["targets"])
    assert (np.asarray(changed["targets"]) != np.asarray(batch["targets"])).any()
    first, other = (NextToken()({"model": model}, b, KEY).loss for b in (batch, changed))
    assert float(first.total) == float(other.total)
    counted = dict(batch, targets=jnp.where(jnp.asarray(~hidden), 0, batch["targets"]))
    assert abs(float(NextToken()({"model": model}, counted, KEY).loss.total) - float(first.total)) > 1e-3


@pytest.mark.parametrize("case", [pytest.param("llama-plain", marks=pytest.mark.slow), "llama-tied-biased"])
def test_every_head_gives_the_same_loss_and_gradient(case):
    graph, params, rest = split(noisy_model(CASES[case], Unroll()), nnx.Param)

    def of(head):
        def loss(params):
            return NextToken(head=head, chunk=5, z_loss=0.01)({"model": merge(graph, params, rest)}, batch_of(), KEY).loss.total

        return jax.jit(jax.value_and_grad(loss))(params)

    value, grads = of("logits")
    for head in ("blocks", "chunks"):
        other, others = of(head)
        assert relative(other, value) < 1e-6
        assert max(relative(others[a], g) for a, g in grads.items()) < 1e-4
