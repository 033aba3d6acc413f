"""Runs of denoisers on latents and captions: what encoders make is computed once, and runs draw what their captions say."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from golden_weights import write_pipeline
from helpers import Heard

import argosy
from argosy.core.errors import UserError
from argosy.core.formats.png import png_bytes
from argosy.core.formats.safetensors import SafeTensors
from argosy.core.storage import Store
from argosy.data.images.arrays import ImageArrays
from argosy.data.images.encoded import EncodedImages, EncodedStore
from argosy.data.images.folder import ImageFolder
from argosy.data.images.settings import ImageSettings
from argosy.infer.denoise.encoder_settings import EncoderSettings
from argosy.infer.denoise.encoders import RunEncoders
from argosy.observe.metrics import read

GOLDENS = Path(__file__).parents[1] / "goldens" / "images"
CAPTIONS = ["a red fox", "nothing of it", "snow"]


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory) -> Path:
    """Tiny pipelines of diffusers with random weights."""
    root = tmp_path_factory.mktemp("pipelines")
    for name in ("flux", "flux2", "sd3", "z-image", "wan", "sd"):
        write_pipeline(GOLDENS / f"pipeline-{name}", root / name)
    return root


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    draw = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("pictures") / "pictures.npz"
    images = draw.integers(0, 255, (20, 16, 16, 3)).astype(np.uint8)
    np.savez(path, images=images, captions=np.array([CAPTIONS[i % 3] for i in range(20)]))
    return path


def words(pipelines, pictures, folder, kind, *more):
    common = [f"model={pipelines / kind}", f"data.source={pictures}", f"dir={folder}", f"data.cache={pictures.parent / 'cache'}"]
    return ["diffusion", *common, "data.batch=8", "eval.batches=1", "log.every=1", "mesh.data=8", *more]


def encoders_of(pipelines, kind="sd3") -> RunEncoders:
    folder = pipelines / kind
    config = argosy.load(folder).config
    return RunEncoders(EncoderSettings(pipeline=str(folder)), config, np.dtype(np.float32))


class Counted:
    """Encoders that count what they are asked."""

    def __init__(self, encoders: RunEncoders, most: int | None = None):
        self.encoders, self.most, self.images, self.texts = encoders, most, 0, 0
        self.identity, self.space, self.reads_text = encoders.identity, encoders.space, encoders.reads_text

    def latents(self, images):
        self.images += 1
        if self.most is not None and self.images > self.most:
            raise KeyboardInterrupt
        return self.encoders.latents(images)

    def states(self, texts):
        self.texts += len(texts)
        return self.encoders.states(texts)


def rows_of(pictures, cache, encoders, held_out=False, **options):
    settings = ImageSettings(**{name: options.pop(name) for name in ("flip", "crop") if name in options})
    source = EncodedImages(ImageArrays(str(pictures), settings, 0.0), encoders, cache, **options)
    return source.rows(sequence=1, vocab=encoders.encoders.config.id_spaces, seed=3, held_out=held_out)


def test_rows_are_what_the_pipeline_encodes_and_are_computed_once(pipelines, pictures, tmp_path):
    encoders = Counted(encoders_of(pipelines))
    rows = rows_of(pictures, tmp_path, encoders)
    assert (encoders.images, encoders.texts) == (3, 4)
    again = Counted(encoders_of(pipelines))
    same = rows_of(pictures, tmp_path, again)
    assert (again.images, again.texts) == (0, 0)
    pipe = argosy.load(pipelines / "sd3")
    with np.load(pictures) as file:
        images, captions = file["images"], file["captions"]
    numbers = [7, 0, 19]
    batch, other = rows.gather(np.array(numbers)), same.gather(np.array(numbers))
    latents = pipe.encode(images[numbers] / np.float32(255))
    conditions = pipe.prompts.encode([str(text) for text in captions[numbers]])
    np.testing.assert_allclose(batch["images"], latents, atol=1e-5)
    np.testing.assert_allclose(batch["text"], conditions.text, atol=1e-5)
    np.testing.assert_allclose(batch["pooled"], conditions.pooled, atol=1e-5)
    for name, values in batch.items():
        np.testing.assert_array_equal(values, other[name])


@pytest.mark.slow
def test_a_killed_cache_goes_on_where_it_was(pipelines, pictures, tmp_path):
    whole = rows_of(pictures, tmp_path / "whole", Counted(encoders_of(pipelines)))
    with pytest.raises(KeyboardInterrupt):
        rows_of(pictures, tmp_path / "killed", Counted(encoders_of(pipelines), most=2))
    later = Counted(encoders_of(pipelines))
    rows = rows_of(pictures, tmp_path / "killed", later)
    assert later.images == 1
    for name, values in whole.gather(np.arange(20)).items():
        np.testing.assert_array_equal(values, rows.gather(np.arange(20))[name])


@pytest.mark.slow
def test_mirrored_latents_and_empty_captions_follow_from_the_place(pipelines, pictures, tmp_path):
    encoders = Counted(encoders_of(pipelines))
    rows = rows_of(pictures, tmp_path, encoders, flip=True, dropout=0.5)
    number, places = np.zeros(64, np.int64), np.arange(64)
    batch = rows.gather(number, places)
    pipe = argosy.load(pipelines / "sd3")
    with np.load(pictures) as file:
        image = file["images"][:1] / np.float32(255)
    straight, mirrored = pipe.encode(image)[0], pipe.encode(image[:, :, ::-1])[0]
    flipped = [np.abs(latents - mirrored).max() < 1e-5 for latents in batch["images"]]
    assert all(np.abs(latents - straight).max() < 1e-5 for latents, turned in zip(batch["images"], flipped) if not turned)
    empty = np.asarray(pipe.prompts.encode([""]).text)[0]
    dropped = [np.abs(states - empty).max() < 1e-5 for states in batch["text"]]
    # Both are drawn at one half, each by itself.
    assert 16 < sum(flipped) < 48
    assert 16 < sum(dropped) < 48
    assert 4 < sum(a and b for a, b in zip(flipped, dropped)) < 32
    parts = [rows.gather(number[:1], places[i : i + 1]) for i in range(8)]
    np.testing.assert_array_equal(np.concatenate([part["text"] for part in parts]), batch["text"][:8])


def test_another_text_encoder_is_another_cache(pipelines, pictures, tmp_path):
    assert encoders_of(pipelines).identity != encoders_of(pipelines, "flux").identity
    first = EncodedImages(ImageArrays(str(pictures), ImageSettings(), 0.0), encoders_of(pipelines), tmp_path)
    second = EncodedImages(ImageArrays(str(pictures), ImageSettings(), 0.0), encoders_of(pipelines, "flux"), tmp_path)
    assert first.folder != second.folder
    assert EncodedStore(first.folder).arrays == {}


@pytest.mark.slow
@pytest.mark.parametrize("kind, part, module", [
    ("flux", "transformer", "single_transformer_blocks.0.attn.to_q"),
    ("sd3", "transformer", "transformer_blocks.0.ff.net.2"),
    ("flux2", "transformer", "transformer_blocks.0.ff.linear_out"),
    ("z-image", "transformer", "layers.0.feed_forward.w2"),
    ("wan", "transformer", "blocks.0.attn2.to_v"),
    ("sd", "unet", "mid_block.attentions.0.transformer_blocks.0.attn2.to_k"),
])  # fmt: skip
def test_adapters_of_captions_train_and_draw_what_their_file_draws(pipelines, pictures, tmp_path, kind, part, module):
    settings = [
        "adapter=lora",
        "adapter.rank=2",
        "sample.every=2",
        "sample.images=4",
        "optimizer.learning_rate=0.01",
        "schedule.warmup=0",
    ]
    argosy.fit(*words(pipelines, pictures, tmp_path / "run", kind, *settings), view=Heard(), steps=2)
    file = SafeTensors.open(tmp_path / "run" / "adapter" / "pytorch_lora_weights.safetensors")
    assert np.abs(file.read(f"{part}.{module}.lora_B.weight")).max() > 0
    metadata = json.loads(file.metadata["lora_adapter_metadata"])
    assert (metadata[f"{part}.r"], metadata[f"{part}.lora_alpha"]) == (2, 32)
    run, base = argosy.load(tmp_path / "run"), argosy.load(pipelines / kind)
    adapted = argosy.load(pipelines / kind, adapter=tmp_path / "run" / "adapter")
    trained, two, three = (pipe.images(["a red fox"], steps=2, guidance=2.0, size=16, output="float") for pipe in (run, adapted, base))
    np.testing.assert_allclose(trained, two, atol=1e-4)
    assert np.abs(trained - three).max() > 1e-3
    assert [path.name for path in sorted((tmp_path / "run" / "samples").iterdir())] == ["00000002-raw.png", "00000002.png"]
    # What was trained is a pipeline that others load.
    adapted.save(tmp_path / "saved")
    four = argosy.load(tmp_path / "saved").images(["a red fox"], steps=2, guidance=2.0, size=16, output="float")
    np.testing.assert_allclose(four, two, atol=1e-4)


@pytest.mark.slow
def test_latents_of_buckets_are_what_the_pipeline_encodes(pipelines, tmp_path):
    draw, shapes = np.random.default_rng(0), [(16, 40), (24, 24), (40, 16)]
    (tmp_path / "images").mkdir()
    for i in range(9):
        image = draw.integers(0, 256, (*shapes[i % 3], 3)).astype(np.uint8)
        (tmp_path / "images" / f"{i}.png").write_bytes(png_bytes(image))
        (tmp_path / "images" / f"{i}.txt").write_text(CAPTIONS[i % 2])
    files = ImageFolder(str(tmp_path / "images"), ImageSettings(size=24, buckets=8, flip=True))
    encoders = encoders_of(pipelines)
    rows = EncodedImages(files, encoders, tmp_path / "cache").rows(sequence=1, vocab=encoders.config.id_spaces, seed=3)
    pipe, factor = argosy.load(pipelines / "sd3"), encoders.space.multiple
    seen = set()
    for bucket, first in zip(rows.buckets, rows.ends - 3):
        images = np.stack([bucket.images.table.pictures[i] for i in bucket.chosen])
        height, width = bucket.table.size
        batch = rows.gather(first + np.arange(3), np.arange(3))
        top, left_edge = (images.shape[1] - height) // 2, (images.shape[2] - width) // 2
        straight = pipe.encode(images[:, top : top + height, left_edge : left_edge + width] / 255)
        mirrored = [bool(bucket.images.drawn(place)[2] >> np.uint64(63)) for place in range(3)]
        assert batch["images"].shape[1:3] == (height // factor, width // factor)
        assert np.abs(batch["images"] - straight)[~np.array(mirrored)].max(initial=0) < 1e-5
        captions = [CAPTIONS[int(i) % 2] for i in bucket.chosen]
        np.testing.assert_allclose(batch["text"], pipe.prompts.encode(captions).text, atol=1e-5)
        seen.add((height, width))
    assert len(seen) == 3


@pytest.mark.slow
def test_a_run_on_latents_and_captions_resumes_bit_for_bit(pipelines, pictures, tmp_path):
    settings = ["schedule=constant", "checkpoint.every=2", "data.image.flip=true", "objective.label_dropout=0.5"]
    for steps in (2, 4):
        argosy.fit(*words(pipelines, pictures, tmp_path / "halves", "sd3", *settings), view=Heard(), steps=steps)
    argosy.fit(*words(pipelines, pictures, tmp_path / "whole", "sd3", *settings), view=Heard(), steps=4)
    losses = [[line["loss"] for line in read(Store(tmp_path / name)) if "loss" in line] for name in ("halves", "whole")]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 4


@pytest.mark.parametrize("word, problem", [
    ("data.image.crop=random", r"latents are computed once for each image"),
    ("encoders.pipeline=nowhere", r"nowhere is no diffusers folder"),
    ("objective.condition=labels", r"the model reads pooled and text, and objective.condition = labels gives none"),
    ("objective=autoencode", r"the model is a denoiser, which objective=diffusion trains"),
    ("model.channels=5", r"is another model|latents have"),
])  # fmt: skip
def test_mistakes_are_named_before_the_first_step(pipelines, pictures, tmp_path, word, problem):
    with pytest.raises(UserError, match=problem):
        argosy.fit(*words(pipelines, pictures, tmp_path / "run", "sd3", *word.split()), view=Heard(), steps=1)
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_pipeline_of_another_model_is_refused(pipelines, pictures, tmp_path):
    word = f"encoders.pipeline={pipelines / 'flux'}"
    with pytest.raises(UserError, match="FluxPipeline draws with a FluxConfig, and the model is a SD3Config"):
        argosy.fit(*words(pipelines, pictures, tmp_path / "run", "sd3", word), view=Heard(), steps=1)


def test_states_of_another_width_are_refused(pipelines, pictures, tmp_path):
    text = tmp_path / "text"
    shutil.copytree(pipelines / "flux" / "text_encoder", text)
    shutil.copytree(pipelines / "flux" / "tokenizer", text, dirs_exist_ok=True)
    settings = [f"encoders.text={text}", "encoders.text_tokens=8"]
    with pytest.raises(UserError, match=r"of a caption: \d+ numbers, and model\.(text|pooled)_width = \d+"):
        argosy.fit(*words(pipelines, pictures, tmp_path / "run", "sd3", *settings), view=Heard(), steps=1)


def test_weights_of_encoders_are_read_once_for_their_identity(pipelines, monkeypatch):
    from argosy.infer.denoise import encoders

    hashed = []
    monkeypatch.setattr(encoders, "hash_file", lambda path: hashed.append(path) or {"sha256": str(path)})
    text_encoders = encoders_of(pipelines)
    assert text_encoders.identity == text_encoders.identity
    assert len(hashed) == len(set(hashed))


def test_images_without_captions_are_refused(pipelines, tmp_path):
    (tmp_path / "images").mkdir()
    for i in range(4):
        (tmp_path / "images" / f"{i}.png").write_bytes(png_bytes(np.zeros((16, 16, 3), np.uint8)))
    with pytest.raises(UserError, match="the model reads captions, and this data has none"):
        argosy.fit(*words(pipelines, tmp_path / "images", tmp_path / "run", "sd3"), view=Heard(), steps=1)


@pytest.mark.slow
def test_a_denoiser_of_its_own_reads_any_text_encoder_and_draws(pipelines, pictures, tmp_path):
    text = tmp_path / "text"
    shutil.copytree(pipelines / "flux" / "text_encoder", text)
    shutil.copytree(pipelines / "flux" / "tokenizer", text, dirs_exist_ok=True)
    width = argosy.load(text).config.width
    sizes = {"family": "sd3", "channels": 3, "size": 16, "patch": 2, "layers": 2, "heads": 2, "head_size": 8, "grid": 8, "waves": 8}
    sizes |= {"text_width": width, "pooled_width": width, "text_tokens": 8}
    settings = [f"encoders.text={text}", "encoders.text_tokens=8", "objective.condition=text", "data.batch=8", "eval.batches=1"]
    common = [f"data.source={pictures}", f"dir={tmp_path / 'run'}", f"data.cache={tmp_path / 'cache'}", "mesh.data=8"]
    argosy.fit("diffusion", *(f"model.{k}={v}" for k, v in sizes.items()), *settings, *common, view=Heard(), steps=2)
    pipe = argosy.load(tmp_path / "run")
    fox, snow = (pipe.images([prompt], steps=2, output="float") for prompt in ("a red fox", "snow"))
    assert fox.shape == (1, 16, 16, 3)
    assert np.abs(fox - snow).max() > 0
