"""The objective of denoisers against its equations in numpy, and the laws of its noise levels."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from argosy.models import FAMILIES
from argosy.models.diffusion.noise import BetaNoise
from argosy.train.objectives.images.diffusion import Diffusion
from argosy.train.objectives.images.timesteps import LogitNormalTimesteps, ModeTimesteps, UniformTimesteps
from argosy.weights.build import random_model

PREDICTIONS = ("velocity", "epsilon", "v", "sample")


def batch_of(rows: int = 8, size: int = 4) -> dict[str, Any]:
    draw = np.random.default_rng(0)
    return {
        "images": jnp.asarray(draw.normal(size=(rows, size, size, 2)), jnp.float32),
        "labels": jnp.arange(rows, dtype=jnp.int32) % 3,
        "row": jnp.arange(rows, dtype=jnp.int32) + 5,
    }


class Recorded:
    """A denoiser that keeps what it was asked, and answers with a multiple of it."""

    def __init__(self, prediction: str):
        self.config = SimpleNamespace(prediction=prediction, size_multiple=1, classes_known=3)

    def __call__(self, x: Any, t: Any, conditions: Any) -> Any:
        self.x, self.t, self.conditions = x, t, conditions
        return 0.3 * x


def kept_signal() -> np.ndarray:
    """alpha^2 of Stable Diffusion's noise (Rombach et al. 2022)."""
    return np.cumprod(1 - np.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2)


@pytest.mark.parametrize("min_snr", [None, 5.0])
@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_the_loss_is_that_of_the_equations(prediction, min_snr):
    model, batch = Recorded(prediction), batch_of()
    objective = Diffusion(timesteps="uniform", min_snr=min_snr, label_dropout=0.0, betas=BetaNoise())
    loss = objective({"model": model}, batch, jax.random.key(1))
    t = np.asarray(model.t, np.float64) / 1000
    if prediction == "velocity":
        alpha, sigma = 1 - t, t
    else:
        bar = kept_signal()[np.round(t * 1000).astype(int)]
        alpha, sigma = bar**0.5, (1 - bar) ** 0.5
    image, x = np.asarray(batch["images"], np.float64), np.asarray(model.x, np.float64)
    a, s = (v[:, None, None, None] for v in (alpha, sigma))
    noise = (x - a * image) / s
    target = {"velocity": noise - image, "epsilon": noise, "v": a * noise - s * image, "sample": image}[prediction]
    error = ((target - 0.3 * x) ** 2).mean((1, 2, 3))
    weight = np.ones(8)
    if min_snr is not None:
        # The image that a prediction means, by solving for it; the weighted loss is min(SNR, gamma) times its squared error.
        output = 0.3 * x
        expected_output = {"velocity": x - s * output, "epsilon": (x - s * output) / a, "v": a * x - s * output, "sample": output}[
            prediction
        ]
        weight = np.minimum((alpha / sigma) ** 2, min_snr) * ((image - expected_output) ** 2).mean((1, 2, 3)) / error
    assert float(loss.loss.value()) == pytest.approx((weight * error).mean(), rel=1e-3)
    quarters = np.minimum((t * 4).astype(int), 3)
    for q in range(4):
        assert float(loss.metrics[f"error_q{q + 1}"].value()) == pytest.approx(error[quarters == q].mean(), rel=1e-3)


def test_noise_is_standard_new_in_each_step_and_follows_from_the_row():
    objective, batch = Diffusion(timesteps="uniform", stratified=False, label_dropout=0.0), batch_of(256)

    def noise(batch, key):
        model = Recorded("velocity")
        objective({"model": model}, batch, key)
        t = model.t[:, None, None, None] / 1000
        return np.asarray((model.x - (1 - t) * batch["images"]) / t), np.asarray(model.t)

    drawn, t = noise(batch, jax.random.key(0))
    keep = t > 100
    assert abs(drawn[keep].mean()) < 0.03
    assert abs(drawn[keep].std() - 1) < 0.03
    assert scipy.stats.kstest(t / 1000, "uniform").pvalue > 1e-3
    other, _ = noise(batch, jax.random.key(1))
    assert abs(np.corrcoef(drawn[keep].ravel(), other[keep].ravel())[0, 1]) < 0.05
    backwards = {name: a[::-1] for name, a in batch.items()}
    same, other_t = noise(backwards, jax.random.key(0))
    both = keep & (other_t[::-1] > 100)
    np.testing.assert_allclose(same[::-1][both], drawn[both], atol=1e-3)


