"""DreamBooth: the loss is that of diffusers' script, a subject and its class stay together, and missing images are drawn once."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_weights import write_pipeline
from helpers import Heard, shared
from PIL import Image

import argosy
from argosy.core.errors import UserError
from argosy.core.storage import Store
from argosy.data.images.arrays import ImageArrays
from argosy.data.images.encoded import EncodedImages
from argosy.data.images.prior import PriorImages
from argosy.data.images.settings import ImageSettings
from argosy.data.pipeline import build
from argosy.data.settings import DataSettings
from argosy.models.diffusion.base import ImageSpace
from argosy.observe.metrics import read
from argosy.train.objectives.images.dreambooth import DreamBooth

GOLDENS = Path(__file__).parents[1] / "goldens" / "images"


def batch_of(pairs: int) -> dict[str, Any]:
    draw = np.random.default_rng(0)
    rows = 2 * pairs
    return {
        "images": jnp.asarray(draw.normal(size=(rows, 4, 4, 2)), jnp.float32),
        "text": jnp.asarray(draw.normal(size=(rows, 3, 5)), jnp.float32),
        "text_mask": jnp.ones((rows, 3), jnp.int32),
        "pooled": jnp.asarray(draw.normal(size=(rows, 5)), jnp.float32),
        "prior": jnp.tile(jnp.array([0.0, 1.0]), pairs),
        "row": jnp.arange(rows, dtype=jnp.int32),
    }


class Recorded:
    """A denoiser that keeps what it was asked."""

    config = SimpleNamespace(prediction="velocity", size_multiple=1, classes_known=0)

    def __call__(self, x: Any, t: Any, conditions: Any) -> Any:
        self.x, self.t = np.asarray(x, np.float64), np.asarray(t, np.float64) / 1000
        return 0.3 * x


@pytest.mark.parametrize("weight", [1.0, 0.25])
def test_the_loss_is_that_of_the_script(weight):
    model, batch = Recorded(), batch_of(6)
    objective = DreamBooth(class_prompt="a dog", prior_loss_weight=weight, timesteps="uniform")
    loss = objective({"model": model}, batch, jax.random.key(1))
    t, image = model.t[:, None, None, None], np.asarray(batch["images"], np.float64)
    error = ((model.x - (1 - t) * image) / t - image - 0.3 * model.x) ** 2
    # train_dreambooth.py: F.mse_loss of the first half, plus prior_loss_weight times that of the second.
    instance, prior = error[::2].mean(), error[1::2].mean()
    assert float(loss.loss.value()) == pytest.approx(instance + weight * prior, rel=1e-3)
    assert float(loss.metrics["error_subject"].value()) == pytest.approx(instance, rel=1e-3)
    assert float(loss.metrics["error_prior"].value()) == pytest.approx(prior, rel=1e-3)


def test_subject_and_class_see_all_levels_in_small_batches():
    seen = {0: [], 1: []}
    for step in range(40):
        DreamBooth(class_prompt="a dog", timesteps="uniform")({"model": (model := Recorded())}, batch_of(2), jax.random.key(step))
        for i, t in enumerate(model.t.tolist()):
            seen[i % 2].append(int(4 * t))
    assert all(min(np.bincount(quarters, minlength=4)) >= 10 for quarters in seen.values())


class Numbered:
    """Encoders whose latents are the images, and whose states of a caption are its length."""

    identity, space, reads_text = "numbered", ImageSpace(1, 1, 0), True

    def latents(self, images):
        return images

    def states(self, texts):
        lengths = np.array([len(text) for text in texts], np.float32)
        return {"text": lengths[:, None, None], "text_mask": np.ones((len(texts), 1), np.int32), "pooled": lengths[:, None]}


def pairs_of(folder, seed=0, **share):
    def encoded(name, count, caption):
        images = np.repeat(np.arange(count, dtype=np.uint8), 4).reshape(count, 2, 2) + np.uint8(name == "class") * 100
        np.savez(folder / f"{name}.npz", images=images)
        arrays = ImageArrays(str(folder / f"{name}.npz"), ImageSettings(caption=caption, white=255))
        return EncodedImages(arrays, Numbered(), folder / "cache")

    source = PriorImages(encoded("subject", 3, "a sks dog"), encoded("class", 7, "a dog"))
    settings = DataSettings(source="subject", batch=4, sequence=1, held_out=0)
    fields = DreamBooth(class_prompt="a dog").reads()
    return build(settings, None, vocab=ImageSpace(1, 1, 0), seed=seed, source=source, fields=fields, rows_per_group=2, **share)


def test_pairs_stay_together_and_the_class_is_seen_whole(tmp_path):
    batches = pairs_of(tmp_path)
    first_batches = [next(batches) for _ in range(21)]
    numbers = np.concatenate([np.rint((batch["images"][:, 0, 0, 0] + 1) * 127.5).astype(int) for batch in first_batches])
    assert (numbers[::2] < 3).all()
    assert (numbers[1::2] >= 100).all()
    assert all(sorted(numbers[::2][i : i + 3]) == [0, 1, 2] for i in range(0, 42, 3))
    assert all(sorted(numbers[1::2][i : i + 7]) == list(range(100, 107)) for i in range(0, 42, 7))
    for batch in first_batches:
        assert batch["prior"].tolist() == [0, 1, 0, 1]
        assert batch["pooled"][:, 0].tolist() == [9, 5, 9, 5]
    halves = [pairs_of(tmp_path, process=i, processes=2) for i in range(2)]
    for batch in first_batches[:5]:
        parts = [next(half) for half in halves]
        np.testing.assert_array_equal(np.concatenate([part["images"] for part in parts]), batch["images"])
    halves[0].restore(batches.state())
    np.testing.assert_array_equal(next(halves[0])["images"], next(batches)["images"][:2])
    for stream in (batches, *halves):
        stream.close()


@pytest.fixture(scope="module")
def subject(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("subject")
    with Image.open(shared("images/flower_256.png")) as photo:
        for i in range(3):
            photo.convert("RGB").crop((20 * i, 40, 20 * i + 64, 104)).save(folder / f"{i}.png")
    return folder


def words(model, subject, folder, *more):
    common = [
        f"model={model}",
        f"data.source={subject}",
        f"dir={folder}",
        f"data.cache={folder.parent / 'cache'}",
        "data.image.size=16",
    ]
    common += ["data.image.caption=a sks flower", "objective.class_prompt=a flower", "objective.num_class_images=5", "sample.steps=2"]
    return ["dreambooth", *common, "data.batch=16", "sample.images=1", "log.every=1", *more]


@pytest.mark.slow
def test_the_class_is_drawn_once_and_a_run_resumes_bit_for_bit(subject, tmp_path):
    write_pipeline(GOLDENS / "pipeline-sd", model := tmp_path / "sd")
    adapter = ["adapter=lora", "adapter.rank=2", "optimizer.learning_rate=1e-3", "checkpoint.every=2"]
    argosy.fit(*words(model, subject, tmp_path / "halves", *adapter), view=Heard(), steps=2)
    class_images = {path.name: path.read_bytes() for path in (tmp_path / "halves" / "class_images").iterdir()}
    assert sorted(class_images) == [f"{i:05}.png" for i in range(5)]
    pipe = argosy.load(model)
    expected = pipe.images(["a flower"] * 5, steps=2, guidance=7.5, seed=list(range(5)), size=16)
    for i in range(5):
        with Image.open(tmp_path / "halves" / "class_images" / f"{i:05}.png") as image:
            assert np.abs(np.array(image.convert("RGB")).astype(int) - expected[i]).max() <= 1
    times = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "halves" / "class_images").iterdir()}
    argosy.fit(*words(model, subject, tmp_path / "halves", *adapter), view=Heard(), steps=4)
    assert times == {path.name: path.stat().st_mtime_ns for path in (tmp_path / "halves" / "class_images").iterdir()}
    # Images that are there are used, and only the missing ones are drawn.
    (tmp_path / "class").mkdir()
    for name in sorted(class_images)[:3]:
        (tmp_path / "class" / name).write_bytes(class_images[name])
    where = f"objective.class_data_dir={tmp_path / 'class'}"
    argosy.fit(*words(model, subject, tmp_path / "whole", where, *adapter), view=Heard(), steps=4)
    assert {path.name: path.read_bytes() for path in (tmp_path / "class").iterdir()} == class_images
    losses = [[line["loss"] for line in read(Store(tmp_path / name)) if "loss" in line] for name in ("halves", "whole")]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 4
    assert (tmp_path / "whole" / "adapter" / "pytorch_lora_weights.safetensors").is_file()


def test_mistakes_are_named_before_anything_is_drawn(subject, tmp_path):
    write_pipeline(GOLDENS / "pipeline-sd", model := tmp_path / "sd")
    for word, problem in (
        ("data.image.buckets=8", "pairs of a subject and its class are of one size"),
        ("data.batch=3", "groups of 2 rows"),
        ("objective.prior_loss_weight=0", "should be greater than 0"),
    ):
        with pytest.raises(UserError, match=problem):
            argosy.fit(*words(model, subject, tmp_path / "run", word), view=Heard(), steps=1)
        assert not (tmp_path / "run" / "class_images").exists()
