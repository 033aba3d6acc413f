"""ControlNets of Flux and Stable Diffusion 3 against diffusers (tests/reference/images.py), their counts, names and beginnings."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_weights import write_model
from helpers import relative
from laws.test_denoisers import inputs_of, noisy_denoiser, positions_of
from safetensors.numpy import load_file

from argosy.checkpoint.open import open_model
from argosy.core.errors import BadInput
from argosy.core.keymap import KeyMap
from argosy.jobs.convert import convert
from argosy.models.blocks.controlnets.controlled import with_controlnets
from argosy.models.diffusion.base import Conditions
from argosy.models.diffusion.controlnets.flux import FluxControlNetConfig
from argosy.models.diffusion.controlnets.sd3 import SD3ControlNetConfig
from argosy.models.diffusion.flux import FluxConfig
from argosy.models.diffusion.sd3 import SD3Config
from argosy.models.parts.stack import Scan, Unroll
from argosy.models.parts.stack.addresses import layer_addresses
from argosy.models.parts.weight import abstract, fill, merge, parameter_count, split, variables
from argosy.observe.flops import contraction_flops
from argosy.weights.build import load_model

GOLDENS = Path(__file__).parents[1] / "goldens" / "images"
TOLERANCE = 1e-5  # of the largest number
NAMES = ["controlnet-flux", "controlnet-flux-union", "controlnet-sd3", "controlnet-sd3.5"]
CASES = {
    f"{family}-{name}": config
    for family, kind in (("flux", FluxControlNetConfig), ("sd3", SD3ControlNetConfig))
    for name, config in kind.examples().items()
}
each = pytest.mark.parametrize("config", CASES.values(), ids=CASES)


def channels_last(a: np.ndarray) -> jnp.ndarray:
    return jnp.asarray(np.moveaxis(a, 1, -1))


@pytest.mark.parametrize("name", NAMES)
def test_it_is_that_of_diffusers(name: str, tmp_path: Path):
    """In both layouts of layers."""
    folder = write_model(GOLDENS / name, tmp_path / name)
    golden = dict(np.load(GOLDENS / name / "golden.npz"))
    conditions = Conditions(**{key: jnp.asarray(golden[key]) for key in ("text", "pooled", "guidance") if key in golden})
    more = [jnp.asarray(golden[key]) if key in golden else None for key in ("mode", "tokens")]
    for run in (None, Scan()):
        model = load_model(open_model(folder), run=run).module
        inputs = channels_last(golden["latents"]), jnp.asarray(golden["timestep"]), conditions, channels_last(golden["control"])
        residuals = jax.jit(model)(*inputs, *more)
        assert {f"out_{key}" for key in residuals} == {key for key in golden if key.startswith("out_")}
        assert sum(map(len, residuals.values())) == model.config.residual_count
        for key, residual in residuals.items():
            assert relative(residual, golden[f"out_{key}"]) < TOLERANCE


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


@each
def test_counts_and_names_are_those_of_what_is_built(config: Any):
    model = noisy_denoiser(config)
    assert parameter_count(abstract(model)) == config.parameters()
    assert set(KeyMap(*config.hub_rows()).paths) == set(variables(model))
    latents, *rest = inputs_of(config)
    # A union reads a token more than its text has.
    counted = config if getattr(config, "modes", None) is None else config.model_copy(update={"text_tokens": 5})
    tokens = jnp.ones((2, positions_of(config, latents), config.width))
    mode = None if counted is config else jnp.asarray([2, 0])
    traced = contraction_flops(jax.make_jaxpr(lambda x: model(x, *rest, x, mode, tokens))(latents).jaxpr)
    if mode is None:
        assert traced == 2 * config.flops(positions_of(config, latents))
    else:
        assert 0 < traced / (2 * config.flops(positions_of(config, latents))) - 1 < 0.1


def pair(name: str) -> tuple[Any, Any]:
    """A denoiser and a ControlNet of it, which gives less than it has layers."""
    config: Any = FluxConfig.examples()["dev"] if name == "flux" else SD3Config.examples()["sd3.5"]
    denoiser = config.model_copy(update={"layers": 5, "single_layers": 4} if name == "flux" else {"layers": 6})
    kind = FluxControlNetConfig if name == "flux" else SD3ControlNetConfig
    return denoiser, kind.of_denoiser(denoiser).model_copy(update={"layers": 2} | ({"single_layers": 3} if name == "flux" else {}))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["flux", "sd3"])
def test_it_begins_without_effect_and_steers_in_any_layout(name: str):
    denoiser, config = pair(name)
    latents, timestep, conditions = inputs_of(denoiser)
    steered_by = conditions._replace(control=(latents[::-1],))
    with jax.enable_x64():
        plain, fresh = noisy_denoiser(denoiser), config.build(Unroll())
        fill(fresh, jax.random.key(1), addresses=layer_addresses(fresh))
        unsteered = plain(latents, timestep, conditions)
        np.testing.assert_array_equal(with_controlnets(plain, [fresh])(latents, timestep, steered_by), unsteered)
        added = {a: v for a, v in variables(fresh).items() if "control" in a and a.endswith(".w")}
        assert len(added) == 1 + config.residual_count
        assert not any(np.any(v[...]) for v in added.values())
        velocities = []
        for run in (Unroll(), Scan()):
            model = with_controlnets(noisy_denoiser(denoiser, run), [noisy_denoiser(config, run)])
            model.denoiser.dtype = model.controlnets[0].dtype = jnp.float64
            velocities.append(model(latents, timestep, steered_by))
        assert relative(velocities[1], velocities[0]) < 1e-6
        assert relative(velocities[0], plain(latents, timestep, conditions)) > 1e-3
        # Step caching runs the layers in two parts.
        streams, step = model.begin(latents, timestep, steered_by)
        apart = model.layered(model.layered(streams, step, "first"), step, "rest")
        assert relative(model.end(apart, step), velocities[0]) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("name", ["flux", "sd3"])
def test_every_weight_learns(name: str):
    denoiser, config = pair(name)
    latents, timestep, conditions = inputs_of(denoiser)
    with jax.enable_x64():
        frozen, net = noisy_denoiser(denoiser, Scan()), noisy_denoiser(config)
        frozen.dtype = net.dtype = jnp.float64
        graph, leaves = split(net)
        steered_by = conditions._replace(control=(latents[::-1],))
        model = lambda leaves: with_controlnets(frozen, [merge(graph, leaves)])  # noqa: E731
        grad = jax.grad(lambda leaves: jnp.sum(model(leaves)(latents, timestep, steered_by) ** 2))(leaves)
    # Nothing reads the text after the last layer, and a softmax does not see a bias of keys.
    last = ("single_layers.2.",) if name == "flux" else ("layers.1.text.attn.q", "layers.1.text.attn.o", "layers.1.text.mlp")
    silent = {a for a, g in grad.items() if not np.abs(g).max() > 1e-12 and not a.endswith("attn.k.b")}
    assert all(a.startswith(last) for a in silent), silent
    assert {"control_patch.w", "layers.0.control.w", "layers.1.control.w"} <= grad.keys() - silent


@pytest.mark.parametrize("name", ["flux", "sd3"])
def test_the_gradient_keeps_no_copy_of_the_scanned_weights(name: str, capsys):
    """A loop that picks each layer's weights would keep those of all layers for the backward pass, beside the stack itself."""
    denoiser, config = pair(name)
    latents, timestep, conditions = inputs_of(denoiser)
    steered_by = conditions._replace(control=(latents[::-1],))
    (frozen_graph, frozen), (graph, leaves) = split(noisy_denoiser(denoiser, Scan())), split(noisy_denoiser(config))

    def loss(leaves: Any, frozen: Any) -> jax.Array:
        model = with_controlnets(merge(frozen_graph, frozen), [merge(graph, leaves)])
        return jnp.sum(model(latents, timestep, steered_by) ** 2)

    jax.ad_checkpoint.print_saved_residuals(loss, leaves, frozen)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 50
    stacks = {f"f32[{','.join(map(str, w.shape))}]" for address, w in frozen.items() if "layers." in address and address.endswith(".w")}
    assert [line for line in lines if line.split()[0] in stacks and "argument" not in line] == []


