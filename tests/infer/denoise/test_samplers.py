"""Samplers, against what diffusers' schedulers draw from the same noise (`./run reference samplers`)."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from argosy.core.errors import BadInput
from argosy.infer.denoise.hub import sampler_of, scheduler_config
from argosy.infer.denoise.plan import (
    FixedParts,
    SamplingPlan,
    advance,
    fresh_noise,
    initial_state,
    pad_plan,
    row_at,
    sample,
)
from argosy.infer.denoise.settings import SAMPLERS, SamplerSettings

GOLDENS = json.loads((Path(__file__).parents[2] / "goldens" / "samplers.json").read_text())
SHAPE = (2, 3, 4, 4)


def network(x: Any, t: Any, level: Any = None) -> Any:
    return 0.6 * jnp.sin(2 * x + t / 300) + 0.3 * x * jnp.cos(t / 500)


def row_of(plan: SamplingPlan, i: int) -> SamplingPlan:
    return row_at(jax.tree.map(jnp.asarray, plan), i)


def settings_of(case: dict[str, Any]) -> SamplerSettings:
    sampler = sampler_of(case["config"])
    if "positions" in case:
        # Pipelines with dynamic shifts give levels that end at 1 / steps.
        sampler = sampler.model_copy(update={"spacing": "trailing"})
    return sampler.model_copy(update={"eta": case.get("eta", 0.0)})


def name_of(case: dict[str, Any]) -> str:
    keys = {k: v for k, v in case["config"].items() if not k.startswith(("_", "beta_start", "beta_end"))}
    return f"{case['config']['_class_name']}-{case['steps']}-{'-'.join(str(v) for v in keys.values())}"


@pytest.mark.parametrize("case", GOLDENS, ids=name_of)
def test_a_sampler_draws_what_diffusers_draws(case: dict[str, Any]):
    sampler, steps = settings_of(case), case["steps"]
    plan = SAMPLERS[sampler.name](sampler, steps, positions=case.get("positions"))
    np.testing.assert_allclose(plan.timestep, case["timesteps"], rtol=1e-5, atol=1e-3)
    noise = np.random.default_rng(7).normal(size=(2 * steps + 2, *SHAPE)).astype(np.float32)
    state = initial_state(plan, jnp.asarray(noise[0]))
    fresh = iter(noise[1:])
    with jax.enable_x64(False):
        for i in range(plan.evaluations):
            state = advance(network, state, row_of(plan, i), jnp.asarray(next(fresh)) if plan.spread[i] else None)
    sample_rows = np.asarray(state.x * plan.scale[1], np.float64).ravel()[::7]
    # diffusers' Euler keeps x / alpha in float32, which begins at thousands and is rounded there.
    rounding = 6e-8 * plan.begin[1] / plan.begin[0] if sampler.name.startswith("euler") and sampler.prediction != "velocity" else 0
    allowed = max(1e-5 * max(1, np.abs(case["sample"]).max()), rounding)
    np.testing.assert_allclose(sample_rows, case["sample"], rtol=0, atol=allowed)


def test_every_method_is_compared():
    assert {sampler_of(case["config"]).name for case in GOLDENS} == set(SAMPLERS)


@pytest.mark.parametrize("case", GOLDENS, ids=name_of)
def test_a_scheduler_config_reads_back_as_it_was_written(case: dict[str, Any]):
    sampler = sampler_of(case["config"])
    assert sampler_of(scheduler_config(sampler)) == sampler


def test_one_loop_is_the_steps_one_by_one():
    sampler = SamplerSettings(name="euler_ancestral", noise={"kind": "betas"}, prediction="epsilon")
    plan, keys = SAMPLERS[sampler.name](sampler, 5), jax.random.split(jax.random.key(3), 2)
    noise = jax.random.normal(jax.random.key(0), SHAPE)
    whole = jax.jit(sample, static_argnums=0)(network, pad_plan(plan), initial_state(plan, noise), keys, None, plan.evaluations)
    state = initial_state(plan, noise)
    for i in range(plan.evaluations):
        state = advance(network, state, row_of(plan, i), fresh_noise(keys, i, noise))
    np.testing.assert_allclose(whole, state.x * plan.scale[1], atol=1e-5)


def test_an_image_does_not_depend_on_its_neighbors():
    sampler = SamplerSettings(name="ddpm", noise={"kind": "betas"}, prediction="v")
    plan, keys = SAMPLERS[sampler.name](sampler, 4), jax.random.split(jax.random.key(3), 2)
    noise = jax.random.normal(jax.random.key(0), SHAPE)
    both, alone = (sample(network, plan, initial_state(plan, noise[at]), keys[at]) for at in (slice(0, 2), slice(1, 2)))
    np.testing.assert_array_equal(both[1], alone[0])


@pytest.mark.parametrize("name", sorted(set(SAMPLERS) - {"lcm"}))
@pytest.mark.parametrize("strength", [0.3, 0.75])
def test_image_to_image_takes_the_last_steps(name: str, strength: float):
    sampler = sampler_of(next(case["config"] for case in GOLDENS if sampler_of(case["config"]).name == name))
    whole, part = (SAMPLERS[name](sampler, 20, strength=s) for s in (1.0, strength))
    # PNDM takes its second evaluation twice, wherever it begins.
    timesteps = np.unique(part.timestep)
    np.testing.assert_array_equal(timesteps, np.unique(whole.timestep)[: len(timesteps)])
    assert len(timesteps) == (6 if strength == 0.3 else 15)
    image = jnp.ones(SHAPE)
    np.testing.assert_allclose(initial_state(part, jnp.zeros(SHAPE), image).x, part.begin[0] * image)


def test_fixed_parts_end_as_they_were():
    plan = SAMPLERS["euler"](SamplerSettings(), 6)
    image, noise = jnp.full(SHAPE, 0.25), jax.random.normal(jax.random.key(1), SHAPE)
    mask = jnp.zeros((*SHAPE[:3], 1)).at[:, 0].set(1)
    images = sample(network, plan, initial_state(plan, noise), fixed=FixedParts(mask, image, noise))
    np.testing.assert_allclose(images[:, 1:], image[:, 1:], atol=1e-6)
    assert float(jnp.max(jnp.abs(images[:, 0] - image[:, 0]))) > 0.05


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"_class_name": "EulerDiscretScheduler"}, "EulerDiscreteScheduler"),
        ({"_class_name": "DDIMScheduler", "thresholding": True}, "thresholding"),
        ({"_class_name": "PNDMScheduler"}, "skip_prk_steps"),
        ({"_class_name": "DDIMScheduler", "prediction_type": "flow_prediction"}, "flow"),
        ({"_class_name": "DPMSolverMultistepScheduler", "solver_order": 3}, "order"),
    ],
)
def test_what_is_not_built_is_refused_by_name(config: dict[str, Any], complaint: str):
    with pytest.raises(BadInput) as caught:
        sampler_of(config)
    assert complaint in str(caught.value) + str(caught.value.hint)


def test_more_steps_than_the_model_has_are_refused():
    sampler = sampler_of({"_class_name": "DDIMScheduler"})
    with pytest.raises(BadInput, match="at most 1000"):
        SAMPLERS["ddim"](sampler, 1001)
    with pytest.raises(BadInput, match="leaves none"):
        SAMPLERS["ddim"](sampler, 3, strength=0.1)
