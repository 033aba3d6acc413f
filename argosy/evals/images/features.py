"""Small models that judge images: a net whose hidden layer gives features, and a separate classifier.

    FeatureNet    a net, pixels -> 64 -> 32 -> classes, trained in seconds on the training images. The 32 hidden units are the features
                  for FID and KID.
    KernelJudge   a classifier by kernel ridge regression with a Gaussian kernel, in closed form. It shares nothing with the net, so
                  images that fool one of them do not fool the other.

Metrics depend on the features: an FID of this net can only be compared with an FID of this net on the same data.
"""

from dataclasses import dataclass
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np

HIDDEN = (64, 32)
# The largest number of training images of the judge, whose kernel matrix has as many rows and columns.
MOST = 4000


@dataclass(frozen=True)
class FeatureNet:
    """A small net of linear layers with ReLU.

    layers: (weight, bias) of each layer.
    scale: the number by which pixels are divided.
    """

    layers: list[tuple[np.ndarray, np.ndarray]]
    scale: float

    def features(self, images: np.ndarray) -> np.ndarray:
        """The features of images [N ...], [N 32]."""
        x = images.reshape(len(images), -1) / self.scale
        for w, b in self.layers[:-1]:
            x = np.maximum(x @ w + b, 0)
        return x


def train_features(images: np.ndarray, labels: np.ndarray, seed: int = 0, steps: int = 600, batch: int = 128) -> FeatureNet:
    """Trains the net on the classes of these images, by Adam with a learning rate of 2e-3. Without classes (one label), the weights
    stay random."""
    x, classes = images.reshape(len(images), -1).astype(np.float32), int(labels.max()) + 1
    scale = float(x.std()) or 1.0
    widths = [x.shape[1], *HIDDEN, classes]
    keys = jax.random.split(jax.random.key(seed), len(widths))
    sizes = list(pairwise(widths))
    layers = [(jax.random.normal(k, size) * (2 / size[0]) ** 0.5, jnp.zeros(size[1])) for k, size in zip(keys, sizes)]
    rows = jnp.asarray(np.random.default_rng(seed).integers(0, len(x), (steps, batch)))
    pixels, truth = jnp.asarray(x / scale), jnp.asarray(labels, jnp.int32)

    def loss(layers: list, picked: jax.Array) -> jax.Array:
        y = pixels[picked]
        for i, (w, b) in enumerate(layers):
            y = y @ w + b if i + 1 == len(layers) else jax.nn.relu(y @ w + b)
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(y), truth[picked][:, None], 1))

    def step(carry: tuple, at: tuple) -> tuple:
        layers, first, second = carry
        i, picked = at
        grads = jax.grad(loss)(layers, picked)
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, grads)
        second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, second, grads)
        n = (i + 1).astype(jnp.float32)
        rate = 2e-3 * jnp.sqrt(1 - 0.999**n) / (1 - 0.9**n)
        layers = jax.tree.map(lambda w, m, v: w - rate * m / (jnp.sqrt(v) + 1e-8), layers, first, second)
        return (layers, first, second), None

    zeros = jax.tree.map(jnp.zeros_like, layers)
    run = jax.jit(lambda layers: jax.lax.scan(step, (layers, zeros, zeros), (jnp.arange(steps), rows))[0][0])
    trained = run(layers) if classes > 1 else layers
    return FeatureNet([(np.asarray(w, np.float64), np.asarray(b, np.float64)) for w, b in trained], scale)


class KernelJudge:
    """A classifier of images by kernel ridge regression.

    Args:
        ridge: the number that is added to the diagonal of the kernel matrix.
        seed: the random seed that selects the training images, if there are more than MOST.
    """

    def __init__(self, images: np.ndarray, labels: np.ndarray, ridge: float = 1e-2, seed: int = 0):
        rows = np.random.default_rng(seed).permutation(len(images))[:MOST]
        self.points = images[rows].reshape(len(rows), -1).astype(np.float64)
        # With half of the median squared distance, the kernel distinguishes near from distant images.
        some = self.points[:500]
        distances = ((some[:, None] - some[None]) ** 2).sum(-1)
        self.width = float(np.median(distances[distances > 0])) / 2 if (distances > 0).any() else 1.0
        targets = np.eye(int(labels.max()) + 1)[labels[rows]] * 2 - 1
        self.weights = np.linalg.solve(self._kernel(self.points) + ridge * np.eye(len(rows)), targets)

    def __call__(self, images: np.ndarray) -> np.ndarray:
        """The class of each image."""
        return (self._kernel(images.reshape(len(images), -1).astype(np.float64)) @ self.weights).argmax(1)

    def _kernel(self, x: np.ndarray) -> np.ndarray:
        squared = (x * x).sum(1)[:, None] - 2 * x @ self.points.T + (self.points * self.points).sum(1)
        return np.exp(-np.clip(squared, 0, None) / self.width)