def test_a_copy_has_fewer_layers_than_its_model():
    flux = FluxConfig.examples()["dev"].model_copy(update={"layers": 19, "single_layers": 38})
    assert (FluxControlNetConfig.of_denoiser(flux).layers, FluxControlNetConfig.of_denoiser(flux).single_layers) == (4, 4)
    sd3 = SD3Config.examples()["sd3"]
    layers = {n: SD3ControlNetConfig.of_denoiser(sd3.model_copy(update={"layers": n})).layers for n in (3, 12, 38)}
    assert layers == {3: 2, 12: 11, 38: 12}


@pytest.mark.parametrize(
    ("name", "key", "value", "says"),
    [
        ("controlnet-flux", "conditioning_embedding_channels", 3, "XLabs"),
        ("controlnet-flux", "patch_size", 2, "patch_size"),
        ("controlnet-sd3", "extra_conditioning_channels", 1, "inpainting"),
        ("controlnet-sd3", "pos_embed_type", None, "pos_embed_type"),
        ("controlnet-sd3", "caption_projection_dim", 30, "caption_projection_dim"),
        ("controlnet-sd3", "qk_norm", "layer_norm", "qk_norm"),
    ],
)
def test_what_is_not_built_is_named(name: str, key: str, value: Any, says: str, tmp_path: Path):
    folder = write_model(GOLDENS / name, tmp_path / name)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {key: value}), encoding="utf-8")
    with pytest.raises(BadInput, match=says):
        open_model(folder)
