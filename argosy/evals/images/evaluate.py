"""Evaluates the images of a denoiser (`tasks=images`). The metrics are shown beside those of real images and of noise.

    fid, kid               the distance of generated images to held-out images
    fid_floor, kid_floor   the distance of training images to held-out images
    fid_noise, kid_noise   the distance of noise to held-out images
    accuracy               the share of generated images whose class a classifier of real images recognizes
    accuracy_real          the same for held-out images
    cas                    the accuracy on held-out images of a classifier that was trained only on generated images (Ravuri and
                           Vinyals 2019, arXiv:1905.10887)
    nearest                the median distance of generated images to the nearest training image
    nearest_real           the same for held-out images
    copies                 the share of generated images that are copies of training images
    diversity              the standard deviation within a class of generated images, divided by that of real images
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from argosy.core.errors import BadInput
from argosy.evals.images.distances import COPY, diversity, frechet_distance, kernel_distance, nearest_distances
from argosy.evals.images.features import KernelJudge, train_features


class LabeledImages(NamedTuple):
    """Images [N H W C] with pixels from -1 to 1, and the class of each image, int [N]."""

    images: np.ndarray
    labels: np.ndarray


class ImageJudges:
    """Compares generated images with real images. What depends only on real images is computed once.

    Args:
        train, held_out: the real images.
        seed: the random seed of training the feature net.
    """

    def __init__(self, train: LabeledImages, held_out: LabeledImages, seed: int = 0):
        if min(len(train.images), len(held_out.images)) < 2:
            raise BadInput("images are compared with held-out ones, and this data holds out fewer than two", hint="data.held_out=0.2")
        self.train, self.held_out = train, held_out
        self.net = train_features(train.images, train.labels, seed)
        self.judge = KernelJudge(*train)
        self.real = self.net.features(held_out.images)
        noise = np.random.default_rng(seed).uniform(-1, 1, held_out.images.shape)
        features_train, noisy = self.net.features(train.images), self.net.features(noise)
        self.bounds = {
            "fid_floor": frechet_distance(features_train, self.real),
            "fid_noise": frechet_distance(noisy, self.real),
            "kid_floor": kernel_distance(features_train, self.real),
            "kid_noise": kernel_distance(noisy, self.real),
            "accuracy_real": float((self.judge(held_out.images) == held_out.labels).mean()),
            "nearest_real": float(np.median(nearest_distances(held_out.images, train.images))),
        }

    def figures(self, drawn: LabeledImages) -> dict[str, float]:
        """The metrics of generated images, and those of real images and noise."""
        features, nearest = self.net.features(drawn.images), nearest_distances(drawn.images, self.train.images)
        several = len(np.unique(drawn.labels)) > 1
        right = self.judge(drawn.images) == drawn.labels
        figures = {
            "fid": frechet_distance(features, self.real),
            "kid": kernel_distance(features, self.real),
            "accuracy": float(right.mean()),
            "nearest": float(np.median(nearest)),
            "copies": float((nearest < COPY * self.bounds["nearest_real"]).mean()),
            "diversity": diversity(*drawn, *self.held_out),
        }
        if several:
            figures["cas"] = float((KernelJudge(*drawn)(self.held_out.images) == self.held_out.labels).mean())
        return {name: value for pair in ORDER for name in pair if (value := (figures | self.bounds).get(name)) is not None}


ORDER = (
    ("fid", "fid_floor", "fid_noise"),
    ("kid", "kid_floor", "kid_noise"),
    ("accuracy", "accuracy_real"),
    ("cas",),
    ("nearest", "nearest_real", "copies"),
    ("diversity",),
)


def images_of(rows: Any, most: int | None = None) -> LabeledImages:
    """The images of the first `most` rows of a table (None: of all rows), with their classes."""
    batch = rows.gather(np.arange(min(len(rows), most or len(rows))))
    images = batch["images"]
    return LabeledImages(images, batch.get("labels", np.zeros(len(images), np.int32)))


def draw_classes(
    pipeline: Any,
    count: int,
    seed: int = 0,
    size: tuple[int, int] | None = None,
    progress: Callable[[int, int], None] = lambda done, of: None,
    batch: int = 256,
    **sampling: Any,
) -> LabeledImages:
    """Generates `count` images, of all classes in turn. Each image begins from different noise.

    Args:
        size: the (height, width); None: the default of the pipeline.
        progress: called with the number of images that are done, and of all.
        batch: the number of images that are generated at once.
        sampling: further arguments of `pipeline.images`.
    """
    classes = pipeline.config.classes_known
    labels = np.arange(count) % max(classes, 1)
    prompts = [str(label) if classes else "" for label in labels]
    images = np.concatenate(list(draw_prompts(pipeline, prompts, seed, size, progress, batch, **sampling)))
    channels = pipeline.config.channels if pipeline.autoencoder is None else 3
    return LabeledImages(images[..., :channels] * 2 - 1, labels.astype(np.int32))


def draw_prompts(
    pipeline: Any,
    prompts: Sequence[str],
    seed: int = 0,
    size: tuple[int, int] | None = None,
    progress: Callable[[int, int], None] = lambda done, of: None,
    batch: int = 256,
    **sampling: Any,
) -> Iterator[np.ndarray]:
    """Generates an image for each prompt, each from different noise. Yields batches, float32 [B H W 3] with pixels from 0 to 1. The
    arguments are as in `draw_classes`."""
    for at in range(0, len(prompts), batch):
        some = prompts[at : at + batch]
        seeds = [seed + at + i for i in range(len(some))]
        yield pipeline.images(some, seed=seeds, size=size, output="float", batch=batch, **sampling).astype(np.float32)
        progress(at + len(some), len(prompts))
