"""Bundles that draw images: those of the pipeline, and read without its modules."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_weights import write_pipeline
from laws.families import noisy_model
from safetensors.numpy import load_file, save_file

import argosy
from argosy.cli.verbs.bundle import bundle_report
from argosy.core.errors import BadInput
from argosy.export.bundle import Bundle
from argosy.export.images import export_images
from argosy.infer.denoise.classes import ClassPrompts
from argosy.infer.denoise.pipeline import ImageDefaults, ImagePipeline
from argosy.infer.denoise.settings import SamplerSettings
from argosy.jobs.bundle import show_bundle
from argosy.models.autoencoders.autoencoder_kl import AutoencoderKLConfig
from argosy.models.diffusion.dit import DiTConfig
from argosy.models.parts.stack import Unroll

CONFIG = DiTConfig(channels=3, size=8, patch=2, width=24, layers=2, heads=3, classes=4, waves=8)
AUTOENCODER = AutoencoderKLConfig(widths=(4, 6), groups=2, latent_channels=3, scale=0.5, shift=0.1)
GOLDENS = Path(__file__).parents[1] / "goldens" / "images"
FAST, SLOW = "z-image", ("sd", "sdxl", "sd3", "flux", "flux2", "flux2-dev", "wan")
UNGUIDED = ("flux", "flux2-dev")
# The small Wan of the goldens hardly follows its prompts.
GUIDANCE = {"wan": 100.0}
HOW = {"flow": SamplerSettings(), "noise": SamplerSettings(name="euler_ancestral")}


@pytest.mark.parametrize("sampler", HOW)
@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_a_bundle_draws_what_the_pipeline_draws(tmp_path: Path, sampler: str, latent: bool, guidance: float):
    autoencoder = noisy_model(AUTOENCODER, Unroll()) if latent else None
    defaults = ImageDefaults(3, guidance, (8, 12))
    pipe = ImagePipeline(noisy_model(CONFIG, Unroll()), ClassPrompts(4), HOW[sampler], defaults, autoencoder)
    pipe.exporter = export_images
    pipe.export(tmp_path / "bundle", platforms=["cpu"], batch=[1, 2])
    bundle = Bundle.open(tmp_path / "bundle")
    images = bundle.run({"labels": np.array([2, 0], np.int32), "seed": np.array([7, 2**32 - 1], np.uint32)})["images"]
    expected = pipe.images(["2", "0"], seed=[7, 2**32 - 1])
    assert np.abs(np.asarray(images).astype(int) - expected).max() <= 1
    assert images.shape == (2, 8, 12, 3)


@pytest.mark.parametrize("name", [FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_bundle_reads_prompts_as_its_pipeline(tmp_path: Path, name: str):
    """Prompts of different lengths in one batch, with negative prompts and without, by every kind of pipeline of diffusers."""
    pipe = argosy.load(write_pipeline(GOLDENS / f"pipeline-{name}", tmp_path / "pipeline"))
    options: dict[str, Any] = {"steps": 2, "size": 32 if name == "sdxl" else 16}
    pipe.export(tmp_path / "bundle", platforms=["cpu"], batch=[2], **options)
    options["guidance"] = GUIDANCE.get(name, pipe.defaults.guidance)
    bundle = Bundle.open(tmp_path / "bundle")
    prompts, seeds = ["a red fox in the snow", "nothing"], [2**31 + 5, 3]
    negatives: list[Any] = [None]
    if "negative_prompt" in [step.input for step in bundle.manifest.signatures["denoise"].preprocess]:
        negatives.append(["snow", "a fox"])
    for negative in negatives:
        inputs: dict[str, Any] = {"prompt": prompts, "seed": seeds, "guidance": [options["guidance"]] * 2}
        inputs |= {} if negative is None else {"negative_prompt": negative}
        images = np.asarray(bundle.run(inputs)["images"]).astype(int)
        expected = pipe.images(prompts, negative=negative, seed=seeds, **options).astype(int)
        assert np.abs(images - expected).max() <= 1
        # Prompts are seen in what is drawn.
        assert np.abs(images - pipe.images(prompts[::-1], negative=negative, seed=seeds, **options)).max() > 1
    assert len(negatives) == (1 if name in UNGUIDED else 2)


def controlled(name: str, folder: Path) -> Path:
    """A pipeline of the goldens with a ControlNet. Those of UNets hardly see their control images there, and here they do."""
    write_pipeline(GOLDENS / f"pipeline-{name}-controlnet", folder)
    file, seen = folder / "controlnet" / "diffusion_pytorch_model.safetensors", "controlnet_cond_embedding.conv_out.weight"
    tensors = load_file(file)
    if seen in tensors:
        save_file(tensors | {seen: 100 * tensors[seen]}, file)
    return folder


CONTROLLED = {"sd": (16, 24), "sdxl": (32, 48), "sd3": (16, 24), "sd3.5": (16, 24), "flux": (16, 24)}


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name == "sd" else pytest.mark.slow) for name in CONTROLLED])
def test_a_bundle_follows_control_images_as_its_pipeline(tmp_path: Path, name: str):
    """By every kind of pipeline with ControlNets: control images and scales differ by row; the union of Flux.1 is told the kind of
    control."""
    pipe, size = argosy.load(controlled(name, tmp_path / "pipeline")), CONTROLLED[name]
    pipe.export(tmp_path / "bundle", platforms=["cpu"], batch=[2], steps=2, size=size)
    bundle, draw = Bundle.open(tmp_path / "bundle"), np.random.default_rng(0)
    # A dark one and a bright one.
    control = (draw.integers(0, 80, (2, *size, 3)) + np.array([0, 170])[:, None, None, None]).astype(np.uint8)
    prompts, seeds, scales = ["a red fox in the snow", "nothing"], [2**31 + 5, 3], [0.7, 1.0]
    modes = [2, 0] if name == "flux" else [None, None]
    inputs: dict[str, Any] = {"prompt": prompts, "seed": seeds, "control_image": control, "control_scale": scales}
    inputs |= {"guidance": [3.0, 3.0]} | ({} if modes[0] is None else {"control_mode": modes})
    negative = None if name == "flux" else "snow"
    inputs |= {} if negative is None else {"negative_prompt": [negative, negative]}
    images = np.asarray(bundle.run(inputs)["images"]).astype(int)
    shared: dict[str, Any] = {"steps": 2, "size": size, "guidance": 3.0, "negative": negative}
    for i, (prompt, seed, scale, mode) in enumerate(zip(prompts, seeds, scales, modes, strict=True)):
        how = shared | {"seed": seed, "control_scale": scale, "control_mode": mode}
        assert np.abs(images[i] - pipe.images(prompt, control_image=control[i], **how)[0]).max() <= 1
        assert np.abs(images[i] - pipe.images(prompt, control_image=control[1 - i], **how)[0].astype(int)).max() > 1
    with pytest.raises(BadInput, match="input `control_image` is missing") as caught:
        bundle.run({"prompt": prompts, "seed": seeds})
    assert str(caught.value.hint).endswith("or `control_image_file`")
    report = bundle_report(show_bundle(str(tmp_path / "bundle")))
    assert "in place of control_image" in report
    assert "in place of prompt_ids" in report
    with pytest.raises(BadInput, match="takes 0 to 100"):
        bundle.run(inputs | {"control_scale": [0.5, 100.5]})
    # The example of the manifest is a file, which is read and stretched.
    assert np.asarray(bundle.run(bundle.manifest.signatures["denoise"].example)["images"]).shape == (1, *size, 3)
    if name == "flux":
        modes_known = pipe.controlnets[0].config.modes
        with pytest.raises(BadInput, match=f"takes 0 to {modes_known - 1}"):
            bundle.run(inputs | {"control_mode": [0, modes_known]})


@pytest.mark.slow
def test_a_bundle_has_several_controlnets(tmp_path: Path):
    net = controlled("sd", tmp_path / "pipeline") / "controlnet"
    pipe = argosy.load(write_pipeline(GOLDENS / "pipeline-sd", tmp_path / "plain"), controlnet=[net, net])
    pipe.export(tmp_path / "bundle", platforms=["cpu"], batch=[1], steps=2, size=16)
    control = np.random.default_rng(0).integers(0, 80, (2, 1, 16, 16, 3)) + np.array([0, 170])[:, None, None, None, None]
    control = control.astype(np.uint8)
    given = {"control_image": control[0], "control_image_2": control[1], "control_scale": [1.0], "control_scale_2": [0.3]}
    images = np.asarray(Bundle.open(tmp_path / "bundle").run({"prompt": ["a red fox"], "seed": [1], **given})["images"]).astype(int)
    expected = pipe.images("a red fox", seed=1, steps=2, size=16, control_image=list(control), control_scale=[1.0, 0.3])
    assert np.abs(images - expected).max() <= 1
    other = pipe.images("a red fox", seed=1, steps=2, size=16, control_image=list(control[::-1]), control_scale=[1.0, 0.3])
    assert np.abs(images - other).max() > 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sd", "sdxl"])
def test_a_bundle_reads_learned_tokens_as_its_pipeline(tmp_path: Path, name: str):
    golden = GOLDENS / f"pipeline-{name}"
    folder = write_pipeline(golden, tmp_path / "pipeline")
    pipe = argosy.load(folder, embeddings=golden / "learned_embeds.safetensors")
    how: dict[str, Any] = {"steps": 2, "size": 32 if name == "sdxl" else 16}
    pipe.export(tmp_path / "bundle", platforms=["cpu"], batch=[2], **how)
    bundle = Bundle.open(tmp_path / "bundle")
    (token,) = pipe.prompts.learned_tokens
    prompts = [f"a {token} in the snow", f"fox,{token.upper()}!"]
    inputs = {"prompt": prompts, "negative_prompt": ["snow", token], "seed": [3, 4], "guidance": [4.0, 4.0]}
    images = np.asarray(bundle.run(inputs)["images"]).astype(int)
    expected = pipe.images(prompts, negative=["snow", token], seed=[3, 4], guidance=4.0, **how)
    assert np.abs(images - expected).max() <= 1
    plain = argosy.load(folder).images(prompts, negative=["snow", token], seed=[3, 4], guidance=4.0, **how)
    assert np.abs(images - plain).max() > 1
    # A bundle without such tokens has the text that it had before there were any.
    text = (tmp_path / "bundle" / "manifest.json").read_text(encoding="utf-8")
    assert token in text
    argosy.load(folder).export(tmp_path / "other", platforms=["cpu"], batch=[1], **how)
    assert '"learned"' not in (tmp_path / "other" / "manifest.json").read_text(encoding="utf-8")


def test_a_template_that_trims_prompts_is_not_in_bundles(tmp_path: Path):
    """The tokenizers of a bundle stand affixes around a prompt, and do no more with it."""
    folder = write_pipeline(GOLDENS / "pipeline-z-image", tmp_path / "pipeline")
    template = folder / "tokenizer" / "chat_template.jinja"
    changed = template.read_text(encoding="utf-8").replace("m.content", "m.content | trim")
    template.write_text(changed, encoding="utf-8")
    assert "| trim" in changed
    with pytest.raises(BadInput, match="more with a prompt than to stand around it"):
        argosy.load(folder).export(tmp_path / "bundle", platforms=["cpu"], batch=[1], steps=1, size=16)
    assert not (tmp_path / "bundle").exists()


def test_a_size_that_the_model_cannot_draw_writes_nothing(tmp_path: Path):
    pipe = ImagePipeline(noisy_model(CONFIG, Unroll()), ClassPrompts(4), SamplerSettings(), ImageDefaults(3, 1.0, (8, 8)))
    with pytest.raises(BadInput, match="multiples of 2"):
        export_images(pipe, tmp_path / "bundle", size=9)
    assert not (tmp_path / "bundle").exists()
