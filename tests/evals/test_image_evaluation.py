"""Distances between sets of images against their definitions, the judges on images that are easy to tell, and a run's figures."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import scipy.linalg
from golden_weights import write_model, write_pipeline
from helpers import Heard

import argosy
from argosy.cli import main
from argosy.core.errors import BadInput
from argosy.evals.images.captions import CaptionJudge, figures_with_real
from argosy.evals.images.distances import diversity, frechet_distance, kernel_distance, nearest_distances
from argosy.evals.images.evaluate import ImageJudges, LabeledImages
from argosy.evals.images.features import KernelJudge, train_features

GOLDENS = Path(__file__).parents[1] / "goldens" / "images"


def normal(seed, *shape, scale=1.0):
    return np.random.default_rng(seed).normal(0, scale, shape)


def test_the_frechet_distance_is_that_of_its_definition():
    first, two = normal(0, 400, 6) @ normal(1, 6, 6), normal(2, 300, 6) @ normal(3, 6, 6) + 0.5
    c1, c2 = (np.cov(x, rowvar=False) for x in (first, two))
    root = scipy.linalg.sqrtm(c1 @ c2)
    expected = ((first.mean(0) - two.mean(0)) ** 2).sum() + np.trace(c1 + c2 - 2 * root.real)
    assert frechet_distance(first, two) == pytest.approx(expected, rel=1e-4)
    assert frechet_distance(first, first) == pytest.approx(0, abs=1e-3)
    # Features that are never active.
    assert np.isfinite(frechet_distance(first * [1, 0, 1, 0, 1, 0], two * [1, 0, 0, 1, 1, 0]))


def test_the_kernel_distance_is_that_of_its_definition_and_unbiased():
    first, two = normal(0, 30, 4), normal(1, 20, 4) + 0.3
    kernel = lambda a, b: (a @ b / 4 + 1) ** 3  # noqa: E731
    within = [np.mean([kernel(a, b) for i, a in enumerate(x) for j, b in enumerate(x) if i != j]) for x in (first, two)]
    across = np.mean([kernel(a, b) for a in first for b in two])
    assert kernel_distance(first, two) == pytest.approx(within[0] + within[1] - 2 * across)
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


def test_the_width_of_the_judges_kernel_is_half_of_the_median_squared_distance():
    """Three images of one pixel at 0, 1 and 3: squared distances of 1, 4 and 9, each twice."""
    judge = KernelJudge(np.array([0.0, 1.0, 3.0]).reshape(3, 1, 1, 1), np.array([0, 1, 1]))
    assert judge.width == 2


class Given:
    """What transformers' CLIPModel makes of three images and texts."""

    def __init__(self):
        self.golden = dict(np.load(GOLDENS / "clip" / "golden.npz"))

    def embed(self, texts, normalize):
        rows = self.golden["out_texts"][["one", "two", "three"].index(texts[0]) :][: len(texts)]
        return rows / np.linalg.norm(rows, axis=1, keepdims=True)

    def cut(self, texts):
        return sum(len(text) > 4 for text in texts)

    def embed_images(self, images, normalize):
        return self.golden["out_images"] / np.linalg.norm(self.golden["out_images"], axis=1, keepdims=True)


def test_the_clip_score_is_that_of_its_definition():
    """100 max(cos, 0), the cosines being transformers' logits without their scale."""
    encoder, captions = Given(), ["one", "two", "three"]
    scale = np.linalg.norm(encoder.golden["out_scores"]) / np.linalg.norm(
        encoder.embed_images(None, True) @ encoder.embed(captions, True).T
    )
    cosines = encoder.golden["out_scores"] / scale
    judge = CaptionJudge(encoder, ["one", "one", "two", "three"])
    assert judge.cut == 1
    figures = judge.figures(judge.cosines(np.zeros((3, 2, 2, 3))), captions)
    assert (np.diag(cosines) < 0).any()
    assert figures["clip_score"] == pytest.approx(100 * np.maximum(np.diag(cosines), 0).mean(), rel=1e-5)
    others = [cosines[0, 1], cosines[1, 0], cosines[2, 0]]  # the next caption but one's own, going round twice as far each second row
    assert figures["clip_score_mismatched"] == pytest.approx(100 * np.maximum(others, 0).mean(), rel=1e-5)
    assert figures["clip_accuracy"] == (cosines.argmax(1) == np.arange(3)).mean()
    assert "clip_accuracy" not in CaptionJudge(encoder, ["one"]).figures(cosines[:1, :1], ["one"]), (
        "one caption alone is always nearest"
    )
    assert list(figures_with_real(figures, {"clip_score": 3.0, "clip_score_mismatched": 2.0, "clip_accuracy": 1.0})) == [
        "clip_score", "clip_score_real", "clip_score_mismatched", "clip_accuracy", "clip_accuracy_real"
    ]  # fmt: skip


