"""Folders of diffusers: small pipelines against what diffusers draws (tests/reference/image_pipelines.py), bad folders, prompts."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from golden_weights import write_pipeline
from safetensors.numpy import load_file, save_file

import argosy
from argosy.checkpoint.open import open_model
from argosy.core.errors import ArgosyError, BadInput
from argosy.infer.denoise.pipeline import ImagePipeline
from argosy.infer.denoise.settings import SamplerSettings
from argosy.weights.hub.image_lora import image_updates

GOLDENS = Path(__file__).parents[2] / "goldens" / "images"
NAMES = [
    "pipeline-flux", "pipeline-flux2", "pipeline-flux2-dev", "pipeline-sd3", "pipeline-z-image", "pipeline-wan", "pipeline-sd",
    "pipeline-sdxl",
]  # fmt: skip
PROMPTS = ["a red fox in the snow", "nothing"]
TOLERANCE = 5e-5  # of the brightest pixel, after three steps; 1.5e-5 was measured, and 1e-5 holds for every module alone
SIZE = (48, 32)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    return {name: write_pipeline(GOLDENS / name, tmp_path_factory.mktemp("pipelines") / name) for name in NAMES}


@pytest.fixture(scope="module")
def pipes(folders: dict[str, Path]) -> dict[str, ImagePipeline]:
    return {name: argosy.load(folder) for name, folder in folders.items()}


def test_flux_draws_what_diffusers_draws(pipes: dict[str, ImagePipeline]):
    golden = dict(np.load(GOLDENS / "pipeline-flux" / "golden.npz"))
    images = pipes["pipeline-flux"].images(PROMPTS, steps=3, guidance=3.5, size=SIZE, latents=golden["latents"], output="float")
    assert np.abs(images - golden["out_images"]).max() < TOLERANCE


def test_sd3_draws_what_diffusers_draws(pipes: dict[str, ImagePipeline]):
    """With negative prompts, and without guidance."""
    golden, pipe = dict(np.load(GOLDENS / "pipeline-sd3" / "golden.npz")), pipes["pipeline-sd3"]
    arguments = {"steps": 3, "size": SIZE, "latents": golden["latents"], "output": "float"}
    images = pipe.images(PROMPTS, negative=["snow", "a fox"], guidance=4.0, **arguments)
    assert np.abs(images - golden["out_images"]).max() < TOLERANCE
    assert np.abs(pipe.images(PROMPTS, guidance=1.0, **arguments) - golden["out_plain"]).max() < TOLERANCE


def test_flux2_draws_what_diffusers_draws(pipes: dict[str, ImagePipeline]):
    """With guidance and without."""
    golden, pipe = dict(np.load(GOLDENS / "pipeline-flux2" / "golden.npz")), pipes["pipeline-flux2"]
    arguments = {"steps": 3, "size": SIZE, "latents": golden["latents"], "output": "float"}
    assert np.abs(pipe.images(PROMPTS, guidance=4.0, **arguments) - golden["out_images"]).max() < TOLERANCE
    assert np.abs(pipe.images(PROMPTS, guidance=1.0, **arguments) - golden["out_plain"]).max() < TOLERANCE


def test_flux2_dev_draws_what_diffusers_draws(pipes: dict[str, ImagePipeline]):
    """Its encoder is the text model of one that sees, with a message before the prompt and padding before both."""
    golden, pipe = dict(np.load(GOLDENS / "pipeline-flux2-dev" / "golden.npz")), pipes["pipeline-flux2-dev"]
    arguments = {"steps": 3, "size": SIZE, "latents": golden["latents"], "output": "float"}
    assert np.abs(pipe.images(PROMPTS, guidance=4.0, **arguments) - golden["out_images"]).max() < TOLERANCE
    with pytest.raises(BadInput, match="negative"):
        pipe.images(PROMPTS, guidance=4.0, negative="snow", **arguments)


def test_z_image_draws_what_diffusers_draws(pipes: dict[str, ImagePipeline]):
    """With negative prompts and without guidance. diffusers adds the scale of guidance to 1."""
    golden, pipe = dict(np.load(GOLDENS / "pipeline-z-image" / "golden.npz")), pipes["pipeline-z-image"]
    arguments = {"steps": 2, "size": SIZE, "latents": golden["latents"], "output": "float"}
    images = pipe.images(PROMPTS, negative=["snow", "a fox"], guidance=1 + 3.0, **arguments)
    assert np.abs(images - golden["out_images"]).max() < TOLERANCE
    assert np.abs(pipe.images(PROMPTS, guidance=1.0, **arguments) - golden["out_plain"]).max() < TOLERANCE


def test_wan_draws_what_diffusers_draws(pipes: dict[str, ImagePipeline]):
    """Videos of five frames by UniPC, with negative prompts and without guidance. An image is a video of one frame."""
    golden, pipe = dict(np.load(GOLDENS / "pipeline-wan" / "golden.npz")), pipes["pipeline-wan"]
    arguments = {"steps": 3, "size": (32, 16), "output": "float"}
    videos = pipe.images(PROMPTS, negative=["snow", "a fox"], guidance=4.0, frames=5, latents=golden["latents"], **arguments)
    assert videos.shape == (2, 5, 32, 16, 3)
    assert np.abs(videos - golden["out_videos"]).max() < TOLERANCE
    plain = pipe.images(PROMPTS, guidance=1.0, frames=5, latents=golden["latents"], **arguments)
    assert np.abs(plain - golden["out_plain"]).max() < TOLERANCE
    image = pipe.images(PROMPTS[0], guidance=1.0, latents=golden["latents"][:1, :, 0], **arguments)
    alone = pipe.images(PROMPTS[0], guidance=1.0, frames=1, latents=golden["latents"][:1, :, :1], **arguments)
    np.testing.assert_allclose(image, alone[:, 0], atol=1e-6)


@pytest.mark.parametrize("name", ["pipeline-sd", "pipeline-sdxl"])
def test_stable_diffusion_draws_what_diffusers_draws(name: str, pipes: dict[str, ImagePipeline]):
    """By PNDM with negative prompts; by Euler, where XL leads away from zeros without them."""
    golden, pipe = dict(np.load(GOLDENS / name / "golden.npz")), pipes[name]
    arguments = {"steps": 3, "size": SIZE, "latents": golden["latents"], "output": "float"}
    images = pipe.images(PROMPTS, negative=["snow", "a fox"] if name == "pipeline-sd" else None, guidance=4.0, **arguments)
    assert np.abs(images - golden["out_images"]).max() < TOLERANCE
    assert np.abs(pipe.images(PROMPTS, guidance=1.0, **arguments) - golden["out_plain"]).max() < TOLERANCE


@pytest.mark.parametrize("name", ["pipeline-flux", "pipeline-sd"])
def test_adapters_of_diffusers_and_kohya_are_merged(name: str, folders: dict[str, Path], tmp_path: Path):
    """What diffusers draws with the same file: on fused and plain weights, with alphas of the metadata and of tensors."""
    golden, file = dict(np.load(GOLDENS / name / "golden.npz")), GOLDENS / name / "lora.safetensors"
    more = {"guidance": 3.5} if name == "pipeline-flux" else {"guidance": 4.0, "negative": ["snow", "a fox"]}
    pipe = argosy.load(folders[name], adapter=file)
    images = pipe.images(PROMPTS, steps=3, size=SIZE, latents=golden["latents"], output="float", **more)
    assert np.abs(images - golden["out_lora"]).max() < TOLERANCE
    tensors = load_file(file)
    first = next(iter(tensors))
    save_file({first: tensors[first]}, tmp_path / "half.safetensors")
    with pytest.raises(BadInput, match="only one of the two factors"):
        argosy.load(folders[name], adapter=tmp_path / "half.safetensors")
    rank, alpha = np.ones((2, 28), np.float32), np.asarray(3.0, np.float32)
    te = "lora_te_text_model_encoder_layers_1_self_attn_q_proj"
    text_tensors = {f"{te}.lora_down.weight": rank, f"{te}.lora_up.weight": 2 * rank.T, f"{te}.alpha": alpha}
    save_file({key: np.ascontiguousarray(value) for key, value in text_tensors.items()}, tmp_path / "text.safetensors")
    opened = open_model(folders[name] / "text_encoder").weights.reader
    ((place, update),) = image_updates(tmp_path / "text.safetensors", {"text_encoder": opened})["text_encoder"].items()
    assert place == "text_model.encoder.layers.1.self_attn.q_proj.weight"
    np.testing.assert_allclose(update.added(opened.read(place)), opened.read(place) + 1.5 * 4)
    save_file({first.replace("attn", "none"): tensors[first]}, tmp_path / "other.safetensors")
    with pytest.raises(BadInput, match="no weight of this pipeline"):
        argosy.load(folders[name], adapter=tmp_path / "other.safetensors")


@pytest.mark.parametrize("name", NAMES)
def test_what_is_saved_is_what_was_read(name: str, folders: dict[str, Path], pipes: dict[str, ImagePipeline], tmp_path: Path):
    """Every file: tensors bit for bit, small files byte for byte but for the order of keys and the library's version."""
    pipes[name].save(tmp_path / "out")
    theirs, ours = ({p.relative_to(at): p for p in at.rglob("*") if p.is_file()} for at in (folders[name], tmp_path / "out"))
    assert theirs.keys() == ours.keys()
    for path in theirs:
        if path.suffix == ".safetensors":
            a, b = load_file(theirs[path]), load_file(ours[path])
            prefix = next(before for before in ("", "text_model.", "model.") if {before + n for n in a} == b.keys())
            assert all((b[prefix + n] == w).all() for n, w in a.items())
        elif path.name == "config.json":
            source_config, saved_config = (json.loads(at[path].read_text(encoding="utf-8")) for at in (theirs, ours))
            assert {key: value for key, value in saved_config.items() if key in source_config} == source_config
        else:
            a, b = theirs[path].read_bytes(), ours[path].read_bytes()
            assert a == b or (path.suffix == ".json" and json.loads(a) == json.loads(b)), path


