"""The training step computes a batch in parts, and its metrics of extremes are those of the whole batch."""

import jax
import jax.numpy as jnp

from argosy.rl.policy.metrics import Highest, Lowest
from argosy.train.step import _summed


def test_a_step_in_parts_reports_the_extremes_of_the_whole_batch():
    def of_part(part, key):
        x = part["x"]
        return jnp.sum(x), {"max": Highest(jnp.max(x)), "min": Lowest(jnp.max(1 / x))}

    total, metrics = _summed(of_part, {"x": jnp.asarray([[2.0, 0.5], [3.0, 1.0], [0.25, 1.0]])}, jax.random.key(0))
    assert float(total) == 7.75
    assert {name: float(metric.value()) for name, metric in metrics.items()} == {"max": 3.0, "min": 0.25}
