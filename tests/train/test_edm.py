"""EDM: the loss against the paper's table, an exact denoiser, drawing back to the data, and what does not combine."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from helpers import Heard

import argosy
from argosy.core.errors import UserError
from argosy.infer.denoise.plan import initial_state, sample
from argosy.infer.denoise.runs import sampler_for
from argosy.infer.denoise.settings import SAMPLERS, SamplerSettings
from argosy.models.diffusion.noise import EDMNoise
from argosy.train.objectives.images.edm import EDM

D = 0.7  # sigma_data


def batch_of(rows: int) -> dict[str, Any]:
    images = D * np.random.default_rng(0).normal(size=(rows, 4, 4, 2))
    row = jnp.arange(rows, dtype=jnp.int32)
    return {"images": jnp.asarray(images, jnp.float32), "labels": row % 3, "row": row + 5}


class Network:
    """F as a function of its input and of s; keeps what it was asked."""

    def __init__(self, function: Any, prediction: str = "edm"):
        self.config = SimpleNamespace(prediction=prediction, size_multiple=1, classes_known=3, conditions=frozenset())
        self.function = function

    def __call__(self, x: Any, t: Any, conditions: Any) -> Any:
        self.x, self.t = x, t
        return self.function(x, jnp.exp(4 * t)[:, None, None, None])


@pytest.mark.parametrize(("prediction", "sign"), [("edm", 1), ("v", -1)])
def test_the_loss_is_that_of_the_papers_table(prediction: str, sign: int):
    """lambda (D(y) - image)^2 with c_skip, c_out, c_in, c_noise and lambda of table 1, in float64."""
    network, batch = Network(lambda x, s: sign * 0.3 * x, prediction), batch_of(64)
    loss = EDM(label_dropout=0.0, noise=EDMNoise(sigma_data=D))({"model": network}, batch, jax.random.key(1)).loss.value()
    s = np.exp(4 * np.asarray(network.t, np.float64))
    wide = s[:, None, None, None]
    c_in, c_skip, c_out = (wide**2 + D**2) ** -0.5, D**2 / (wide**2 + D**2), wide * D / (wide**2 + D**2) ** 0.5
    image, x = np.asarray(batch["images"], np.float64), np.asarray(network.x, np.float64)
    y = x / c_in
    denoised = c_skip * y + c_out * 0.3 * x
    expected = np.mean((wide**2 + D**2) / (wide * D) ** 2 * (denoised - image) ** 2)
    assert float(loss) == pytest.approx(expected, rel=1e-4)
    noise = (y - image) / wide
    assert abs(noise.mean()) < 0.1
    assert noise.std() == pytest.approx(1, abs=0.05)
    # log s is normal with the paper's mean and deviation.
    assert scipy.stats.kstest(np.log(s), "norm", args=(-1.2, 1.2)).pvalue > 0.5


def test_times_at_either_end_are_finite():
    """A uniform law draws 0 now and then, where log s is not finite."""
    levels = EDM(noise=EDMNoise(sigma_data=D)).levels_at("edm", jnp.asarray([0.0, 1.0]))
    assert all(np.isfinite(column).all() for column in levels)
    timestep, alpha, sigma = levels
    assert timestep[0] < -3 < 3 < timestep[1]
    np.testing.assert_allclose(D**2 * alpha**2 + sigma**2, 1, rtol=1e-5)


def test_inputs_and_targets_have_variance_one():
    """F of the best denoiser of normal data is 0: c_skip alone is the answer, and the loss is 1."""
    network = Network(lambda x, s: 0 * x)
    loss = EDM(label_dropout=0.0, noise=EDMNoise(sigma_data=D))({"model": network}, batch_of(2000), jax.random.key(0)).loss.value()
    assert float(loss) == pytest.approx(1, abs=0.02)
    assert float(network.x.std()) == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("method", ["heun", "euler", "dpmpp_2m"])
@pytest.mark.parametrize(("prediction", "sign"), [("edm", 1), ("v", -1)])
def test_the_exact_network_draws_the_data(method: str, prediction: str, sign: int):
    """Normal data with mean m and deviation 1/2, whose denoiser is linear: its ODE moves noise to m + e / 2."""
    m, deviation, noise = 0.4, 0.5, EDMNoise(sigma_data=D)

    def exact(x: Any, s: Any) -> Any:
        alpha = (s**2 + D**2) ** -0.5
        best = (deviation**2 * x / alpha + s**2 * m) / (deviation**2 + s**2)
        return sign * (best - D**2 * alpha * x) / (s * D * alpha)

    network, sampler = Network(exact, prediction), SamplerSettings(name=method, noise=noise, prediction=prediction, levels="karras")
    plan = SAMPLERS[method](sampler, 400)
    e = jax.random.normal(jax.random.key(0), (4, 3, 3, 1))
    images = sample(lambda x, t, level: network(x, jnp.full(len(x), t), None), plan, initial_state(plan, e))
    np.testing.assert_allclose(images, m + deviation * e, atol=0.03 if method == "euler" else 3e-3)


def test_a_run_draws_by_its_own_noise(tmp_path: Any):
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "noise.npz", images=rng.integers(0, 256, (60, 8, 8), np.uint8), labels=rng.integers(0, 3, 60))
    words = ["diffusion", "objective=edm", "model.prediction=edm", "objective.noise.sigma_data=0.6", "model.width=32", "model.layers=2"]
    words += ["model.heads=2", "model.waves=16", "model.classes=3", "data.batch=16", "eval.batches=2", "mesh.data=1"]
    words += [f"data.source={tmp_path / 'noise.npz'}", f"dir={tmp_path / 'run'}"]
    argosy.fit(*words, view=Heard(), steps=3)
    pipe = argosy.load(tmp_path / "run")
    assert pipe.sampler == sampler_for(pipe.config, EDM(noise=EDMNoise(sigma_data=0.6)))
    assert (pipe.sampler.name, pipe.sampler.noise.sigma_data) == ("heun", 0.6)
    assert np.isfinite(pipe.images("1", steps=4, output="latents")).all()


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["objective=edm"], "objective=edm trains model.prediction=edm or v"),
        (["model.prediction=edm"], "model.prediction = edm is for objective=edm"),
        (["objective=edm", "model.prediction=edm", "objective.min_snr=5"], "objective.min_snr is not for objective=edm"),
        (["objective=edm", "model.prediction=edm", "objective.betas.start=0.1"], "objective.betas is not for objective=edm"),
        (["objective=edm", "model.prediction=edm", "objective.noise.sigma_max=0.001"], "is not below sigma_max"),
    ],
)
def test_what_does_not_combine_is_refused(more: list[str], says: str, tmp_path: Any):
    np.savez(tmp_path / "x.npz", images=np.zeros((60, 8, 8), np.uint8), labels=np.arange(60) % 3)
    with pytest.raises(UserError) as caught:
        argosy.fit("diffusion", *more, f"data.source={tmp_path / 'x.npz'}", f"dir={tmp_path / 'run'}", view=Heard(), steps=1)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"name": "ddim", "noise": {"kind": "edm"}, "prediction": "edm", "levels": "karras"}, "ddim does not follow noise.kind = edm"),
        ({"name": "euler", "noise": {"kind": "edm"}, "prediction": "edm"}, "levels = timesteps"),
        ({"name": "euler", "noise": {"kind": "edm"}, "prediction": "epsilon", "levels": "karras"}, "is of prediction = edm or v"),
        ({"name": "euler", "noise": {"kind": "betas"}, "prediction": "edm"}, "set noise.kind = edm"),
    ],
)
def test_samplers_that_do_not_fit_are_refused(options: dict[str, Any], says: str):
    with pytest.raises(ValueError, match=says):
        SamplerSettings(**options)
