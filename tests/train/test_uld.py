"""Distillation across tokenizers: the distance against TRL's GOLD and by hand, with its gradient, however tokens are merged."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from laws.families import CASES

from argosy.data.batch import BatchWrapper
from argosy.data.distillation.across import Aligned, AlignedSpan, BothTokenizers, align
from argosy.data.tokenizers.matched import Matched
from argosy.ops.sorted_distance import sorted_distance
from argosy.train.objectives.distillation.gold import GOLD
from argosy.train.objectives.distillation.uld import ULD, hybrid

TRL = json.loads((Path(__file__).parents[1] / "goldens" / "uld.json").read_text(encoding="utf-8"))
PROMPT, PAIRS = TRL["prompt"], np.array(TRL["pairs"], np.int32)
MATCHED = Matched(PAIRS[:, 0].tobytes(), PAIRS[:, 1].tobytes())
KEY = jax.random.key(0)


class Given:
    """A model whose hidden states are given logits."""

    def __init__(self, logits):
        self.logits, self.config, self.matched = logits, CASES["llama-plain"], MATCHED
        self.head, self.embed = self, self

    def hidden(self, tokens, attend):
        return self.logits, None, {}

    def unembed(self, x):
        return x


class Nothing(BatchWrapper):
    def __init__(self):
        self.inner, self.sizes = None, {}
        self.fingerprint, self.tokens_per_batch, self.bytes_per_token = {}, 0, None

    def __next__(self): ...


def batch_of(ids, others, groups, places):
    """A row of one document, of which the prompt is not learned. groups: of its tokens."""
    tokenizers = BothTokenizers(Nothing(), lambda _: Aligned(list(others), groups), places)
    n = len(ids)
    rows = {"tokens": ids, "targets": [*ids[1:], 0], "segments": [1] * n}
    rows["mask"] = [float(PROMPT - 1 <= i < n - 1) for i in range(n)]
    batch = {name: np.asarray([row], np.float32 if name == "mask" else np.int32) for name, row in rows.items()}
    return tokenizers.aligned_batch(batch)


@pytest.mark.parametrize("case", TRL["cases"], ids=lambda case: f"{case['name']}-{case['temperature']}-{case['hybrid']}")
def test_the_distance_and_its_gradient_equal_those_of_trl(case):
    """TRL's mean over groups is the metric; its logits at a place predict the next token, as here."""
    with jax.enable_x64(True):
        groups = [AlignedSpan(*((a + PROMPT, b + PROMPT) for a, b in pair)) for pair in align(*case["sizes"])]
        ids, others = case["ids"][0], case["teacher_ids"][0]
        batch = {name: jnp.asarray(a) for name, a in batch_of(ids, others, groups, len(others) + 2).items()}
        batch["mask"] = batch["mask"].astype(jnp.float64)
        teacher = jnp.pad(jnp.asarray(case["teacher"]), ((0, 0), (0, 2), (0, 0)))
        options = {} if case["hybrid"] is None else dict(zip(("hybrid", "matched", "beta"), (True, *case["hybrid"])))
        objective = ULD(teacher="none", temperature=case["temperature"], cross_entropy=0, weight=2, chunk=3, **options)

        def loss_of(student):
            return objective({"model": Given(student), "teacher": Given(teacher)}, batch, KEY)

        result = loss_of(jnp.asarray(case["student"]))
        assert float(result.metrics["uld"].value()) == pytest.approx(case["loss"], rel=1e-6)
        slope = jax.grad(lambda student: loss_of(student).metrics["uld"].value())(jnp.asarray(case["student"]))
        np.testing.assert_allclose(slope, case["gradient"], rtol=1e-6, atol=1e-9)
        targets = len(case["sizes"][0])
        assert float(result.loss.value()) == pytest.approx(2 * case["loss"] * len(groups) / targets, rel=1e-6)
        assert float(result.metrics["aligned"].value()) == 1


def test_sorted_distances_by_hand():
    probs, other = jnp.array([[0.1, 0.6, 0.3], [1.0, 0.0, 0.0]]), jnp.array([[0.5, 0.1, 0.2, 0.2], [0.0, 0.0, 0.0, 1.0]])
    np.testing.assert_allclose(sorted_distance(probs, other), [0.1 + 0.1 + 0.1 + 0.1, 0], atol=1e-6)
    np.testing.assert_allclose(sorted_distance(other, probs), [0.4, 0], atol=1e-6)