def test_an_image_depends_on_its_seed_and_not_on_the_batch(pipes: dict[str, ImagePipeline]):
    pipe, arguments = pipes["pipeline-flux"], {"steps": 2, "size": SIZE, "output": "latents"}
    both = pipe.images(PROMPTS, seed=[5, 9], **arguments)
    np.testing.assert_allclose(pipe.images(PROMPTS[1], seed=9, **arguments)[0], both[1], atol=2e-5)
    assert np.abs(both[0] - pipe.images(PROMPTS[0], seed=6, **arguments)[0]).max() > 0.1


def test_a_prompt_that_is_too_long_is_cut_and_said(pipes: dict[str, ImagePipeline], capsys):
    pipe = pipes["pipeline-flux"]
    long = " ".join(["snow"] * 40)
    capsys.readouterr()
    conditions = pipe.prompts.encode([long])
    warnings = capsys.readouterr().err
    assert "text_encoder reads 21 tokens" in warnings
    assert "snow snow" in warnings
    assert conditions.text.shape[1] == 512
    pipe.prompts.encode(["snow"])
    assert capsys.readouterr().err == ""


def test_what_does_not_fit_is_named(pipes: dict[str, ImagePipeline]):
    flux, sd3 = pipes["pipeline-flux"], pipes["pipeline-sd3"]
    with pytest.raises(BadInput, match="multiples of 8"):
        flux.images(PROMPTS, size=(44, 32))
    with pytest.raises(BadInput, match="predicts velocity"):
        sd3.images(PROMPTS, size=SIZE, sampler=SamplerSettings(name="ddim", noise={"kind": "betas"}, prediction="epsilon"))
    with pytest.raises(BadInput, match="negative prompts have no effect"):
        flux.images(PROMPTS, size=SIZE, negative="snow")
    with pytest.raises(BadInput, match="frames = 5: this model draws images alone"):
        flux.images(PROMPTS, size=SIZE, frames=5)
    wan = pipes["pipeline-wan"]
    for frames, near in ((8, "frames=5 or frames=9"), (0, "frames=1"), (2, "frames=1 or frames=5")):
        with pytest.raises(BadInput, match=f"frames = {frames}: .* multiple of 4, and one more") as caught:
            wan.images(PROMPTS, size=(32, 16), frames=frames)
        assert caught.value.hint == near
    with pytest.raises(BadInput, match=r"\[N C F H W\] is \[1, 4, 2, 4, 2\]"):
        wan.images(PROMPTS[0], size=(32, 16), frames=5, latents=np.zeros((1, 4, 3, 4, 2)))
    with pytest.raises(BadInput, match="a video begins from noise"):
        wan.images(PROMPTS[0], size=(32, 16), frames=5, image=np.zeros((32, 16, 3), np.uint8))


