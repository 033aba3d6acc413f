"""Distances between sets of images against their definitions, the judges on images that are easy to tell, and a run's figures."""

import json

import numpy as np
import pytest
import scipy.linalg
from helpers import Heard

import argosy
from argosy.cli import main
from argosy.core.errors import BadInput
from argosy.evals.images.distances import diversity, frechet_distance, kernel_distance, nearest_distances
from argosy.evals.images.evaluate import ImageJudges, LabeledImages
from argosy.evals.images.features import KernelJudge, train_features


def normal(seed, *shape, scale=1.0):
    return np.random.default_rng(seed).normal(0, scale, shape)


def test_the_frechet_distance_is_that_of_its_definition():
    one, two = normal(0, 400, 6) @ normal(1, 6, 6), normal(2, 300, 6) @ normal(3, 6, 6) + 0.5
    c1, c2 = (np.cov(x, rowvar=False) for x in (one, two))
    root = scipy.linalg.sqrtm(c1 @ c2)
    expected = ((one.mean(0) - two.mean(0)) ** 2).sum() + np.trace(c1 + c2 - 2 * root.real)
    assert frechet_distance(one, two) == pytest.approx(expected, rel=1e-4)
    assert frechet_distance(one, one) == pytest.approx(0, abs=1e-3)
    # Features that are never active.
    assert np.isfinite(frechet_distance(one * [1, 0, 1, 0, 1, 0], two * [1, 0, 0, 1, 1, 0]))


def test_the_kernel_distance_is_that_of_its_definition_and_unbiased():
    one, two = normal(0, 30, 4), normal(1, 20, 4) + 0.3
    kernel = lambda a, b: (a @ b / 4 + 1) ** 3  # noqa: E731
    own = [np.mean([kernel(a, b) for i, a in enumerate(x) for j, b in enumerate(x) if i != j]) for x in (one, two)]
    across = np.mean([kernel(a, b) for a in one for b in two])
    assert kernel_distance(one, two) == pytest.approx(own[0] + own[1] - 2 * across)
    same = [kernel_distance(normal(i, 50, 4), normal(1000 + i, 50, 4)) for i in range(200)]
    assert abs(np.mean(same)) < 4 * np.std(same) / 200**0.5


def test_nearest_images_and_diversity():
    images, others = normal(0, 9, 2, 3, 1), normal(1, 700, 2, 3, 1)
    brute = [min(np.linalg.norm(a - b) for b in others) for a in images]
    np.testing.assert_allclose(nearest_distances(images, others, block=4), brute, rtol=1e-6)
    assert nearest_distances(others[:3], others).max() < 1e-6
    labels = np.arange(700) % 2
    assert diversity(others * 0.5, labels, others, labels) == pytest.approx(0.5)


def blobs(seed, count):
    """Two classes of images, of which one is bright on the left."""
    labels = np.arange(count) % 2
    images = normal(seed, count, 4, 4, 1, scale=0.3) - 0.5
    images[labels == 0, :, :2] += 1
    images[labels == 1, :, 2:] += 1
    return LabeledImages(images.astype(np.float32), labels)


def test_judges_tell_good_images_from_bad_ones():
    judges = ImageJudges(blobs(0, 200), blobs(1, 100))
    good, bad = judges.figures(blobs(2, 100)), judges.figures(LabeledImages(blobs(2, 100).images, 1 - blobs(2, 100).labels))
    assert good["accuracy"] > 0.97
    assert bad["accuracy"] < 0.03
    assert good["cas"] > 0.97
    assert bad["cas"] < 0.03
    noise = judges.figures(LabeledImages(normal(3, 100, 4, 4, 1).astype(np.float32), np.arange(100) % 2))
    assert good["fid"] < 3 * good["fid_floor"] < noise["fid"]
    copied = judges.figures(judges.train)
    assert copied["copies"] == 1
    assert good["copies"] == 0
    with pytest.raises(BadInput, match="holds out fewer than two"):
        ImageJudges(blobs(0, 20), blobs(1, 1))


def test_the_net_and_the_judge_learn_the_classes_apart():
    train, test = blobs(0, 200), blobs(1, 100)
    net = train_features(*train)
    x = net.features(test.images)
    assert x.shape == (100, 32)
    logits = x @ net.layers[-1][0] + net.layers[-1][1]
    assert (logits.argmax(1) == test.labels).mean() > 0.97
    assert (KernelJudge(*train)(test.images) == test.labels).mean() > 0.97


def test_a_run_is_evaluated_and_keeps_its_figures(tmp_path, capsys):
    images = blobs(0, 120)
    np.savez(tmp_path / "blobs.npz", images=np.clip((images.images + 2) / 4, 0, 1), labels=images.labels)
    sizes = ["model.size=4", "model.width=16", "model.layers=1", "model.heads=2", "model.classes=2", "model.waves=16"]
    how = [f"data.source={tmp_path / 'blobs.npz'}", "data.batch=16", f"dir={tmp_path / 'run'}", "eval.batches=1"]
    argosy.fit("diffusion", *sizes, *how, view=Heard(), steps=2)
    assert main(["eval", str(tmp_path / "run"), "tasks=images", "limit=20", "steps=2", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)["tasks"]["images"]
    assert figures["n"] == 20
    assert figures["fid"] > figures["fid_floor"]
    assert 0 <= figures["accuracy"] <= 1
    assert "fid_floor" in (tmp_path / "run" / "report.html").read_text()
