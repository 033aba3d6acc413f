"""Computes distances between two sets of images, by their features or pixels, with numpy in double precision.

    FID        |m1 - m2|^2 + tr(C1 + C2 - 2 (C1 C2)^1/2), with the means and covariances of features. Heusel et al. 2017
               (arXiv:1706.08500)
    KID        the unbiased squared maximum mean discrepancy of features with the kernel (x y / d + 1)^3. It needs fewer images than
               FID, whose estimate is too large for few images. Binkowski et al. 2018 (arXiv:1801.01401)
    nearest    the distance of each image to the nearest image of another set, which is 0 for copies of training images
    diversity  the standard deviation of pixels within a class, divided by that of other images; below 1, images are too similar
"""

import numpy as np

# Added to the diagonal of covariances, because features that are never active make them singular.
EPS = 1e-6
# Two images whose distance is below this share of the typical distance count as copies.
COPY = 0.05


def frechet_distance(features: np.ndarray, others: np.ndarray) -> float:
    """The FID of two sets of features, [N D] and [M D]."""
    (m1, c1), (m2, c2) = (_moments(x) for x in (features, others))
    root = _root(c1)
    cross = np.sqrt(np.clip(np.linalg.eigvalsh(root @ c2 @ root), 0, None)).sum()
    return float(((m1 - m2) ** 2).sum() + np.trace(c1) + np.trace(c2) - 2 * cross)


def kernel_distance(features: np.ndarray, others: np.ndarray) -> float:
    """The KID of two sets of features, [N D] and [M D]."""
    d, x, y = features.shape[1], features.astype(np.float64), others.astype(np.float64)
    inner_means = [_off_diagonal((z @ z.T / d + 1) ** 3) for z in (x, y)]
    return float(inner_means[0] + inner_means[1] - 2 * ((x @ y.T / d + 1) ** 3).mean())


def nearest_distances(images: np.ndarray, others: np.ndarray, block: int = 512) -> np.ndarray:
    """The Euclidean distance over pixels, [N], of each image [N ...] to the nearest of the other images [M ...]."""
    b = others.reshape(len(others), -1).astype(np.float64)
    squares = (b * b).sum(1)
    distances = []
    for at in range(0, len(images), block):
        a = images[at : at + block].reshape(-1, b.shape[1]).astype(np.float64)
        distances.append(np.sqrt(np.clip((a * a).sum(1)[:, None] - 2 * a @ b.T + squares, 0, None).min(1)))
    return np.concatenate(distances)


def diversity(images: np.ndarray, labels: np.ndarray, others: np.ndarray, their_labels: np.ndarray) -> float:
    """The standard deviation of pixels within a class, divided by that of the other images in the class, as a mean over classes. 0 if
    no class has two images in both sets."""
    shares = []
    for label in np.intersect1d(labels, their_labels):
        mine, theirs = images[labels == label], others[their_labels == label]
        if len(mine) > 1 and len(theirs) > 1:
            shares.append(mine.std(0).mean() / max(theirs.std(0).mean(), 1e-9))
    return float(np.mean(shares)) if shares else 0.0


def _moments(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    x = x.astype(np.float64)
    return x.mean(0), np.cov(x, rowvar=False).reshape(x.shape[1], x.shape[1]) + EPS * np.eye(x.shape[1])


def _root(c: np.ndarray) -> np.ndarray:
    values, vectors = np.linalg.eigh(c)
    return (vectors * np.sqrt(np.clip(values, 0, None))) @ vectors.T


def _off_diagonal(k: np.ndarray) -> float:
    n = len(k)
    return float((k.sum() - np.trace(k)) / (n * (n - 1)))