@pytest.mark.slow
def test_a_merged_group_by_hand():
    """Student: two tokens for what the teacher says in one. p = p1(token) p2, against q."""
    p1, p2, q = np.array([0.7, 0.2, 0.1]), np.array([0.5, 0.3, 0.2]), np.array([0.4, 0.6])
    student = jnp.log(jnp.asarray([np.ones(3) / 3, p1, p2, np.ones(3) / 3], jnp.float32))[None]
    teacher = jnp.log(jnp.asarray([np.ones(2) / 2, q, np.ones(2) / 2], jnp.float32))[None]
    batch = batch_of([0, 0, 1, 2], [0, 1, 0], [AlignedSpan((2, 4), (2, 3))], 3)
    objective = ULD(teacher="none", cross_entropy=1, weight=1.5)
    result = objective({"model": Given(student), "teacher": Given(teacher)}, {k: jnp.asarray(v) for k, v in batch.items()}, KEY)
    joint = np.sort(p1[1] * p2)[::-1]
    distance = abs(joint[0] - 0.6) + abs(joint[1] - 0.4) + joint[2]
    assert float(result.metrics["uld"].value()) == pytest.approx(distance, rel=1e-5)
    nll = -np.log(p1[1]) - np.log(p2[2])
    assert float(result.loss.value()) == pytest.approx((nll + 1.5 * distance) / 2, rel=1e-5)


def test_a_hybrid_by_hand():
    """Tokens of both as themselves, the others sorted; what one side alone has counts in full."""
    p, q = np.array([[0.5, 0.2, 0.2, 0.1]]), np.array([[0.3, 0.4, 0.3]])
    pairs = Matched(np.array([0, 2], np.int32).tobytes(), np.array([1, 2], np.int32).tobytes())
    objective = ULD(teacher="none", hybrid=True, matched=0.25, beta=0.0)
    terms = hybrid(objective, jnp.asarray(p, jnp.float32), jnp.asarray(q, jnp.float32), pairs)
    same = 0.4 * np.log(0.4 / 0.5) + 0.3 * np.log(0.3 / 0.2)
    rest = abs(0.2 - 0.3) + 0.1
    np.testing.assert_allclose(terms["matched"], [same], rtol=1e-5)
    np.testing.assert_allclose(terms["unmatched"], [rest], rtol=1e-5)
    np.testing.assert_allclose(terms["uld"], [0.25 * same + 0.75 * rest], rtol=1e-5)
    every = Matched(np.array([0, 1, 2], np.int32).tobytes(), np.array([0, 1, 2], np.int32).tobytes())
    alone = hybrid(objective, jnp.asarray(p, jnp.float32), jnp.asarray(q, jnp.float32), every)
    np.testing.assert_allclose(alone["unmatched"], [0.1], rtol=1e-5)


def test_labels_count_where_they_are_given():
    """Of two targets one is of an answer of the student's own."""
    student = jnp.log(jnp.asarray([[[0.7, 0.3], [0.4, 0.6], [0.5, 0.5]]], jnp.float32))
    batch = {k: jnp.asarray(v) for k, v in batch_of([0, 1, 0, 1], [0, 1, 0, 1], [], 4).items()}
    models = {"model": Given(jnp.pad(student, ((0, 0), (1, 0), (0, 0)))), "teacher": Given(jnp.zeros((1, 4, 3)))}
    objective = GOLD(teacher="none", cross_entropy=2)
    nll = [-np.log(0.7), -np.log(0.6)]
    for labels, expected in {(1.0, 1.0): 2 * sum(nll) / 2, (1.0, 0.0): 2 * nll[0] / 2, (0.0, 0.0): 0.0}.items():
        labels_row = jnp.asarray([[0.0, *labels, 0.0]], jnp.float32)
        result = objective(models, batch | {"labels": labels_row}, KEY)
        assert float(result.loss.value()) == pytest.approx(expected, rel=1e-5)
        assert float(result.metrics["cross_entropy"].value()) == pytest.approx(sum(nll) / 2, rel=1e-5)
        assert float(result.metrics["uld"].value()) == 0, "nothing is aligned"
