"""Losses over whole texts against their equations, written out in NumPy: what counts as a negative, padding, packing, and widths."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from argosy.models import FAMILIES
from argosy.models.parts.texts import text_vectors
from argosy.train.objectives.texts.batch import text_hashes, unit_rows
from argosy.train.objectives.texts.contrastive import Contrastive, contrastive_loss
from argosy.train.objectives.texts.rerank import Rerank, reranking_loss
from argosy.train.objectives.texts.similarity import Similarity, similarity_loss
from argosy.weights.build import random_model


@pytest.fixture(scope="module")
def encoder():
    config = FAMILIES["bert"].examples()["plain"]
    return random_model(config, 0).module


def batch_of(texts, length=12, slots=1):
    """Rows of texts, `slots` to a row; an empty text leaves its slot empty."""
    rows = len(texts) // slots
    tokens, segments, live = np.zeros((rows, length), np.int32), np.zeros((rows, length), np.int32), np.zeros((rows, slots), np.float32)
    for number, text in enumerate(texts):
        row, slot = divmod(number, slots)
        at = int((segments[row] > 0).sum())
        tokens[row, at : at + len(text)], segments[row, at : at + len(text)] = text, slot + 1
        live[row, slot] = bool(text)
    return {"tokens": jnp.asarray(tokens), "segments": jnp.asarray(segments), "live": jnp.asarray(live)}


def vectors_of(encoder, texts, pooling="mean"):
    """Each text alone."""
    rows = [(jnp.asarray([text], jnp.int32), jnp.ones((1, len(text)), jnp.int32)) for text in texts]
    return [np.asarray(text_vectors(encoder, *row, pooling)[0][0, 0]) for row in rows]


def cosine(a, b):
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def by_hand(anchors, documents, texts, scale):
    """The loss of each anchor. A document with the same tokens as its positive is no negative."""
    each = []
    for i, a in enumerate(anchors):
        others = [j for j in range(len(documents)) if j == i or texts[j] != texts[i]]
        scores = np.array([scale * cosine(a, documents[j]) for j in others])
        each.append(np.log(np.exp(scores).sum()) - scale * cosine(a, documents[i]))
    return np.array(each)


ANCHORS = [[1, 5, 9], [2, 7], [3, 3, 4, 8], [6, 2]]
POSITIVES = [[4, 4], [5, 1, 7], [4, 4], [9, 9, 9, 1]]  # the first and the third are equal
NEGATIVES = [[8], [7, 7], [2, 1], [5, 6]]


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_each_anchor_is_compared_with_the_documents_of_all(encoder, pooling):
    texts = [text for group in zip(ANCHORS, POSITIVES) for text in group]
    loss = Contrastive(pooling=pooling)({"model": encoder}, batch_of(texts), None)
    documents = vectors_of(encoder, POSITIVES, pooling)
    expected = by_hand(vectors_of(encoder, ANCHORS, pooling), documents, POSITIVES, 20.0)
    assert float(loss.loss.value()) == pytest.approx(expected.mean(), rel=2e-4)
    # Of three others, one is the same text for the first and the third.
    assert float(loss.metrics["negatives"].value()) == pytest.approx((2 + 3 + 2 + 3) / 4)


def test_negatives_of_records_are_negatives_of_every_anchor(encoder):
    texts = [text for group in zip(ANCHORS, POSITIVES, NEGATIVES) for text in group]
    loss = Contrastive(negatives=1, scale=7)({"model": encoder}, batch_of(texts), None)
    documents = vectors_of(encoder, [*POSITIVES, *NEGATIVES])
    expected = by_hand(vectors_of(encoder, ANCHORS), documents, [*POSITIVES, *NEGATIVES], 7.0)
    assert float(loss.loss.value()) == pytest.approx(expected.mean(), rel=2e-4)


def test_all_negatives_of_all_records_are_compared_with_and_missing_ones_are_not(encoder):
    """Three negatives a record, of which some records lack one, two or all; by hand in float64."""
    more = [[[8], [7, 7], [2, 1]], [[5, 6], [], []], [[], [], []], [[1, 1], [9, 2, 5], []]]
    texts = [text for group in zip(ANCHORS, POSITIVES, *zip(*more)) for text in group]
    batch = batch_of(texts)
    # The tokens of an empty slot are read by nobody.
    batch["tokens"] = jnp.where(batch["segments"] > 0, batch["tokens"], 11)
    settings = Contrastive(negatives=3, scale=7)
    loss = settings({"model": encoder}, batch, None)
    documents = [*POSITIVES, *[text for each in more for text in each if text]]
    anchors, vectors = ([v.astype(np.float64) for v in vectors_of(encoder, some)] for some in (ANCHORS, documents))
    assert float(loss.loss.value()) == pytest.approx(by_hand(anchors, vectors, documents, 7.0).mean(), rel=2e-5)
    # 4 positives and 6 negatives, without the own positive and its twin.
    assert float(loss.metrics["negatives"].value()) == pytest.approx((8 + 9 + 8 + 9) / 4)
    graph, weights = nnx.split(encoder, nnx.Param)[0], nnx.state(encoder, nnx.Param)
    rest = nnx.state(encoder, nnx.Not(nnx.Param))
    gradient = jax.grad(lambda w: settings({"model": nnx.merge(graph, w, rest)}, batch, None).loss.total)(weights)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


@pytest.mark.parametrize("pooling", ["mean", "max", "last", "cls"])
def test_prompts_may_be_left_out_of_vectors(encoder, pooling):
    texts = [text for group in zip(ANCHORS, POSITIVES) for text in group]
    sizes = [1, 0, 1, 2, 0, 1, 1, 3]
    batch = batch_of(texts) | {"prompt_length": jnp.asarray(sizes, jnp.float32)[:, None]}
    loss = Contrastive(pooling=pooling, include_prompt=False)({"model": encoder}, batch, None)
    pooled = []
    for text, size in zip(texts, sizes):
        row = jnp.asarray([text], jnp.int32)
        x = np.asarray(encoder.hidden(row, encoder.config.attend(jnp.ones_like(row)))[0][0])[size:]
        pooled.append({"mean": x.mean(0), "max": x.max(0), "last": x[-1], "cls": x[0]}[pooling])
    expected = by_hand(pooled[::2], pooled[1::2], POSITIVES, 20.0)
    assert float(loss.loss.value()) == pytest.approx(expected.mean(), rel=2e-4)


def test_packing_and_empty_slots_change_nothing(encoder):
    """Three pairs in two rows of two slots each: the slot that is empty counts nowhere, and its gradient is finite."""
    plain = batch_of([text for group in list(zip(ANCHORS, POSITIVES))[:3] for text in group])
    packed = batch_of([ANCHORS[0], ANCHORS[1], POSITIVES[0], POSITIVES[1], ANCHORS[2], [], POSITIVES[2], []], slots=2)
    for settings in (Contrastive(), Contrastive(symmetric=True), Contrastive(dimensions=[4, 8], pooling="max")):
        losses = [settings({"model": encoder}, batch, None).loss.value() for batch in (plain, packed)]
        assert float(losses[0]) == pytest.approx(float(losses[1]), rel=1e-4)
    vectors, live = jnp.zeros((3, 4)), jnp.asarray([True, False, True])
    keys = jnp.arange(3, dtype=jnp.uint32)
    gradient = jax.grad(lambda v: contrastive_loss(Contrastive(symmetric=True), v, keys, live, v, keys, live).loss.total)(vectors)
    assert np.isfinite(gradient).all()


def test_both_directions_and_first_numbers_are_means():
    rng = np.random.default_rng(0)
    anchors, documents = (rng.normal(size=(5, 8)).astype(np.float32) for _ in range(2))
    keys = jnp.arange(5, dtype=jnp.uint32)
    live = jnp.ones(5, bool)

    def loss(settings, a=anchors, d=documents):
        return float(contrastive_loss(settings, jnp.asarray(a), keys, live, jnp.asarray(d), keys, live).loss.value())

    texts = [[i] for i in range(5)]
    there, back = by_hand(anchors, documents, texts, 20.0).mean(), by_hand(documents, anchors, texts, 20.0).mean()
    assert loss(Contrastive(symmetric=True)) == pytest.approx((there + back) / 2, rel=1e-4)
    short = by_hand(anchors[:, :3], documents[:, :3], texts, 20.0).mean()
    assert loss(Contrastive(dimensions=[3, 8])) == pytest.approx((there + short) / 2, rel=1e-4)


def test_ranks_are_among_the_documents_that_may_be_negatives():
    """Recall and reciprocal rank over all documents that count, by sorting; one of them is a twin of a positive, one is empty."""
    rng = np.random.default_rng(4)
    anchors, documents = rng.normal(size=(12, 4)).astype(np.float32), rng.normal(size=(14, 4)).astype(np.float32)
    keys, there = np.arange(14, dtype=np.uint32), np.arange(14) != 12
    keys[3] = keys[0]
    arguments = (jnp.asarray(anchors), jnp.arange(12, dtype=jnp.uint32), jnp.ones(12, bool))
    metrics = contrastive_loss(Contrastive(), *arguments, jnp.asarray(documents), jnp.asarray(keys), jnp.asarray(there)).metrics
    ranks, others = [], []
    for i, anchor in enumerate(anchors):
        against = [cosine(anchor, documents[j]) for j in range(14) if there[j] and keys[j] != keys[i]]
        ranks.append(sum(score > cosine(anchor, documents[i]) for score in against))
        others.append(np.mean(against))
    assert 0 < ranks.count(0) < 12
    assert float(metrics["recall@1"].value()) == pytest.approx(ranks.count(0) / 12)
    assert float(metrics["recall@10"].value()) == pytest.approx(sum(rank < 10 for rank in ranks) / 12)
    assert float(metrics["mrr"].value()) == pytest.approx(np.mean([1 / (1 + rank) for rank in ranks]), rel=1e-5)
    assert float(metrics["cosine/negative"].value()) == pytest.approx(np.mean(others), abs=1e-5)


def test_losses_equal_those_of_sentence_transformers():
    """compute_loss_from_embeddings of MultipleNegativesRankingLoss (both directions by MultipleNegativesSymmetricRankingLoss) and
    CoSENTLoss, sentence-transformers 6.2.0, on these vectors."""
    rng, live, keys = np.random.default_rng(5), jnp.ones(6, bool), jnp.arange(30, dtype=jnp.uint32)
    a, p, n = (jnp.asarray(rng.normal(size=(6, 16)).astype(np.float32)) for _ in range(3))
    both, there = jnp.concatenate([p, n]), jnp.ones(24, bool)

    def loss(settings, documents):
        count = len(documents)
        return float(contrastive_loss(settings, a, keys[24:], live, documents, keys[:count], there[:count]).loss.value())

    assert loss(Contrastive(), p) == pytest.approx(8.212372779846191, rel=1e-6)
    assert loss(Contrastive(), both) == pytest.approx(8.909858703613281, rel=1e-6)
    more = jnp.concatenate([both, *(jnp.asarray(rng.normal(size=(6, 16)).astype(np.float32)) for _ in range(2))])
    assert loss(Contrastive(negatives=3), more) == pytest.approx(12.272549629211426, rel=1e-6)
    assert loss(Contrastive(negatives=3, scale=7), more) == pytest.approx(5.320077896118164, rel=1e-6)
    assert loss(Contrastive(scale=7), p) == pytest.approx(3.601745843887329, rel=1e-6)
    assert loss(Contrastive(symmetric=True), p) == pytest.approx(8.216635704040527, rel=1e-6)
    label = jnp.asarray([3.0, 1, 4, 1, 5, 9])[:, None]
    graded = similarity_loss(Similarity(), jnp.sum(unit_rows(a) * unit_rows(p), -1)[:, None], label, jnp.ones((6, 1)))
    assert float(graded.loss.value()) == pytest.approx(17.038944244384766, rel=1e-6)


def test_hashes_tell_texts_apart_wherever_they_stand():
    batch = batch_of([[1, 2, 3], [3, 2, 1], [7], [1, 2, 3], [1, 2, 3, 0], [0]], slots=2)
    hashes = np.asarray(text_hashes(batch)).reshape(-1).tolist()
    assert hashes[0] == hashes[3]
    assert len(set(hashes)) == 5


def test_pairs_are_ordered_by_their_scores():
    """Every two pairs of which one has the higher score, by two loops."""
    rng = np.random.default_rng(1)
    cosines, label, live = rng.uniform(-1, 1, 6), np.array([5, 1, 3, 3, 0, 9.0]), np.array([1, 1, 1, 1, 1, 0.0])
    terms = [np.exp(20 * (cosines[j] - cosines[i])) for i in range(5) for j in range(5) if label[i] > label[j]]
    right = [float(cosines[i] > cosines[j]) for i in range(5) for j in range(5) if label[i] > label[j]]
    loss = similarity_loss(Similarity(), *(jnp.asarray(a, jnp.float32)[:, None] for a in (cosines, label, live)))
    assert float(loss.loss.value()) == pytest.approx(np.log1p(sum(terms)), rel=1e-5)
    assert float(loss.metrics["ordered"].value()) == pytest.approx(np.mean(right))


@pytest.mark.parametrize("kind", ["pairwise", "pointwise"])
def test_documents_that_answer_score_above_others(kind):
    right, wrong, live = np.array([2.0, -1, 0, 50]), np.array([1.0, 3, 0, -50]), np.array([1, 1, 1, 0.0])

    def nll(x):
        return np.log1p(np.exp(-x))

    each = nll(right - wrong) if kind == "pairwise" else (nll(right) + nll(-wrong)) / 2
    loss = reranking_loss(Rerank(loss=kind), *(jnp.asarray(a, jnp.float32)[:, None] for a in (right, wrong, live)))
    assert float(loss.loss.value()) == pytest.approx(each[:3].mean(), rel=1e-5)
    assert float(loss.metrics["accuracy"].value()) == pytest.approx((1 + 0 + 0.5) / 3)


def test_a_vector_of_zeros_has_a_finite_gradient():
    assert np.isfinite(jax.grad(lambda v: unit_rows(v).sum())(jnp.zeros((2, 3)))).all()