def clip_folder(folder):
    """A small random CLIP with its tokenizer."""
    target = write_model(GOLDENS / "clip", folder)
    for file in (GOLDENS / "pipeline-sd" / "tokenizer").iterdir():
        shutil.copyfile(file, target / file.name)
    return target


def test_a_diffusers_folder_is_compared_with_captions(tmp_path, capsys):
    """Beside real images of the same captions; without captions or CLIP it is said what is missing."""
    from PIL import Image

    folder, clip = write_pipeline(GOLDENS / "pipeline-sd", tmp_path / "sd"), clip_folder(tmp_path / "clip")
    (tmp_path / "real").mkdir()
    for i, caption in enumerate(["a red fox", "nothing", "snow", "a red fox " * 20]):
        Image.fromarray(np.random.default_rng(i).integers(0, 256, (26, 30, 3), np.uint8)).save(tmp_path / "real" / f"{i}.png")
        (tmp_path / "real" / f"{i}.txt").write_text(caption, encoding="utf-8")
    words = ["eval", str(folder), "tasks=images", f"clip={clip}", "steps=1", "guidance=1", "--json"]
    assert main([*words, f"data={tmp_path / 'real'}", "limit=3"]) == 0
    figures = json.loads(capsys.readouterr().out)["tasks"]["images"]
    assert (figures["n"], figures["truncated"]) == (3, 0)
    assert {"clip_score", "clip_score_real", "clip_score_mismatched", "clip_accuracy", "clip_accuracy_real"} <= set(figures)
    pipe, judge = argosy.load(folder), argosy.load(clip)
    texts = ["a red fox", "nothing", "snow"]
    images = pipe.images(texts, steps=1, guidance=1.0, seed=[0, 1, 2], output="float")
    cosines = judge.embed_images(list(images), normalize=True) @ judge.embed(texts, normalize=True).T
    assert figures["clip_score"] == pytest.approx(100 * np.maximum(np.diag(cosines), 0).mean(), rel=1e-4)
    assert main([*words, f"data={tmp_path / 'real'}"]) == 0
    out = capsys.readouterr()
    assert json.loads(out.out)["tasks"]["images"]["truncated"] == 1
    assert "CLIP reads the beginning of 1 caption alone" in out.err
    assert main(words) == 2
    assert "compared with captions of data" in capsys.readouterr().err
    np.savez(tmp_path / "plain.npz", images=np.full((3, *pipe.defaults.size, 3), 200, np.uint8))
    assert main([*words, f"data={tmp_path / 'plain.npz'}"]) == 2
    assert "this data has no captions" in capsys.readouterr().err


def test_clip_is_no_encoder_of_sentences(tmp_path, capsys):
    rows = [json.dumps({"sentence1": "a", "sentence2": "b", "score": score}) for score in (1, 2)]
    (tmp_path / "sts.jsonl").write_text("\n".join(rows), encoding="utf-8")
    assert main(["eval", str(clip_folder(tmp_path / "clip")), "tasks=sts", f"data={tmp_path / 'sts.jsonl'}"]) == 2
    assert "this model is no encoder of sentences" in capsys.readouterr().err


def test_a_run_is_evaluated_and_keeps_its_figures(tmp_path, capsys):
    images = blobs(0, 120)
    names = ["red fox", "snow"]
    np.savez(tmp_path / "blobs.npz", images=np.clip((images.images + 2) / 4, 0, 1), labels=images.labels, class_names=names)
    sizes = ["model.size=4", "model.width=16", "model.layers=1", "model.heads=2", "model.classes=2", "model.waves=16"]
    words = [f"data.source={tmp_path / 'blobs.npz'}", "data.batch=16", f"dir={tmp_path / 'run'}", "eval.batches=1"]
    argosy.fit("diffusion", *sizes, *words, view=Heard(), steps=2)
    clip = clip_folder(tmp_path / "clip")
    assert main(["eval", str(tmp_path / "run"), "tasks=images", "limit=20", "steps=2", f"clip={clip}", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)["tasks"]["images"]
    assert figures["n"] == 20
    assert figures["fid"] > figures["fid_floor"]
    assert 0 <= figures["accuracy"] <= 1
    # Random weights: the score says nothing, but images of a class are compared with the name of that class.
    assert {"clip_score", "clip_score_real", "clip_score_mismatched", "clip_accuracy", "clip_accuracy_real"} <= set(figures)
    assert main(["eval", str(tmp_path / "run"), "tasks=images", "limit=20", f"clip={tmp_path / 'run'}"]) == 2
    assert "no CLIP with both towers" in capsys.readouterr().err
    assert main(["eval", str(clip), "tasks=perplexity", f"clip={clip}"]) == 2
    assert "only tasks=images reads this" in capsys.readouterr().err
    assert "fid_floor" in (tmp_path / "run" / "report.html").read_text()
