"""Advantages, losses with their gradients, and importance weights equal those of TRL's own trainers.

In float64, both from the same numbers: `./run reference reinforce` wrote them.
"""

import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from argosy.rl.advantages.totals import overlong, total
from argosy.rl.algorithms.cispo import cispo
from argosy.rl.algorithms.gdpo import gdpo
from argosy.rl.algorithms.grpo import grpo
from argosy.rl.algorithms.gspo import gspo
from argosy.rl.algorithms.ppo import ppo
from argosy.rl.algorithms.rloo import rloo
from argosy.rl.policy.correction import correction
from argosy.rl.policy.entropy import entropy_bonus
from argosy.rl.policy.kl import kl_loss
from argosy.rl.policy.token_losses import ConstantLength, SequenceMean, TokenMean

TRL = json.loads((Path(__file__).parents[1] / "goldens" / "reinforce.json").read_text(encoding="utf-8"))
OF = {name: np.asarray(values) for name, values in TRL["numbers"].items()}
C = TRL["constants"]
EACH = 4
BOUNDS = {"low": C["low"], "high": C["high"]}


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


def numbers():
    arrays = {name: jnp.asarray(values) for name, values in OF.items()}
    return arrays["old"], arrays["advantages"][:, None], arrays["mask"], arrays["reference"], arrays["entropies"]


def clip(new, **more):
    old, advantages, mask, _, _ = numbers()
    return ppo(new, old, advantages, mask, **BOUNDS, **more)


def with_kl(new, **more):
    _, _, mask, reference, _ = numbers()
    return clip(new).tokens + kl_loss(new, reference, mask, coefficient=C["beta"], estimator="k3", **more).tokens


LOSSES = {
    "token": (lambda new: clip(new).tokens, TokenMean()),
    "sequence": (lambda new: clip(new).tokens, SequenceMean()),
    "constant": (lambda new: clip(new).tokens, ConstantLength(C["longest"])),
    "dual": (lambda new: clip(new, dual=C["delta"]).tokens, TokenMean()),
    "gspo": (lambda new: gspo(new, *numbers()[:3], **BOUNDS).tokens, SequenceMean()),
    "cispo": (lambda new: cispo(new, *numbers()[:3], high=C["cispo"]).tokens, TokenMean()),
    "k3": (with_kl, TokenMean()),
    "entropy": (
        lambda new: clip(new).tokens + entropy_bonus(numbers()[4], numbers()[2], C["entropy"]).tokens, TokenMean()
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_their_gradients_equal_those_of_trl(name):
    loss, average = LOSSES[name]
    value, slope = jax.value_and_grad(lambda new: average(loss(new), numbers()[2]).value())(jnp.asarray(OF["new"]))
    assert float(value) == pytest.approx(TRL["losses"][name]["loss"], rel=1e-6)
    np.testing.assert_allclose(slope, TRL["losses"][name]["gradient"], rtol=1e-6, atol=1e-9)


def test_a_corrected_k3_has_the_value_of_trl():
    """Its gradient differs: TRL differentiates the ratio too, which k2's gradient makes unnecessary."""
    value = TokenMean()(with_kl(jnp.asarray(OF["new"]), old=numbers()[0]), numbers()[2]).value()
    assert float(value) == pytest.approx(TRL["losses"]["k3_corrected"]["loss"], rel=1e-6)


def test_metrics_equal_those_of_trl():
    theirs = TRL["losses"]["k3"]["metrics"]
    metrics = clip(jnp.asarray(OF["new"])).metrics
    assert float(metrics["clip/low"].value()) == pytest.approx(theirs["clip_ratio/low_mean"], rel=1e-6)
    assert float(metrics["clip/high"].value()) == pytest.approx(theirs["clip_ratio/high_mean"], rel=1e-6)
    assert theirs["clip_ratio/low_mean"] > 0 < theirs["clip_ratio/high_mean"]
    _, _, mask, reference, entropies = numbers()
    kl = kl_loss(jnp.asarray(OF["new"]), reference, mask, coefficient=1.0).metrics["kl"]
    assert float(kl.value()) == pytest.approx(theirs["kl"], rel=1e-6)
    assert float(entropy_bonus(entropies, mask, 1.0).metrics["entropy"].value()) == pytest.approx(theirs["entropy"], rel=1e-6)


def rewards():
    """[g n k], NaN where missing."""
    rewards_each = np.asarray([[math.nan if r is None else r for r in row] for row in TRL["rewards"]])
    return jnp.asarray(rewards_each.reshape(-1, EACH, rewards_each.shape[-1])), TRL["weights"]


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_of_grpo_equal_those_of_trl(scale):
    advantages = grpo(total(*rewards()), scale=scale, epsilon=1e-4)
    np.testing.assert_allclose(advantages.values.reshape(-1), TRL["advantages"][scale], rtol=1e-6, atol=1e-9)
    assert np.sum(~np.asarray(advantages.scored)) == 1


def test_advantages_of_rloo_equal_those_of_trl():
    np.testing.assert_allclose(rloo(total(*rewards())).values.reshape(-1), TRL["advantages"]["rloo"], rtol=1e-6, atol=1e-9)


def test_advantages_of_rewards_normalized_each_equal_those_of_trl():
    advantages = gdpo(*rewards(), epsilon=1e-4)
    np.testing.assert_allclose(advantages.values.reshape(-1), TRL["advantages"]["each"], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("outside", ["truncate", "mask"])
def test_importance_weights_equal_those_of_trl(level, outside):
    of, mask = TRL["correction"], jnp.asarray(OF["mask"])
    result = correction(
        jnp.asarray(OF["old"]), jnp.asarray(OF["sampler"]), mask, level=level, outside=outside, lowest=of["low"], highest=of["high"]
    )
    theirs = np.asarray(of[f"{level}_{outside}"])
    live = OF["mask"] > 0 if level == "token" else np.ones_like(theirs) > 0
    np.testing.assert_allclose(np.asarray(result.weights)[live], theirs[live], rtol=1e-6)
    assert float(result.metrics["sampler/outside"].value()) > 0


def test_the_penalty_of_length_equals_that_of_trl():
    assert overlong(jnp.arange(10.0, 24.0), 20, 8).tolist() == TRL["overlong"]
