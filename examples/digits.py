"""A digit classifier in plain Flax, exported and served: none of its code is this package's.

    python examples/digits.py digits_8x8.npz models/digits/1 [mlp]
    argosy predict models

The file has `images` [N 8 8] uint8 from 0 to 16 and `labels` [N], as scikit-learn's `load_digits` (UCI, Optical Recognition of
Handwritten Digits). A small convolution by default; `mlp` for two layers. Trains for some seconds on a CPU, tells the accuracy on the
last fifth, which it has not seen, and writes a bundle: arrays or image files in; scores, digits and their names out.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import argosy
from argosy.export.steps import DecodeImageStep, LabelsStep


class Convolution(nnx.Module):
    """Two layers of 3 x 3, then one of scores."""

    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Conv(1, 16, (3, 3), rngs=rngs)
        self.second = nnx.Conv(16, 32, (3, 3), strides=2, rngs=rngs)
        self.last = nnx.Linear(4 * 4 * 32, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.first(x[..., None]))
        x = nnx.relu(self.second(x))
        return self.last(x.reshape(x.shape[0], -1))


class MLP(nnx.Module):
    """One layer of 64, then one of scores."""

    def __init__(self, rngs: nnx.Rngs):
        self.first, self.last = nnx.Linear(64, 64, rngs=rngs), nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(nnx.relu(self.first(x.reshape(x.shape[0], -1))))


class Digits(nnx.Module):
    """What is served: images as they are stored to scores and digits."""

    def __init__(self, model: nnx.Module):
        self.model = model

    def __call__(self, image: jax.Array) -> dict[str, jax.Array]:
        scores = self.model(image.astype(jnp.float32) / 16)
        return {"scores": jax.nn.softmax(scores), "digit": jnp.argmax(scores, -1).astype(jnp.int32)}


def trained(model: nnx.Module, images: np.ndarray, labels: np.ndarray, steps: int = 400, batch: int = 64) -> nnx.Module:
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x, y):
        def loss(model):
            return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()

        value, gradients = nnx.value_and_grad(loss)(model)
        optimizer.update(model, gradients)
        return value

    draws = np.random.default_rng(0)
    for _ in range(steps):
        rows = draws.integers(len(images), size=batch)
        step(model, optimizer, jnp.asarray(images[rows], jnp.float32) / 16, jnp.asarray(labels[rows], jnp.int32))
    return model


def main(file: str, target: str, kind: str = "convolution") -> float:
    with np.load(file) as data:
        images, labels = data["images"], data["labels"]
    train_count = 4 * len(images) // 5
    model = {"convolution": Convolution, "mlp": MLP}[kind](nnx.Rngs(0))
    served = Digits(trained(model, images[:train_count], labels[:train_count]))
    predicted = np.asarray(nnx.jit(lambda served, x: served(x))(served, jnp.asarray(images[train_count:]))["digit"])
    accuracy = float(np.mean(predicted == labels[train_count:]))
    # Image files are taken too: white digits on black, as the arrays are.
    files = DecodeImageStep(height=8, width=8, channels=1, layout="HW", rescale_factor=16 / 255, background=0)
    names = LabelsStep(names=["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"])
    steps = {"preprocess": [files], "postprocess": [names]}
    argosy.export(served, (jnp.zeros((1, 8, 8), jnp.uint8),), target, batch="symbolic", description="handwritten digits", **steps)
    print(f"{accuracy:.1%} of {len(predicted)} unseen digits; {target} is written")
    return accuracy


if __name__ == "__main__":
    main(*sys.argv[1:])
