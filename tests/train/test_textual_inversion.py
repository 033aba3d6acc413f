"""Textual inversion: rows that learn what a frozen model needs to read, a loss as its pipeline's, and exact resumes."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_weights import write_pipeline
from helpers import Heard
from PIL import Image
from safetensors.numpy import load_file

import argosy
from argosy.checkpoint.open import open_model
from argosy.core.errors import UserError
from argosy.core.storage import Store
from argosy.infer.denoise.folder import load_diffusers
from argosy.infer.denoise.learned import LearnedToken
from argosy.infer.denoise.trained_parts import open_unet
from argosy.jobs.convert import convert
from argosy.models.diffusion.learned_embeddings import LearnedEmbeddingsConfig
from argosy.models.parts.weight import abstract, merge, parameter_count, put, split
from argosy.observe.metrics import read
from argosy.run.start.learned_tokens import initial_ids, template_ids
from argosy.train.objectives.images.diffusion import Diffusion
from argosy.train.objectives.images.textual_inversion import TextualInversion
from argosy.weights.build import load_model
from argosy.weights.manifest import hash_file

GOLDENS = Path(__file__).parents[1] / "goldens" / "images"
TOKEN = "<fox-toy>"


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: write_pipeline(GOLDENS / f"pipeline-{name}", root / name) for name in ("sd", "sdxl")}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    root, draw = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    for i in range(6):
        Image.fromarray(draw.integers(0, 256, (16, 20, 3)).astype(np.uint8)).save(root / f"{i}.png")
    return root


def words(model: Path, data: Path, folder: Path, *more: str) -> list[str]:
    common = [f"model={model}", f"data.source={data}", f"dir={folder}", f"data.cache={folder.parent / 'cache'}", "data.image.size=16"]
    words_of_token = [f"model.token={TOKEN}", "objective.initializer=fox", "data.batch=8", "log.every=1", "sample.every=none"]
    return ["textual_inversion", *common, *words_of_token, *more]


def config_for(name: str, vectors: int) -> LearnedEmbeddingsConfig:
    widths = (28,) if name == "sd" else (28, 28)
    return LearnedEmbeddingsConfig(token=TOKEN, vectors=vectors, widths=widths, channels=4, multiple=2, text_tokens=21)


@pytest.mark.parametrize("name", ["sd", pytest.param("sdxl", marks=pytest.mark.slow)])
def test_the_loss_is_that_of_the_pipeline_with_the_token(name: str, models: dict[str, Path]):
    """States of prompts are those of a pipeline with these rows, and the gradient reaches every row."""
    folder, config = models[name], config_for(name, 2)
    objective = TextualInversion(initializer="fox", templates=("the {}", "a {} fox", "{} here"), timesteps="uniform")
    ids = template_ids(config, objective, str(folder))
    draw = np.random.default_rng(3)
    rows = [draw.normal(0, 0.5, (2, width)).astype(np.float32) for width in config.widths]
    learned = config.build()
    put(learned, {name: jnp.asarray(row) for name, row in zip(config.encoders, rows)})
    stored, unet_config = open_unet(folder)
    unet: Any = load_model(stored).module
    unet.config = unet_config
    frozen = {"unet": unet} | {part: load_model(open_model(folder / part)).module for part in config.encoders}
    caption_numbers = np.array([0, 1, 2, 3])
    images = jnp.asarray(draw.normal(size=(4, 4, 4, 4)), jnp.float32)
    batch: dict[str, Any] = {"images": images, "row": jnp.arange(4, dtype=jnp.int32)}
    prompts = load_diffusers(folder, embeddings=LearnedToken(TOKEN, rows)).prompts
    encoded = prompts.encode(["", *(objective.prompts[i - 1].format(TOKEN) for i in caption_numbers[1:])])
    pooled = jnp.zeros((4, 1)) if encoded.pooled is None else encoded.pooled
    plain_batch = batch | {"text": encoded.text, "text_mask": jnp.ones(encoded.text.shape[:2], jnp.int32), "pooled": pooled}
    graph, leaves = split(learned)

    def loss(leaves: Any) -> Any:
        prompt_batch = batch | {"prompts": jnp.asarray(ids[caption_numbers])}
        return objective({"model": merge(graph, leaves), **frozen}, prompt_batch, jax.random.key(1)).loss.value()

    ours, gradients = jax.jit(jax.value_and_grad(loss))(leaves)
    plain = Diffusion(condition="text", timesteps="uniform")
    theirs = jax.jit(lambda batch: plain({"model": unet}, batch, jax.random.key(1)).loss.value())(plain_batch)
    assert float(ours) == pytest.approx(float(theirs), rel=1e-5)
    assert {address: bool((np.abs(g).max(1) > 0).all()) for address, g in gradients.items()} == dict.fromkeys(config.encoders, True)


def test_counts_and_templates(models: dict[str, Path]):
    for config in LearnedEmbeddingsConfig.examples().values():
        assert parameter_count(abstract(config.build())) == config.parameters() == config.vectors * sum(config.widths)
    config, objective = config_for("sd", 3), TextualInversion(initializer="fox", templates=("{} here", "the {}"))
    ids = template_ids(config, objective, str(models["sd"]))
    assert ids.shape == (3, 1, 21)
    assert ids[1, 0, 1:4].tolist() == [90, 91, 92]
    assert not (ids[0] >= 90).any(), "the empty prompt names no token"
    assert initial_ids(config, objective, str(models["sd"])) == [55]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sd", "sdxl"])
def test_only_the_rows_move_and_a_run_resumes_bit_for_bit(name: str, models: dict[str, Path], data: Path, tmp_path: Path):
    model = models[name]
    before = {path: hash_file(path) for path in sorted(model.rglob("*.safetensors"))}
    settings = ["checkpoint.every=2", "model.vectors=2", "data.image.flip=true", "objective.label_dropout=0.2", "sample.steps=1"]
    for steps in (2, 4):
        argosy.fit(*words(model, data, tmp_path / "halves", *settings), view=Heard(), steps=steps)
    argosy.fit(*words(model, data, tmp_path / "whole", *settings, "sample.every=4", "sample.images=2"), view=Heard(), steps=4)
    losses = [[line["loss"] for line in read(Store(tmp_path / name)) if "loss" in line] for name in ("halves", "whole")]
    assert losses[0] == losses[1]
    assert len(set(losses[0])) == 4
    files = [load_file(tmp_path / name / "learned_embeds.safetensors") for name in ("halves", "whole")]
    assert all((files[0][key] == array).all() for key, array in files[1].items())
    assert {path: hash_file(path) for path in before} == before, "the folder stays as it is"
    assert (tmp_path / "whole" / "samples" / "00000004.png").is_file()
    # The rows began as those of the word, and all of them moved by a few learning rates.
    stored = open_model(tmp_path / "whole")
    for part in stored.config.encoders:
        word = np.asarray(open_model(model / part).weights.read("embed.w"))[55]
        distance = np.abs(stored.weights.read(part) - word)
        assert (distance.max(1) > 1e-4).all()
        assert distance.max() < 0.02
    # What is written draws as the run does, and other prompts draw what they drew.
    names = [[TOKEN] if name == "sd" else ["clip_g", "clip_l"]] * 2
    convert(str(tmp_path / "whole"), tmp_path / "folder", "hub", None)
    convert(str(tmp_path / "whole"), tmp_path / "cat.safetensors", "hub", None)
    saved_files = tmp_path / "folder" / "learned_embeds.safetensors", tmp_path / "cat.safetensors"
    assert [sorted(load_file(file)) for file in saved_files] == names
    plain, prompts = argosy.load(model), [f"a photo of a {TOKEN}", "a red fox"]
    drawing: dict[str, Any] = {"steps": 2, "size": 16, "output": "float"}
    images = [
        argosy.load(model, embeddings=embeddings).images(prompts, **drawing)
        for embeddings in (tmp_path / "whole", tmp_path / "folder", tmp_path / "cat.safetensors")
    ]
    for other in images[1:]:
        np.testing.assert_array_equal(images[0], other)
    bare = plain.images(prompts, **drawing)
    np.testing.assert_array_equal(images[0][1], bare[1])
    assert np.abs(images[0][0] - bare[0]).max() > 1e-4
    with pytest.raises(UserError, match="has learned embeddings, which the text encoder of another model reads"):
        argosy.load(tmp_path / "whole")
    # Training goes on from the rows of another run.
    argosy.fit(*words(model, data, tmp_path / "on", f"init.weights={tmp_path / 'whole'}", "model.vectors=2"), view=Heard(), steps=1)
    described = json.loads((tmp_path / "whole" / "text_encoder.json").read_text(encoding="utf-8"))
    assert described["path"] == str(model / "text_encoder")


def test_mistakes_are_named_before_anything_is_read(models: dict[str, Path], data: Path, tmp_path: Path):
    model = models["sd"]
    for more, problem in (
        ("objective.initializer=foxes", "objective.initializer = 'foxes' is 5 tokens"),
        ("model.token=aa", "the learned token 'aa' is in the vocabulary of text_encoder already"),
        ("model.vectors=19", "loses the learned ones: 'a photo of a <fox-toy>'"),
        ("objective.templates=[plain]", "'plain' has no {} where the token stands"),
        ("objective.templates=['a {} }']", "'a {} }' has no {} where the token stands"),
        ("data.image.caption=x", "prompts come from objective.templates"),
        ("adapter=lora", "adapters on learned embeddings are not built"),
        ("encoders.pipeline=null", "encoders.pipeline is missing"),
        (f"model={model / 'unet'}", "objective=textual_inversion trains a token for the text encoders of a diffusers folder"),
        ("objective=diffusion", "`initializer` belongs to `name: textual_inversion`"),
    ):
        with pytest.raises(UserError, match=problem):
            argosy.fit(*words(model, data, tmp_path / "run", more), view=Heard(), steps=1)
    # The padding of its second tokenizer is the letter a.
    with pytest.raises(UserError, match="has 'a' in it, a special token of"):
        argosy.fit(*words(models["sdxl"], data, tmp_path / "run", "model.token=<cat>"), view=Heard(), steps=1)
    assert not (tmp_path / "run" / "checkpoints").exists()
    flux = write_pipeline(GOLDENS / "pipeline-flux", tmp_path / "flux")
    with pytest.raises(UserError, match="a learned token is for the UNet of Stable Diffusion 1, 2 or XL"):
        argosy.fit(*words(flux, data, tmp_path / "run"), view=Heard(), steps=1)
