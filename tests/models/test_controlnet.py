"""ControlNets of UNets against diffusers (tests/reference/images.py), their counts and names, and how they begin."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_weights import write_model
from helpers import relative
from safetensors.numpy import load_file

from argosy.checkpoint.open import open_model
from argosy.core.keymap import KeyMap
from argosy.jobs.convert import convert
from argosy.models.blocks.controlnets.unet import ControlledUNet
from argosy.models.diffusion.base import Conditions
from argosy.models.diffusion.controlnets.unet import ControlNetConfig
from argosy.models.diffusion.unet import UNetConfig
from argosy.models.parts.stack.addresses import layer_addresses
from argosy.models.parts.weight import abstract, fill, parameter_count, variables
from argosy.observe.flops import contraction_flops
from argosy.weights.build import load_model

GOLDENS = Path(__file__).parents[1] / "goldens" / "images"
TOLERANCE = 1e-5  # of the largest number
NAMES = ["controlnet-sd", "controlnet-xl"]


def channels_last(a: np.ndarray) -> jnp.ndarray:
    return jnp.asarray(np.moveaxis(a, 1, -1))


@pytest.mark.parametrize("name", NAMES)
def test_it_is_that_of_diffusers(name: str, tmp_path: Path):
    """Plain, and in guess mode at a scale of 0.75."""
    golden = dict(np.load(GOLDENS / name / "golden.npz"))
    model = load_model(open_model(write_model(GOLDENS / name, tmp_path / name))).module
    fields = {key: jnp.asarray(golden[key]) for key in ("text", "pooled", "sizes") if key in golden}
    scales = 0.75 * np.logspace(-1, 0, len(model.config.residual_channels) + 1, dtype=np.float32)
    for key, scale in (("residuals", None), ("guessed", np.tile(scales, (2, 1)))):
        inputs = channels_last(golden["latents"]), jnp.asarray(golden["timestep"]), Conditions(**fields)
        residuals = jax.jit(model)(*inputs, channels_last(golden["control"]), None if scale is None else jnp.asarray(scale))
        assert [residual.shape[-1] for residual in residuals] == [*model.config.residual_channels, model.config.widths[-1]]
        flat = jnp.concatenate([jnp.moveaxis(residual, -1, 1).reshape(2, -1) for residual in residuals], 1)
        assert relative(flat, golden[f"out_{key}"]) < TOLERANCE


@pytest.mark.parametrize("name", NAMES)
def test_folder_to_argosy_to_folder_is_exact(name: str, tmp_path: Path):
    """Tensors bit for bit, under the names of diffusers' files; of config.json every key that it had."""
    folder = write_model(GOLDENS / name, tmp_path / name)
    convert(str(folder), tmp_path / "argosy", "argosy", None)
    convert(str(tmp_path / "argosy"), tmp_path / "hub", "hub", None)
    theirs, ours = load_file(folder / "model.safetensors"), load_file(tmp_path / "hub" / "diffusion_pytorch_model.safetensors")
    assert theirs.keys() == ours.keys()
    assert all((ours[n] == w).all() for n, w in theirs.items())
    source_config, saved_config = (json.loads((at / "config.json").read_text(encoding="utf-8")) for at in (folder, tmp_path / "hub"))
    assert saved_config == source_config


def inputs_of(config: UNetConfig) -> tuple[Any, Any, Conditions]:
    draw = np.random.default_rng(1)
    normal = lambda *shape: jnp.asarray(draw.normal(size=shape), jnp.float32)  # noqa: E731
    pooled = {} if config.pooled_width is None else {"pooled": normal(2, config.pooled_width)}
    control = jnp.asarray(draw.random((2, 12, 8, 3)), jnp.float32)
    return normal(2, 6, 4, config.channels), jnp.asarray([20.0, 900.0]), Conditions(text=normal(2, 5, 10), control=(control,), **pooled)


@pytest.mark.parametrize("name", ["sd", "xl"])
def test_counts_and_names_are_those_of_what_is_built(name: str):
    config, unet = ControlNetConfig.examples()[name], UNetConfig.examples()[name]
    model = config.build()
    fill(model, jax.random.key(0), addresses=layer_addresses(model))
    assert parameter_count(abstract(model)) == config.parameters()
    assert set(KeyMap(*config.hub_rows()).paths) == set(variables(model))
    latents, *rest = inputs_of(unet)
    traced = contraction_flops(jax.make_jaxpr(lambda x: model(x, *rest, rest[1].control[0]))(latents).jaxpr)
    assert traced == 2 * config.flops(3 * 2)


def test_it_begins_without_effect():
    unet, config = UNetConfig.examples()["sd"].build(), ControlNetConfig.examples()["sd"]
    controlnet = config.build()
    for i, model in enumerate((unet, controlnet)):
        fill(model, jax.random.key(i), addresses=layer_addresses(model))
    inputs = inputs_of(unet.config)
    steered, free = jax.jit(lambda *inputs: (ControlledUNet(unet, [controlnet])(*inputs), unet(*inputs)))(*inputs)
    np.testing.assert_array_equal(steered, free)
    zeros = {a for a, v in variables(controlnet).items() if a.endswith(".w") and not np.any(v[...])}
    places = [*(f"controlnet_down_blocks.{i}" for i in range(4)), "controlnet_mid_block", "controlnet_cond_embedding.conv_out"]
    assert zeros == {f"{place}.w" for place in places}


def test_a_copy_has_the_embedding_that_its_unet_needs():
    unet = UNetConfig.examples()["sd"]
    for pixels, embedding in ((8, (16, 32, 96, 256)), (4, (16, 32, 256)), (1, (256,))):
        config = ControlNetConfig.of_denoiser(unet.model_copy(update={"pixels": pixels}))
        assert (config.embedding, config.factor) == (embedding, pixels)
