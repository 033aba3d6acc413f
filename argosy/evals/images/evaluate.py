"""`tasks=images`: how good the images of a denoiser are, each figure beside what real images reach and what noise does.

    fid, kid         drawn images against held-out ones. `_floor`: training images against the same; `_noise`: noise
    accuracy         share of drawn images whose class the judge sees; `_real`: the judge on held-out images
    cas              a judge trained on drawn images alone, on held-out ones (Ravuri and Vinyals 2019, arXiv:1905.10887)
    nearest          median distance to the nearest training image; `_real`: that of held-out images. copies: share that are one
    diversity        deviation within a class, drawn over real
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from argosy.core.errors import BadInput
from argosy.evals.images.distances import COPY, diversity, frechet_distance, kernel_distance, nearest_distances
from argosy.evals.images.features import KernelJudge, train_features


class LabeledImages(NamedTuple):
    """Images [N H W C] from -1 to 1, and their classes [N]."""

    images: np.ndarray
    labels: np.ndarray


class ImageJudges:
    """What real images say, once for any number of drawings.

    Args:
        train, held_out: real images.
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
        """The figures of drawn images, and those beside them."""
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
    """The images of a table's rows, the first `most` of them."""
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
    """So many images, of all classes in turn, each from noise of its own."""
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
    """An image of each prompt, each from noise of its own: batches [B H W 3] float32 in 0..1."""
    for at in range(0, len(prompts), batch):
        some = prompts[at : at + batch]
        seeds = [seed + at + i for i in range(len(some))]
        yield pipeline.images(some, seed=seeds, size=size, output="float", batch=batch, **sampling).astype(np.float32)
        progress(at + len(some), len(prompts))