def test_labels_are_dropped_as_often_as_asked_and_padding_counts_for_nothing():
    model, batch = Recorded("velocity"), batch_of(4000, 1)
    Diffusion(label_dropout=0.1)({"model": model}, batch, jax.random.key(0))
    labels = np.asarray(model.conditions.labels)
    dropped = labels == 3
    assert abs(dropped.mean() - 0.1) < 4 * (0.09 / 4000) ** 0.5
    assert (labels[~dropped] == np.asarray(batch["labels"])[~dropped]).all()
    batch = batch_of()
    padded = batch | {"row": batch["row"].at[5:].set(-1), "images": batch["images"].at[5:].set(1e6)}
    loss = Diffusion()({"model": Recorded("velocity")}, padded, jax.random.key(0))
    assert float(loss.loss.weight) == 5
    assert float(loss.loss.value()) < 100
    assert sum(float(m.weight) for m in loss.metrics.values()) == 5


@pytest.mark.parametrize("law, by", [
    (UniformTimesteps(), lambda u: u),
    (LogitNormalTimesteps(mean=0.5, std=0.8), lambda u: 1 / (1 + np.exp(-scipy.stats.norm(0.5, 0.8).ppf(u)))),
    (ModeTimesteps(scale=0.0), lambda u: u),
    (UniformTimesteps(shift=3.0), lambda u: 3 * u / (1 + 2 * u)),
    (UniformTimesteps(shift="size"), lambda u: 2 * u / (1 + u)),
])  # fmt: skip
def test_laws_are_quantile_functions(law, by):
    u = np.linspace(0.01, 0.99, 33)
    np.testing.assert_allclose(law.levels(jnp.asarray(u, jnp.float32), 1024), by(u), rtol=1e-4)


def test_the_mode_law_is_that_of_its_paper():
    u = jnp.asarray(np.random.default_rng(0).random(20_000), jnp.float32)
    t = np.asarray(ModeTimesteps(scale=1.29).levels(u, 16))
    v = np.random.default_rng(1).random(20_000)
    paper = 1 - v - 1.29 * (np.cos(np.pi / 2 * v) ** 2 - 1 + v)
    assert scipy.stats.ks_2samp(t, paper).pvalue > 1e-3
    rising = np.asarray(ModeTimesteps(scale=1.29).levels(jnp.linspace(0, 1, 50), 16))
    assert (np.diff(rising) > 0).all()


def test_strata_cover_the_law():
    model = Recorded("velocity")
    Diffusion(timesteps="uniform")({"model": model}, batch_of(64, 1), jax.random.key(3))
    assert (np.sort((np.asarray(model.t) / 1000 * 64).astype(int)) == np.arange(64)).all()


@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_gradients_are_finite(prediction):
    config = FAMILIES["dit"].examples()["velocity"].model_copy(update={"prediction": prediction, "channels": 2})
    model, batch = random_model(config, 0).module, batch_of()
    from argosy.train.state import split_trained
    from argosy.train.step import model_for

    graph, params, rest = split_trained(model)
    grads = jax.grad(
        lambda params: Diffusion()({"model": model_for(graph, "float32", params, rest)}, batch, jax.random.key(0)).loss.total
    )(params)
    assert all(np.isfinite(g).all() for g in grads.values())
    assert float(jnp.abs(grads["head.w"]).max()) > 0
