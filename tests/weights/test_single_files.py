"""Files in their authors' own names: what diffusers' converters make of them draws the same (tests/reference/author_files.py)."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_weights import digest, draw_weights, write_pipeline
from helpers import relative
from safetensors.numpy import load_file, save_file

import argosy
from argosy.checkpoint.open import open_model
from argosy.checkpoint.save import write_model_folder
from argosy.cli import main
from argosy.core.errors import BadInput
from argosy.core.formats import Arrays
from argosy.core.keymap import KeyMap
from argosy.jobs.convert import convert
from argosy.models.clip import ClipTextConfig
from argosy.models.diffusion.base import Conditions
from argosy.models.parts.stack import Unroll
from argosy.models.parts.weight import abstract
from argosy.weights.build import load_model
from argosy.weights.hub.single_file import single_file_parts

GOLDENS = Path(__file__).parents[1] / "goldens" / "images"
TOLERANCE = 1e-5  # of the largest number


def tensors_of(name: str) -> dict[str, np.ndarray]:
    description = json.loads((GOLDENS / name / "tensors.json").read_text(encoding="utf-8"))
    weights = draw_weights(description["tensors"], description["seed"])
    assert digest(weights) == description["sha256"]
    return weights


def write_single(name: str, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors_of(name), folder / f"{name}.safetensors")
    return folder / f"{name}.safetensors"


def last(a: np.ndarray) -> jnp.ndarray:
    return jnp.asarray(np.moveaxis(a, 1, -1))


@pytest.mark.parametrize("name", ["single-flux", "single-sd", "single-xl"])
def test_a_file_is_the_model_that_diffusers_reads_from_it(name: str, tmp_path: Path):
    file, golden = write_single(name, tmp_path), dict(np.load(GOLDENS / name / "golden.npz"))
    conditions = {key: jnp.asarray(golden[key]) for key in Conditions._fields if key in golden}
    arguments = last(golden["latents"]), jnp.asarray(golden["timestep"]), Conditions(**conditions)
    expected = last(golden["out_velocity" if name == "single-flux" else "out_prediction"])
    heard: list[str] = []
    assert relative(jax.jit(load_model(open_model(file, heard.append)).module)(*arguments), expected) < TOLERANCE
    assert [("without vae" in message) for message in heard] == ([] if name == "single-flux" else [True])
    convert(str(file), tmp_path / "hub", "hub", None)
    assert relative(jax.jit(load_model(open_model(tmp_path / "hub")).module)(*arguments), expected) < TOLERANCE
    parts = single_file_parts(file)
    if "vae" in parts:
        vae = load_model(parts["vae"]).module
        assert relative(vae.decode(last(golden["coded"])), last(golden["out_images"])) < TOLERANCE
        assert vae.config.scale == (0.13025 if name == "single-xl" else 0.18215)


def test_prefixes_of_other_programs_are_read(tmp_path: Path):
    """ComfyUI writes Flux's denoiser under the prefix of Stable Diffusion's."""
    tensors = tensors_of("single-flux")
    save_file({f"model.diffusion_model.{name}": w for name, w in tensors.items()}, tmp_path / "prefixed.safetensors")
    save_file(tensors, tmp_path / "plain.safetensors")
    first, two = (open_model(tmp_path / f"{name}.safetensors") for name in ("prefixed", "plain"))
    assert first.config == two.config
    assert all((first.weights.read(name) == two.weights.read(name)).all() for name in two.weights.names)


def test_the_text_encoder_of_stable_diffusion_1_is_read(tmp_path: Path):
    config = ClipTextConfig(vocab=30, width=64, layers=2, ffn=20, heads=1, context=9, eos=2)
    draw = np.random.default_rng(0)
    table, described = KeyMap(*config.hub_rows()), abstract(config.build(Unroll()))
    ours = {name: draw.normal(size=w.shape).astype(np.float32) for name, w in described.items()}
    clip = {f"cond_stage_model.transformer.{entry.name}": np.ascontiguousarray(entry.make()) for entry in table.inverse(Arrays(ours))}
    clip["cond_stage_model.transformer.text_model.embeddings.position_ids"] = np.arange(9)[None]
    save_file(tensors_of("single-sd") | clip, tmp_path / "sd.safetensors")
    parts = single_file_parts(tmp_path / "sd.safetensors")
    assert list(parts) == ["unet", "vae", "text_encoder"]
    assert parts["text_encoder"].config == config
    assert all((parts["text_encoder"].weights.read(name) == w).all() for name, w in ours.items())


def test_a_pipeline_draws_with_the_models_of_a_file(tmp_path: Path, capsys):
    """The folder's own denoiser is zero: what is drawn is the file's, and what is saved draws the same."""
    file, folder = write_single("single-flux", tmp_path), write_pipeline(GOLDENS / "pipeline-flux", tmp_path / "folder")
    shutil.rmtree(folder / "transformer")
    convert(str(file), folder / "transformer", "hub", None)
    options = {"steps": 2, "size": 16, "output": "float"}
    expected = argosy.load(folder).images("a red fox", **options)
    weights = next((folder / "transformer").glob("*.safetensors"))
    save_file({name: np.zeros_like(w) for name, w in load_file(weights).items()}, weights)
    pipe = argosy.load(folder, single_file=file)
    assert "text_encoder, text_encoder_2, vae are the folder's" in capsys.readouterr().err
    np.testing.assert_array_equal(pipe.images("a red fox", **options), expected)
    assert np.abs(argosy.load(folder).images("a red fox", **options) - expected).max() > 0.01
    pipe.save(tmp_path / "out")
    np.testing.assert_array_equal(argosy.load(tmp_path / "out").images("a red fox", **options), expected)
    with pytest.raises(BadInput, match="another model than that of the folder"):
        argosy.load(write_pipeline(GOLDENS / "pipeline-flux", tmp_path / "other"), single_file=file)
    with pytest.raises(BadInput, match="has the model unet, which FluxPipeline has not"):
        argosy.load(folder, single_file=write_single("single-sd", tmp_path))
    with pytest.raises(BadInput, match="is a denoiser alone") as caught:
        argosy.load(file)
    assert f"single_file={file}" in str(caught.value.hint)


@pytest.mark.parametrize("names, problem", [
    (["joint_blocks.0.x_block.attn.qkv.weight"], "Stable Diffusion 3"),
    (["decoder.up.0.block.0.conv1.weight"], "an autoencoder alone"),
    (["lora_unet_down.lora_down.weight"], "low-rank adapters"),
    (["model.layers.0.self_attn.q_proj.weight"], "a language model"),
    (["something.weight"], "its tensors begin with something.weight"),
])  # fmt: skip
def test_other_files_are_named(names: list[str], problem: str, tmp_path: Path):
    save_file({name: np.zeros((2, 2), np.float32) for name in names}, tmp_path / "file.safetensors")
    with pytest.raises(BadInput, match=problem):
        open_model(tmp_path / "file.safetensors")


def test_models_that_read_an_image_and_incomplete_files_are_named(tmp_path: Path):
    flux, sd = tensors_of("single-flux"), tensors_of("single-sd")
    stem = "model.diffusion_model.input_blocks.0.0.weight"
    wrong = {
        "reads 40 numbers of a patch and gives 16": flux | {"img_in.weight": np.zeros((128, 40), np.float32)},
        "reads 9 channels and gives 4": sd | {stem: np.zeros((32, 9, 3, 3), np.float32)},
        "missing": {name: w for name, w in flux.items() if name != "txt_in.bias"},
        "do not fit a flux": {name: w for name, w in flux.items() if name != "txt_in.weight"},
    }
    for i, (problem, tensors) in enumerate(wrong.items()):
        save_file(tensors, tmp_path / f"{i}.safetensors")
        with pytest.raises(BadInput, match=problem):
            open_model(tmp_path / f"{i}.safetensors")


# ---------------------------------------------------------------- writing


def pipeline_of(file: Path, folder: Path, **changes: dict) -> Path:
    """The models of a file as the folders of a pipeline."""
    for part, loaded in single_file_parts(file).items():
        config = loaded.config.model_copy(update=changes.get(part, {}))
        write_model_folder(folder / part, "hub", config, loaded.weights, {}, None)
    (folder / "model_index.json").write_text("{}")
    return folder


def clip_tensors(start: str) -> dict[str, np.ndarray]:
    config = ClipTextConfig(vocab=30, width=64, layers=2, ffn=20, heads=1, context=9)
    draw, table = np.random.default_rng(0), KeyMap(*config.hub_rows())
    weights = {name: draw.normal(size=w.shape).astype(np.float32) for name, w in abstract(config.build(Unroll())).items()}
    return {start + entry.name: np.ascontiguousarray(entry.make()) for entry in table.inverse(Arrays(weights))}


def test_openclip_is_the_encoder_that_diffusers_reads(tmp_path: Path):
    """The second encoder of Stable Diffusion XL, with queries, keys and values in one matrix and its projection the other way round."""
    save_file(tensors_of("single-xl") | tensors_of("single-openclip"), tmp_path / "xl.safetensors")
    golden = dict(np.load(GOLDENS / "single-openclip" / "golden.npz"))
    part = single_file_parts(tmp_path / "xl.safetensors")["text_encoder_2"]
    module, tokens = load_model(part).module, jnp.asarray(golden["tokens"], jnp.int32)
    module.config = part.config.model_copy(update={"eos": 89})
    hidden, penultimate = module.states(tokens, part.config.attend(jnp.ones_like(tokens)))
    assert relative(hidden, golden["out_hidden"]) < TOLERANCE
    assert relative(penultimate, golden["out_penultimate"]) < TOLERANCE
    assert relative(module.pooled(hidden, tokens), golden["out_pooled"]) < TOLERANCE


def test_the_last_layer_of_stable_diffusion_2_is_left_out_as_in_diffusers_folders(tmp_path: Path):
    """Its encoder has 24 layers, of which the states before the last are read."""
    start, layer = "cond_stage_model.model.", "transformer.resblocks.0."
    tensors = {name.removeprefix("conditioner.embedders.1.model."): w for name, w in tensors_of("single-openclip").items()}
    layer_tensors = {name.removeprefix(layer): w for name, w in tensors.items() if name.startswith(layer)}
    tensors |= {f"transformer.resblocks.{i}.{name}": w for i in range(24) for name, w in layer_tensors.items()}
    tensors["logit_scale"] = np.zeros((), np.float32)
    save_file(tensors_of("single-sd") | {start + name: w for name, w in tensors.items()}, tmp_path / "sd2.safetensors")
    config = single_file_parts(tmp_path / "sd2.safetensors")["text_encoder"].config
    assert (config.layers, config.projection, config.activation) == (23, None, "gelu")


@pytest.mark.parametrize("name", ["flux", "flux alone", "sd", "sd 2", "xl"])
def test_what_is_written_is_the_file_that_was_read(name: str, tmp_path: Path, capsys: pytest.CaptureFixture):
    """Name by name and bit by bit, through the folders of a pipeline: diffusers' converters read the same file."""
    tensors = tensors_of(f"single-{name.split()[0]}")
    openclip = tensors_of("single-openclip")
    if name == "sd":
        tensors |= clip_tensors("cond_stage_model.transformer.")
    if name == "sd 2":
        prefix = "conditioner.embedders.1.model."
        tensors |= {n.replace(prefix, "cond_stage_model.model."): w for n, w in openclip.items() if "text_projection" not in n}
    if name == "xl":
        tensors |= clip_tensors("conditioner.embedders.0.transformer.") | openclip
    save_file(tensors, tmp_path / "given.safetensors")
    source = pipeline_of(tmp_path / "given.safetensors", tmp_path / "pipeline")
    source = source / "transformer" if name == "flux alone" else source
    assert main(["convert", str(source), str(tmp_path / "written.safetensors")]) == 0
    assert f"{len(tensors)} tensors" in capsys.readouterr().out
    saved = load_file(tmp_path / "written.safetensors")
    assert saved.keys() == tensors.keys()
    for key, w in tensors.items():
        np.testing.assert_array_equal(saved[key], w, err_msg=key)
    assert main(["convert", str(source), str(tmp_path / "written.safetensors")]) == 2
    assert "exists" in capsys.readouterr().err
    assert main(["convert", str(source), str(tmp_path / "half.safetensors"), "dtype=bfloat16"]) == 0
    half, whole = ((tmp_path / f"{name}.safetensors").stat().st_size for name in ("half", "written"))
    assert half < 0.6 * whole


