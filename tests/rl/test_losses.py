"""Policy and value losses: by hand, gradients where value and gradient differ, and parts that add up to the whole."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from argosy.core.errors import BadInput
from argosy.rl.algorithms.cispo import cispo
from argosy.rl.algorithms.gspo import gspo
from argosy.rl.algorithms.ppo import ppo
from argosy.rl.algorithms.reinforce import reinforce
from argosy.rl.policy.entropy import entropy_bonus, entropy_of
from argosy.rl.policy.kl import kl_loss
from argosy.rl.policy.metrics import EffectiveShare, Highest, Lowest
from argosy.rl.policy.token_losses import ConstantLength, SequenceMean, TokenMean
from argosy.rl.policy.value import value_loss

NAN, INF = math.nan, math.inf


def array(values):
    return jnp.asarray(values, jnp.float32)


def values(metrics):
    return {name: float(metric.value()) for name, metric in metrics.items()}


# ---------------------------------------------------------------- by hand

# Ratios 1.5, 0.5, 1.1, 4 of one row, with a fifth position of padding.
RATIOS = [1.5, 0.5, 1.1, 4.0]
NEW = array([[-1.0, -2.0, -0.5, -3.0, NAN]])
OLD = NEW - jnp.log(array([[*RATIOS, 1.0]]))
OWN = array([[1, 1, 1, 1, 0]])


def gradient(loss, new=NEW):
    return jax.grad(lambda new: jnp.sum(loss(new)))(new)


@pytest.mark.parametrize(
    ("advantages", "bounds", "tokens", "gradients"),
    [
        # A gain: the ratio is held at 1 + high, without gradient above it.
        ([1, 1, 1, 1], {}, [-1.2, -0.5, -1.1, -1.2], [0, -0.5, -1.1, 0]),
        ([1, 1, 1, 1], {"high": 0.6}, [-1.5, -0.5, -1.1, -1.6], [-1.5, -0.5, -1.1, 0]),
        # A loss: held at 1 - low, without gradient below it, and unbounded above.
        ([-1, -1, -1, -1], {}, [1.5, 0.8, 1.1, 4], [1.5, 0, 1.1, 4]),
        ([-2, -2, -2, -2], {"dual": 3.0}, [3, 1.6, 2.2, 6], [3, 0, 2.2, 0]),
        ([2, 2, 2, 2], {"dual": 3.0}, [-2.4, -1, -2.2, -2.4], [0, -1, -2.2, 0]),
        ([0, 0, 0, 0], {}, [0, 0, 0, 0], [0, 0, 0, 0]),
    ],
)
def test_ppo_by_hand(advantages, bounds, tokens, gradients):
    by = array([[*advantages, NAN]])
    losses = ppo(NEW, OLD, by, OWN, **bounds)
    np.testing.assert_allclose(losses.tokens[0], [*tokens, 0], rtol=2e-6)
    np.testing.assert_allclose(gradient(lambda new: ppo(new, OLD, by, OWN, **bounds).tokens)[0], [*gradients, 0], rtol=2e-6)


def test_the_metrics_of_ppo_by_hand():
    metrics = values(ppo(NEW, OLD, array([[1, -1, 1, -1, 1]]), OWN, dual=3.0).metrics)
    k3 = np.mean([r - 1 - math.log(r) for r in RATIOS])
    expected = {"clip/low": 0.25, "clip/high": 0.25, "clip/dual": 0.25, "ratio/mean": 7.1 / 4, "ratio/max": 4, "ratio/min": 0.5}
    assert metrics == pytest.approx(expected | {"kl/old": k3}, rel=1e-5)


def test_clipping_counts_only_where_the_gradient_is_lost():
    """A ratio above the range with a bad token, or below it with a good one, is not clipped."""
    metrics = values(ppo(NEW, OLD, array([[-1, 1, 1, -1, 1]]), OWN).metrics)
    assert metrics["clip/low"] == metrics["clip/high"] == 0


ROW_ADVANTAGES = array([[2.0], [-1.0]])
ROW_LOGS = array([[0.2, 0.0, 0.4], [-0.3, 0.1, 0.0]])
ROW_MASK = array([[1, 1, 1], [1, 1, 0]])
ROW_OLD = array([[-1, -2, -3], [-2, -1, -1]])
S = [math.exp(0.2), math.exp(-0.1)]


def test_gspo_by_hand():
    """Ratios of whole sequences: geometric means over their tokens."""
    losses = gspo(ROW_OLD + ROW_LOGS, ROW_OLD, ROW_ADVANTAGES, ROW_MASK, low=0.2, high=0.3)
    np.testing.assert_allclose(losses.tokens, [[-2 * S[0]] * 3, [S[1], S[1], 0]], rtol=1e-6)
    losses = gspo(ROW_OLD + ROW_LOGS, ROW_OLD, ROW_ADVANTAGES, ROW_MASK)
    np.testing.assert_allclose(losses.tokens, [[-2 * 1.0004] * 3, [1 - 3e-4, 1 - 3e-4, 0]], rtol=1e-6)
    metrics = values(losses.metrics)
    # Of tokens: the second sequence has 2, the first 3.
    assert (metrics["clip/low"], metrics["clip/high"]) == pytest.approx((0.4, 0.6))
    assert (metrics["ratio/max"], metrics["ratio/min"]) == pytest.approx((S[0], S[1]), rel=1e-6)


def test_the_gradient_of_gspo_is_that_of_its_sequences():
    """s A / length at each token, divided by the number of sequences."""

    def loss(new):
        return SequenceMean()(gspo(new, ROW_OLD, ROW_ADVANTAGES, ROW_MASK, low=0.2, high=0.3).tokens, ROW_MASK).value()

    slopes = gradient(loss, ROW_OLD + ROW_LOGS)
    np.testing.assert_allclose(slopes, [[-2 * S[0] / 3 / 2] * 3, [S[1] / 2 / 2, S[1] / 2 / 2, 0]], rtol=2e-6)


@pytest.mark.parametrize("bounds", [(0.2, 0.3), (3e-4, 4e-4)])
def test_gspo_is_the_objective_of_whole_sequences(bounds):
    """Equations 5 to 7, in value and gradient, clipped and not."""

    def paper(new):
        logs = jnp.sum((new - ROW_OLD) * ROW_MASK, 1) / jnp.sum(ROW_MASK, 1)
        ratios, by = jnp.exp(logs), ROW_ADVANTAGES[:, 0]
        return -jnp.mean(jnp.minimum(ratios * by, jnp.clip(ratios, 1 - bounds[0], 1 + bounds[1]) * by))

    def ours(new):
        losses = gspo(new, ROW_OLD, ROW_ADVANTAGES, ROW_MASK, low=bounds[0], high=bounds[1])
        return SequenceMean()(losses.tokens, ROW_MASK).value()

    for new in (ROW_OLD + ROW_LOGS, ROW_OLD - ROW_LOGS):
        assert float(ours(new)) == pytest.approx(float(paper(new)), rel=1e-6)
        np.testing.assert_allclose(gradient(ours, new), gradient(paper, new), rtol=2e-6, atol=1e-7)


def test_gspo_moves_each_token_by_its_own_advantage():
    by = array([[1, 0, -1], [2, 0, 5]])
    loss = functools.partial(gspo, old=ROW_OLD, advantages=by, mask=ROW_MASK, low=0.9, high=9.0)
    slopes = gradient(lambda new: loss(new).tokens, ROW_OLD + ROW_LOGS)
    np.testing.assert_allclose(slopes, [[-S[0], 0, S[0]], [-2 * S[1], 0, 0]], rtol=2e-6, atol=1e-7)


def test_cispo_by_hand():
    """Every token keeps its gradient; its weight is bounded."""
    by = array([[1, -1, 1, -2, NAN]])
    losses = cispo(NEW, OLD, by, OWN, high=2.0, low=0.6)
    weights = [1.5, 0.6, 1.1, 2.0]
    expected = [1.5 * 1, -0.6 * 2, 1.1 * 0.5, -2 * 2.0 * 3]
    np.testing.assert_allclose(losses.tokens[0], [*expected, 0], rtol=2e-6)
    slopes = gradient(lambda new: cispo(new, OLD, by, OWN, high=2.0, low=0.6).tokens)
    np.testing.assert_allclose(slopes[0], [-w * a for w, a in zip(weights, [1, -1, 1, -2])] + [0], rtol=2e-6)
    assert values(losses.metrics)["clip/low"] == values(losses.metrics)["clip/high"] == 0.25


def test_reinforce_by_hand():
    by = array([[1, -1, 2, 0, NAN]])
    np.testing.assert_allclose(reinforce(NEW, by, OWN).tokens[0], [1, -2, 1, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(gradient(lambda new: reinforce(new, by, OWN).tokens)[0], [-1, 1, -2, 0, 0], rtol=1e-6)


@pytest.mark.parametrize("loss", [ppo, gspo, cispo])
def test_on_policy_every_gradient_is_that_of_reinforce(loss):
    by = array([[1, -1, 2, 0.5, 1]])
    bounds = {"low": 0.2, "high": 0.2} if loss is gspo else {}
    slopes = gradient(lambda new: loss(new, NEW, by, OWN, **bounds).tokens)
    np.testing.assert_allclose(slopes, gradient(lambda new: reinforce(new, by, OWN).tokens), rtol=1e-6)


def test_an_exploded_ratio_leaves_value_and_gradient_finite():
    far = array([[-1000.0, -1000.0]])
    by, mask = array([[-1.0, 1.0]]), jnp.ones((1, 2))
    for loss in (ppo, cispo):
        losses = loss(jnp.zeros((1, 2)), far, by, mask)
        assert np.isfinite(np.asarray(losses.tokens)).all()
        assert all(np.isfinite(v) for v in values(losses.metrics).values())
        assert np.isfinite(np.asarray(gradient(lambda new, loss=loss: loss(new, far, by, mask).tokens, jnp.zeros((1, 2))))).all()


def test_the_value_loss_by_hand():
    """The worse of the value and the clipped value counts; the clipped one has no gradient."""
    now, old, returns = array([[1.0, 0.1, 2.0, NAN]]), array([[0.0, 0.0, 1.9, NAN]]), array([[2.0, 1.0, 1.0, NAN]])
    mask = array([[1, 1, 1, 0]])
    # The first moved by 1, clipped at 0.2: (0.2 - 2)^2. The second moved by 0.1. The third is above its return.
    losses = value_loss(now, old, returns, mask)
    np.testing.assert_allclose(losses.tokens[0], [1.8**2 / 2, 0.9**2 / 2, 0.5, 0], rtol=2e-6)
    slopes = gradient(lambda now: value_loss(now, old, returns, mask).tokens, now)
    np.testing.assert_allclose(slopes[0], [0, -0.9, 1, 0], rtol=2e-6)
    assert values(losses.metrics) == pytest.approx(
        {"value/error": (1 + 0.81 + 1) / 3, "value/mean": 3.1 / 3, "value/clipped": 1 / 3}, rel=1e-5
    )
    plain = value_loss(now, old, returns, mask, clip=None)
    np.testing.assert_allclose(plain.tokens[0], [0.5, 0.81 / 2, 0.5, 0], rtol=2e-6)


def test_the_entropy_by_hand():
    logits = jnp.log(array([[0.5, 0.25, 0.25, 0.0], [0.25, 0.25, 0.25, 0.25], [0.0, 0.0, 1.0, 0.0]]))
    entropies = entropy_of(logits)
    np.testing.assert_allclose(entropies, [1.5 * math.log(2), 2 * math.log(2), 0], rtol=1e-6, atol=1e-7)


def test_the_gradient_of_the_entropy_is_finite_where_a_token_is_forbidden():
    slopes = jax.grad(lambda logits: entropy_of(logits).sum())(array([[1.0, 0.0, -INF]]))
    p = math.e / (1 + math.e)
    slope = p * (1 - p)  # dH/dl = -p (log p + H), which for two tokens is -p (1 - p) times their difference of 1
    np.testing.assert_allclose(slopes[0], [-slope, slope, 0], rtol=1e-5)


def test_the_entropy_bonus_lowers_the_loss():
    losses = entropy_bonus(array([[1.0, 3.0, NAN]]), array([[1, 1, 0]]), 0.1)
    np.testing.assert_allclose(losses.tokens[0], [-0.1, -0.3, 0], rtol=1e-6)
    assert values(losses.metrics) == {"entropy": 2.0}


# ---------------------------------------------------------------- normalization


def test_three_normalizations_by_hand():
    """Rows of 3, 1 and no tokens."""
    tokens, mask = array([[1, 2, 6], [5, NAN, NAN], [NAN] * 3]), array([[1, 1, 1], [1, 0, 0], [0, 0, 0]])
    assert float(TokenMean()(tokens, mask).value()) == 14 / 4
    assert float(SequenceMean()(tokens, mask).value()) == (3 + 5) / 2
    assert float(ConstantLength(10)(tokens, mask).value()) == pytest.approx((9 / 10 + 5 / 10) / 2)


# ---------------------------------------------------------------- laws of every loss


class Numbers(NamedTuple):
    new: jax.Array
    old: jax.Array
    reference: jax.Array
    advantages: jax.Array
    mask: jax.Array


def numbers(rows=6, tokens=5):
    rng = np.random.default_rng(3)
    new = rng.normal(-2, 1, (rows, tokens))
    lengths = rng.integers(1, tokens + 1, rows)
    arrays = Numbers(
        new, new + rng.normal(0, 0.4, new.shape), new + rng.normal(0, 0.4, new.shape), rng.normal(0, 1, (rows, 1)),
        np.arange(tokens) < lengths[:, None],
    )  # fmt: skip
    return Numbers(*(array(a) for a in arrays))


LOSSES = {
    "ppo": lambda x: ppo(x.new, x.old, x.advantages, x.mask, high=0.28, dual=3.0),
    "gspo": lambda x: gspo(x.new, x.old, x.advantages, x.mask, low=0.1, high=0.1),
    "cispo": lambda x: cispo(x.new, x.old, x.advantages, x.mask, high=1.2),
    "reinforce": lambda x: reinforce(x.new, x.advantages, x.mask),
    "value": lambda x: value_loss(x.new, x.old, x.reference, x.mask),
    "entropy": lambda x: entropy_bonus(-x.new, x.mask, 0.1),
    "kl": lambda x: kl_loss(x.new, x.reference, x.mask, coefficient=0.1, old=x.old),
}
each_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
NORMALIZATIONS = (TokenMean(), SequenceMean(), ConstantLength(7))


@functools.partial(jax.jit, static_argnums=0)
def whole(loss, x):
    """Under each normalization: the sum, its weight and the gradient of the sum; and the metrics."""

    def sums_of(average):
        def total(new):
            mean = average(loss(x._replace(new=new)).tokens, x.mask)
            return mean.total, mean.weight

        (value, weight), slope = jax.value_and_grad(total, has_aux=True)(x.new)
        return value, weight, slope

    return [sums_of(average) for average in NORMALIZATIONS], loss(x).metrics


@each_loss
def test_parts_add_up_to_the_whole(loss):
    x = numbers()
    parts = [whole(loss, jax.tree.map(lambda a, i=i: a[i::2], x)) for i in (0, 1)]
    losses, metrics = whole(loss, x)
    for (value, weight, slope), (first, one_weight, one_slope), (two, two_weight, two_slope) in zip(losses, *(p[0] for p in parts)):
        assert float(first + two) == pytest.approx(float(value), rel=1e-5)
        assert float(one_weight + two_weight) == float(weight)
        np.testing.assert_allclose(np.stack([one_slope, two_slope], 1).reshape(slope.shape), slope, rtol=1e-5, atol=1e-7)
    for name, metric in metrics.items():
        assert float((parts[0][1][name] + parts[1][1][name]).value()) == pytest.approx(float(metric.value()), rel=1e-5), name


@each_loss
def test_padding_and_the_order_of_rows_change_nothing(loss):
    """What stands in the padding reaches neither value nor gradient, NaN and infinity included."""
    x = numbers()
    order = np.asarray([3, 0, 5, 4, 2, 1])

    def padded(a, fill):
        return jnp.pad(a[order], ((0, 2), (0, 3 if a.shape[1] > 1 else 0)), constant_values=fill)

    dirty = x._replace(new=jnp.where(x.mask > 0, x.new, NAN), old=jnp.where(x.mask > 0, x.old, -INF))
    more = Numbers(*(padded(a, 0.0 if name == "mask" else NAN) for name, a in dirty._asdict().items()))
    (sums, metrics), (again, again_metrics) = whole(loss, x), whole(loss, more)
    for (value, weight, slope), (value_again, weight_again, slope_again) in zip(sums, again):
        assert float(value_again) == pytest.approx(float(value), rel=1e-5)
        assert float(weight_again) == float(weight)
        np.testing.assert_allclose(slope_again[:6, :5], slope[order], rtol=1e-5, atol=1e-7)
        assert not np.any(np.asarray(slope_again)[6:])
        assert not np.any(np.asarray(slope_again)[:, 5:])
    for name, metric in metrics.items():
        assert float(again_metrics[name].value()) == pytest.approx(float(metric.value()), rel=1e-5), name


@each_loss
def test_a_batch_without_tokens_weighs_nothing(loss):
    x = numbers()
    sums, _ = whole(loss, x._replace(mask=jnp.zeros_like(x.mask)))
    for value, weight, slope in sums:
        assert float(value) == float(weight) == 0
        assert not np.any(np.asarray(slope))


def test_metrics_have_zeros_as_their_neutral_part():
    """Accumulation starts from zeros."""
    zero = jnp.zeros(())
    assert float((Highest(zero) + Highest(array(0.3))).value()) == pytest.approx(0.3)
    assert float((Lowest(zero) + Lowest(1 / array(0.3))).value()) == pytest.approx(0.3)
    share = EffectiveShare(array(3.0), array(5.0), array(2.0))
    assert float((EffectiveShare(zero, zero, zero) + share).value()) == pytest.approx(9 / 10)
    assert float(EffectiveShare(zero, zero, zero).value()) == 0


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (lambda: ppo(NEW, OLD, OWN, OWN, low=1.5), "clipped between 1 - 1.5"),
        (lambda: ppo(NEW, OLD, OWN, OWN, high=-0.1), "1 \\+ -0.1"),
        (lambda: ppo(NEW, OLD, OWN, OWN, dual=1.0), "a dual clip at 1.0"),
        (lambda: cispo(NEW, OLD, OWN, OWN, high=0.28), "between 0.0 and 0.28"),
        (lambda: value_loss(NEW, OLD, OLD, OWN, clip=0.0), "a distance of 0.0"),
        (lambda: ConstantLength(0), "divided by 0 tokens"),
    ],
)
def test_bounds_that_make_no_sense_are_refused(call, problem):
    with pytest.raises(BadInput, match=problem):
        call()