def copy_with_config(folder: Path, target: Path, file: str, **keys: object) -> Path:
    shutil.copytree(folder, target)
    config = json.loads((target / file).read_text(encoding="utf-8"))
    (target / file).write_text(json.dumps(config | keys), encoding="utf-8")
    return target


def test_folders_that_are_not_built_are_named(folders: dict[str, Path], tmp_path: Path):
    flux = folders["pipeline-flux"]
    for i, (file, keys, problem) in enumerate(
        (
            ("model_index.json", {"_class_name": "FluxControlPipeline"}, "FluxControlPipeline"),
            ("model_index.json", {"controlnet": ["diffusers", "FluxControlNetModel"]}, "controlnet"),
            ("scheduler/scheduler_config.json", {"_class_name": "KDPM2DiscreteScheduler"}, "KDPM2DiscreteScheduler"),
            ("transformer/config.json", {"_class_name": "FooTransformer2DModel"}, r"transformer \(FluxTransformer2DModel\).*FooTransf"),
        )
    ):
        with pytest.raises(BadInput, match=problem):
            argosy.load(copy_with_config(flux, tmp_path / str(i), file, **keys))
    wan = folders["pipeline-wan"]
    with pytest.raises(BadInput, match="transformer_2"):
        argosy.load(copy_with_config(wan, tmp_path / "two", "model_index.json", transformer_2=["diffusers", "WanTransformer3DModel"]))
    with pytest.raises(BadInput, match="expand_timesteps"):
        argosy.load(copy_with_config(wan, tmp_path / "times", "model_index.json", expand_timesteps=True))
    shutil.copytree(folders["pipeline-z-image"], tmp_path / "plain")
    (tmp_path / "plain" / "tokenizer" / "chat_template.jinja").unlink()
    with pytest.raises(BadInput, match="no chat template"):
        argosy.load(tmp_path / "plain")
    shutil.copytree(flux, tmp_path / "missing")
    shutil.rmtree(tmp_path / "missing" / "vae")
    with pytest.raises(BadInput, match="no folder vae/"):
        argosy.load(tmp_path / "missing")


def test_a_pipeline_where_one_model_is_asked_for_names_its_parts(folders: dict[str, Path]):
    with pytest.raises(BadInput, match="is a pipeline of diffusers") as caught:
        open_model(folders["pipeline-sd"])
    assert "unet" in str(caught.value)


def test_numbers_that_are_not_finite_name_their_stage(folders: dict[str, Path], tmp_path: Path):
    for part, file, problem in (
        ("vae", "diffusion_pytorch_model.safetensors", "decoder"),
        ("transformer", "diffusion_pytorch_model.safetensors", "denoiser"),
        ("text_encoder_2", "model.safetensors", "text_encoder_2"),
    ):
        folder = shutil.copytree(folders["pipeline-flux"], tmp_path / part)
        tensors = load_file(folder / part / file)
        ends = {"vae": "decoder.conv_out.bias", "transformer": "proj_out.bias", "text_encoder_2": "encoder.final_layer_norm.weight"}
        end = ends[part]
        save_file(tensors | {end: np.full_like(tensors[end], np.nan)}, folder / part / file)
        with pytest.raises(ArgosyError, match=problem):
            argosy.load(folder).images(PROMPTS[:1], steps=1, size=(8, 8))