def test_models_that_would_be_read_back_otherwise_are_not_written(tmp_path: Path):
    file = write_single("single-sd", tmp_path)
    folder = pipeline_of(file, tmp_path / "scaled", vae={"scale": 0.5})
    with pytest.raises(BadInput, match=r"vae: scale=0.5 would be read back as 0.18215"):
        convert(str(folder), tmp_path / "out.safetensors", "hub", None)
    for part, change, problem in (("vae", {"shift": 0.25}, "shift=0.25"), ("unet", {"norm_eps": 1e-3}, "norm_eps=0.001")):
        odd = pipeline_of(file, tmp_path / part, **{part: change})
        with pytest.raises(BadInput, match=f"{part}: {problem} would be read back as"):
            convert(str(odd), tmp_path / "out.safetensors", "hub", None)
    other = write_pipeline(GOLDENS / "pipeline-sd3", tmp_path / "sd3")
    with pytest.raises(BadInput, match="no single file in its authors' names is written of SD3Config"):
        convert(str(other), tmp_path / "out.safetensors", "hub", None)
    with pytest.raises(BadInput, match="to=argosy"):
        convert(str(folder), tmp_path / "out.safetensors", "argosy", None)
    with pytest.raises(BadInput, match=r"ends in .safetensors"):
        convert(str(folder), tmp_path / "out", "single_file", None)
    assert not (tmp_path / "out.safetensors").exists()
