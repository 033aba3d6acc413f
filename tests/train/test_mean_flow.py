"""MeanFlow: the exact mean velocity has no loss, the target is that of its equation, and steps are told their length."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import Heard, shared

import argosy
from argosy.core.errors import BadInput, UserError
from argosy.infer.denoise.classes import ClassPrompts
from argosy.infer.denoise.pipeline import ImageDefaults, ImagePipeline
from argosy.infer.denoise.runs import sampler_for
from argosy.infer.denoise.settings import SamplerSettings
from argosy.models.diffusion.dit import DiTConfig
from argosy.train.objectives.images.mean_flow import MeanFlow
from argosy.weights.build import random_model

CONFIG = SimpleNamespace(prediction="velocity", size_multiple=1, classes_known=3)


def batch_of(rows: int, images: Any = None) -> dict[str, Any]:
    draw = np.random.default_rng(0)
    images = draw.normal(size=(rows, 4, 4, 2)) if images is None else images
    return {
        "images": jnp.asarray(images, jnp.float32),
        "labels": jnp.arange(rows, dtype=jnp.int32) % 3,
        "row": jnp.arange(rows, dtype=jnp.int32),
    }


class Function:
    """A denoiser that is a function of the image, the time and the interval in 0..1; keeps what it was asked first."""

    config = CONFIG

    def __init__(self, function: Any):
        self.function, self.asked = function, []

    def __call__(self, x: Any, t: Any, conditions: Any) -> Any:
        self.asked.append((x, t, conditions.interval))
        wide = [a[:, None, None, None] / 1000 for a in (t, conditions.interval)]
        return self.function(x, *wide)


def test_the_exact_mean_velocity_has_no_loss():
    # All images are one, c: lines go straight to it, so that the mean velocity over any interval is (x - c) / t.
    c = np.random.default_rng(1).normal(size=(4, 4, 2))
    batch = batch_of(32, np.repeat(c[None], 32, 0))
    for equal in (0.0, 0.5):
        objective = MeanFlow(equal=equal, power=0.0, label_dropout=0.0)
        exact = objective({"model": Function(lambda x, t, h: (x - c) / t)}, batch, jax.random.key(0))
        assert float(exact.loss.value()) < 1e-6
        # One that leaves out the interval's part of the target, and one that is wrong by a little.
        wrong = objective({"model": Function(lambda x, t, h: (x - c) / t + 0.1 * h)}, batch, jax.random.key(0))
        assert float(wrong.loss.value()) > 1e-4


@pytest.mark.parametrize("power", [0.0, 1.0])
def test_the_target_is_that_of_the_equation(power):
    def smooth(x, t, h):
        return jnp.sin(x + 2 * t) * (1 + h) + 0.3 * h * x

    model, batch = Function(smooth), batch_of(16)
    loss = MeanFlow(equal=0.25, power=power, label_dropout=0.0)({"model": model}, batch, jax.random.key(2))
    x, t, h = (np.asarray(getattr(a, "primal", a), np.float64) for a in model.asked[0])
    with jax.enable_x64():
        t, h = t[:, None, None, None] / 1000, h[:, None, None, None] / 1000
        image = np.asarray(batch["images"], np.float64)
        noise = (x - (1 - t) * image) / t
        v, e = noise - image, 1e-5
        slope = (np.asarray(smooth(x + e * v, t + e, h + e)) - np.asarray(smooth(x - e * v, t - e, h - e))) / (2 * e)
        error = ((np.asarray(smooth(x, t, h)) - (v - h * slope)) ** 2).mean((1, 2, 3))
    assert ((h > 0) & (h <= t)).mean() > 0.5
    assert 0 < (h == 0).mean() < 0.6
    assert float(loss.loss.value()) == pytest.approx((error / (error + 1e-3) ** power).mean(), rel=1e-3)
    assert float(loss.metrics["error"].value()) == pytest.approx(error.mean(), rel=1e-3)


def test_gradients_do_not_flow_through_the_target():
    batch = batch_of(8)

    def loss(w):
        model = Function(lambda x, t, h: w * x * (1 + h))
        return MeanFlow(equal=0.0, power=0.0)({"model": model}, batch, jax.random.key(0)).loss.value()

    def parts(w, is_kept):
        model = Function(lambda x, t, h: jnp.where(is_kept, w, jax.lax.stop_gradient(w)) * x * (1 + h))
        return MeanFlow(equal=0.0, power=0.0)({"model": model}, batch, jax.random.key(0)).loss.value()

    assert float(jax.grad(loss)(0.5)) == pytest.approx(float(jax.grad(parts)(0.5, True)))
    # The loss itself, with its target, has another slope.
    e = 1e-2
    assert float(jax.grad(loss)(0.5)) != pytest.approx(float((loss(0.5 + e) - loss(0.5 - e)) / (2 * e)), rel=1e-2)


def test_steps_are_told_their_length():
    config = DiTConfig(channels=1, size=4, patch=2, width=16, layers=1, heads=2, classes=3, waves=8, intervals=True)
    module = random_model(config, 0).module
    intervals = []
    call = type(module).__call__

    def recording(self, x, t, conditions):
        jax.debug.callback(lambda t, h: intervals.append((float(t), float(h))), t[0], conditions.interval[0])
        return call(self, x, t, conditions)

    kind = type("Recording", (type(module),), {"__call__": recording})
    module.__class__ = kind
    pipe = ImagePipeline(module, ClassPrompts(3), sampler_for(config, MeanFlow()), ImageDefaults(4, 1.0, (4, 4)))
    pipe.images(["1"], steps=4)
    jax.effects_barrier()
    times = [1000 * i / 4 for i in (4, 3, 2, 1)]
    np.testing.assert_allclose(intervals, [(t, 250) for t in times], rtol=1e-4)
    with pytest.raises(BadInput, match="which Euler's method takes"):
        pipe.images(["1"], steps=4, sampler=SamplerSettings(name="heun"))


@pytest.mark.parametrize("words, problem", [
    (["objective=mean_flow"], "models that read intervals: model.family=dit model.intervals=true"),
    (["model.intervals=true"], r"model\.intervals is for objective=mean_flow"),
    (["objective=mean_flow", "model.intervals=true", "model.prediction=epsilon"], "trains velocities"),
    (["objective=mean_flow", "model.intervals=true", "execution.products=amx"], "differentiates the model forward"),
    (["objective=mean_flow", "model.intervals=true", "execution.attention=blocked"], "execution.attention=blocked does not"),
])  # fmt: skip
def test_mistakes_are_named(tmp_path, words, problem):
    common = [f"data.source={shared('images/digits_8x8.npz')}", "data.image.white=16", f"dir={tmp_path / 'run'}"]
    with pytest.raises(UserError, match=problem):
        argosy.fit("diffusion", *common, *words, view=Heard(), steps=1)


@pytest.mark.slow
def test_a_run_takes_steps(tmp_path):
    """Its loss is differentiated forward inside a backward pass, when memory is predicted too."""
    words = [f"data.source={shared('images/digits_8x8.npz')}", "data.image.white=16", "objective=mean_flow", "model.intervals=true"]
    outcome = argosy.fit("diffusion", *words, f"dir={tmp_path / 'run'}", "sample.every=none", view=Heard(), steps=2)
    assert outcome.step == 2
